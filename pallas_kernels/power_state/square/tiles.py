"""Tile sizes of the kernels at p = 2, chosen by predicted cost."""

from pallas_kernels.hopper import launch
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.square import layouts

_BLOCK = configs.BLOCK
# Blocks of keys in flight, and vectors of a block of rows in the gradient of queries.
_KEY_STAGES, _ROW_VECTORS = 2, 6
# Sizes of heads and values that the kernels support; others are padded with zeros.
_HEAD_SIZES = (32, 64, 128)
_VALUE_SIZES = (64, 128)


def choose(head_dim, value_dim, dtype, chunk, exact_window) -> configs.Config:
    """Returns the tiles for a chunk; raises NotImplementedError for unsupported sizes and dtypes."""
    supported = {
        f"head_dim at most {_HEAD_SIZES[-1]}, not {head_dim}": head_dim <= _HEAD_SIZES[-1],
        f"value_dim at most {_VALUE_SIZES[-1]}, not {value_dim}": value_dim <= _VALUE_SIZES[-1],
    }
    launch.require("power_state", supported | configs.needs_of_rows(dtype, chunk, exact_window))
    head_dim = next(size for size in _HEAD_SIZES if size >= head_dim)
    value_dim = next(size for size in _VALUE_SIZES if size >= value_dim)
    layout = layouts.Layout(head_dim)
    keys = _KEY_STAGES * _BLOCK * (head_dim + value_dim)

    # The query. Three warpgroups have 160 registers per thread, too few for more than 64 values or for the features of
    # D = 128. If a chunk is one block of rows, the compiler unrolls loops, for which two lack registers at D = 128.
    most = 3 if head_dim < 128 and value_dim == _BLOCK else 2
    blocks = configs.warpgroups(chunk, 1 if head_dim == 128 and chunk == 2 * _BLOCK else most)
    parts = 1 if head_dim < 128 else 3 * value_dim // _BLOCK
    rows = blocks * _BLOCK * (2 * head_dim + (0 if head_dim == value_dim else value_dim))
    vectors = 2 * (chunk + exact_window) + (blocks + _KEY_STAGES) * _BLOCK
    left = configs.SHARED_BYTES - 2 * (rows + keys) - 4 * vectors
    stages = configs.stages(left // (2 * value_dim * (layout.width // parts)), 6, chunk)

    # The gradient of queries. Three warpgroups have too few registers. At the largest sizes even two have too few for a
    # chunk of one block of rows, whose loop over keys the compiler unrolls.
    query_blocks = configs.warpgroups(chunk, 1 if head_dim == value_dim == 128 and chunk == 2 * _BLOCK else 2)
    height = _BLOCK if head_dim == 128 else value_dim
    rows = query_blocks * _BLOCK * (2 * head_dim + value_dim)
    vectors = 2 * (chunk + exact_window) + (_ROW_VECTORS * query_blocks + _KEY_STAGES) * _BLOCK
    left = configs.SHARED_BYTES - 2 * (rows + keys) - 4 * vectors
    query_stages = configs.stages(left // (2 * height * layout.section_width), 6, chunk)
    # In a chunk of 64 too, loops over keys are unrolled: with jax 0.11.2, four groups would spill 48 bytes per thread.
    groups = 1 if head_dim == 128 else 2 if chunk == _BLOCK else 4
    if head_dim < 128:
        # Use a number that divides the steps of a round, so that slots are known at compile time.
        query_stages = next(number for number in range(query_stages, 1, -1) if groups % number == 0)

    # The gradient of keys. At D = 128 parts are narrow, to save registers and so that two fit next to a second copy of
    # the keys.
    key_blocks = configs.warpgroups(chunk, 2)
    key_parts = 6 * value_dim // _BLOCK if head_dim == 128 else 1
    tiles = key_blocks * _BLOCK * ((3 if head_dim == 128 else 2) * head_dim + value_dim)
    # And two blocks of queries.
    tiles += 2 * _BLOCK * (head_dim + value_dim)
    left = configs.SHARED_BYTES - 2 * tiles - 4 * _BLOCK * (9 * key_blocks + 2 * 5)
    key_stages = configs.stages(left // (2 * value_dim * (layout.width // key_parts)), 4, chunk)

    # Two warpgroups hold at most 2 x 320 features, of 64 values, in their accumulators.
    scalars = 8 if head_dim == 32 else 4
    return configs.Config(
        head_dim=head_dim,
        value_dim=value_dim,
        chunk=chunk,
        update_blocks=value_dim // _BLOCK * layout.sections * (layouts.TILE // scalars),
        update_scalars=scalars,
        update_stages=4,
        query_blocks=blocks,
        parts=parts,
        state_stages=stages,
        key_stages=_KEY_STAGES,
        query_vjp_blocks=query_blocks,
        query_vjp_stages=query_stages,
        query_vjp_groups=groups,
        key_vjp_blocks=key_blocks,
        key_vjp_parts=key_parts,
        key_vjp_stages=key_stages,
        # Two warpgroups have 232 registers per thread, too few for both if either gradient has 128 columns.
        key_vjp_together=head_dim < 128 and value_dim == _BLOCK,
    )


def longest_chunk(head_dim: int, time: int, heads: int) -> int:
    """Returns the chunk of long rows, whose exact part costs about half of its state's, for `heads` heads in total."""
    longest = next((chunk for size, chunk in ((32, 384), (64, 768)) if head_dim <= size), 1024)
    # Fewer than two blocks of 192 queries for each multiprocessor leave many of them idle. On an H100, both passes of 8
    # heads of 64 take 504 us with chunks of 512 and 560 us with 768 at T = 4,096, and 803 and 809 us at T = 8,192.
    few = heads * -(-time // (3 * _BLOCK)) < 2 * configs.MULTIPROCESSORS
    return 512 if longest == 768 < time and few else longest
