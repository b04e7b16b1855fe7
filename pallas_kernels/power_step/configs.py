"""Tile sizes of the kernels, and the sizes that they support."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch

# Threads of a warpgroup, and floats that one of them loads at once.
_THREADS, _VECTOR = 128, 4
# Rows of shared memory that one copy may fill: TMA takes at most 256 along an axis.
_ROWS = 256
# Bytes of a tile of the state, and tiles in flight: enough in the two or three blocks per multiprocessor to hide the
# latency of memory.
_TILE_BYTES = 16 * 1024
_STAGES = 4
# Bytes of the features of all rows of a block, for p = 2, which leave room for three blocks on a multiprocessor.
_FEATURE_BYTES = 6 * 1024
# Blocks that share the work: four rounds of three for each of an H100's 132 multiprocessors, so that the last, partial
# round is short.
_BLOCKS = 4 * 3 * 132
# Maximum query heads per key head, and registers per thread for their sums; more of either would spill.
_GROUP, _SUMS = 16, 128
# Tokens of the window that fit in shared memory in a fold, each with 128 values and the features of a tile.
_WINDOW = 128
# Features of a state: the fold has a block for every 64 along the last axis of CUDA's grid, which has 65,535.
_FEATURES = 64 * 65_535
# Products of keys and a query that a warpgroup holds at once, 32 per thread.
_PRODUCTS = 32 * 128
# Tiles are not swizzled in shared memory: inferred layouts swizzle rows in groups of 8, and F may not be a multiple.
COMPILER = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tiling of one call. Made by `choose`.

    tile: rows of the state in one copy of the read.
    stages: copies in flight in each block of the read.
    parts, tiles: number of blocks that share the state of a head, and of tiles per block.
    window_tile: tokens of the window in one copy.
    """

    tile: int
    stages: int
    parts: int
    tiles: int
    window_tile: int


def choose(query_shape, kv, *, exact_window, power) -> Config:
    """Returns the tile sizes for queries [B, K, G, D] and a state kv [B, K, F, E].

    Raises NotImplementedError naming the first constraint that the arguments violate.
    """
    batch, kv_heads, group, head_dim = query_shape
    features, value_dim = kv.shape[2:]
    # A thread sums its columns of every query head.
    most = min(_GROUP, _SUMS // (_VECTOR * value_dim // _columns(value_dim)))
    supported = {
        f"float32 states, not {jnp.dtype(kv.dtype).name}": kv.dtype == jnp.float32,
        f"an even power up to 16, not {power}": power % 2 == 0 and 2 <= power <= 16,
        f"head_dim a multiple of 8 up to 128, not {head_dim}": head_dim % 8 == 0 and head_dim <= 128,
        f"value_dim a multiple of 8 up to 128, not {value_dim}": value_dim % 8 == 0 and value_dim <= 128,
        f"features in multiples of 4, the alignment of copies, not {features}": features % 4 == 0,
        f"at most {_FEATURES} features, not {features}": features <= _FEATURES,
        f"a window from 1 to {_WINDOW}, not {exact_window}": 1 <= exact_window <= _WINDOW,
        f"an exact_window and a value_dim whose product is a multiple of 32, the size of copies, not {exact_window} "
        f"and {value_dim}": exact_window * value_dim % 32 == 0,
        f"at most {most} query heads for each key head where value_dim is {value_dim}, not {group}": (
            group <= most
        ),
    }
    launch.require("power_step", supported)
    step = max(chunk_rows(head_dim), chunk_rows(value_dim))
    tile = max(step, min(_ROWS, _TILE_BYTES // (4 * value_dim)) // step * step)
    tiles = -(-features // tile)
    each = -(-tiles // min(tiles, -(-_BLOCKS // (batch * kv_heads))))
    if power == 2:
        each = min(each, max(1, _FEATURE_BYTES // (4 * group * tile)))
    # At most half a tile, since only tiles with tokens are read.
    window_tile = max(step, min(tile // 2, _PRODUCTS // head_dim) // step * step)
    parts, stages = -(-tiles // each), min(_STAGES, each)
    return Config(tile=tile, stages=stages, parts=parts, tiles=each, window_tile=window_tile)


def _columns(width: int, vector: int = _VECTOR) -> int:
    """Returns the columns covered by one row of threads: a power of two that divides the width."""
    return math.gcd(width, vector * 16)


def chunk_rows(width: int, vector: int = _VECTOR) -> int:
    """Returns the rows of `width` floats that a warpgroup holds at once, `vector` columns per thread."""
    return _THREADS * vector // _columns(width, vector)


def layout(width: int, vector: int = _VECTOR):
    """Returns the register layout of rows of `width` floats: `vector` columns per thread, lanes first along a row.

    With four, every load is of 16 bytes and free of bank conflicts, and a sum over rows needs one register per column.
    """
    columns, rows = _columns(width, vector), chunk_rows(width, vector)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, columns), (rows // 4, columns), (vector,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def line(width: int):
    """Returns the register layout of a vector that no two warps share, for stores to shared memory."""
    size = math.gcd(width, 64)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((size,), (size // 4,), (1,))),
        warp_dims=(-3,),
        lane_dims=(-2, plgpu.Replicated(_THREADS // size)),
        vector_dim=-1,
    )


def spread(x, shape, axis, vector=_VECTOR):
    """Broadcasts a vector along `axis` to an array of that shape, in the layout of its rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout(shape[1], vector))
