"""The loss of every token of long documents, streamed through a model's state in bounded memory."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from sympow_jax import models

__all__ = ["token_losses"]

# Bounds on one call of the model: its tokens, and the bytes of the logits that exist at once.
_CALL_TOKENS = 16_384
_LOGIT_BYTES = 2**26


def token_losses(
    model: models.DecoderLM,
    tokens: Int[np.ndarray, "documents length"],
    *,
    on_call: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "documents length-1"]:
    """The loss in nats of predicting each token of a document but the first from all those before it.

    As many documents as have 16,384 predictions together take one call of the model, without a state. A
    document of more goes through it in equal segments of at most so many, each call given the state of the
    one before; the padding that makes the segments equal comes after the last prediction, where causality
    keeps it from mattering. Every call has the same shape and compiles once. `on_call`, if given, is called
    with the number of tokens each call has done.

    Memory beyond the parameters: the activations of at most 16,384 tokens; the state (or a KV cache and
    values) of one document; 64 MiB of logits, whatever the vocabulary; on the host 12 bytes a token of
    `tokens`.
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
        hidden, state = model.hidden(inputs, state=state, return_state=True)

    def loss_of_token(pair):
        hidden_M, target = pair
        logits = model.unembed(hidden_M[None, None])[0, 0]
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, target)

    hidden_and_targets = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
    vocabulary = jax.eval_shape(model.unembed, hidden).shape[-1]
    tokens_at_once = max(1, _LOGIT_BYTES // (4 * vocabulary))
    losses = jax.lax.map(loss_of_token, hidden_and_targets, batch_size=min(tokens_at_once, inputs.size))
    return losses.reshape(targets.shape), state
