"""Gradients of keys and values: from the gradient of the state after their chunk, and from in-window queries.

R is the gradient of the state after a chunk. A block has `key_vjp_blocks` warpgroups of 64 consecutive keys of one
chunk. With k^ and v^ the key and the value divided by powers of two, w the weights of features and M = v^ R for one
group of features at a time, a warpgroup sums

    dv = state_value (w phi(k^)) R^T + window part,
    dk = state_key sum of w (x_i M_b for index b of a feature x_i x_b, x_b M_b for index i) + state_norm k Rz
         + window part,

with the window part as in `window_queries`. Both products with R read the same tile of it. If there are too few
registers for two sums, each has a launch of its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, results, ring, tensor_core
from pallas_kernels.power_state import configs, window_queries
from pallas_kernels.power_state.square import layouts, state_copies

_BLOCK = configs.BLOCK
_TILE = layouts.TILE
_POWER = 2
_GRADIENTS = ("dkey", "dvalue")
# Columns of a tile of R that are multiplied at a time, limited by registers: all of a narrow tile, or slices.
_NARROW, _SLICE = 96, 64


class Rows(NamedTuple):
    """Vectors of keys, in the order in which the kernel takes them.

    kappa is the decay to the state after the chunk, 0 for tokens that are not in the state.
    """

    narrow_key: jax.Array  # 2^-b, brings the largest entry of the key into [1/2, 1)
    narrow_value: jax.Array  # 2^-a, the same for the value
    state_key: jax.Array  # kappa 2^(a + b) times the power of two of the state's gradient
    state_norm: jax.Array  # 2 kappa, times the power of two of the state's gradient
    state_value: jax.Array  # kappa 2^(2 b), times the power of two of the state's gradient
    # Running sums of base-2 logarithms of decays in the frame of the key's own chunk, and of the chunk before.
    coarse: jax.Array
    fine: jax.Array
    coarse_before: jax.Array
    fine_before: jax.Array


class Operands(NamedTuple):
    """Arrays that the kernel reads; position t is padded position W + t.

    Of the padded positions, Y = n C or (n + 1) C are used; keys of chunk n are in no state. H, HN, X and n are as in
    `query.Operands`.
    """

    key: jax.Array  # bfloat16 [B, at least T, K, D]
    scalars: jax.Array  # float16 [H, D, at least W + T], keys times `Rows.narrow_key`, time last
    value: jax.Array  # bfloat16 [B, at least T, K, E]
    dual: jax.Array  # float16 [H, n, 16, E, P], the gradient of the state after chunk c at n - 1 - c
    norm: jax.Array  # bfloat16 [H, n, 2 D, D], Rz at the same positions, symmetric, as the sum of two
    query: jax.Array  # bfloat16 [HN, at least T, D]
    dout: jax.Array  # bfloat16 [B, at least T, N, E]
    rows: jax.Array  # float32 [H, Y / 64, 9, 64], in the order of `Rows`
    columns: jax.Array  # float32 [HN, X / 64, 5, 64], in the order of `window_queries.Columns`


def key_vjp(operands: Operands, *, time: int, call: configs.Call):
    """Returns dk bfloat16 [B, T, K, D], dv bfloat16 [B, T, K, E], and sums for the gradients of decays.

    Gradients are sums over the queries of a group. The window is at most a chunk. Sums, float32 [H, 2, Y]: over
    queries, of weights times (dout . v - delta); and k . dk / 2 for the part of dk from the state. Accumulates in
    float32. `time` is T.
    """
    key, scalars, value, *_ = operands
    heads, batch_time = len(scalars), (len(key), time)
    types = {
        "dkey": results.kind(batch_time, heads, key.shape[-1], key.dtype),
        "dvalue": results.kind(batch_time, heads, value.shape[-1], value.dtype),
        "sums": jax.ShapeDtypeStruct((heads, 2, operands.rows.shape[1] * _BLOCK), jnp.float32),
    }
    # The sums are computed with the gradient of keys.
    together = call.config.key_vjp_together
    output: dict[str, jax.Array] = {}
    for wanted in [("dkey", "dvalue", "sums")] if together else [("dkey", "sums"), ("dvalue",)]:
        output |= _gradients(operands, {name: types[name] for name in wanted}, call)
    return *(output[name][:, :time] for name in _GRADIENTS), output["sums"]


def _gradients(operands: Operands, outputs, call: configs.Call):
    """Runs the kernel for the requested gradients; returns its results by name."""
    key, value, dual = operands.key, operands.value, operands.dual
    (heads, blocks, *_), head_dim = operands.rows.shape, key.shape[-1]
    config, chunk, exact_window, value_dim = call.config, call.chunk, call.exact_window, value.shape[-1]
    layout = layouts.Layout(head_dim)
    count, stages, parts = config.key_vjp_blocks, config.key_vjp_stages, config.key_vjp_parts
    chunks, groups = dual.shape[1], len(operands.query) // heads
    gradients = [name for name in _GRADIENTS if name in outputs]
    with_key, with_value = "dkey" in outputs, "dvalue" in outputs
    # Tiles of its own keys that the kernel multiplies.
    tiles = ("key", "value") if with_key else ("key",)
    # At D = 128 there are too few registers for the keys: tiles of 16 indices are read when they are needed.
    slices = _BLOCK // 2 if with_key and head_dim == 128 else None

    def body(gmem, smem):
        head, index = lax.axis_index("head"), lax.axis_index("chunk")
        # The block of 64 padded positions of the first warpgroup.
        block = index * (chunk // _BLOCK) + lax.axis_index("rows") * count
        state = jnp.maximum(chunks - 1 - index, 0)
        # Keys after the last query's chunk are in no state.
        in_state = index < chunks

        def span(warpgroup):
            return window_queries.Span.of_keys(index, block, warpgroup, chunks, call)

        def copy():
            # Inputs that every warpgroup needs from the start.
            ready = smem["ready"]
            for n in range(count):
                tokens, begin = pl.ds((block + n) * _BLOCK, _BLOCK), (block + n) * _BLOCK - exact_window
                for name in tiles:
                    source = results.block(gmem[name], head, begin)
                    plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[n], ready)
                scalars = gmem["scalars"].at[head, :, tokens]
                plgpu.copy_gmem_to_smem(scalars, smem["scalar_smem"].at[n], ready)
            plgpu.copy_gmem_to_smem(gmem["rows"].at[head, pl.ds(block, count)], smem["row_smem"], ready)
            # The gradient of the state, then that of its normalizer.
            steps = _copy_dual(gmem["dual"].at[head, state], smem, in_state, parts)
            norms = _copy_norms(gmem["norm"].at[head, state], smem, in_state) if with_key else 0
            # Queries are copied while the last of these are still being read.
            window_queries.Queries(smem, span(0), groups, norms).copy(gmem, head)
            ring.drain(steps, stages, smem["dual_free"])

        def compute(warpgroup, core):
            names = ("key_smem", "value_smem", "scalar_smem", "row_smem", "narrow_smem")
            own = {name: smem[name].at[warpgroup] for name in names if name in smem}
            own["row"] = Rows(*(own["row_smem"].at[n] for n in range(len(Rows._fields))))
            own["decay_smem"] = own["row_smem"].at[pl.ds(Rows._fields.index("coarse"), 4)]
            tokens = pl.ds((block + warpgroup) * _BLOCK, _BLOCK)
            plgpu.barrier_wait(smem["ready"])

            def with_dvalue(dvalue):
                # The state's gradient, for both results.
                tiles = _read_dual(core, dvalue, own, smem, in_state, with_key)
                if with_value:
                    factor = own["row"].state_value
                    dvalue[...] = dvalue[...] * tensor_core.along_columns(factor, dvalue.shape)

                def with_dkey(dkey):
                    first, sums = 0, ()
                    if with_key:
                        first, *sums = _finish_state(core, dkey, tiles, own, smem, in_state)
                    # The queries that attend to the keys in their window.
                    queries = window_queries.Queries(smem, span(warpgroup), groups, first)
                    window_sum = queries.read(core, dkey, dvalue, own, _POWER)
                    # Store what was requested.
                    if with_key:
                        for n, total in enumerate((window_sum, *sums)):
                            gmem["sums"][head, n, tokens] = total
                        own["key_smem"][...] = (dkey[...] * _POWER).astype(own["key_smem"].dtype)
                    if with_value:
                        own["value_smem"][...] = dvalue[...].astype(own["value_smem"].dtype)
                    plgpu.commit_smem()
                    begin = (block + warpgroup) * _BLOCK - exact_window
                    for name in gradients:
                        target = results.block(gmem[name], head, begin)
                        plgpu.copy_smem_to_gmem(own[f"{name[1:]}_smem"], target)
                    plgpu.wait_smem_to_gmem(0)

                _with_accumulator(core, with_dkey, head_dim if with_key else None)

            _with_accumulator(core, with_dvalue, value_dim if with_value else None)

        return copy, compute

    scratch = {
        "key_smem": tensor_core.operand((count,), _BLOCK, head_dim, key.dtype, slices),
        "value_smem": tensor_core.operand((count,), _BLOCK, value_dim, value.dtype),
        "scalar_smem": plgpu.SMEM((count, head_dim, _BLOCK), operands.scalars.dtype),
        "row_smem": plgpu.SMEM((count, len(Rows._fields), _BLOCK), jnp.float32),
        "dual_smem": tensor_core.operand((stages,), value_dim, layout.width // parts, dual.dtype),
        "ready": plgpu.Barrier(num_arrivals=(1 + len(tiles)) * count + 1),
        "dual_full": plgpu.Barrier(num_barriers=stages),
        "dual_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
        **window_queries.scratch(head_dim, value_dim, operands.query.dtype, count, slices),
    }
    if slices:
        scratch["narrow_smem"] = tensor_core.operand((count,), _BLOCK, head_dim, dual.dtype, _TILE)
    return launch.launch(
        body,
        operands._asdict(),
        outputs,
        scratch,
        grid=call.grid(heads, blocks * _BLOCK, count),
        warpgroups=count,
        name="power_state_key_vjp" if with_key else "power_state_value_vjp",
        interpret=call.interpret,
    )


def _with_accumulator(core, body, columns):
    """Calls `body` with an accumulator of that number of columns, or with None."""
    if columns is None:
        body(None)
    else:
        core.accumulators(body, columns)


def _copy_dual(dual, smem, in_state, parts):
    """Copies the gradient of the state [16, E, P], by parts.

    Returns the number of steps, the last of which may not have been read yet.
    """
    stages, _, columns = smem["dual_smem"].shape

    def copy(step, slot):
        group, part = lax.rem(step, _TILE), lax.div(step, _TILE)
        source = dual.at[group, :, pl.ds(part * columns, columns)]
        plgpu.copy_gmem_to_smem(source, smem["dual_smem"].at[slot], smem["dual_full"].at[slot])

    count = jnp.where(in_state, _TILE * parts, 0)
    pl.loop(jnp.int32(0), count)(lambda step: ring.put(step, stages, smem["dual_free"], copy))
    return count


def _copy_norms(norm, smem, in_state):
    """Copies both terms of each 64 rows of Rz into the ring, before the queries.

    Returns the number of steps.
    """
    rows, head_dim = norm.shape
    halves = max(1, head_dim // _BLOCK)

    def copy(step, slot):
        # At D = 128 a term has two blocks: step 2 h + t brings half h of term t.
        block = lax.rem(step, 2) * halves + lax.div(step, 2)
        for begin, size in state_copies.NORM_COPIES[window_queries.COPIES]:
            target = smem["query_smem"].at[slot, pl.ds(begin, size)]
            source = norm.at[pl.ds(block * _BLOCK + begin, size)]
            plgpu.copy_gmem_to_smem(source, target, smem["query_full"].at[slot])

    count = jnp.where(in_state, rows // _BLOCK, 0)
    pl.loop(jnp.int32(0), count)(lambda step: ring.put(step, window_queries.STAGES, smem["query_free"], copy))
    return count


def _read_dual(core, dvalue, own, smem, in_state, with_key):
    """Adds (w phi(k^)) R^T to dvalue unless it is None.

    If the gradient of keys is requested, returns the gradient of k^ through its features, float32 [64, 16] per tile of
    D.
    """
    (stages, _, columns), dtype = smem["dual_smem"].shape, smem["dual_smem"].dtype
    layout, with_value = layouts.Layout(own["key_smem"].shape[1]), dvalue is not None
    value = _narrow(own["value_smem"], own["row"].narrow_value, dtype) if with_key else None
    narrow = _narrow(own["key_smem"], own["row"].narrow_key, dtype)
    if "narrow_smem" in own:
        own["narrow_smem"][...] = narrow
        plgpu.commit_smem()
        narrow = own["narrow_smem"]

    most = columns if columns <= _NARROW else _SLICE

    def read(part, group, tiles):
        gradient = _Gradient(group, tiles, narrow) if with_key else None
        slot = ring.slot_of(part * _TILE + group, stages)
        # Wait before any accumulator exists, so that its zeros do not occupy registers meanwhile.
        plgpu.barrier_wait(smem["dual_full"].at[slot])
        for begin in range(0, columns, most):
            width, offset = min(most, columns - begin), part * columns + begin
            pieces = layout.pieces(offset, offset + width)
            scalars = {
                piece.scalar: plgpu.load(
                    own["scalar_smem"].at[piece.scalar + group], layout=tensor_core.PER_ROW
                )
                for piece in pieces
            }
            dual = smem["dual_smem"].at[slot, :, pl.ds(begin, width)]
            if with_value:
                # Stays in flight while the next product is issued; straight-line code waits for both.
                core.add(dvalue, _features(narrow, pieces, scalars), dual.T, wait=1)
            if with_key:

                def multiply(dfeatures, dual=dual):
                    core.add(dfeatures, value, dual)
                    return dfeatures[...]

                gradient.add(core.accumulators(multiply, width), pieces, scalars)
        if with_value and not with_key:
            core.wait()
        plgpu.barrier_arrive(smem["dual_free"].at[slot])
        if not with_key:
            return ()
        gradient.give()
        return tuple(gradient.tiles)

    zeros = plgpu.layout_cast(jnp.zeros((_BLOCK, _TILE), jnp.float32), plgpu.Layout.WGMMA)
    tiles = (zeros,) * (layout.head_dim // _TILE if with_key else 0)
    for part in range(layout.width // columns):
        # One loop per part: products of several parts at once would need too many registers.
        groups = jnp.where(in_state, _TILE, 0)
        tiles = lax.fori_loop(jnp.int32(0), groups, functools.partial(read, part), tiles)
    return tiles


class _Gradient:
    """Gradient of k^, in `tiles` of 16 columns, through the features of one part of a group.

    narrow: k^, float16 [64, D], in registers or, if there are too few, in shared memory.
    """

    def __init__(self, group, tiles, narrow):
        self.tiles = list(tiles)
        self._narrow = narrow
        shape = (_BLOCK, _TILE)
        self._column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) == group
        self._scalar, self._sums = None, {}

    def add(self, dfeatures, pieces, scalars):
        """Adds the gradients of the features of these pieces, float32 [64, width]."""
        offset = 0
        for piece in pieces:
            if piece.scalar != self._scalar:
                self.give()
                self._scalar = piece.scalar
            scalar = _broadcast(scalars[piece.scalar].astype(jnp.float32) * piece.weight)
            for start in range(piece.vector, piece.vector + piece.width, _TILE):
                dfeature = dfeatures[:, offset : offset + _TILE]
                tile = start // _TILE % len(self.tiles)
                self.tiles[tile] += scalar * dfeature
                if isinstance(self._narrow, jax.Array):
                    vector = self._narrow[:, tile * _TILE : (tile + 1) * _TILE]
                else:
                    vector = self._narrow.at[:, pl.ds(tile * _TILE, _TILE)]
                    vector = plgpu.load(vector, layout=plgpu.Layout.WGMMA)
                product, before = vector.astype(jnp.float32) * dfeature, self._sums.get(piece.weight)
                self._sums[piece.weight] = product if before is None else before + product
                offset += _TILE

    def give(self):
        """Adds the gradient of the scalar of the last pieces."""
        if self._scalar is None:
            return
        # By weight; pairs across tiles represent both orders.
        total = self._sums.get(1)
        if 2 in self._sums:
            total = 2 * self._sums[2] if total is None else total + 2 * self._sums[2]
        total = _broadcast(total.sum(1))
        tile = self._scalar // _TILE
        self.tiles[tile] = jnp.where(self._column, self.tiles[tile] + total, self.tiles[tile])
        self._scalar, self._sums = None, {}


def _narrow(x_smem, factor, dtype):
    """Returns the warpgroup's keys or values divided by powers of two, in `dtype`."""
    whole = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return (whole * tensor_core.along_columns(factor, whole.shape)).astype(dtype)


