"""Gradient of queries at p = 4: through the state, and through the keys from the window on.

A block has one chunk's rows in `query_blocks` warpgroups of 64. `far_vjp` computes the from-state contribution,
of the query and its output's cotangent divided by a power of two so that they fit in 16 bits. `near_vjp` adds that of
the in-window keys. The normalizer's contribution is added in plain JAX, since the kernel has no room for its matrix.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import near, near_vjp
from pallas_kernels.power_state.quartic import far_vjp as far

__all__ = ["Rows", "query_vjp"]

_BLOCK = configs.BLOCK
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_POWER = 4
# Number of scalars of a state per step.
_TOGETHER = 3


class Rows(NamedTuple):
    """Index of each factor of queries. The largest entry of a row of dout times 2^-a is in [1/2, 1)."""

    narrow: int = 0  # 2^-a
    far: int = 1  # 2^a times the factor from the stored state to the query
    delta: int = 2  # dout . out
    inverse: int = 3  # 1 / the sum of weights, 0 where that is 0


def query_vjp(
    query,
    vector,
    scalars,
    dout,
    states,
    key,
    value,
    decay,
    rows,
    *,
    layout,
    config,
    chunk,
    exact_window,
    interpret=None,
):
    """Returns the gradient of every query, float32 [HN, X, D], and float32 sums [HN, 2, X].

    The gradient lacks the normalizer's contribution.

    query, vector, scalars, states, key, value, decay: as in `query.query_states`. dout: bfloat16 [HN, X, E],
    the cotangent of the weighted mean. rows: float32 [HN, X / 64, 4, 64], in the order of `Rows`.

    The sums are those of the gradient with respect to the logarithms of weights: over the in-window keys, and over the
    keys in the state, without the normalizer's contribution. Accumulates in float32.
    """
    heads, time, head_dim = query.shape
    config = config.for_query_vjp()
    value_dim, count, stages = value.shape[-1], config.query_blocks, config.state_stages
    states = states.reshape(*states.shape[:2], -1, layout.width)
    scratch = {
        "query_smem": products.operand((count,), _BLOCK, head_dim, query.dtype),
        "dout_smem": products.operand((count,), _BLOCK, value_dim, dout.dtype),
        "decay_smem": plgpu.SMEM(decay.shape[2:], jnp.float32),
        "rows_smem": plgpu.SMEM((count, *rows.shape[2:]), jnp.float32),
        "key_smem": products.operand((config.key_stages,), _BLOCK, head_dim, key.dtype),
        "value_smem": products.operand((config.key_stages,), _BLOCK, value_dim, value.dtype),
        "ready": plgpu.Barrier(num_arrivals=2 * count + 2),
        "key_full": plgpu.Barrier(num_arrivals=2, num_barriers=config.key_stages),
        "key_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.key_stages),
        **far.scratch(layout, count, stages, vector, scalars, states),
    }
    if interpret is not None:
        shapes = far.held_shapes(layout, _TOGETHER) | {
            "near": [(_BLOCK, _BLOCK)] * 2,
            "gradient": [(_BLOCK, head_dim)],
        }
        scratch["interpreted"] = far.interpreted(count, shapes)
    body = functools.partial(
        _body,
        layout=layout,
        config=config,
        chunk=chunk,
        exact_window=exact_window,
        groups=heads // key.shape[0],
    )
    arrays = query, vector, scalars, dout, states, key, value, decay, rows, *far.tables(layout).values()
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
            jax.ShapeDtypeStruct((heads, 2, time), jnp.float32),
        ),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(heads, time // chunk, chunk // (count * _BLOCK)),
        grid_names=("head", "chunk", "rows"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name="power_state_quartic_query_vjp",
        interpret=interpret,
    )(*arrays)


_INPUTS = (
    "query",
    "vector",
    "scalars",
    "dout",
    "states",
    "key",
    "value",
    "decay",
    "rows",
    "steps",
    "block_pairs",
    "scalar_pairs",
)


def _body(*refs, layout, config, chunk, exact_window, groups, interpreted=None, **smem):
    gmem = dict(zip((*_INPUTS, "dquery", "sums"), refs, strict=True))
    count, stages = config.query_blocks, config.state_stages
    warpgroup = lax.axis_index("warpgroup")
    placed = functools.partial(_placed, layout, count, chunk, groups)

    @pl.when(warpgroup == count)
    def _produce():
        if count > 1:
            plgpu.set_max_registers({2: 40, 3: 32}[count], action="decrease")
        place = placed()
        _copy_inputs(gmem, smem, place, config, chunk)
        far.copy(gmem, smem, place, layout, count, stages)
        # Keys are copied while the last states are still being read.
        near.copy_keys(gmem, smem, place, config, chunk, exact_window)
        far.drain(smem, place, layout, stages)

    @pl.when(warpgroup < count)
    def _consume():
        if count > 1:
            plgpu.set_max_registers({2: 232, 3: 160}[count], action="increase")
        own = {name: smem[name].at[warpgroup] for name in ("query_smem", "dout_smem", "rows_smem")}
        held = far.of_warpgroup(interpreted, warpgroup)
        place = placed()

        def with_gradient(gradient):
            plgpu.barrier_wait(smem["ready"])
            value = _along(own, Rows().narrow, own["dout_smem"].shape) * _load(own["dout_smem"])
            far.read(
                gradient,
                None,
                own["query_smem"],
                value,
                gmem["steps"],
                smem,
                warpgroup,
                place["blocks"],
                layout=layout,
                stages=stages,
                together=_TOGETHER,
                held=held,
            )
            gradient[...] = gradient[...] * _along(own, Rows().far, gradient.shape) / _POWER
            time = pl.ds(place["begin"] + warpgroup * _BLOCK, _BLOCK)
            far_sum = (_load(own["query_smem"]) * gradient[...]).sum(1)
            near_sum = near_vjp.read_keys(
                gradient,
                lambda: own["query_smem"],
                own["dout_smem"],
                smem,
                _row(own, Rows().delta),
                place["block"] + warpgroup,
                place["block"] + count - 1,
                config,
                exact_window,
                held and held["near"],
                power=_POWER,
            )
            inverse = _row(own, Rows().inverse)
            for n, total in enumerate((near_sum, far_sum)):
                gmem["sums"][place["head"], n, time] = inverse * total
            factor = lax.broadcast_in_dim(_POWER * inverse, gradient.shape, [0])
            gmem["dquery"][place["head"], time] = gradient[...] * factor

        products.with_accumulators(with_gradient, [own["query_smem"].shape], held and held["gradient"])


def _placed(layout, count, chunk, groups):
    """Returns the indices of a block's rows, keys and state in the arrays."""
    key_head = lax.div(lax.axis_index("head"), jnp.int32(groups))
    # The block of 64 rows of the first warpgroup, counted in the chunk.
    block = lax.axis_index("rows") * count
    return {
        "head": lax.axis_index("head"),
        "key_head": key_head,
        "chunk": lax.axis_index("chunk"),
        "block": block,
        "state_head": key_head,
        "state": lax.axis_index("chunk"),
        "begin": lax.axis_index("chunk") * chunk + block * _BLOCK,
        "blocks": jnp.int32(layout.blocks),
    }


def _load(x_smem):
    return plgpu.load(x_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _row(own, index):
    """Loads a vector of the warpgroup's queries."""
    return plgpu.load(own["rows_smem"].at[index], layout=_ROWS)


def _along(own, index, shape):
    """Broadcasts a vector of the warpgroup's queries along the columns of that shape."""
    return lax.broadcast_in_dim(_row(own, index), shape, [0])


def _copy_inputs(gmem, smem, place, config, chunk):
    """Copies the inputs that every warpgroup needs from the start."""
    head, ready = place["head"], smem["ready"]
    for n in range(config.query_blocks):
        time = pl.ds(place["begin"] + n * _BLOCK, _BLOCK)
        for name in ("query", "dout"):
            plgpu.copy_gmem_to_smem(gmem[name].at[head, time], smem[f"{name}_smem"].at[n], ready)
    plgpu.copy_gmem_to_smem(gmem["decay"].at[place["key_head"], place["chunk"]], smem["decay_smem"], ready)
    blocks = pl.ds(place["chunk"] * (chunk // _BLOCK) + place["block"], config.query_blocks)
    plgpu.copy_gmem_to_smem(gmem["rows"].at[head, blocks], smem["rows_smem"], ready)
