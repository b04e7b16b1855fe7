"""Gradient of the decays of the attention form: one launch."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, tensor_core
from pallas_kernels.power_attention import pairs

# Tokens of a thread block, and of one load of later ones: an entry for each thread.
_TOGETHER = 128
# Loads in flight.
_AHEAD = 8


def log_decay_vjp(dlog, *, interpret=None):
    """Returns the gradient of log_decay, float32 [B, S, K], from sums over queries of P (dP - delta), [B, K, S].

    The decay at t multiplies the weights of all pairs of a query at or after t and a key before t. For each query the
    gradients of all log weights sum to zero, so the result is minus the sum over pairs with keys at or after t. S is a
    multiple of 128.
    """
    batch, heads, length = dlog.shape
    count, block = length // _TOGETHER, pairs.BLOCK
    layout = plgpu.Layout.WG_STRIDED((_TOGETHER,), 1)

    def body(dlog, result):
        row, index, head = (lax.axis_index(name) for name in ("batch", "block", "head"))

        def add(step, later):
            places = [index + 1 + step * _AHEAD + n for n in range(_AHEAD)]
            terms = [
                plgpu.load(dlog.at[row, head, jnp.minimum(n, count - 1)], layout=layout, optimized=False)
                for n in places
            ]
            return later + sum(jnp.where(n < count, term, 0.0) for n, term in zip(places, terms))

        later = plgpu.layout_cast(jnp.zeros((_TOGETHER,), jnp.float32), layout)
        steps = lax.div(count - 1 - index + _AHEAD - 1, jnp.int32(_AHEAD))
        later = lax.fori_loop(jnp.int32(0), steps, add, later).sum()
        token, other = (
            plgpu.broadcasted_iota(jnp.int32, (block, block), n, layout=pairs.LAYOUT) for n in (0, 1)
        )
        total = plgpu.layout_cast(lax.broadcast(later, (block,)), tensor_core.PER_ROW)
        for half in reversed(range(_TOGETHER // block)):
            tokens = pl.ds(half * block, block)
            x = plgpu.load(dlog.at[row, head, index, tokens], layout=tensor_core.PER_COLUMN, optimized=False)
            x = pairs.by_column(x)
            after = total + jnp.where(other >= token, x, 0.0).sum(1)
            launch.store(result.at[row, pl.ds(index * _TOGETHER + half * block, block), head], -after)
            total = total + x.sum(1)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, length, heads), jnp.float32),
        grid=(batch, count, heads),
        grid_names=("batch", "block", "head"),
        kernel_name="power_attention_decays_vjp",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **launch.interpreted(interpret),
    )(dlog.reshape(batch, heads, count, _TOGETHER))
