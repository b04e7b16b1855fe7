"""Cross-entropy of tokens, with logits of one slice of time at once."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sympow_jax import models
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import parallel, partitioning

__all__ = ["token_sums"]

# Maximum bytes of float32 logits that exist on a device at the same time, in each of forward and backward.
_LOGITS_BYTES = 1 << 28


def token_sums(
    hidden: Float[Array, "B T M"],
    embedding: Float[Array, "V M"],
    targets: Int[Array, "B T"],
    dtype: Any,
    *,
    z_loss: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """Returns the sums of cross-entropies and squared log-normalizers over the targets >= 0.

    Logits are hidden . embedding^T.

    The second is None without `z_loss`. Its use is from "PaLM" (Chowdhery et al. 2022, section 5).

    The product is in `dtype` with float32 accumulation, and the result is float32. If logits of all times would take
    more than 256 MB, they exist for one slice of time at once, and the backward pass recomputes them. Under a mesh,
    rows, times and the vocabulary are sharded; the embedding is gathered over `fsdp`, and its gradient is scattered.
    """
    summed = partitioning.dividing(partitioning.TOKENS, targets.shape)
    axes = tuple(partitioning.fit(partitioning.ROWS, embedding.shape))
    vocabulary = partitioning.TENSOR if partitioning.TENSOR in axes else None

    def on_device(hidden, embedding, targets):
        embedding = parallel.gather(embedding, axes, partitioning.FSDP)

        def of_slice(hidden, targets):
            logits = models.logits(hidden, embedding, dtype)
            if vocabulary is None:
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
            else:
                losses = _divided_cross_entropy(logits, targets, vocabulary)
            total = jnp.sum(jnp.where(targets >= 0, losses, 0))
            if not z_loss:
                return total, None
            normalizers = (
                jax.nn.logsumexp(logits, -1) if vocabulary is None else _divided_logsumexp(logits, vocabulary)
            )
            return total, jnp.sum(jnp.where(targets >= 0, jnp.square(normalizers), 0))

        rows, time = targets.shape
        width = max(1, _LOGITS_BYTES // (4 * rows * len(embedding)))
        if width >= time:
            total = of_slice(hidden, targets)
        else:
            slices = -(-time // width)
            width = -(-time // slices)
            padding = slices * width - time
            hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
            targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)

            @jax.checkpoint
            def add(total, start):
                part = (
                    jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=1) for leaf in (hidden, targets)
                )
                return jax.tree.map(jnp.add, total, of_slice(*part)), None

            zeros = jnp.float32(0), jnp.float32(0) if z_loss else None
            total, _ = jax.lax.scan(add, zeros, jnp.arange(slices) * width)
        return jax.lax.psum(total, summed) if summed else total

    specs = partitioning.TOKENS, partitioning.ROWS, partitioning.TOKENS
    return partitioning.over_devices(on_device, (hidden, embedding, targets), specs, partitioning.REPLICATED)


def _divided_logsumexp(logits: Float[Array, "B T V"], axis_name: str) -> Float[Array, "B T"]:
    """Returns log sum exp over a vocabulary that is sharded over a mesh axis."""
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), axis_name)
    weights = jax.lax.psum(jnp.exp(logits - highest[..., None]).sum(-1), axis_name)
    return jnp.log(weights) + highest


def _divided_cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], axis_name: str
) -> Float[Array, "B T"]:
    size = logits.shape[-1]
    label = targets - jax.lax.axis_index(axis_name) * size
    here = (label >= 0) & (label < size)
    picked = jnp.take_along_axis(logits, jnp.clip(label, 0, size - 1)[..., None], axis=-1)[..., 0]
    return _divided_logsumexp(logits, axis_name) - jax.lax.psum(jnp.where(here, picked, 0), axis_name)
