"""Training loss: the sum of a batch's losses, and their number."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sympow_jax import config as configs
from sympow_jax import models
from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.layers import parallel, partitioning

__all__ = ["Batch", "Sums", "count", "label_sums", "layer_names", "predict", "sums", "token_sums", "zeros"]

Batch = Mapping[str, Array]

# Maximum bytes of float32 logits that exist on a device at the same time, in each of forward and backward.
_LOGITS_BYTES = 1 << 28


class Sums(NamedTuple):
    """Sums over the targets or labels of a batch that count.

    Attributes:
        loss: cross-entropies in nats, or squared errors, which for `AttentionMatcher` are relative.
        correct: number of rows whose class has the largest logit; 0 if no classes are predicted.
        z: squared log-normalizers of the tokens' probabilities; None if there is no z-loss.
        layers: relative squared errors of each new layer of `AttentionMatcher`, whose mean is `loss`; else None.
    """

    loss: Float[Array, ""]
    correct: Float[Array, ""]
    z: Float[Array, ""] | None = None
    layers: Float[Array, " layers"] | None = None


def sums(model: models.Model, batch: Batch, *, z_loss: bool = False) -> Sums:
    """Returns the sums of a model over a batch, in float32; `z` is of tokens, and only with `z_loss`.

    A batch has `inputs`, optional `segment_ids`, and either `targets` or `labels`. `targets [B T]` are tokens, and
    `labels [B]` are classes if they are integers, or else numbers. Integers >= 0 count, and so do numbers except NaN.
    """
    inputs, segment_ids = batch["inputs"], batch.get("segment_ids")
    if isinstance(model, models.AttentionMatcher):
        errors = model.errors(inputs, segment_ids=segment_ids)
        layers = jnp.sum(errors, axis=(0, 1), where=_counts(batch["targets"])[..., None])
        return Sums(layers.mean(), jnp.float32(0), layers=layers)
    if "targets" in batch:
        assert not isinstance(model, models.ImageClassifier)
        hidden = model.hidden(inputs, segment_ids=segment_ids)
        dtype = jnp.dtype(model.config.dtype)
        losses, z = token_sums(hidden, model.output_table, batch["targets"], dtype, z_loss=z_loss)
        return Sums(losses, jnp.float32(0), z)
    return label_sums(predict(model, batch), batch["labels"])


def zeros(*, z_loss: bool = False, layers: int = 0) -> Sums:
    """Returns the sums over no targets or labels."""
    z, errors = jnp.float32(0) if z_loss else None, jnp.zeros(layers) if layers else None
    return Sums(jnp.float32(0), jnp.float32(0), z, errors)


def layer_names(config: configs.Config) -> list[str]:
    """Returns the names of the metrics of `Sums.layers`; empty for another task than `match_attention`."""
    layers = config.model.replaced_layers if config.task.name == "match_attention" else ()
    return [f"loss_layer_{layer}" for layer in sorted(layers)]


def label_sums(outputs: Float[Array, "B outputs"], labels: Array) -> Sums:
    """Returns the sums over the labels that count, from the outputs of `predict`."""
    counts = _counts(labels)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        errors = outputs[:, 0] - jnp.where(counts, labels, 0)
        return Sums(jnp.sum(jnp.square(errors), where=counts), jnp.float32(0))
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(labels, 0))
    correct = jnp.sum(outputs.argmax(-1) == labels, where=counts, dtype=jnp.float32)
    return Sums(jnp.sum(losses, where=counts), correct)


def predict(model: models.Model, batch: Batch) -> Float[Array, "B outputs"]:
    """Returns the outputs of a model with a head for the rows of a batch."""
    assert not isinstance(model, models.DecoderLM | models.AttentionMatcher)
    if isinstance(model, models.ImageClassifier):
        return model.classify(batch["inputs"])
    return model.classify(batch["inputs"], segment_ids=batch.get("segment_ids"))


def count(batch: Batch) -> Int[Array, ""]:
    """Returns the number of targets or labels that count.

    It is at least 1, so that the mean over none is 0 instead of NaN.
    """
    return jnp.maximum(jnp.sum(_counts(batch["targets" if "targets" in batch else "labels"])), 1)


def _counts(wanted: Array) -> Bool[Array, "..."]:
    return ~jnp.isnan(wanted) if jnp.issubdtype(wanted.dtype, jnp.floating) else wanted >= 0


def token_sums(
    hidden: Float[Array, "B T M"],
    embedding: Float[Array, "V M"],
    targets: Int[Array, "B T"],
    dtype: Any,
    *,
    z_loss: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """Returns the sums of `Sums.loss` and `Sums.z` over the targets >= 0 under logits hidden . embedding^T.

    The second is None without `z_loss`. Its use is from "PaLM" (Chowdhery et al. 2022, section 5).

    The product is in `dtype` with float32 accumulation, and the result is float32. Logits exist only for one slice of
    time at once, also in the backward pass, which recomputes them. Under a mesh, rows, times and the vocabulary are
    sharded; the embedding is gathered over `fsdp`, and its gradient is scattered.
    """
    summed = partitioning.dividing(partitioning.TOKENS, targets.shape)
    axes = tuple(partitioning.fit(partitioning.ROWS, embedding.shape))
    vocabulary = partitioning.TENSOR if partitioning.TENSOR in axes else None

    def local(hidden, embedding, targets):
        embedding = parallel.gather(embedding, axes, partitioning.FSDP)
        sums = functools.partial(
            _slice_sums, embedding=embedding, dtype=dtype, axis_name=vocabulary, z_loss=z_loss
        )
        total = _over_slices(sums, hidden, targets, len(embedding), z_loss)
        return jax.lax.psum(total, summed) if summed else total

    specs = partitioning.TOKENS, partitioning.ROWS, partitioning.TOKENS
    return partitioning.over_devices(local, (hidden, embedding, targets), specs, partitioning.REPLICATED)


def _over_slices(sums, hidden, targets, vocabulary, z_loss):
    """Returns the total of sums(hidden, targets) over slices of time whose logits fit in `_LOGITS_BYTES`."""
    rows, time = targets.shape
    width = max(1, _LOGITS_BYTES // (4 * rows * vocabulary))
    if width >= time:
        return sums(hidden, targets)
    slices = -(-time // width)
    width = -(-time // slices)
    padding = slices * width - time
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)

    @jax.checkpoint
    def add(total, start):
        part = (jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=1) for leaf in (hidden, targets))
        return jax.tree.map(jnp.add, total, sums(*part)), None

    zero = jnp.float32(0)
    return jax.lax.scan(add, (zero, zero if z_loss else None), jnp.arange(slices) * width)[0]


def _slice_sums(hidden, targets, *, embedding, dtype, axis_name, z_loss):
    """Returns the sums for one slice; `axis_name` is the mesh axis that shards the vocabulary, if any."""
    logits = models.logits(hidden, embedding, dtype)
    counts = targets >= 0
    if axis_name is None:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    else:
        losses = _divided_cross_entropy(logits, targets, axis_name)
    z = None
    if z_loss:
        normalizers = (
            jax.nn.logsumexp(logits, -1) if axis_name is None else _divided_normalizer(logits, axis_name)
        )
        z = jnp.sum(jnp.where(counts, jnp.square(normalizers), 0))
    return jnp.sum(jnp.where(counts, losses, 0)), z


def _divided_normalizer(logits, axis_name):
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), axis_name)
    weights = jax.lax.psum(jnp.exp(logits - highest[..., None]).sum(-1), axis_name)
    return jnp.log(weights) + highest


def _divided_cross_entropy(logits, targets, axis_name):
    size = logits.shape[-1]
    label = targets - jax.lax.axis_index(axis_name) * size
    here = (label >= 0) & (label < size)
    picked = jnp.take_along_axis(logits, jnp.clip(label, 0, size - 1)[..., None], axis=-1)[..., 0]
    return _divided_normalizer(logits, axis_name) - jax.lax.psum(jnp.where(here, picked, 0), axis_name)
