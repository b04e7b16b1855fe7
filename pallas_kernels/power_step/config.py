"""Tile sizes of the kernels, and what they cannot do."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["COMPILER", "FOLD_TILE", "Config", "choose", "chunk_rows", "layout", "spread"]

# Threads of a warpgroup, and floats that one of them loads at once.
_THREADS, _VECTOR = 128, 4
# Rows of shared memory that one copy may fill: TMA takes at most 256 along an axis.
_ROWS = 256
# Bytes of a tile of the state, and tiles in flight: enough of them in the two or three blocks of a multiprocessor to
# hide the latency of memory.
_TILE_BYTES = 16 * 1024
_STAGES = 4
# Blocks that share the work: four rounds of three for each of an H100's 132 multiprocessors, so that the last round,
# which is not full, is short.
_BLOCKS = 4 * 3 * 132
# Query heads of a key head, and registers of a thread that may hold their sums: more of either spill.
_GROUP, _SUMS = 16, 128
# Tokens of the window that a fold holds in shared memory, values of 128 and features of a tile each.
_WINDOW = 128
# Rows of the state that a block of the fold updates: as many as its registers hold.
FOLD_TILE = 64
# Tiles stay in shared memory as they are: inferred layouts swizzle them in eights, which F need not be a multiple of.
COMPILER = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one call is cut up. Made by `choose`.

    tile: rows of the state in one copy of the read.
    stages: copies in flight in each block of the read.
    parts, tiles: blocks that share the state of a head, and how many tiles each of them takes.
    """

    tile: int
    stages: int
    parts: int
    tiles: int


def choose(*, heads, group, features, head_dim, value_dim, exact_window, power, dtype) -> Config:
    """Tile sizes for `heads` key heads (times the batch) of `group` query heads each.

    Raises NotImplementedError naming the first constraint that the arguments break.
    """
    supported = {
        f"float32 states, not {jnp.dtype(dtype).name}": dtype == jnp.float32,
        f"an even power up to 16, not {power}": power % 2 == 0 and 2 <= power <= 16,
        f"head_dim a multiple of 8 up to 128, not {head_dim}": head_dim % 8 == 0 and head_dim <= 128,
        f"value_dim a multiple of 8 up to 128, not {value_dim}": value_dim % 8 == 0 and value_dim <= 128,
        f"features in multiples of 4, the alignment of copies, not {features}": features % 4 == 0,
        f"a window from 1 to {_WINDOW}, not {exact_window}": 1 <= exact_window <= _WINDOW,
    }
    for constraint, holds in supported.items():
        if not holds:
            raise NotImplementedError(f"the power_step kernels need {constraint}")
    # A thread sums its columns of every query head.
    columns = _VECTOR * value_dim // _columns(value_dim)
    most = min(_GROUP, _SUMS // columns)
    if group > most:
        raise NotImplementedError(
            f"the power_step kernels need at most {most} query heads for each key head where value_dim is "
            f"{value_dim}, not {group}"
        )
    step = max(chunk_rows(head_dim), chunk_rows(value_dim))
    tile = max(step, min(_ROWS, _TILE_BYTES // (4 * value_dim)) // step * step)
    tiles = -(-features // tile)
    each = -(-tiles // min(tiles, -(-_BLOCKS // heads)))
    return Config(tile=tile, stages=min(_STAGES, each), parts=-(-tiles // each), tiles=each)


def _columns(width: int) -> int:
    """Columns that a row of threads lies side by side on: a power of two that divides the width."""
    return math.gcd(width, _VECTOR * 16)


def chunk_rows(width: int) -> int:
    """Rows of `width` floats that a warpgroup holds at once, four columns a thread."""
    return _THREADS * _VECTOR // _columns(width)


def layout(width: int):
    """Who holds what of rows of `width` floats: four columns a thread, lanes first along a row, then down rows.

    Every load is of 16 bytes and free of conflicts, and a sum over rows is one register for each of its columns.
    """
    columns, rows = _columns(width), chunk_rows(width)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, columns), (rows // 4, columns), (_VECTOR,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def spread(x, shape, axis):
    """A vector along `axis` of an array of that shape, in the layout of its rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout(shape[1]))
