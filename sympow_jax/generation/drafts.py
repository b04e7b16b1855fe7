"""Verification of drafts: several tokens per call of the model, with the text of token-by-token decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import models
from sympow_jax.array_types import Array, Float, Int, UInt32
from sympow_jax.generation import decoding
from sympow_jax.generation import sampling as sampling_lib
from sympow_jax.ops import arguments
from sympow_jax.ops.promotion import by_default_rules

_GREEDY = sampling_lib.Sampling(temperature=0)


def verify(
    program: decoding.Program,
    state: models.DecoderState,
    logits: Float[Array, "B V"],
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"],
    *,
    sampling: sampling_lib.Sampling = _GREEDY,
    seed: UInt32[Array, ""] | UInt32[Array, " B"] | int = 0,
    position: Int[Array | np.ndarray, " B"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, "B V"], models.DecoderState]:
    """Returns the number of accepted tokens of each row's draft, and the logits and the state after these tokens.

    A token is accepted if all tokens before it are and `sample` returns it there. The text is therefore that of
    decoding token by token, whatever the draft is. Only the rounding of logits differs.

    The draft is processed twice. One pass computes its logits. The other computes the state after the accepted tokens
    from `state`, which is not modified, so that nothing remains of other tokens.

    Args:
        program: the model that verifies.
        state: state before the draft. KV caches need room for the accepted tokens.
        logits: logits of the first token of the draft, which `prefill`, `decode` or `verify` returned with `state`.
        tokens: the draft of row b is the first `lengths[b]` tokens; later tokens are ignored. If it begins with the
            `sample` of `logits`, that token is accepted, and every call adds at least one token.
        lengths: number of draft tokens of each row, from 0 to T.
        sampling: options of sampling; the default selects the likeliest tokens.
        seed: seed of the draws, one for all rows or one per row. A draft model that calls `sample` with the same seed
            and positions draws with the same noise, so that nearly equal logits nearly always give equal tokens.
        position: number of tokens before the draft in each row; None if the temperature is 0.

    Raises:
        ValueError: the shapes or dtypes are wrong, a length is below 0 or above T, the state is of another model or
            batch size, there is a repetition penalty, or there are draws and `position` is None.

    Examples:
        >>> import numpy as np
        >>> from sympow_jax import config, generation, models
        >>> settings = config.ModelConfig(vocab_size=256, layers=1, width=32, heads=2)
        >>> program = generation.Program(models.DecoderLM(settings, rngs=0))
        >>> logits, state = program.prefill(np.array([[5, 6, 7]]), np.array([3]))
        >>> draft = np.array([[int(logits.argmax()), 8]])
        >>> accepted, logits, state = generation.verify(program, state, logits, draft, np.array([1]))
        >>> accepted.tolist()
        [1]
    """
    decoding.check_batch(tokens, lengths)
    arguments.check_array("logits", logits)
    rows, time = tokens.shape
    if logits.shape != (rows, program.config.vocab_size):
        raise ValueError(
            f"logits have shape {logits.shape}; they must be [{rows}, {program.config.vocab_size}], those after the "
            f"state, for the {rows} rows of tokens"
        )
    if not isinstance(lengths, jax.core.Tracer):
        counts = np.asarray(lengths)
        if (counts < 0).any() or (counts > time).any():
            raise ValueError(
                f"lengths are {counts.tolist()}; they must be from 0 to {time}, the tokens of a row"
            )
    if sampling.uses_seen:
        raise ValueError(
            f"repetition_penalty is {sampling.repetition_penalty:g}; a draft is verified without one; decode instead"
        )
    if position is None:
        if sampling.temperature > 0:
            raise ValueError(
                f"temperature is {sampling.temperature:g}; draws need the position; pass position"
            )
        position = np.zeros(rows, np.int32)
    with decoding.mesh_in_scope(program.leaves):
        seeds = jnp.broadcast_to(jnp.asarray(seed, jnp.uint32), (rows,))
        options = {"seeds": seeds, "position": jnp.asarray(position)}
        return _verify(program, sampling, state, logits, jnp.asarray(tokens), jnp.asarray(lengths), **options)


@functools.partial(jax.jit, static_argnames="sampling")
@by_default_rules
def _verify(program, sampling, state, logits, tokens, lengths, *, seeds, position):
    model = program.model
    is_known = (tokens >= 0) & (tokens < model.config.vocab_size)
    known = jnp.where(is_known, tokens, 0)

    # The logits before each token and after the last.
    ids, segment_ids = decoding.padded(program, known, lengths, state)
    hidden = model.hidden(ids, segment_ids=segment_ids, initial_state=state)
    logits = jnp.concatenate([logits[:, None], model.unembed(hidden)], axis=1)

    # A token is never equal to the sampled one if it is not known.
    def sample(logits, index):
        return sampling_lib.sample(logits, sampling, seed=seeds, position=position + index)

    offsets = jnp.arange(tokens.shape[1])
    sampled = jax.vmap(sample, in_axes=(1, 0), out_axes=1)(logits[:, :-1], offsets)
    is_accepted = (sampled == tokens) & (offsets < lengths[:, None])
    accepted = jnp.cumprod(is_accepted, axis=1, dtype=jnp.int32).sum(axis=1)

    # The state after the accepted tokens, to which the others are padding.
    ids, segment_ids = decoding.padded(program, known, accepted, state)
    _, state = model.extend_hidden(ids, state, segment_ids=segment_ids, compiled=True)
    return accepted, jnp.take_along_axis(logits, accepted[:, None, None], axis=1)[:, 0], state