def _features(narrow, pieces, scalars):
    """Returns features times their weights, float16 [64, columns of the pieces]."""
    tiles = []
    for piece in pieces:
        scalar = scalars[piece.scalar]
        # Pairs across tiles represent both orders.
        scalar = _broadcast(scalar + scalar if piece.weight == 2 else scalar)
        for start in range(piece.vector, piece.vector + piece.width, _TILE):
            begin = start % narrow.shape[1]
            tiles.append(narrow[:, begin : begin + _TILE] * scalar)
    return jnp.concatenate(tiles, 1)


def _broadcast(scalar):
    """Broadcasts a vector of rows along the columns of a tile."""
    return lax.broadcast_in_dim(scalar, (_BLOCK, _TILE), [0])


def _finish_state(core, dkey, tiles, own, smem, in_state):
    """Sets dkey to 1 / power of the from-state part.

    Returns the number of steps of the ring that it used, and k . dk / 2.
    """
    head_dim = dkey.shape[1]
    halves = max(1, head_dim // _BLOCK)
    steps = 1 if head_dim < _BLOCK else 2
    for half in range(halves):
        columns = pl.ds(half * _BLOCK, min(head_dim, _BLOCK))

        @pl.loop(jnp.int32(0), jnp.where(in_state, steps, 0))
        def _term(term, half=half, columns=columns):
            slot = ring.slot_of(half * 2 + term, window_queries.STAGES)
            plgpu.barrier_wait(smem["query_full"].at[slot])
            # Rz is symmetric, so its rows serve as columns. At D = 32 a block has both terms.
            for begin in range(0, _BLOCK, min(head_dim, _BLOCK)):
                norm = smem["query_smem"].at[slot, pl.ds(begin, min(head_dim, _BLOCK))]
                core.add(dkey.at[:, columns], own["key_smem"], norm.T)
            plgpu.barrier_arrive(smem["query_free"].at[slot])

    factor, norm = (
        tensor_core.along_columns(x, dkey.shape) for x in (own["row"].state_key, own["row"].state_norm)
    )
    dkey[...] = (factor * jnp.concatenate(tiles, 1) + norm * dkey[...]) / _POWER
    key = plgpu.load(own["key_smem"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return jnp.where(in_state, halves * steps, 0), (key * dkey[...]).sum(1) * (_POWER / 2)
