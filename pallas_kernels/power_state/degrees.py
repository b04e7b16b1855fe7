"""The powers that the kernels support, each with modules of its own, and the choice of tiles for a call."""

import dataclasses
from types import ModuleType
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.hopper import launch
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.quartic import backward as quartic_backward
from pallas_kernels.power_state.quartic import forward as quartic_forward
from pallas_kernels.power_state.quartic import tiles as quartic_tiles
from pallas_kernels.power_state.square import backward as square_backward
from pallas_kernels.power_state.square import forward as square_forward
from pallas_kernels.power_state.square import tiles as square_tiles

_BLOCK = configs.BLOCK
# The largest second axis of a CUDA grid, here blocks of 64 tokens of a row.
_MOST_BLOCKS = 65_535


class Degree(NamedTuple):
    """Modules of one power, with the same functions.

    Attributes:
        forward: `stored`, `returned`, `operands_of_keys`, `states`, `norms` and `attend`.
        backward: `operands_of_queries`, `query_vjp`, `key_vjp` and `inner`.
        tiles: `choose` and `longest_chunk`.
    """

    forward: ModuleType
    backward: ModuleType
    tiles: ModuleType


_DEGREES = {
    2: Degree(square_forward, square_backward, square_tiles),
    4: Degree(quartic_forward, quartic_backward, quartic_tiles),
}


def degree(power: int) -> Degree:
    """Returns the modules of a power; raises NotImplementedError for other powers."""
    if power not in _DEGREES:
        raise NotImplementedError(f"the power_state kernels need power 2 or 4, not {power}")
    return _DEGREES[power]


def choose(
    *,
    power: int,
    head_dim: int,
    value_dim: int,
    time: int,
    heads: int,
    dtype,
    exact_window: int = _BLOCK,
    chunk: int | None = None,
) -> configs.Config:
    """Returns chunk, segments and tiles for rows of `time` positions and `heads` key heads in total over all rows.

    All are chosen by predicted cost (pallas_kernels/README.md), except the shorter chunks of few rows at p = 2, by
    measurement; `chunk` is used unchanged if given. Raises NotImplementedError naming the first constraint that the
    shapes violate.
    """
    tiles = degree(power).tiles
    most = _MOST_BLOCKS * _BLOCK - exact_window
    launch.require("power_state", {f"at most {most} positions, not {time}": time <= most})
    if not chunk:
        # A short row is one chunk, which divides among the warpgroups of the query at E = 64.
        step = (1 if time <= 6 * _BLOCK else 2 if head_dim > 64 else 3) * _BLOCK
        chunk = max(min(tiles.longest_chunk(head_dim, time, heads), -(-time // step) * step), exact_window)
    config = tiles.choose(head_dim, value_dim, dtype, chunk, exact_window)
    # As many segments as run at once. More than one segment costs an additional pass over the states.
    segments = configs.MULTIPROCESSORS // (heads * config.update_blocks)
    return dataclasses.replace(config, segments=max(1, min(segments, -(-time // chunk))))


def call_for(
    key,
    value,
    *,
    power: int,
    chunk: int | None = None,
    exact_window: int = _BLOCK,
    interpret=None,
) -> configs.Call:
    """Returns the static options of a call on keys [B, T, K, D] and values [B, T, K, E], as in `power_state_fwd`.

    Raises NotImplementedError naming the first constraint that the arguments violate.
    """
    batch, time, kv_heads, head_dim = key.shape
    config = choose(
        power=power,
        head_dim=head_dim,
        value_dim=value.shape[-1],
        time=time,
        heads=batch * kv_heads,
        dtype=jnp.result_type(key, value),
        exact_window=exact_window,
        chunk=chunk,
    )
    return configs.Call(power=power, config=config, exact_window=exact_window, interpret=interpret)
