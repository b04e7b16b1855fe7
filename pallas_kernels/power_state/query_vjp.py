"""The gradient with respect to queries: through the state before the window, and through the keys from there on.

A block owns one chunk's rows in as many warpgroups of 64 as `query_vjp_blocks` says. For each group j of the state and
each index i = 16 a + j, with M_b = (dO narrow) S[i, b]^T for the window of tiles b that i multiplies,

    dx_b += x_i M_b                 as the features' vector,
    dx_i += sum over b of x_b M_b   as their scalar,

which is half the gradient of x^T S x: pairs across tiles count twice. A pair within the tile of i is there in both
orders, of which each would be the scalar once; as the state is symmetric, being the vector twice is the same. dO is
multiplied by a power of two that lets float16 hold it.

The normaliser's share is subtracted, and what the keys add follows in the same accumulator (`near_vjp`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import far, near, near_vjp, products, ring
from pallas_kernels.power_state import layout as layouts

__all__ = ["Rows", "query_vjp"]

_BLOCK = configs.BLOCK
_TILE = layouts.TILE
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_POWER = 2


class Rows(NamedTuple):
    """Factors of each query, in the order in which the kernel takes them."""

    narrow: jax.Array  # 2^-a, which brings the largest entry of its dO into [1/2, 1)
    far: jax.Array  # 2^a times the factor from the state to the query
    far_norm: jax.Array  # 2 delta times the factor from the state to the query
    delta: jax.Array  # dO . o
    inverse: jax.Array  # 1 / den, 0 where den is 0


def query_vjp(
    query,
    scalars,
    dout,
    states,
    norm,
    key,
    value,
    decay,
    rows,
    *,
    layout,
    config,
    chunk,
    window,
    interpret=None,
):
    """The gradient of every query, bfloat16 [HN, X, D], and float32 sums [HN, 2, X].

    query, scalars, states, norm, key, value, decay: as in `query.query_states`. dout: bfloat16 [HN, X, E], the cotangent
    of the weighted mean. rows: float32 [HN, X / 64, 5, 64], in the order of `Rows`.

    The sums are those of the gradient with respect to the logarithms of decays, over the keys that the query meets
    exactly, and over those behind the state. Accumulates in float32.
    """
    heads, time, head_dim = query.shape
    config = config.for_query_vjp()
    value_dim, count, stages = value.shape[-1], config.query_blocks, config.state_stages
    width = layout.width // config.parts
    scratch = {
        "query_smem": products.operand((count,), _BLOCK, head_dim, query.dtype),
        "dout_smem": products.operand((count,), _BLOCK, value_dim, dout.dtype),
        "scalar_smem": plgpu.SMEM((count, head_dim, _BLOCK), scalars.dtype),
        "decay_smem": plgpu.SMEM(decay.shape[2:], jnp.float32),
        "rows_smem": plgpu.SMEM((count, *rows.shape[2:]), jnp.float32),
        "state_smem": products.operand((stages,), value_dim, width, states.dtype),
        "key_smem": products.operand((config.key_stages,), _BLOCK, head_dim, key.dtype),
        "value_smem": products.operand((config.key_stages,), _BLOCK, value_dim, value.dtype),
        "ready": plgpu.Barrier(num_arrivals=3 * count + 2),
        "state_full": plgpu.Barrier(num_barriers=stages),
        "state_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
        "key_full": plgpu.Barrier(num_arrivals=2, num_barriers=config.key_stages),
        "key_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.key_stages),
    }
    if interpret is not None:
        shapes = ((_BLOCK, head_dim), (_BLOCK, width), (_BLOCK, _BLOCK), (_BLOCK, _BLOCK))
        scratch["interpreted"] = [plgpu.SMEM((count, *shape), jnp.float32) for shape in shapes]
    body = functools.partial(
        _body, layout=layout, config=config, chunk=chunk, window=window, groups=heads // key.shape[0]
    )
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((heads, 2, time), jnp.float32),
        ),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(heads, time // chunk, chunk // (count * _BLOCK)),
        grid_names=("head", "chunk", "rows"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name="power_state_query_vjp",
        interpret=interpret,
    )(query, scalars, dout, states, norm, key, value, decay, rows)


def _body(*refs, layout, config, chunk, window, groups, interpreted=None, **smem):
    inputs = ("query", "scalars", "dout", "states", "norm", "key", "value", "decay", "rows")
    gmem = dict(zip((*inputs, "out", "sums"), refs, strict=True))
    warpgroup = lax.axis_index("warpgroup")
    place = {
        "head": lax.axis_index("head"),
        "key_head": lax.div(lax.axis_index("head"), jnp.int32(groups)),
        "chunk": lax.axis_index("chunk"),
        # The block of 64 rows, counted in the chunk, that the first warpgroup owns.
        "block": lax.axis_index("rows") * config.query_blocks,
    }

    @pl.when(warpgroup == config.query_blocks)
    def _produce():
        if config.query_blocks > 1:
            plgpu.set_max_registers({2: 40, 3: 32}[config.query_blocks], action="decrease")
        _copy_inputs(gmem, smem, place, config, chunk)
        steps = far.copy_states(gmem, smem, place, config)
        # The normaliser and keys come while the last states are still being read.
        far.copy_norms(gmem, smem, place, config)
        near.copy_keys(gmem, smem, place, config, chunk, window, far.norm_blocks(layout))
        ring.drain(steps, config.state_stages, smem["state_free"])

    @pl.when(warpgroup < config.query_blocks)
    def _consume():
        if config.query_blocks > 1:
            plgpu.set_max_registers({2: 232, 3: 160}[config.query_blocks], action="increase")
        own = {name: smem[name].at[warpgroup] for name in ("query_smem", "dout_smem", "scalar_smem")}
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        block = place["block"] + warpgroup
        end = place["block"] + config.query_blocks - 1
        terms = gmem["states"].shape[3] // gmem["value"].shape[-1]
        plgpu.barrier_wait(smem["ready"])
        row = Rows(*(smem["rows_smem"].at[warpgroup, n] for n in range(len(Rows._fields))))

        both = jnp.concatenate(_read_states(own, smem, row, terms, layout, config, held and held[1:2]), 1)
        norm = _read_norm(own["query_smem"], smem, layout, config, held and held[2:3])
        scale, far_norm = plgpu.load(row.far, layout=_ROWS), plgpu.load(row.far_norm, layout=_ROWS) / _POWER
        gradient = lax.broadcast_in_dim(scale, both.shape, [0]) * both
        gradient = gradient - lax.broadcast_in_dim(far_norm, both.shape, [0]) * norm
        query = plgpu.load(own["query_smem"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        inverse = plgpu.load(row.inverse, layout=_ROWS)
        time = pl.ds(place["chunk"] * chunk + block * _BLOCK, _BLOCK)
        gmem["sums"][place["head"], 1, time] = inverse * (query * gradient).sum(1)

        def rows(acc):
            acc[...] = gradient
            total = near_vjp.read_keys(
                acc,
                own,
                smem,
                plgpu.load(row.delta, layout=_ROWS),
                block,
                end,
                config,
                window,
                held and held[2:],
                first=far.norm_blocks(layout),
            )
            inverse = plgpu.load(row.inverse, layout=_ROWS)
            gmem["sums"][place["head"], 0, time] = inverse * total
            _store(acc, _POWER * inverse, own["query_smem"], gmem["out"].at[place["head"], time])

        products.with_accumulators(rows, [own["query_smem"].shape], held and held[:1])


def _copy_inputs(gmem, smem, place, config, chunk):
    """What every warpgroup needs from the start."""
    head, ready = place["head"], smem["ready"]
    begin = place["chunk"] * chunk + place["block"] * _BLOCK
    for n in range(config.query_blocks):
        time = pl.ds(begin + n * _BLOCK, _BLOCK)
        for name in ("query", "dout"):
            plgpu.copy_gmem_to_smem(gmem[name].at[head, time], smem[f"{name}_smem"].at[n], ready)
        plgpu.copy_gmem_to_smem(gmem["scalars"].at[head, :, time], smem["scalar_smem"].at[n], ready)
    plgpu.copy_gmem_to_smem(gmem["decay"].at[place["key_head"], place["chunk"]], smem["decay_smem"], ready)
    blocks = pl.ds(place["chunk"] * (chunk // _BLOCK) + place["block"], config.query_blocks)
    plgpu.copy_gmem_to_smem(gmem["rows"].at[head, blocks], smem["rows_smem"], ready)


def _read_states(own, smem, row, terms, layout, config, interpreted):
    """Half the gradient of q^T S q: float32 [64, 16] for each tile of the query."""
    dtype = smem["state_smem"].dtype
    columns, tiles = layout.width // config.parts, layout.head_dim // _TILE
    query = plgpu.load(own["query_smem"], layout=plgpu.Layout.WGMMA)
    dout = plgpu.load(own["dout_smem"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    narrow = plgpu.load(row.narrow, layout=_ROWS)
    dout = (dout * lax.broadcast_in_dim(narrow, dout.shape, [0])).astype(dtype)
    shape = _BLOCK, _TILE
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

    def product(step):
        def add(acc):
            for term in range(terms):
                slot = ring.slot_of(step * terms + term, config.state_stages)
                plgpu.barrier_wait(smem["state_full"].at[slot])
                products.accumulate(acc, dout, smem["state_smem"].at[slot], interpreted)
                plgpu.barrier_arrive(smem["state_free"].at[slot])
            return acc[...]

        return products.with_accumulators(add, [(_BLOCK, columns)], interpreted)

    def group(index, gradients):
        gradients, sums = list(gradients), {}
        own_column = jnp.where(column == index, 1.0, 0.0)
        for part in range(config.parts):
            weights, begin = product(index * config.parts + part), 0
            for piece in layout.pieces(part * columns, (part + 1) * columns):
                scalar = plgpu.load(own["scalar_smem"].at[piece.scalar + index], layout=_ROWS)
                scalar = lax.broadcast_in_dim(scalar.astype(jnp.float32), shape, [0])
                for vector in range(piece.vector, piece.vector + piece.width, _TILE):
                    tile, begin = weights[:, begin : begin + _TILE], begin + _TILE
                    vector = vector % layout.head_dim
                    gradients[vector // _TILE] += scalar * tile
                    if piece.weight == 2:
                        share = query[:, vector : vector + _TILE].astype(jnp.float32) * tile
                        sums[piece.scalar] = sums[piece.scalar] + share if piece.scalar in sums else share
        for scalar, total in sums.items():
            gradients[scalar // _TILE] += lax.broadcast_in_dim(total.sum(1), shape, [0]) * own_column
        return tuple(gradients)

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(jnp.int32(0), jnp.int32(_TILE), group, (zeros,) * tiles)


def _read_norm(query_smem, smem, layout, config, interpreted):
    """q Z for 64 rows, float32 [64, D]; Z is symmetric, so that its rows serve as keys do."""
    total = {}
    for step in range(far.norm_blocks(layout)):
        slot = step % config.key_stages
        plgpu.barrier_wait(smem["key_full"].at[slot])
        product = products.scores(query_smem, smem["key_smem"].at[slot], interpreted)
        plgpu.barrier_arrive(smem["key_free"].at[slot])
        for begin in range(0, _BLOCK, layout.head_dim):
            column = (step * _BLOCK + begin) % layout.head_dim
            part = product[:, begin : begin + layout.head_dim]
            total[column] = total[column] + part if column in total else part
    return jnp.concatenate(list(total.values()), 1)


def _store(acc, factor, out_smem, out):
    """Writes factor times acc by way of shared memory."""
    out_smem[...] = (acc[...] * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out)
    plgpu.wait_smem_to_gmem(0)
