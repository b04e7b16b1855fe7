"""Gradients of keys and values: from the gradient of the state after their chunk, and from in-window queries.

R is the gradient of the state after a chunk. A block has `key_vjp_blocks` warpgroups of 64 consecutive keys of one
chunk. With k^ and v^ the key and the value divided by powers of two, w the weights of features and M = v^ R for one
group of features at a time, a warpgroup sums

    dv = far_value (w phi(k^)) R^T + near part,
    dk = far_key sum of w (x_i M_b for index b of a feature x_i x_b, x_b M_b for index i) + far_norm k Rz + near part,

with the near (in-window) part as in `near_key_vjp`. Both products of the far (from-state) part read the same tile of R.
If there are too few registers for two sums, each has a launch of its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products, results, ring
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import near_key_vjp as near
from pallas_kernels.power_state.square import layout as layouts

__all__ = ["Columns", "Rows", "key_vjp"]

Columns = near.Columns

_BLOCK = configs.BLOCK
_TILE = layouts.TILE
_POWER = 2
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_INPUTS = ("key", "scalars", "value", "dual", "norm", "query", "dout", "rows", "columns")
_GRADIENTS = ("dkey", "dvalue")
# Rows of the norm in each copy: the number of copies must be equal to that of a block of queries.
_NORM_COPIES = ((0, 32), (32, 16), (48, 16))
# Columns of a tile of R that are multiplied at a time, limited by registers: all of a narrow tile, or slices.
_NARROW, _SLICE = 96, 64


class Rows(NamedTuple):
    """Index of each vector of keys. kappa is the decay to the state after the chunk, 0 for tokens not in the state."""

    narrow_key: int = 0  # 2^-b, brings the largest entry of the key into [1/2, 1)
    narrow_value: int = 1  # 2^-a, the same for the value
    far_key: int = 2  # kappa 2^(a + b) times the power of two of the state's gradient
    far_norm: int = 3  # 2 kappa
    far_value: int = 4  # kappa 2^(2 b), times the power of two of the state's gradient
    # Running sums of base-2 logarithms of decays in the frame of the key's own chunk, and of the chunk before.
    coarse: int = 5
    fine: int = 6
    coarse_before: int = 7
    fine_before: int = 8


def key_vjp(
    key,
    scalars,
    value,
    dual,
    dual_norm,
    query,
    dout,
    rows,
    columns,
    *,
    layout,
    config,
    chunk,
    exact_window,
    batch_time,
    interpret=None,
):
    """Returns dk bfloat16 [B, T, K, D], dv bfloat16 [B, T, K, E], and sums for the gradients of decays.

    batch_time: B and T; H = B K, and position t is padded position W + t.
    key: bfloat16 [H, at least Y, D]; value: bfloat16 [H, at least Y, E]. Of the padded positions, Y = n C or (n + 1) C
    are used; keys of chunk n are in no state. scalars: 16-bit [H, D, Y], keys times `narrow_key`, time last.
    dual: 16-bit [H, n, 16, terms E, P], the gradient of the state after chunk c at n - 1 - c, as the sum of its terms.
    dual_norm: bfloat16 [H, n, 2 D, D], Rz at the same positions, symmetric, as the sum of two.
    query: bfloat16 [H N / K, X, D]; dout: bfloat16 [H N / K, X, E]; gradients are summed over the queries of a group.
    rows: float32 [H, Y / 64, 9, 64] in the order of Rows; columns: float32 [H N / K, X / 64, 4, 64] in that of Columns.

    The window is at most a chunk. Sums, float32 [H, 2, Y]: over queries, of weights times (dout . v - delta); and
    k . dk / 2 for the part of dk from the state. Accumulates in float32.
    """
    arrays = key, scalars, value, dual, dual_norm, query, dout, rows, columns
    options = {
        "layout": layout,
        "config": config,
        "chunk": chunk,
        "exact_window": exact_window,
        "batch_time": batch_time,
        "interpret": interpret,
    }
    launches = (_GRADIENTS,) if config.key_vjp_together else ((name,) for name in _GRADIENTS)
    found = {}
    for wanted in launches:
        found |= _launch(arrays, wanted, **options)
    return *(results.cut(found[name], batch_time) for name in _GRADIENTS), found["sums"]


def _launch(arrays, wanted, *, layout, config, chunk, exact_window, batch_time, interpret):
    """Runs the kernel for the requested gradients; returns its results by name."""
    key, scalars, value, dual, _, query, *_ = arrays
    heads, _, head_dim = key.shape
    time = scalars.shape[2]
    value_dim, count = value.shape[-1], config.key_vjp_blocks
    slices = _BLOCK // 2 if _reads_tiles(wanted, layout) else None
    columns_of_part = layout.width // config.key_vjp_parts
    scratch = {
        "key_smem": products.operand((count,), _BLOCK, head_dim, key.dtype, slices),
        "value_smem": products.operand((count,), _BLOCK, value_dim, value.dtype),
        "scalar_smem": plgpu.SMEM((count, head_dim, _BLOCK), scalars.dtype),
        "row_smem": plgpu.SMEM((count, len(Rows()), _BLOCK), jnp.float32),
        "dual_smem": products.operand((config.key_vjp_stages,), value_dim, columns_of_part, dual.dtype),
        "ready": plgpu.Barrier(num_arrivals=(1 + len(_operands(wanted))) * count + 1),
        "dual_full": plgpu.Barrier(num_barriers=config.key_vjp_stages),
        "dual_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.key_vjp_stages),
        **near.scratch(head_dim, value_dim, query.dtype, count, slices),
    }
    if _reads_tiles(wanted, layout):
        scratch["narrow_smem"] = products.operand((count,), _BLOCK, head_dim, dual.dtype, _TILE)
    if interpret is not None:
        shapes = {
            "near": near.held_shapes(),
            "key": [(_BLOCK, head_dim)],
            "value": [(_BLOCK, value_dim)],
            "slopes": [(_BLOCK, columns_of_part)],
        }
        scratch["interpreted"] = {
            name: [plgpu.SMEM((count, *shape), jnp.float32) for shape in group]
            for name, group in shapes.items()
        }
    options = {"layout": layout, "config": config, "chunk": chunk, "exact_window": exact_window}
    body = functools.partial(_body, wanted=wanted, groups=query.shape[0] // heads, **options)
    shapes = {
        "dkey": results.kind(batch_time, heads, head_dim, key.dtype),
        "dvalue": results.kind(batch_time, heads, value_dim, value.dtype),
        "sums": jax.ShapeDtypeStruct((heads, 2, time), jnp.float32),
    }
    names = _results(wanted)
    found = plgpu.kernel(
        body,
        out_type=tuple(shapes[name] for name in names),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(heads, time // chunk, chunk // (count * _BLOCK)),
        grid_names=("head", "chunk", "rows"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name="power_state_key_vjp" if "dkey" in wanted else "power_state_value_vjp",
        interpret=interpret,
    )(*arrays)
    return dict(zip(names, found, strict=True))


def _reads_tiles(wanted, layout):
    """Returns True if there are too few registers for the keys.

    Tiles of 16 indices are then read when they are needed.
    """
    return "dkey" in wanted and layout.head_dim == 128


def _results(wanted):
    """Returns the names of a launch's results; the sums are computed with the gradient of keys."""
    return (*wanted, "sums") if "dkey" in wanted else wanted


