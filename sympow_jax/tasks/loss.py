"""Cross-entropy of tokens, fused with its gradients, with logits of one slice of time at a time."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import parallel, partitioning
from sympow_jax.ops import derivatives

# Bytes of float32 logits that exist on a device at the same time. Each slice also reads and writes the float32 gradient
# of the embedding: with 512 MB, a width of 768 and GPT-2's vocabulary, an eighth of the bytes of its logits.
_LOGITS_BYTES = 1 << 29
# For the products of gradients, the vocabulary of a device and the tokens of a slice are padded to multiples of this,
# once. Otherwise XLA pads the operands of each product on a GPU.
_ALIGNMENT = 8


def token_sums(
    hidden: Float[Array, "B T M"],
    embedding: Float[Array, "V M"],
    targets: Int[Array, "B T"],
    dtype: Any,
    *,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """Returns the sums over the targets >= 0 of cross-entropies, and of squared log-normalizers times `z_loss`.

    With logits x = hidden . embedding^T and n = log sum_v exp(x_v), the sums over tokens are those of n - x_target and
    z_loss n^2. The gradient of both together for x_v is

        (1 + 2 z_loss n) exp(x_v - n) - [v = target]

    The second sum is None if `z_loss` is 0. Its use is from "PaLM" (Chowdhery et al. 2022, section 5).

    The forward pass computes the gradients too if they are needed, because it has the logits: it rounds the gradient of
    a slice's logits to `dtype` and multiplies it by the embedding and by `hidden`. The backward pass only multiplies by
    the cotangent, which must be the same for both sums. Otherwise gradients are NaN.

    Products are in `dtype` with float32 accumulation, and the results are float32. Each device holds about 512 MB of
    float32 logits at a time. Under a mesh, rows, time and the vocabulary are sharded; the embedding is gathered over
    `fsdp`, and its gradient is scattered.
    """
    loss, z = _sums(jnp.dtype(dtype), float(z_loss), hidden, embedding, targets)
    return loss, z if z_loss else None


@functools.partial(derivatives.custom_vjp, static=2)
def _sums(dtype, z_loss, hidden, embedding, targets):
    return _over_slices(dtype, z_loss, hidden, embedding, targets, differentiate=False)[0]


def _sums_fwd(dtype, z_loss, hidden, embedding, targets):
    return _over_slices(dtype, z_loss, hidden, embedding, targets, differentiate=True)


def _sums_bwd(dtype, z_loss, gradients, cotangents):
    cotangent, of_z = cotangents
    if z_loss:
        cotangent = jnp.where(cotangent == of_z, cotangent, jnp.nan)
    return *((cotangent * gradient).astype(gradient.dtype) for gradient in gradients), None


_sums.defvjp(_sums_fwd, _sums_bwd)


def _over_slices(
    dtype: Any,
    z_loss: float,
    hidden: Float[Array, "B T M"],
    embedding: Float[Array, "V M"],
    targets: Int[Array, "B T"],
    *,
    differentiate: bool,
):
    """Returns both sums and, if `differentiate`, the gradients of their total for `hidden` and `embedding`."""
    summed = partitioning.dividing(partitioning.TOKENS, targets.shape)
    axes = tuple(partitioning.fit(partitioning.ROWS, embedding.shape))
    vocabulary = partitioning.TENSOR if partitioning.TENSOR in axes else None

    def on_device(hidden, embedding, targets):
        table = parallel.gather(embedding, axes, partitioning.FSDP).astype(dtype)
        size = len(table)
        if differentiate:
            table = jnp.pad(table, ((0, -size % _ALIGNMENT), (0, 0)))

        def add(carry, tokens):
            sums, dtable = carry
            hidden, targets = tokens
            logits = jnp.einsum(
                "btm,vm->btv", hidden.astype(dtype), table, preferred_element_type=jnp.float32
            )
            logits = logits[..., :size]

            # Sums. Over a sharded vocabulary, they are those of all devices.
            highest, total = _max_and_sum(logits)
            if vocabulary is not None:
                of_device, highest = highest, jax.lax.pmax(jax.lax.stop_gradient(highest), vocabulary)
                total = jax.lax.psum(total * jnp.exp(of_device - highest), vocabulary)
            label = targets if vocabulary is None else targets - size * jax.lax.axis_index(vocabulary)
            index = jnp.maximum(label, 0) if vocabulary is None else jnp.clip(label, 0, size - 1)
            picked = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
            if vocabulary is not None:
                picked = jax.lax.psum(jnp.where(label == index, picked, 0), vocabulary)
            normalizers = jnp.log(total) + highest
            terms = jnp.log(total) - (picked - highest), z_loss * jnp.square(normalizers)
            counts = targets >= 0
            sums = tuple(before + jnp.sum(term, where=counts) for before, term in zip(sums, terms))
            if not differentiate:
                return (sums, None), None

            # Gradients.
            factor = jnp.where(counts, 1 + 2 * z_loss * normalizers, 0) / total
            is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == label[..., None]
            dlogits = (factor[..., None] * jnp.exp(logits - highest[..., None]) - is_label).astype(dtype)
            dlogits = jnp.pad(dlogits, ((0, 0), (0, 0), (0, len(table) - size)))
            # Otherwise XLA computes it twice on a CPU, once for each product.
            dlogits = jax.lax.optimization_barrier(dlogits)
            dhidden = jnp.einsum("btv,vm->btm", dlogits, table, preferred_element_type=hidden.dtype)
            dtable += jnp.einsum(
                "btv,btm->vm", dlogits, hidden.astype(dtype), preferred_element_type=jnp.float32
            )
            return (sums, dtable), dhidden

        rows, time = targets.shape
        # Equal slices within the limit, rounded up so that they have multiples of 8 tokens.
        width = max(1, min(time, _LOGITS_BYTES // (4 * rows * len(table))))
        slices = -(-time // width)
        width = -(-time // slices)
        if slices > 1:
            width += -width % (_ALIGNMENT // math.gcd(_ALIGNMENT, rows))
            slices = -(-time // width)
        padding = slices * width - time

        def split(x, fill):
            padded = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
            return padded.reshape(rows, slices, width, *x.shape[2:]).swapaxes(0, 1)

        zeros = (
            (jnp.float32(0), jnp.float32(0)),
            jnp.zeros(table.shape, jnp.float32) if differentiate else None,
        )
        (sums, dtable), dhidden = jax.lax.scan(add, zeros, (split(hidden, 0), split(targets, -1)))
        if summed:
            sums = jax.lax.psum(sums, summed)
        if not differentiate:
            return sums, None
        dhidden = dhidden.swapaxes(0, 1).reshape(rows, slices * width, -1)[:, :time]
        if vocabulary is not None:
            dhidden = jax.lax.psum(dhidden, vocabulary)
        return sums, (dhidden, parallel.scatter(dtable[:size], axes, summed).astype(embedding.dtype))

    specs = partitioning.TOKENS, partitioning.ROWS, partitioning.TOKENS
    like = tuple(partitioning.fit(spec, x.shape) for spec, x in zip(specs, (hidden, embedding)))
    out = partitioning.REPLICATED, like if differentiate else None
    return partitioning.over_devices(on_device, (hidden, embedding, targets), specs, out)


@jax.custom_jvp
def _max_and_sum(logits: Float[Array, "B T V"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns max_v x_v and sum_v exp(x_v - max); on a GPU, whose bandwidth limits this, reads the logits once."""
    return jax.lax.platform_dependent(logits, cuda=_in_one_pass, default=_in_two_passes)


@_max_and_sum.defjvp
def _max_and_sum_jvp(primals, tangents):
    # The maximum is a constant: any other would give the same loss.
    (logits,), (tangent,) = primals, tangents
    highest, total = _max_and_sum(logits)
    weights = jnp.exp(logits - highest[..., None])
    return (highest, total), (jnp.zeros_like(highest), jnp.sum(weights * tangent, -1))


def _in_two_passes(logits):
    highest = logits.max(-1)
    return highest, jnp.exp(logits - highest[..., None]).sum(-1)


def _in_one_pass(logits):
    def combine(first, second):
        (a, sum_a), (b, sum_b) = first, second
        is_a = a >= b
        total = jnp.where(is_a, sum_a, sum_b) + jnp.exp(-jnp.abs(a - b)) * jnp.where(is_a, sum_b, sum_a)
        return jnp.maximum(a, b), total

    # Not -inf, whose difference from itself is NaN.
    nothing = jnp.finfo(jnp.float32).min, jnp.float32(0)
    return jax.lax.reduce((logits, jnp.ones_like(logits)), nothing, combine, (logits.ndim - 1,))
