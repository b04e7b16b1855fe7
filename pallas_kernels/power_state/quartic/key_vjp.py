"""Gradients of keys and values at p = 4: from the gradient of the state after them, and from in-window queries.

A block has `key_vjp_blocks` warpgroups of 64 keys of one chunk. One pass over the gradient of the state after the chunk
computes both from-state contributions (`far_vjp`), of the key and the value divided by powers of two so that
they fit in 16 bits. `near_key_vjp` adds those of in-window queries. The normalizer's contribution is added in plain
JAX, since the kernel has no room for its matrix.
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
from pallas_kernels.power_state import near_key_vjp as near
from pallas_kernels.power_state.quartic import far_vjp as far

__all__ = ["Rows", "key_vjp"]

_BLOCK = configs.BLOCK
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_POWER = 4


class Rows(NamedTuple):
    """Index of each vector of keys. The largest entry of a value times 2^-a, and of a key times 2^-b, is in [1/2, 1).

    kappa is the decay from the key to the state after its chunk, times the factor that undoes the scale of the stored
    gradient; 0 if the key does not update the state.
    """

    narrow_value: int = 0  # 2^-a
    far_key: int = 1  # kappa 2^(a + 2 b)
    far_value: int = 2  # kappa 2^(4 b)
    # Running sums of base-2 logarithms of decays in the frame of the key's own chunk.
    coarse: int = 3
    fine: int = 4
    # The same in the frame of the previous chunk, whose queries attend to the first keys of this one.
    coarse_before: int = 5
    fine_before: int = 6


def key_vjp(
    key,
    vector,
    scalars,
    value,
    dual,
    query,
    dout,
    rows,
    columns,
    *,
    layout,
    config,
    chunk,
    exact_window,
    interpret=None,
):
    """Returns float32 gradients of keys [H, Y, D] and values [H, Y, E], and sums [H, 2, Y].

    The gradients of keys lack the normalizer's contribution.

    Positions are those of keys with the window in front, Y = m C of them. m is the n chunks of queries or one more,
    whose keys are in no state. key: bfloat16 [H, Y, D]; value: bfloat16 [H, Y, E].
    vector: 16-bit [H, Y, layout.rows], y of keys divided by powers of two, with zeros in front. scalars: 16-bit [H,
    layout.scalar_rows, Y], the same products in the order of the scalars, time last.
    dual: 16-bit [H, n, U, E, P], the gradient of the state for the keys of chunk c at n - 1 - c, times its weights.
    query: bfloat16 [HN, X, D]; dout: bfloat16 [HN, X, E]; HN a multiple of H.
    rows: float32 [H, Y / 64, 7, 64], in the order of `Rows`; columns: float32 [HN, X / 64, 4, 64], in that of
    `near_key_vjp.Columns`.

    The window is at most a chunk. The sums are those of the gradient with respect to the logarithms of weights: over
    in-window queries, and over queries that read the key from the state, without the normalizer's contribution.
    Accumulates in float32.
    """
    heads, time, head_dim = key.shape
    value_dim, count, stages = value.shape[-1], config.key_vjp_blocks, config.key_vjp_stages
    dual = dual.reshape(*dual.shape[:2], -1, layout.width)
    scratch = {
        "key_smem": products.operand((count,), _BLOCK, head_dim, key.dtype),
        "value_smem": products.operand((count,), _BLOCK, value_dim, value.dtype),
        "rows_smem": plgpu.SMEM((count, *rows.shape[2:]), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2 * count + 1),
        **near.scratch(head_dim, value_dim, query.dtype, count),
        **far.scratch(layout, count, stages, vector, scalars, dual),
    }
    if interpret is not None:
        shapes = far.held_shapes(layout, _together(layout, count)) | {
            "near": near.held_shapes(),
            "gradients": [(_BLOCK, head_dim), (_BLOCK, value_dim)],
        }
        scratch["interpreted"] = far.interpreted(count, shapes)
    body = functools.partial(
        _body,
        layout=layout,
        config=config,
        chunk=chunk,
        exact_window=exact_window,
        groups=query.shape[0] // heads,
    )
    arrays = key, vector, scalars, value, dual, query, dout, rows, columns, *far.tables(layout).values()
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(key.shape, jnp.float32),
            jax.ShapeDtypeStruct(value.shape, jnp.float32),
            jax.ShapeDtypeStruct((heads, 2, time), jnp.float32),
        ),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(heads, time // chunk, chunk // (count * _BLOCK)),
        grid_names=("head", "chunk", "rows"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name="power_state_quartic_key_vjp",
        interpret=interpret,
    )(*arrays)


_INPUTS = (
    "key",
    "vector",
    "scalars",
    "value",
    "states",
    "query",
    "dout",
    "rows",
    "columns",
    "steps",
    "block_pairs",
    "scalar_pairs",
)


def _body(*refs, layout, config, chunk, exact_window, groups, interpreted=None, **smem):
    gmem = dict(zip((*_INPUTS, "dkey", "dvalue", "sums"), refs, strict=True))
    count, stages = config.key_vjp_blocks, config.key_vjp_stages
    warpgroup = lax.axis_index("warpgroup")
    placed = functools.partial(_placed, gmem, layout, count, chunk, exact_window)

    @pl.when(warpgroup == count)
    def _produce():
        if count > 1:
            plgpu.set_max_registers(24, action="decrease")
        place, span = placed()
        _copy_inputs(gmem, smem, place, count)
        far.copy(gmem, smem, place, layout, count, stages)
        # Queries are copied while the last gradients of states are still being read.
        near.copy_queries(gmem, smem, place["head"], span(0), groups=groups)
        far.drain(smem, place, layout, stages)

    @pl.when(warpgroup < count)
    def _consume():
        if count > 1:
            plgpu.set_max_registers(240, action="increase")
        own = {name: smem[name].at[warpgroup] for name in ("key_smem", "value_smem", "rows_smem")}
        own["decay_smem"] = own["rows_smem"].at[pl.ds(Rows().coarse, 4)]
        held = far.of_warpgroup(interpreted, warpgroup)
        place, span = placed()

        def with_gradients(dkey, dvalue):
            plgpu.barrier_wait(smem["ready"])
            value = _along(own, Rows().narrow_value, dvalue.shape) * _load(own["value_smem"])
            far.read(
                dkey,
                dvalue,
                own["key_smem"],
                value,
                gmem["steps"],
                smem,
                warpgroup,
                place["blocks"],
                layout=layout,
                stages=stages,
                together=_together(layout, count),
                held=held,
            )
            dkey[...] = dkey[...] * _along(own, Rows().far_key, dkey.shape) / _POWER
            dvalue[...] = dvalue[...] * _along(own, Rows().far_value, dvalue.shape)
            far_sum = (_load(own["key_smem"]) * dkey[...]).sum(1)
            near_sum = near.read_queries(
                dkey, dvalue, own, smem, span(warpgroup), held and held["near"], groups=groups, power=_POWER
            )
            time = pl.ds(place["begin"] + warpgroup * _BLOCK, _BLOCK)
            for n, total in enumerate((near_sum, far_sum)):
                gmem["sums"][place["head"], n, time] = total
            gmem["dkey"][place["head"], time] = dkey[...] * _POWER
            # Not through shared memory: there is no register left for the address of the value there.
            gmem["dvalue"][place["head"], time] = dvalue[...]

        shapes = [own["key_smem"].shape, own["value_smem"].shape]
        products.with_accumulators(with_gradients, shapes, held and held["gradients"])


def _together(layout, count):
    """Returns the number of scalars of a state's gradient per step, the most that compile without register spills."""
    return 2 if layout.value_dim == 32 and count == 1 else 3


