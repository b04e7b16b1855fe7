"""What training minimizes: the sum of the losses of a batch, and how many there are."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sympow_jax import models
from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.layers import parallel, partitioning

__all__ = ["Batch", "Sums", "count", "cross_entropy_sum", "label_sums", "predict", "sums"]

Batch = Mapping[str, Array]

# At most so many bytes of float32 logits exist on a device at once, in each of forward and backward.
_LOGITS_BYTES = 1 << 28


class Sums(NamedTuple):
    """Over what counts of a batch.

    loss: in nats, or squared errors.
    correct: the rows whose class has the largest logit; 0 where no class is predicted.
    """

    loss: Float[Array, ""]
    correct: Float[Array, ""]


def sums(model: models.Model, batch: Batch) -> Sums:
    """The sums of a model over a batch, in float32.

    A batch has `inputs` and maybe `segment_ids`. Its `targets [B T]` are tokens, of which those >= 0 count. Its `labels
    [B]` are classes if they are integers, of which those >= 0 count, and else numbers, of which NaN do not count.
    """
    inputs, segment_ids = batch["inputs"], batch.get("segment_ids")
    if "targets" in batch:
        assert not isinstance(model, models.ImageClassifier)
        hidden = model.hidden(inputs, segment_ids=segment_ids)
        dtype = jnp.dtype(model.config.dtype)
        return Sums(cross_entropy_sum(hidden, model.embedding[...], batch["targets"], dtype), jnp.float32(0))
    return label_sums(predict(model, batch), batch["labels"])


def label_sums(outputs: Float[Array, "B outputs"], labels: Array) -> Sums:
    """The sums over the labels that count, from what `predict` returns."""
    counts = _counts(labels)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        errors = outputs[:, 0] - jnp.where(counts, labels, 0)
        return Sums(jnp.sum(jnp.square(errors), where=counts), jnp.float32(0))
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(labels, 0))
    correct = jnp.sum(outputs.argmax(-1) == labels, where=counts, dtype=jnp.float32)
    return Sums(jnp.sum(losses, where=counts), correct)


def predict(model: models.Model, batch: Batch) -> Float[Array, "B outputs"]:
    """What a model with a head says of the rows of a batch."""
    assert not isinstance(model, models.DecoderLM)
    if isinstance(model, models.ImageClassifier):
        return model.classify(batch["inputs"])
    return model.classify(batch["inputs"], segment_ids=batch.get("segment_ids"))


def count(batch: Batch) -> Int[Array, ""]:
    """How many targets or labels count; at least 1, so that the mean over none is 0 and not NaN."""
    return jnp.maximum(jnp.sum(_counts(batch["targets" if "targets" in batch else "labels"])), 1)


def _counts(wanted: Array) -> Bool[Array, "..."]:
    return ~jnp.isnan(wanted) if jnp.issubdtype(wanted.dtype, jnp.floating) else wanted >= 0


def cross_entropy_sum(
    hidden: Float[Array, "B T M"], embedding: Float[Array, "V M"], targets: Int[Array, "B T"], dtype: Any
) -> Float[Array, ""]:
    """The cross-entropies in nats of the targets >= 0 under logits hidden . embedding^T, summed in float32.

    The product is in `dtype`, its sums in float32. Logits exist for one slice of time at once, in the backward pass
    too, which computes them again. Over the mesh in scope each device has its rows, its times and its part of the
    vocabulary; the embedding is gathered over `fsdp` and its gradient scattered again.
    """
    summed = partitioning.dividing(partitioning.TOKENS, targets.shape)
    axes = tuple(partitioning.fit(partitioning.ROWS, embedding.shape))
    vocabulary = partitioning.TENSOR if partitioning.TENSOR in axes else None

    def local(hidden, embedding, targets):
        embedding = parallel.gather(embedding, axes, partitioning.FSDP)
        loss = functools.partial(_slice_loss, embedding=embedding, dtype=dtype, axis_name=vocabulary)
        total = _over_slices(loss, hidden, targets, len(embedding))
        return jax.lax.psum(total, summed) if summed else total

    specs = partitioning.TOKENS, partitioning.ROWS, partitioning.TOKENS
    return partitioning.over_devices(local, (hidden, embedding, targets), specs, partitioning.REPLICATED)


def _over_slices(loss, hidden, targets, vocabulary):
    """The sum of loss(hidden, targets) over slices of time whose logits are few enough."""
    rows, time = targets.shape
    width = max(1, _LOGITS_BYTES // (4 * rows * vocabulary))
    if width >= time:
        return loss(hidden, targets)
    slices = -(-time // width)
    width = -(-time // slices)
    padding = slices * width - time
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)

    @jax.checkpoint
    def add(total, start):
        part = (jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=1) for leaf in (hidden, targets))
        return total + loss(*part), None

    return jax.lax.scan(add, jnp.float32(0), jnp.arange(slices) * width)[0]


def _slice_loss(hidden, targets, *, embedding, dtype, axis_name):
    """The sum for one slice; `axis_name` is the axis that the vocabulary is divided over, if any."""
    logits = models.logits(hidden, embedding, dtype)
    counts = targets >= 0
    if axis_name is None:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    else:
        losses = _divided_cross_entropy(logits, targets, axis_name)
    return jnp.sum(jnp.where(counts, losses, 0))


def _divided_cross_entropy(logits, targets, axis_name):
    size = logits.shape[-1]
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), axis_name)
    weights = jax.lax.psum(jnp.exp(logits - highest[..., None]).sum(-1), axis_name)
    label = targets - jax.lax.axis_index(axis_name) * size
    here = (label >= 0) & (label < size)
    picked = jnp.take_along_axis(logits, jnp.clip(label, 0, size - 1)[..., None], axis=-1)[..., 0]
    return jnp.log(weights) + highest - jax.lax.psum(jnp.where(here, picked, 0), axis_name)