def _operands(wanted):
    """Returns the names of the tiles of its own keys that a launch multiplies."""
    return ("key", "value") if "dkey" in wanted else ("key",)


def _body(*refs, wanted, layout, config, chunk, exact_window, groups, interpreted=None, **smem):
    gmem = dict(zip((*_INPUTS, *_results(wanted)), refs, strict=True))
    count, warpgroup = config.key_vjp_blocks, lax.axis_index("warpgroup")
    chunks = gmem["dual"].shape[1]
    place = {
        "head": lax.axis_index("head"),
        "dual": jnp.maximum(chunks - 1 - lax.axis_index("chunk"), 0),
        # The block of 64 padded positions of the first warpgroup.
        "block": lax.axis_index("chunk") * (chunk // _BLOCK) + lax.axis_index("rows") * count,
        # Keys after the last query's chunk are in no state.
        "folded": lax.axis_index("chunk") < chunks,
    }
    span = functools.partial(
        near.Span.of_keys, place["block"], chunk=chunk, exact_window=exact_window, time=gmem["query"].shape[1]
    )

    @pl.when(warpgroup == count)
    def _produce():
        if count > 1:
            plgpu.set_max_registers(40, action="decrease")
        _copy_keys(gmem, smem, place, count, _operands(wanted))
        steps = _copy_dual(gmem, smem, place, config)
        norms = _copy_norms(gmem, smem, place) if "dkey" in wanted else 0
        near.copy_queries(gmem, smem, place["head"], span(0), groups=groups, first=norms)
        ring.drain(steps, config.key_vjp_stages, smem["dual_free"])

    @pl.when(warpgroup < count)
    def _consume():
        if count > 1:
            plgpu.set_max_registers(232, action="increase")
        names = ("key_smem", "value_smem", "scalar_smem", "row_smem", "narrow_smem")
        own = {name: smem[name].at[warpgroup] for name in names if name in smem}
        own["decay_smem"] = own["row_smem"].at[pl.ds(Rows().coarse, 4)]
        held = None if interpreted is None else _of_warpgroup(interpreted, warpgroup)
        terms = gmem["dual"].shape[3] // gmem["value"].shape[-1]
        time = pl.ds((place["block"] + warpgroup) * _BLOCK, _BLOCK)
        plgpu.barrier_wait(smem["ready"])

        def with_value(dvalue):
            tiles = _read_dual(dvalue, own, smem, place["folded"], terms, wanted, layout, config, held)
            if dvalue is not None:
                dvalue[...] = dvalue[...] * _of_rows(own, Rows().far_value, dvalue.shape)

            def with_key(dkey):
                first, sums = 0, ()
                if dkey is not None:
                    first, *sums = _finish_far(dkey, tiles, own, smem, place["folded"], held)
                near_sum = near.read_queries(
                    dkey,
                    dvalue,
                    own,
                    smem,
                    span(warpgroup),
                    held and held["near"],
                    groups=groups,
                    power=_POWER,
                    first=first,
                )
                if dkey is not None:
                    for n, total in enumerate((near_sum, *sums)):
                        gmem["sums"][place["head"], n, time] = total
                    own["key_smem"][...] = (dkey[...] * _POWER).astype(own["key_smem"].dtype)
                if dvalue is not None:
                    own["value_smem"][...] = dvalue[...].astype(own["value_smem"].dtype)
                plgpu.commit_smem()
                # No token is in front of the first, where the window is.
                begin = (place["block"] + warpgroup) * _BLOCK - exact_window

                @pl.when(begin >= 0)
                def _store():
                    for name in wanted:
                        block = results.block(gmem[name], place["head"], begin)
                        plgpu.copy_smem_to_gmem(own[f"{name[1:]}_smem"], block)
                    plgpu.wait_smem_to_gmem(0)

            _accumulating(with_key, "dkey", wanted, own["key_smem"], held and held["key"])

        _accumulating(with_value, "dvalue", wanted, own["value_smem"], held and held["value"])


def _accumulating(body, name, wanted, like, held):
    """Calls `body` with an accumulator like `like` if that gradient is requested, otherwise with None."""
    if name in wanted:
        products.with_accumulators(body, [like.shape], held)
    else:
        body(None)


def _of_warpgroup(interpreted, warpgroup):
    return {name: [ref.at[warpgroup] for ref in group] for name, group in interpreted.items()}


def _of_rows(own, index, shape):
    """Broadcasts a vector of the warpgroup's keys along the columns of that shape."""
    return lax.broadcast_in_dim(plgpu.load(own["row_smem"].at[index], layout=_ROWS), shape, [0])


def _copy_keys(gmem, smem, place, count, operands):
    """Copies the inputs that every warpgroup needs from the start."""
    head, ready = place["head"], smem["ready"]
    for n in range(count):
        time = pl.ds((place["block"] + n) * _BLOCK, _BLOCK)
        for name in operands:
            plgpu.copy_gmem_to_smem(gmem[name].at[head, time], smem[f"{name}_smem"].at[n], ready)
        plgpu.copy_gmem_to_smem(gmem["scalars"].at[head, :, time], smem["scalar_smem"].at[n], ready)
    plgpu.copy_gmem_to_smem(gmem["rows"].at[head, pl.ds(place["block"], count)], smem["row_smem"], ready)


def _copy_dual(gmem, smem, place, config):
    """Copies the gradient of the state; returns the number of steps, the last of which may not have been read yet."""
    value_dim, columns = smem["dual_smem"].shape[1:]
    parts, terms = config.key_vjp_parts, gmem["dual"].shape[3] // value_dim

    def copy(step, slot):
        term, group = lax.rem(step, terms), lax.rem(lax.div(step, terms), _TILE)
        part = lax.div(step, terms * _TILE)
        rows, columns_of = pl.ds(term * value_dim, value_dim), pl.ds(part * columns, columns)
        dual = gmem["dual"].at[place["head"], place["dual"], group, rows, columns_of]
        plgpu.copy_gmem_to_smem(dual, smem["dual_smem"].at[slot], smem["dual_full"].at[slot])

    count = jnp.where(place["folded"], _TILE * parts * terms, 0)
    pl.loop(jnp.int32(0), count)(lambda step: ring.put(step, config.key_vjp_stages, smem["dual_free"], copy))
    return count


def _copy_norms(gmem, smem, place):
    """Copies both terms of each 64 rows of Rz into the ring, before the queries.

    Returns the number of steps.
    """
    rows, head_dim = gmem["norm"].shape[2:]
    halves = max(1, head_dim // _BLOCK)

    def copy(step, slot):
        # At D = 128 a term has two blocks: step 2 h + t brings half h of term t.
        block = lax.rem(step, 2) * halves + lax.div(step, 2)
        for begin, size in _NORM_COPIES:
            source = gmem["norm"].at[place["head"], place["dual"], pl.ds(block * _BLOCK + begin, size)]
            target = smem["query_smem"].at[slot, pl.ds(begin, size)]
            plgpu.copy_gmem_to_smem(source, target, smem["query_full"].at[slot])

    count = jnp.where(place["folded"], rows // _BLOCK, 0)
    pl.loop(jnp.int32(0), count)(lambda step: ring.put(step, near.STAGES, smem["query_free"], copy))
    return count


def _read_dual(dvalue, own, smem, folded, terms, wanted, layout, config, held):
    """Adds (w phi(k^)) R^T to dvalue unless it is None.

    If the gradient of keys is requested, returns the gradient of k^ through its features, float32 [64, 16] per tile of
    D.
    """
    dtype, columns = smem["dual_smem"].dtype, layout.width // config.key_vjp_parts
    with_key, with_value = "dkey" in wanted, dvalue is not None
    value = _narrow(own["value_smem"], own, Rows().narrow_value, dtype) if with_key else None
    narrow = _narrow(own["key_smem"], own, Rows().narrow_key, dtype)
    if "narrow_smem" in own:
        own["narrow_smem"][...] = narrow
        plgpu.commit_smem()
        narrow = own["narrow_smem"]

    most = columns if columns <= _NARROW else _SLICE

    def read(part, group, tiles):
        gradient = _Gradient(group, tiles, narrow) if with_key else None
        step = (part * _TILE + group) * terms
        slots = [ring.slot_of(step + term, config.key_vjp_stages) for term in range(terms)]
        # Wait before any accumulator exists, so that its zeros do not occupy registers meanwhile.
        for slot in slots:
            plgpu.barrier_wait(smem["dual_full"].at[slot])
        for begin in range(0, columns, most):
            width, offset = min(most, columns - begin), part * columns + begin
            pieces = layout.pieces(offset, offset + width)
            scalars = {
                piece.scalar: plgpu.load(own["scalar_smem"].at[piece.scalar + group], layout=_ROWS)
                for piece in pieces
            }
            duals = [smem["dual_smem"].at[slot, :, pl.ds(begin, width)] for slot in slots]
            if with_value:
                features = _features(narrow, pieces, scalars)
                for dual in duals:
                    # Stays in flight while the next product is issued; straight-line code waits for both.
                    products.accumulate(dvalue, features, dual.T, held, wait=1)
            if with_key:
                gradient.add(_product(value, duals, width, held), pieces, scalars)
        if with_value and not with_key and held is None:
            plgpu.wgmma_wait(0)
        for slot in slots:
            plgpu.barrier_arrive(smem["dual_free"].at[slot])
        if not with_key:
            return ()
        gradient.give()
        return tuple(gradient.tiles)

    zeros = plgpu.layout_cast(jnp.zeros((_BLOCK, _TILE), jnp.float32), plgpu.Layout.WGMMA)
    tiles = (zeros,) * (layout.head_dim // _TILE if with_key else 0)
    for part in range(config.key_vjp_parts):
        # One loop per part: products of several parts at once would need too many registers.
        groups = jnp.where(folded, _TILE, 0)
        tiles = lax.fori_loop(jnp.int32(0), groups, functools.partial(read, part), tiles)
    return tiles


class _Gradient:
    """Gradient of k^, in `tiles` of 16 columns, through the features of one part of a group.

    narrow: k^, 16-bit [64, D], in registers or, if there are too few, in shared memory.
    """

    def __init__(self, group, tiles, narrow):
        self.tiles = list(tiles)
        self._narrow = narrow
        shape = (_BLOCK, _TILE)
        self._column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) == group
        self._scalar = self._single = self._double = None

    def add(self, slopes, pieces, scalars):
        """Adds slopes, float32 [64, width], the gradients of the features of these pieces."""
        offset = 0
        for piece in pieces:
            if piece.scalar != self._scalar:
                self.give()
                self._scalar = piece.scalar
            scalar = _along(scalars[piece.scalar].astype(jnp.float32) * piece.weight, _TILE)
            for start in range(piece.vector, piece.vector + piece.width, _TILE):
                slope = slopes[:, offset : offset + _TILE]
                tile = start // _TILE % len(self.tiles)
                self.tiles[tile] += scalar * slope
                self._collect(self._vector(tile * _TILE).astype(jnp.float32) * slope, piece.weight)
                offset += _TILE

    def give(self):
        """Adds the gradient of the scalar of the last pieces."""
        if self._scalar is None:
            return
        total, double = self._single, self._double
        if double is not None:
            total = 2 * double if total is None else total + 2 * double
        total = _along(total.sum(1), _TILE)
        tile = self._scalar // _TILE
        self.tiles[tile] = jnp.where(self._column, self.tiles[tile] + total, self.tiles[tile])
        self._scalar = self._single = self._double = None

    def _vector(self, begin):
        """Returns 16 indices of k^."""
        if isinstance(self._narrow, jax.Array):
            return self._narrow[:, begin : begin + _TILE]
        return plgpu.load(self._narrow.at[:, pl.ds(begin, _TILE)], layout=plgpu.Layout.WGMMA)

    def _collect(self, products_of_tile, weight):
        """Collects the gradient of the scalar from a tile: the tile of weight 1, or a sum over tiles of weight 2."""
        if weight == 1:
            self._single = products_of_tile
        else:
            self._double = products_of_tile if self._double is None else self._double + products_of_tile


def _narrow(x_smem, own, index, dtype):
    """Returns the warpgroup's keys or values divided by powers of two, 16-bit."""
    whole = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return (whole * _of_rows(own, index, whole.shape)).astype(dtype)


def _features(narrow, pieces, scalars):
    """Returns features times their weights, 16-bit [64, columns of the pieces]."""
    tiles = []
    for piece in pieces:
        scalar = scalars[piece.scalar]
        # Pairs across tiles represent both orders.
        scalar = _along(scalar + scalar if piece.weight == 2 else scalar, _TILE)
        for start in range(piece.vector, piece.vector + piece.width, _TILE):
            begin = start % narrow.shape[1]
            tiles.append(narrow[:, begin : begin + _TILE] * scalar)
    return jnp.concatenate(tiles, 1)


def _along(scalar, width):
    return lax.broadcast_in_dim(scalar, (_BLOCK, width), [0])


def _product(value, duals, width, held):
    """Returns value @ the sum of duals, float32 [64, width]."""

    def multiply(slopes):
        for dual in duals:
            products.accumulate(slopes, value, dual, held)
        return slopes[...]

    refs = held and [held["slopes"][0].at[:, pl.ds(0, width)]]
    return products.with_accumulators(multiply, [(_BLOCK, width)], refs)


def _finish_far(dkey, tiles, own, smem, folded, held):
    """Sets dkey to 1 / power of the from-state part.

    Returns the number of steps of the ring that it used, and k . dk / 2.
    """
    head_dim = dkey.shape[1]
    halves = max(1, head_dim // _BLOCK)
    steps = 1 if head_dim < _BLOCK else 2
    for half in range(halves):
        columns = pl.ds(half * _BLOCK, min(head_dim, _BLOCK))

        @pl.loop(jnp.int32(0), jnp.where(folded, steps, 0))
        def _term(term, half=half, columns=columns):
            slot = ring.slot_of(half * 2 + term, near.STAGES)
            plgpu.barrier_wait(smem["query_full"].at[slot])
            # Rz is symmetric, so its rows serve as columns. At D = 32 a block has both terms.
            for begin in range(0, _BLOCK, min(head_dim, _BLOCK)):
                norm = smem["query_smem"].at[slot, pl.ds(begin, min(head_dim, _BLOCK))]
                products.accumulate(dkey.at[:, columns], own["key_smem"], norm.T, held)
            plgpu.barrier_arrive(smem["query_free"].at[slot])

    far, norm = (_of_rows(own, index, dkey.shape) for index in (Rows().far_key, Rows().far_norm))
    dkey[...] = (far * jnp.concatenate(tiles, 1) + norm * dkey[...]) / _POWER
    key = plgpu.load(own["key_smem"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return jnp.where(folded, halves * steps, 0), (key * dkey[...]).sum(1) * (_POWER / 2)
