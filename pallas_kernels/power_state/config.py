"""Tile sizes of the kernels and what they can do."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.power_state import layout as layouts
from pallas_kernels.power_state import quartic_layout

__all__ = ["BLOCK", "MULTIPROCESSORS", "Config", "choose", "default_chunk", "segments"]

# Tokens, query rows or values that one warpgroup handles at a time: the height of a Hopper matrix product.
BLOCK = 64
# Multiprocessors of an H100: with fewer blocks of the update, time is cut into segments.
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes. Made by `choose`.

    update_scalars: groups of features that a block of the update owns, half of them for each of two warpgroups.
    update_stages: blocks of 64 tokens in flight in the update.
    query_blocks: blocks of 64 rows, one for each warpgroup, that share the states read by the query.
    state_stages, key_stages: groups of a state, and blocks of 64 keys, in flight in the query.
    """

    update_scalars: int
    update_stages: int
    query_blocks: int
    state_stages: int
    key_stages: int


def choose(*, power, head_dim, value_dim, dtype, chunk, window, state_dtype) -> Config:
    """Tile sizes for these shapes. Raises NotImplementedError naming the first constraint that they break."""
    if power == 4:
        return _choose_quartic(head_dim, value_dim, dtype, chunk, window, state_dtype)
    supported = {
        f"power 2 or 4, not {power}": power == 2,
        f"head_dim 32 or 64, not {head_dim}": head_dim in (32, 64),
        f"value_dim at most {BLOCK}, not {value_dim}": value_dim <= BLOCK,
        f"bfloat16 inputs, not {jnp.dtype(dtype).name}": dtype == jnp.bfloat16,
        f"states of float16 or bfloat16, the operands of the tensor core, not {jnp.dtype(state_dtype).name}": (
            state_dtype in (jnp.float16, jnp.bfloat16)
        ),
        f"a chunk that is a positive multiple of {BLOCK}, not {chunk}": chunk > 0 and chunk % BLOCK == 0,
        f"a window that is a multiple of {BLOCK}, not {window}": window >= 0 and window % BLOCK == 0,
    }
    _require(supported)
    # Two warpgroups hold at most 2 x 320 features, of the 64 values, in their accumulators.
    scalars = {32: 8, 64: 4}[head_dim]
    return Config(
        update_scalars=scalars,
        update_stages=4,
        query_blocks=_query_blocks(chunk),
        state_stages=3,
        key_stages=2,
    )


def _choose_quartic(head_dim, value_dim, dtype, chunk, window, state_dtype):
    _require(
        {
            f"head_dim 16 or 32 at power 4, not {head_dim}": head_dim in (16, 32),
            f"value_dim at most 32 at power 4, not {value_dim}": value_dim <= 32,
            f"bfloat16 inputs, not {jnp.dtype(dtype).name}": dtype == jnp.bfloat16,
            f"states of float16 at power 4, not {jnp.dtype(state_dtype).name}": state_dtype == jnp.float16,
            f"a chunk that is a positive multiple of {BLOCK}, not {chunk}": chunk > 0 and chunk % BLOCK == 0,
            f"a window that is a multiple of {BLOCK}, not {window}": window >= 0 and window % BLOCK == 0,
        }
    )
    return Config(
        update_scalars=quartic_layout.UNIT,
        update_stages=4,
        query_blocks=_query_blocks(chunk),
        state_stages=3,
        key_stages=2,
    )


def _require(supported):
    for constraint, holds in supported.items():
        if not holds:
            raise NotImplementedError(f"the power_state kernels need {constraint}")


def _query_blocks(chunk):
    return next(count for count in (3, 2, 1) if chunk % (count * BLOCK) == 0)


def default_chunk(*, power: int, head_dim: int) -> int:
    """The chunk that the kernels like best: three warpgroups of 64 rows some times, for one pass over a state each.

    At p = 4, about where writing and reading the states takes as long as the keys of the chunk do.
    """
    if power == 4:
        return 960 if head_dim <= 16 else 3072
    return 576


def segments(config: Config, *, heads: int, chunks: int) -> int:
    """Stretches of time that the update handles side by side, of `heads` key heads (times the batch)."""
    blocks = heads * (layouts.TILE // config.update_scalars)
    # As many as run at once; more than one cost a pass over the states.
    return max(1, min(MULTIPROCESSORS // blocks, chunks))
