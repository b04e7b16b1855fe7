"""Gradient of queries: through the state before the window, and through the keys from the window on.

A thread block has 64 rows of one chunk in each of its `query_vjp_blocks` warpgroups. For each group j of the state and
each index i = 16 a + j, with M_b = (dO narrow) S[i, b] for the window of tiles b that i multiplies,

    dx_b += x_i M_b                 as the features' vector,
    dx_i += sum over b of x_b M_b   as their scalar,

which is half the gradient of x^T S x: pairs across tiles count twice. A pair within the tile of i occurs in both
orders, each of which would contribute once as the scalar; as the state is symmetric, contributing twice as the vector
is the same. dO is multiplied by a power of two so that it fits in float16.

The normalizer's contribution is subtracted, and `window_keys` adds that of the keys in the same accumulator.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, results, ring, tensor_core
from pallas_kernels.power_state import configs, query_tile, window_keys
from pallas_kernels.power_state.square import layouts, state_copies

_BLOCK = configs.BLOCK
# Columns of an accumulator of which each thread has two next to each other.
_HALF = layouts.TILE // 2
_POWER = 2


class Rows(NamedTuple):
    """Factors of each query, in the order in which the kernel takes them."""

    narrow: jax.Array  # 2^-a, scales the largest entry of its dO into [1/2, 1)
    state: jax.Array  # 2^a times the factor from the state to the query
    delta: jax.Array  # dO . o
    inverse: jax.Array  # 1 / den, 0 where den is 0
    # The power of two that the query was multiplied by, as the product of two.
    unit: jax.Array
    unit_rest: jax.Array


class Operands(NamedTuple):
    """Arrays that the kernel reads, with those of `query.Operands`."""

    query: jax.Array
    scalars: jax.Array
    # bfloat16 [B, at least T, N, E], the cotangent of the weighted mean; at E = 128 padded to X tokens
    dout: jax.Array
    states: jax.Array
    norm: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    rows: jax.Array  # float32 [HN, X / 64, 6, 64], in the order of `Rows`


def query_vjp(operands: Operands, *, time: int, call: configs.Call):
    """Returns the gradient with respect to the unscaled queries, bfloat16 [B, T, N, D], and float32 sums.

    The sums [HN, 2, X] are those of the gradient with respect to the logarithms of decays, over the in-window keys, and
    over the keys in the state. Accumulates in float32. `time` is T.
    """
    query, scalars, dout, states, _, key, value, _, rows = operands
    config, chunk, (heads, _, head_dim) = call.config, call.chunk, query.shape
    layout, batch_time, whole = layouts.Layout(head_dim), (len(key), time), states.shape[1] * chunk
    value_dim, count, stages = value.shape[-1], config.query_vjp_blocks, config.query_vjp_stages
    norm_steps, width = state_copies.norm_blocks(layout), layout.section_width
    # At E = 128 there are too few registers for dO: while states are read, it is an operand in their dtype.
    narrows = value_dim == 128
    # At D = 128 shared memory cannot hold all values of a section.
    state_values = _BLOCK if head_dim == 128 else value_dim
    # At D = 128 there are too few registers for queries: tiles are read as they are needed.
    slices = layouts.TILE if head_dim == 128 else None

    def body(gmem, smem):
        tile = query_tile.QueryTile.of_thread_block(heads // len(states), chunk, count)
        keys = window_keys.Keys(gmem, smem, tile, count, call, norm_steps)

        def dout_of(warpgroup):
            return results.block(gmem["dout"], tile.head, tile.token + warpgroup * _BLOCK)

        def copy():
            # Inputs that every warpgroup needs from the start.
            ready = smem["ready"]
            for n in range(count):
                query = gmem["query"].at[tile.head, tile.tokens_of(n)]
                plgpu.copy_gmem_to_smem(query, smem["query_smem"].at[n], ready)
                if not narrows:
                    plgpu.copy_gmem_to_smem(dout_of(n), smem["dout_smem"].at[n], ready)
                scalars = gmem["scalars"].at[tile.head, :, tile.tokens_of(n)]
                plgpu.copy_gmem_to_smem(scalars, smem["scalar_smem"].at[n], ready)
            keys.copy_decays(ready)
            blocks = tile.blocks_of(chunk, count)
            plgpu.copy_gmem_to_smem(gmem["rows"].at[tile.head, blocks], smem["rows_smem"], ready)
            # The normalizer, then the states.
            state_copies.copy_norms(gmem, smem, tile, keys.copies)
            piece_of = functools.partial(_piece, groups=config.query_vjp_groups)
            steps = state_copies.copy_states(gmem, smem, tile, layout.sections, piece_of)
            # Keys are copied while the last states are still being read.
            keys.copy()
            ring.drain(steps, stages, smem["state_free"])

        def compute(warpgroup, core):
            names = ("query_smem", "dout_smem", "narrow_smem", "scalar_smem")
            own = {name: smem[name].at[warpgroup] for name in names if name in smem}
            tokens = tile.tokens_of(warpgroup)
            dout_ref = dout_of(warpgroup) if narrows else own["dout_smem"]
            plgpu.barrier_wait(smem["ready"])

            def dout():
                return plgpu.load(dout_ref, layout=plgpu.Layout.WGMMA, optimized=False)

            # The query as an operand is loaded for each use, or stays in shared memory, where its descriptors take
            # registers between uses. Registers are short for large queries, and for a chunk whose loop over keys is
            # unrolled.
            reload_query = head_dim == 128 or chunk == count * _BLOCK

            def query():
                return (
                    plgpu.load(own["query_smem"], layout=plgpu.Layout.WGMMA)
                    if reload_query
                    else own["query_smem"]
                )

            rows_smem = smem["rows_smem"].at[warpgroup]
            row = Rows(*(rows_smem.at[n] for n in range(rows_smem.shape[0])))

            # The normalizer.
            narrow, delta = (plgpu.load(ref, layout=tensor_core.PER_ROW) for ref in (row.narrow, row.delta))
            start = _read_norm(core, query(), smem, layout)
            start = start * lax.broadcast_in_dim(-narrow * delta, start.shape, [0])

            # The state before the window.
            wide = dout()
            narrowed = wide.astype(jnp.float32) * lax.broadcast_in_dim(narrow, wide.shape, [0])
            narrowed = narrowed.astype(states.dtype)
            if narrows:
                own["narrow_smem"][...] = narrowed
                plgpu.commit_smem()
                narrowed = own["narrow_smem"]
            both = _read_states(core, start, narrowed, own, smem, config.query_vjp_groups)
            scale = plgpu.load(row.state, layout=tensor_core.PER_ROW)
            gradient = lax.broadcast_in_dim(scale, both.shape, [0]) * both
            exact = plgpu.load(own["query_smem"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            inverse = plgpu.load(row.inverse, layout=tensor_core.PER_ROW)
            gmem["sums"][tile.head, 1, tokens] = inverse * (exact * gradient).sum(1)

            def attend(acc):
                # The keys from the window on.
                acc[...] = gradient
                exact_dout = dout() if narrows else dout_ref
                own_rows = query, exact_dout, plgpu.load(row.delta, layout=tensor_core.PER_ROW)
                total = keys.add_gradient(core, acc, own_rows, warpgroup, _POWER)
                # The division.
                inverse = plgpu.load(row.inverse, layout=tensor_core.PER_ROW)
                gmem["sums"][tile.head, 0, tokens] = inverse * total
                unit = (plgpu.load(ref, layout=tensor_core.PER_ROW) for ref in (row.unit, row.unit_rest))
                factors = (_POWER * inverse, *unit)
                block = results.block(gmem["dquery"], tile.head, tile.token + warpgroup * _BLOCK)
                _store(acc, factors, own["query_smem"], block)

            core.accumulators(attend, head_dim)

        return copy, compute

    scratch = {
        "query_smem": tensor_core.operand((count,), _BLOCK, head_dim, query.dtype, slices),
        "scalar_smem": plgpu.SMEM((count, head_dim, _BLOCK), scalars.dtype),
        "rows_smem": plgpu.SMEM((count, *rows.shape[2:]), jnp.float32),
        "state_smem": tensor_core.operand((stages,), state_values, width, states.dtype),
        "ready": plgpu.Barrier(num_arrivals=(2 if narrows else 3) * count + 2),
        "state_full": plgpu.Barrier(num_barriers=stages),
        "state_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
        **window_keys.scratch(operands, count, call),
    }
    if narrows:
        scratch["narrow_smem"] = tensor_core.operand((count,), _BLOCK, value_dim, states.dtype, width)
    else:
        scratch["dout_smem"] = tensor_core.operand((count,), _BLOCK, value_dim, dout.dtype)
    output = launch.launch(
        body,
        operands._asdict(),
        {
            "dquery": results.kind(batch_time, heads, head_dim, query.dtype),
            "sums": jax.ShapeDtypeStruct((heads, 2, whole), jnp.float32),
        },
        scratch,
        grid=call.grid(heads, whole, count),
        warpgroups=count,
        name="power_state_query_vjp",
        interpret=call.interpret,
    )
    return output["dquery"][:, :time], output["sums"]


def _piece(index, groups):
    """Returns the group and the section of it to read at a step: by section, round and group of a round.

    In a round of more than one group, the first half are neighbors, and the second half are the same plus 8.
    """
    section, step = lax.div(index, layouts.TILE), lax.rem(index, layouts.TILE)
    turn, position, half = lax.div(step, groups), lax.rem(step, groups), groups // 2
    group = turn if groups == 1 else turn * half + lax.div(position, half) * _HALF + lax.rem(position, half)
    return group, section


def _read_states(core, start, dout, own, smem, round_groups):
    """Returns `start` plus half the gradient of q^T S q, float32 [64, D].

    dout: the operand that states are multiplied by. Sections differ only in where they begin: each counts tiles of
    queries and of their gradient from its own first tile.
    """
    layout, (stages, height, columns) = layouts.Layout(start.shape[1]), smem["state_smem"].shape
    vector_of = _vector_of(own["query_smem"])
    # Blocks of values, which are read one after the other.
    douts = [dout]
    if dout.shape[1] > height:
        douts = [dout.at[:, pl.ds(begin, height)] for begin in range(0, dout.shape[1], height)]
    shape = _BLOCK, _HALF
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    ends = {window.begin: window.begin + window.width for window in layout.section}
    half_round = round_groups // 2

    def product(rounds, step):
        slots = range(step * len(douts), (step + 1) * len(douts))
        steps = round_groups * len(douts)
        if steps % stages:
            slots = [ring.slot_of(rounds * steps + slot, stages) for slot in slots]
        else:
            # Known at compile time.
            slots = [slot % stages for slot in slots]
        # Wait before the accumulator exists, so that its zeros do not occupy registers meanwhile.
        for slot in slots:
            plgpu.barrier_wait(smem["state_full"].at[slot])

        def add(acc):
            for slot, values in zip(slots, douts):
                core.add(acc, values, smem["state_smem"].at[slot])
            return acc[...]

        dfeatures = core.accumulators(add, columns)
        for slot in slots:
            plgpu.barrier_arrive(smem["state_free"].at[slot])
        return dfeatures

    def group(first, turn, position, gradients):
        # The halves of its tile that may contain the group's index, and the index within the half.
        shares, halves, index = 0.0, (0, 1), turn
        if round_groups > 1:
            halves, index = (position // half_round,), turn * half_round + position % half_round
        rounds = turn + lax.div(jnp.int32(first), jnp.int32(round_groups))
        dfeatures = product(rounds, position)
        begin = 0
        for piece in layout.pieces(0, columns):
            scalar = own["scalar_smem"].at[piece.scalar + first + halves[0] * _HALF + index]
            scalar = plgpu.load(scalar, layout=tensor_core.PER_ROW).astype(jnp.float32)
            scalar = lax.broadcast_in_dim(scalar, shape, [0])
            for start in range(piece.vector, piece.vector + piece.width, layouts.TILE):
                vector = vector_of(start, first) if piece.weight == 2 else None
                for side in range(2):
                    tile, begin = dfeatures[:, begin : begin + _HALF], begin + _HALF
                    gradients[start % layout.head_dim // _HALF + side] += scalar * tile
                    if piece.weight == 2:
                        shares = shares + vector[:, side * _HALF : (side + 1) * _HALF] * tile
            if piece.weight == 2 and piece.vector + piece.width == ends[piece.scalar]:
                total = lax.broadcast_in_dim(shares.sum(1), shape, [0])
                for half in halves:
                    tile, own_column = (
                        piece.scalar // _HALF + half,
                        column == index - (half - halves[0]) * _HALF,
                    )
                    gradients[tile] = jnp.where(own_column, gradients[tile] + total, gradients[tile])
                shares = 0.0
        return gradients

    def groups(turn, gradients, first):
        gradients = list(gradients)
        # Unrolled, so that each group has its column in registers of its own.
        for position in range(round_groups):
            gradients = group(first, turn, position, gradients)
        return tuple(gradients)

    def section(index, gradients):
        body = functools.partial(groups, first=index * layouts.TILE)
        gradients = lax.fori_loop(jnp.int32(0), jnp.int32(layouts.TILE // round_groups), body, gradients)
        return gradients[2:] + gradients[:2] if layout.sections > 1 else gradients

    gradients = tuple(start[:, begin : begin + _HALF] for begin in range(0, layout.head_dim, _HALF))
    if layout.sections == 1:
        return jnp.concatenate(section(0, gradients), 1)
    gradients = lax.fori_loop(jnp.int32(0), jnp.int32(layout.sections), section, gradients)
    return jnp.concatenate(gradients[-2 * layout.sections :] + gradients[: -2 * layout.sections], 1)


def _vector_of(query_smem):
    """Returns a function of the first of 16 indices, given as two summands, that returns these, float32 [64, 16].

    Indices are cyclic.
    """
    head_dim = query_smem.shape[1]
    if head_dim == 128:
        load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA)

        def tile(start, first):
            begin = (start + first) & (head_dim - 1)
            return load(query_smem.at[:, pl.ds(begin, layouts.TILE)]).astype(jnp.float32)

        return tile
    query = plgpu.load(query_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return lambda start, first: query[:, (start + first) % head_dim :][:, : layouts.TILE]


def _read_norm(core, query, smem, layout):
    """Returns q Z for 64 rows, float32 [64, D]; Z is symmetric, so its rows can be loaded like keys."""
    total = {}
    for step in range(state_copies.norm_blocks(layout)):
        slot = step % smem["key_smem"].shape[0]
        plgpu.barrier_wait(smem["key_full"].at[slot])
        product = core.product(query, smem["key_smem"].at[slot])
        plgpu.barrier_arrive(smem["key_free"].at[slot])
        for begin in range(0, _BLOCK, layout.head_dim):
            column = (step * _BLOCK + begin) % layout.head_dim
            part = product[:, begin : begin + layout.head_dim]
            total[column] = total[column] + part if column in total else part
    return jnp.concatenate(list(total.values()), 1)


def _store(acc, factors, out_smem, out):
    """Writes acc times the factors of its rows, one after another, through shared memory."""
    product = acc[...]
    for factor in factors:
        product = product * lax.broadcast_in_dim(factor, acc.shape, [0])
    out_smem[...] = product.astype(out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out)
    plgpu.wait_smem_to_gmem(0)
