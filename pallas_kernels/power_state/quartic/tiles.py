"""Tile sizes of the kernels at p = 4, chosen by predicted cost."""

from pallas_kernels.hopper import launch
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.quartic import layouts

_BLOCK = configs.BLOCK


def choose(head_dim, value_dim, dtype, chunk, exact_window) -> configs.Config:
    """Returns the tiles for a chunk; raises NotImplementedError for unsupported sizes and dtypes."""
    most = layouts.SIZES[-1]
    supported = {
        f"head_dim at most {most} at power 4, not {head_dim}": head_dim <= most,
        f"value_dim at most {most} at power 4, not {value_dim}": value_dim <= most,
    }
    launch.require("power_state", supported | configs.needs_of_rows(dtype, chunk, exact_window))
    layout = layouts.layout_for(head_dim, value_dim)
    both, in_window = layout.head_dim + layout.value_dim, 2 * _BLOCK
    blocks = configs.warpgroups(chunk, 3)
    rows = blocks * _BLOCK
    operands = (rows + in_window) * both + 2 * rows * layouts.COLUMNS
    left = configs.SHARED_BYTES - 2 * operands - 4 * (2 * (chunk + exact_window) + 2 * rows)
    stage = 2 * layouts.STEP * (_BLOCK * layouts.COLUMNS + layout.per_stack * rows)

    def vjp(most, decays):
        # Both gradients use about the same shared memory: the operands of the rows, the in-window tiles, and two blocks
        # of y with the matrices that select its columns.
        blocks = configs.warpgroups(chunk, most)
        rows = blocks * _BLOCK
        operands = (rows + in_window) * both + 2 * layouts.COLUMNS * (rows + 2 * layout.head_dim)
        left = configs.SHARED_BYTES - 2 * operands - 4 * (decays + 7 * rows + 8 * _BLOCK)
        stage = layouts.SCALARS * (rows + layout.value_dim * layouts.COLUMNS)
        stage += 2 * layout.head_dim * layouts.SCALAR_COLUMNS
        return blocks, configs.stages(left // (2 * stage), 3, chunk)

    # Three warpgroups have 160 registers per thread, too few for sizes of 32, or for two gradients. Two have 240, too
    # few for heads of 16 with values of 32 in chunks of some lengths.
    pair = 1 if layout.head_dim < layout.value_dim else 2
    query_vjp = vjp(3 if layout.head_dim == layout.value_dim == 16 else pair, 2 * (chunk + exact_window))
    key_vjp = vjp(pair, 0)
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
        query_vjp_blocks=query_vjp[0],
        query_vjp_stages=query_vjp[1],
        key_vjp_blocks=key_vjp[0],
        key_vjp_stages=key_vjp[1],
    )


def longest_chunk(head_dim: int, *_) -> int:
    """Returns the chunk of long rows: writing and reading its states takes as long as its keys do, forward."""
    return 1152 if head_dim <= 16 else 3072
