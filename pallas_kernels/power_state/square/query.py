"""Fused query: the state before the window, the keys from the window on, and the division.

A block has one chunk's rows in `query_blocks` warpgroups of 64. Row i of a warpgroup sums, in one accumulator,

    scale_i * sum_j (q_ij * q_i[windows]) S_j^T    over the 16 groups j of the state, by parts,
    (q_i . k)^2 * 2^(g_i - g_k) v                  over the keys k from the window's first one to i itself,

and divides by the same sums without states and values: q_i^T Z q_i for the state, plain sums for the keys.

The decays g are running sums from the window's first key, in two floats: a multiple of a power of two that no sum
rounds, and a small remainder. The difference of two is therefore right to its own rounding, however large both are.
Weights of keys are split into two bfloat16 operands, whose sum has 16 bits: a single one would add as much error as the
rounding of the output does.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products, results, ring
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import near, queries
from pallas_kernels.power_state.square import far
from pallas_kernels.power_state.square import layout as layouts

__all__ = ["query_states"]

_BLOCK = configs.BLOCK
_ROWS = plgpu.Layout.WGMMA.reduce(1)


def query_states(
    query,
    scalars,
    states,
    norm,
    key,
    value,
    decay,
    scale,
    *,
    layout,
    config,
    chunk,
    exact_window,
    batch_time,
    interpret=None,
):
    """Returns the weighted means of values, bfloat16 [B, T, N, E], and their sums of weights, float32 [HN, X].

    batch_time: B and T; HN = B N, and X is T in whole chunks.

    query: bfloat16 [HN, X, D]; scalars: 16-bit [HN, D, X], the same, time last; HN a multiple of H.
    states: 16-bit [H, n, 16, terms E, P], the state that chunk c's queries read at c, as the sum of its terms. norm:
    bfloat16 [H, n, 2 D, D], Z as the sum of two.
    key: bfloat16 [H, W + X, D]; value: bfloat16 [H, W + X, E]; the first W are the window before the first chunk.
    decay: float32 [H, n, 2, (W + C) / 64, 64], running sums of base-2 logarithms over a chunk and its window, coarse
    and fine. scale: float32 [H, X / 64, 64], from the state to each query.

    If all weights of a row are zero, its output is zero. Accumulates in float32.
    """
    head_dim, value_dim, count = query.shape[-1], value.shape[-1], config.query_blocks
    scratch = {
        "query_smem": products.operand((count,), _BLOCK, head_dim, query.dtype),
        "scalar_smem": plgpu.SMEM((count, head_dim, _BLOCK), scalars.dtype),
        "decay_smem": plgpu.SMEM(decay.shape[2:], jnp.float32),
        "scale_smem": plgpu.SMEM((count, _BLOCK), jnp.float32),
        "state_smem": products.operand(
            (config.state_stages,), value_dim, layout.width // config.parts, states.dtype
        ),
        "key_smem": products.operand((config.key_stages,), _BLOCK, head_dim, key.dtype),
        "value_smem": products.operand((config.key_stages,), _BLOCK, value_dim, value.dtype),
        "ready": plgpu.Barrier(num_arrivals=2 * count + 2),
        "state_full": plgpu.Barrier(num_barriers=config.state_stages),
        "state_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.state_stages),
        "key_full": plgpu.Barrier(num_arrivals=2, num_barriers=config.key_stages),
        "key_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.key_stages),
    }
    if value_dim != head_dim:  # else the output takes the memory of the query
        scratch["out_smem"] = products.operand((count,), _BLOCK, value_dim, value.dtype)
    body = functools.partial(_body, layout=layout)
    arrays = query, scalars, states, norm, key, value, decay, scale
    options = {"config": config, "chunk": chunk, "exact_window": exact_window}
    options |= {"batch_time": batch_time, "interpret": interpret}
    return queries.launch(body, arrays, scratch, key=key, value=value, name="power_state_query", **options)


def _body(*refs, layout, config, chunk, exact_window, groups, interpreted=None, **smem):
    gmem = dict(
        zip(
            ("query", "scalars", "states", "norm", "key", "value", "decay", "scale", "out", "denominator"),
            refs,
            strict=True,
        )
    )
    warpgroup = lax.axis_index("warpgroup")
    place = {
        "head": lax.axis_index("head"),
        "key_head": lax.div(lax.axis_index("head"), jnp.int32(groups)),
        "chunk": lax.axis_index("chunk"),
        # The block of 64 rows of the first warpgroup, counted in the chunk.
        "block": lax.axis_index("rows") * config.query_blocks,
    }

    @pl.when(warpgroup == config.query_blocks)
    def _produce():
        if config.query_blocks > 1:
            plgpu.set_max_registers({2: 40, 3: 32}[config.query_blocks], action="decrease")
        _copy_inputs(gmem, smem, place, config, chunk)
        far.copy_norms(gmem, smem, place, config)
        steps = far.copy_states(gmem, smem, place, config)
        # Keys are copied while the last states are still being read.
        near.copy_keys(gmem, smem, place, config, chunk, exact_window, far.norm_blocks(layout))
        ring.drain(steps, config.state_stages, smem["state_free"])

    @pl.when(warpgroup < config.query_blocks)
    def _consume():
        if config.query_blocks > 1:
            plgpu.set_max_registers({2: 232, 3: 160}[config.query_blocks], action="increase")
        own = {name: smem[name].at[warpgroup] for name in ("query_smem", "scalar_smem")}
        out_smem = smem.get("out_smem", smem["query_smem"]).at[warpgroup]
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        block = place["block"] + warpgroup
        terms = gmem["states"].shape[3] // gmem["value"].shape[-1]
        plgpu.barrier_wait(smem["ready"])
        scale = plgpu.load(smem["scale_smem"].at[warpgroup], layout=_ROWS)
        denominator = scale * _norm_of_queries(own["query_smem"], smem, layout, config, held and held[1:])

        def rows(acc):
            _read_states(acc, own, smem, terms, layout, config, held)
            acc[...] = acc[...] * lax.broadcast_in_dim(scale, acc.shape, [0])
            end = place["block"] + config.query_blocks - 1
            total = queries.read_keys(
                acc,
                own,
                smem,
                denominator,
                block,
                end,
                config,
                exact_window,
                held and held[1:],
                first=far.norm_blocks(layout),
            )
            begin = place["chunk"] * chunk + block * _BLOCK
            gmem["denominator"][place["head"], pl.ds(begin, _BLOCK)] = total
            queries.store_mean(acc, total, out_smem, results.block(gmem["out"], place["head"], begin))

        products.with_accumulators(rows, [out_smem.shape], held and held[:1])


def _copy_inputs(gmem, smem, place, config, chunk):
    """Copies the inputs that every warpgroup needs from the start."""
    head, key_head, ready = place["head"], place["key_head"], smem["ready"]
    begin = place["chunk"] * chunk + place["block"] * _BLOCK
    for n in range(config.query_blocks):
        time = pl.ds(begin + n * _BLOCK, _BLOCK)
        plgpu.copy_gmem_to_smem(gmem["query"].at[head, time], smem["query_smem"].at[n], ready)
        plgpu.copy_gmem_to_smem(gmem["scalars"].at[head, :, time], smem["scalar_smem"].at[n], ready)
    plgpu.copy_gmem_to_smem(gmem["decay"].at[key_head, place["chunk"]], smem["decay_smem"], ready)
    rows = pl.ds(place["chunk"] * (chunk // _BLOCK) + place["block"], config.query_blocks)
    plgpu.copy_gmem_to_smem(gmem["scale"].at[key_head, rows], smem["scale_smem"], ready)


def _norm_of_queries(query_smem, smem, layout, config, interpreted):
    """Returns q^T Z q for 64 rows; Z is symmetric, so its rows can be loaded like keys."""
    query = plgpu.load(query_smem, layout=plgpu.Layout.WGMMA)
    if layout.head_dim < _BLOCK:
        query = jnp.concatenate([query] * (_BLOCK // layout.head_dim), 1)
    total = 0.0
    for step in range(far.norm_blocks(layout)):
        slot = step % config.key_stages
        plgpu.barrier_wait(smem["key_full"].at[slot])
        product = products.scores(query_smem, smem["key_smem"].at[slot], interpreted)
        plgpu.barrier_arrive(smem["key_free"].at[slot])
        begin = step * _BLOCK % query.shape[1]
        total += (product * query[:, begin : begin + _BLOCK].astype(jnp.float32)).sum(1)
    return total


def _read_states(acc, own, smem, terms, layout, config, interpreted):
    """Adds phi(q) S^T to acc, one part of a group of features at a time."""
    dtype = smem["state_smem"].dtype
    columns = layout.width // config.parts
    query = plgpu.load(own["query_smem"], layout=plgpu.Layout.WGMMA).astype(jnp.float32).astype(dtype)
    wrapped = jnp.concatenate([query, query], 1)

    @pl.loop(jnp.int32(0), jnp.int32(layouts.TILE))
    def _group(group):
        for part in range(config.parts):
            tiles = []
            for piece in layout.pieces(part * columns, (part + 1) * columns):
                scalar = plgpu.load(own["scalar_smem"].at[piece.scalar + group], layout=_ROWS)
                # Pairs across tiles represent both orders.
                scalar = scalar + scalar if piece.weight == 2 else scalar
                vector = wrapped[:, piece.vector : piece.vector + piece.width]
                tiles.append(vector * lax.broadcast_in_dim(scalar, vector.shape, [0]))
            features = jnp.concatenate(tiles, 1)
            for term in range(terms):
                slot = ring.slot_of((group * config.parts + part) * terms + term, config.state_stages)
                plgpu.barrier_wait(smem["state_full"].at[slot])
                products.accumulate(acc, features, smem["state_smem"].at[slot].T, interpreted)
                plgpu.barrier_arrive(smem["state_free"].at[slot])