def _placed(gmem, layout, count, chunk, exact_window):
    """Returns a block's indices in the arrays, and a function that returns spans of queries.

    The function maps a warpgroup to the `near_key_vjp.Span` of the queries that attend to its keys.
    """
    index, chunks = lax.axis_index("chunk"), gmem["states"].shape[1]
    # The block of 64 padded positions of the first warpgroup.
    block = index * (chunk // _BLOCK) + lax.axis_index("rows") * count
    place = {
        "head": lax.axis_index("head"),
        "block": block,
        "begin": block * _BLOCK,
        "state_head": lax.axis_index("head"),
        "state": jnp.maximum(chunks - 1 - index, 0),
        # Keys after the last query's chunk are in no state.
        "blocks": jnp.where(index < chunks, layout.blocks, 0),
    }
    time = gmem["query"].shape[1]
    return place, functools.partial(
        near.Span.of_keys, block, chunk=chunk, exact_window=exact_window, time=time
    )


def _load(x_smem):
    return plgpu.load(x_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _along(own, index, shape):
    """Broadcasts a vector of the warpgroup's keys along the columns of that shape."""
    return lax.broadcast_in_dim(plgpu.load(own["rows_smem"].at[index], layout=_ROWS), shape, [0])


def _copy_inputs(gmem, smem, place, count):
    """Copies the inputs that every warpgroup needs from the start."""
    head, ready = place["head"], smem["ready"]
    for n in range(count):
        time = pl.ds(place["begin"] + n * _BLOCK, _BLOCK)
        for name in ("key", "value"):
            plgpu.copy_gmem_to_smem(gmem[name].at[head, time], smem[f"{name}_smem"].at[n], ready)
    rows = gmem["rows"].at[head, pl.ds(place["block"], count)]
    plgpu.copy_gmem_to_smem(rows, smem["rows_smem"], ready)
