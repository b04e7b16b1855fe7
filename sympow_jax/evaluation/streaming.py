"""Per-token losses of long documents, streamed through a model's state in bounded memory."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from sympow_jax import models

__all__ = ["losses_and_hits", "token_losses"]

# Limits of one call of the model: number of tokens, and bytes of logits that exist at the same time.
_CALL_TOKENS = 16_384
_LOGIT_BYTES = 2**26


def token_losses(
    model: models.DecoderLM,
    tokens: Int[np.ndarray, "documents length"],
    *,
    on_call: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "documents length-1"]:
    """Returns the loss in nats of every token of a document, except the first, given all tokens before it.

    Documents of at most 16,384 predictions are batched into calls of at most that many, without a state. A longer
    document is split into equal segments of at most 16,384 tokens, and each call gets the state after the previous
    segment. Padding makes the segments equal. It follows the last prediction, so causality keeps it from having an
    effect. Every call has the same shape, so the model is compiled once.

    Memory in addition to the parameters: activations of at most 16,384 tokens, the recurrent state or KV cache of one
    document, 64 MiB of logits whatever the vocabulary, and 12 bytes per token of `tokens` on the host.

    Args:
        model: the decoder.
        tokens: documents of equal length.
        on_call: called after each call of the model with its number of tokens, padding included.
    """
    count, predictions = tokens.shape[0], tokens.shape[1] - 1
    segments = -(-predictions // _CALL_TOKENS)
    segment = -(-predictions // segments)
    positions = segments * segment
    calls = -(-count // (_CALL_TOKENS // segment))
    batch = -(-count // calls)
    padding = ((0, -count % batch), (0, positions - predictions))
    inputs, targets = np.pad(tokens[:, :-1], padding), np.pad(tokens[:, 1:], padding)

    graph, parameters = nnx.split(model)
    losses = np.empty(inputs.shape, np.float32)
    for row in range(0, len(inputs), batch):
        state = model.init_state(batch, max_length=positions) if segments > 1 else None
        for start in range(0, positions, segment):
            part = np.s_[row : row + batch, start : start + segment]
            losses[part], state = _call_losses(graph, parameters, state, inputs[part], targets[part])
            if on_call is not None:
                on_call(batch * segment)
    return losses[:count, :predictions]


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def _call_losses(
    graph: nnx.GraphDef,
    parameters: nnx.State,
    state: PyTree | None,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], PyTree | None]:
    model = nnx.merge(graph, parameters)
    if state is None:
        hidden = model.hidden(inputs)
    else:
        hidden, state = model.hidden(inputs, initial_state=state, return_state=True)
    return losses_and_hits(model, hidden, targets)[0], state


def losses_and_hits(
    model: models.DecoderLM, hidden: Float[Array, "B T M"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns the loss in nats of each target, and whether it has the highest logit.

    At most 64 MiB of logits exist at the same time, or those of one target.
    """

    def score_token(pair):
        hidden_M, target = pair
        logits = model.unembed(hidden_M[None, None])[0, 0]
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, target)
        return loss, jnp.argmax(logits) == target

    vocabulary = jax.eval_shape(model.unembed, hidden).shape[-1]
    tokens_at_once = min(max(1, _LOGIT_BYTES // (4 * vocabulary)), targets.size)
    pairs = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
    losses, hits = jax.lax.map(score_token, pairs, batch_size=tokens_at_once)
    return losses.reshape(targets.shape), hits.reshape(targets.shape)
