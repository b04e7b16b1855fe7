"""Tile sizes of the kernels at p = 4, chosen by predicted cost."""

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.quartic import layout as layouts

__all__ = ["choose", "longest_chunk"]

_BLOCK = configs.BLOCK


def choose(head_dim, value_dim, dtype, chunk, exact_window) -> configs.Config:
    """Returns the tiles for a chunk; raises NotImplementedError for unsupported sizes and dtypes."""
    sizes = layouts.SIZES
    configs.require(
        {
            f"head_dim at most {sizes[-1]} at power 4, not {head_dim}": head_dim <= sizes[-1],
            f"value_dim at most {sizes[-1]} at power 4, not {value_dim}": value_dim <= sizes[-1],
        }
        | configs.needs_of_rows(dtype, chunk, exact_window)
    )
    layout = layouts.layout_for(head_dim, value_dim)
    blocks = next(count for count in (3, 2, 1) if chunk % (count * _BLOCK) == 0)
    rows = blocks * _BLOCK
    operands = (rows + 2 * _BLOCK) * (layout.head_dim + layout.value_dim) + 2 * rows * layouts.COLUMNS
    left = configs.SHARED_BYTES - 2 * operands - 4 * (2 * (chunk + exact_window) + 2 * rows)
    stage = 2 * layouts.STEP * (_BLOCK * layouts.COLUMNS + layout.per_stack * rows)
    return configs.Config(
        head_dim=layout.head_dim,
        value_dim=layout.value_dim,
        chunk=chunk,
        update_blocks=len(layout.units),
        update_scalars=layouts.UNIT,
        update_stages=4,
        query_blocks=blocks,
        state_stages=configs.stages(left // stage, 3, chunk),
        key_stages=2,
        parts=1,
        **_vjp(layout, chunk, exact_window),
    )


def _vjp(layout, chunk, exact_window):
    """Returns the fields of the gradients at p = 4, whose kernels use about the same shared memory."""
    # Three warpgroups have 160 registers per thread, too few for sizes of 32, or for two gradients. Two have 240, too
    # few for heads of 16 with values of 32 in chunks of some lengths.
    pair = 1 if layout.head_dim < layout.value_dim else 2
    most = {"query": 3 if layout.head_dim == layout.value_dim == 16 else pair, "key": pair}
    decays = {"query": 2 * (chunk + exact_window), "key": 0}
    fields = {}
    for name in most:
        blocks = next(count for count in (3, 2, 1) if count <= most[name] and chunk % (count * _BLOCK) == 0)
        rows = blocks * _BLOCK
        # Both operands of the rows, the in-window tiles, and two blocks of y with the matrices that select its columns.
        operands = (rows + 2 * _BLOCK) * (layout.head_dim + layout.value_dim)
        operands += 2 * layouts.COLUMNS * (rows + 2 * layout.head_dim)
        left = configs.SHARED_BYTES - 2 * operands - 4 * (decays[name] + 7 * rows + 8 * _BLOCK)
        stage = layouts.SCALARS * (rows + layout.value_dim * layouts.COLUMNS)
        stage += 2 * layout.head_dim * layouts.SCALAR_COLUMNS
        fields |= {
            f"{name}_vjp_blocks": blocks,
            f"{name}_vjp_stages": configs.stages(left // (2 * stage), 3, chunk),
        }
    return fields


def longest_chunk(head_dim: int, *_) -> int:
    """Returns the chunk of long rows: writing and reading its states takes as long as its keys do, forward."""
    return 1152 if head_dim <= 16 else 3072
