"""Tile sizes of the kernels and the constraints on their arguments."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper import tensor_core

# Tokens, query rows or values that one warpgroup handles at a time: the height of a Hopper matrix product.
BLOCK = tensor_core.ROWS
# Multiprocessors of an H100. If the update has fewer blocks, time is cut into segments.
MULTIPROCESSORS = 132
# Maximum number of positions of a chunk and its window, of which a thread block holds five float32 vectors.
_MOST_POSITIONS = 10_240
# Shared memory of one thread block on Hopper, minus an allowance for barriers and alignment.
SHARED_BYTES = 227 * 1024 - 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static options of a call, made by `choose`."""

    # Sizes inside the kernels, which are the caller's padded with zeros.
    head_dim: int
    value_dim: int
    chunk: int  # positions between states
    segments: int = 1  # stretches of time that the update processes in parallel
    # The update: thread blocks for one head and one segment; groups of features per block, half of them for each of two
    # warpgroups; blocks of 64 tokens in flight.
    update_blocks: int
    update_scalars: int
    update_stages: int
    # The query: blocks of 64 rows, one for each warpgroup, that share the states that they read; pieces of equal width
    # in which it reads a group of features; such parts in flight; blocks of 64 keys in flight.
    query_blocks: int
    parts: int = 1
    state_stages: int
    key_stages: int
    # The gradient of queries: blocks and stages, and the groups that one round of its loop reads: 1, 2 or 4.
    query_vjp_blocks: int
    query_vjp_stages: int
    query_vjp_groups: int = 2
    # The gradients of keys and values: blocks of 64 keys that share the gradients of states; parts, and such in flight;
    # whether one launch computes both gradients.
    key_vjp_blocks: int
    key_vjp_parts: int = 1
    key_vjp_stages: int
    key_vjp_together: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static options of a call with its tiles, which depend on shapes alone: every pass has the same.

    Attributes:
        power: 2 or 4.
        config: tile sizes, with the chunk.
        exact_window: positions before each chunk that its queries attend to exactly.
        interpret: parameters of the GPU interpreter, or None.
    """

    power: int
    config: Config
    exact_window: int
    interpret: Any

    @property
    def chunk(self) -> int:
        """Positions between states."""
        return self.config.chunk

    def grid(self, heads: int, time: int, warpgroups: int) -> dict[str, int]:
        """Returns the grid with a thread block for each head, chunk and number of `warpgroups` blocks of 64 rows."""
        return {"head": heads, "chunk": time // self.chunk, "rows": self.chunk // (warpgroups * BLOCK)}


def needs_of_rows(dtype, chunk, exact_window) -> dict[str, bool]:
    """Returns the constraints of both powers on rows, in words, and whether each holds."""
    return {
        f"bfloat16 inputs, not {jnp.dtype(dtype).name}": dtype == jnp.bfloat16,
        f"a chunk that is a positive multiple of {BLOCK}, not {chunk}": chunk > 0 and chunk % BLOCK == 0,
        f"an exact_window that is a multiple of {BLOCK}, not {exact_window}": exact_window >= 0
        and exact_window % BLOCK == 0,
        f"an exact_window no longer than the chunk of {chunk}, not {exact_window}": exact_window <= chunk,
        f"at most {_MOST_POSITIONS} positions in a chunk and its window, not {chunk + exact_window}": (
            chunk + exact_window <= _MOST_POSITIONS
        ),
    }


def warpgroups(chunk: int, most: int) -> int:
    """Returns the largest number of warpgroups, at most `most`, whose blocks of 64 rows divide a chunk."""
    return next(count for count in range(most, 0, -1) if chunk % (count * BLOCK) == 0)


def stages(fitting: int, most: int, chunk: int) -> int:
    """Returns the number of stages, at most `most`; raises NotImplementedError if fewer than two fit."""
    if fitting < 2:
        raise NotImplementedError(
            f"the power_state kernels need a chunk shorter than {chunk}, for shared memory"
        )
    return min(fitting, most)
