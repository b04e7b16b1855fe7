"""Tile sizes of the kernels and the constraints on their arguments."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper import tensor_core

__all__ = [
    "BLOCK",
    "MULTIPROCESSORS",
    "SHARED_BYTES",
    "Call",
    "Config",
    "needs_of_rows",
    "require",
    "stages",
]

# Tokens, query rows or values that one warpgroup handles at a time: the height of a Hopper matrix product.
BLOCK = tensor_core.ROWS
# Multiprocessors of an H100. If the update has fewer blocks, time is cut into segments.
MULTIPROCESSORS = 132
# Maximum number of blocks of 64 in one TMA copy.
_COPIED = 256
# Shared memory of one thread block on Hopper, minus an allowance for barriers and alignment.
SHARED_BYTES = 227 * 1024 - 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static options of a call, made by `choose`.

    head_dim, value_dim: sizes inside the kernels, which are the caller's sizes padded with zeros.
    chunk: positions between states. segments: stretches of time that the update processes in parallel.
    update_blocks: thread blocks of the update for one head and one segment.
    update_scalars: groups of features per block of the update, half of them for each of two warpgroups.
    update_stages: blocks of 64 tokens in flight in the update.
    query_blocks: blocks of 64 rows, one for each warpgroup, that share the states read by the query.
    parts: pieces of equal width in which the query reads a group.
    state_stages: number of such parts in flight in the query.
    key_stages: blocks of 64 keys in flight in the query.
    query_vjp_blocks, query_vjp_parts, query_vjp_stages: counterparts of query_blocks, parts and state_stages in the
    gradient of queries.
    query_vjp_groups: groups that one round of its loop reads, 1 or 4.
    key_vjp_blocks: blocks of 64 keys, one for each warpgroup, that share the gradients of states in the gradient of
    keys.
    key_vjp_parts: pieces of equal width in which it reads a group.
    key_vjp_stages: number of such parts in flight.
    key_vjp_together: whether one launch computes both gradients, of keys and of values.
    """

    head_dim: int
    value_dim: int
    chunk: int
    segments: int = 1
    update_blocks: int
    update_scalars: int
    update_stages: int
    query_blocks: int
    state_stages: int
    key_stages: int
    parts: int = 1
    query_vjp_blocks: int = 1
    query_vjp_parts: int = 1
    query_vjp_stages: int = 2
    query_vjp_groups: int = 2
    key_vjp_blocks: int = 1
    key_vjp_parts: int = 1
    key_vjp_stages: int = 2
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


def needs_of_rows(dtype, chunk, exact_window) -> dict[str, bool]:
    """Returns the constraints of both powers on rows, in words, and whether each holds."""
    return {
        f"bfloat16 inputs, not {jnp.dtype(dtype).name}": dtype == jnp.bfloat16,
        f"a chunk that is a positive multiple of {BLOCK}, not {chunk}": chunk > 0 and chunk % BLOCK == 0,
        f"an exact_window that is a multiple of {BLOCK}, not {exact_window}": exact_window >= 0
        and exact_window % BLOCK == 0,
        f"an exact_window no longer than the chunk of {chunk}, not {exact_window}": exact_window <= chunk,
        f"at most {_COPIED * BLOCK} positions in a chunk and its window, not {chunk + exact_window}": (
            chunk + exact_window <= _COPIED * BLOCK
        ),
    }


def stages(fitting: int, most: int, chunk: int) -> int:
    """Returns the number of stages, at most `most`; raises NotImplementedError if fewer than two fit."""
    if fitting < 2:
        raise NotImplementedError(
            f"the power_state kernels need a chunk shorter than {chunk}, for shared memory"
        )
    return min(fitting, most)


def require(supported: dict[str, bool]) -> None:
    """Raises NotImplementedError naming the first constraint that does not hold."""
    for constraint, holds in supported.items():
        if not holds:
            raise NotImplementedError(f"the power_state kernels need {constraint}")
