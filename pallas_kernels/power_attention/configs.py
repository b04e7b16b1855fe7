"""Tile sizes of the kernels, and the constraints on their arguments."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper import tensor_core

# Two warpgroups of queries share every block of keys; a block of queries is as long as a block of keys, so that
# exactly one block of keys, the diagonal one, needs a mask.
BLOCK = 2 * tensor_core.ROWS
# Shared memory available to one thread block on Hopper, minus an allowance for barriers and reductions.
_SHARED_BYTES = 227 * 1024 - 4096
# The largest weight is near 2^14: float16 ends just below 2^16.
_WEIGHT_BITS = 14
# From this power on most weights of a row are below float16's range with any scale that is known in advance.
_SCALED_POWER = 8
# Bits of weights that are scaled by row: their sums must fit in float32.
_SCALED_WEIGHT_BITS = 96
# Numbers of a block of keys besides a factor per key.
_BLOCK_NUMBERS = 5
# Rows of 32, 64 or 128 bytes, or several tiles of those, for which wgmma and TMA have a conflict-free swizzle.
_WIDTHS = (16, 32, 64, 96, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tiling of one forward call.

    head_dim, value_dim: sizes inside the kernel, which are the caller's sizes padded with zeros.
    stages: blocks of keys and values that may be in flight.
    """

    head_dim: int
    value_dim: int
    stages: int
    block: int = BLOCK
    compute_warpgroups: int = 2

    @property
    def columns(self) -> tuple[int, int]:
        """Shape of the floats of a block of keys: one per key, then numbers of the block, each repeated for 64 rows."""
        return 1 + -(-_BLOCK_NUMBERS * tensor_core.ROWS // self.block), self.block

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of the tiles."""
        keys_and_values = self.block * (self.head_dim + self.value_dim) * 2 + 4 * math.prod(self.columns)
        return self.block * self.head_dim * 2 + self.stages * keys_and_values


def scaled_by_row(power: int) -> bool:
    """Returns True if weights are rounded to float16 relative to the largest of their row so far.

    The diagonal block always uses such a scale.
    """
    return power >= _SCALED_POWER


def query_bits(power: int) -> int:
    """Returns h: queries are scaled by 2^h, so that weights use the available range.

    Scores are then at most 2^h, and weights at most 2^(ph).
    """
    return (_SCALED_WEIGHT_BITS if scaled_by_row(power) else _WEIGHT_BITS) // power


@dataclasses.dataclass(frozen=True, kw_only=True)
class VjpConfig:
    """Tiling of the two gradient kernels, whose thread blocks process 128 queries or 128 keys.

    head_dim, value_dim: as in `Config`.
    query_stages: blocks of keys and values in flight in the pass over queries.
    key_stages: blocks of queries and cotangents in flight in the pass over keys.
    """

    head_dim: int
    value_dim: int
    query_stages: int
    key_stages: int
    # Rows that one warpgroup processes, and rows that all of them multiply with in one step.
    block: int = tensor_core.ROWS
    compute_warpgroups: int = 2

    @property
    def operands_in_registers(self) -> bool:
        """True if a warpgroup's own rows stay in registers in the pass over queries.

        Reading them from shared memory takes as long as reading the tiles that they are multiplied with.
        """
        return self.head_dim + self.value_dim <= 128

    @property
    def key_results(self) -> tuple[tuple[str, ...], ...]:
        """Gradients that each kernel of the pass over keys computes.

        One kernel computes both if registers can hold both sums; otherwise each has its own kernel.
        """
        both = max(self.head_dim, self.value_dim) <= 64
        return (("dkey", "dvalue"),) if both else (("dkey",), ("dvalue",))

    @property
    def shared_bytes(self) -> tuple[int, int]:
        """Bytes of shared memory of the tiles in the pass over queries and in the pass over keys."""
        tile, vector = self.block * 2 * (self.head_dim + self.value_dim), 4 * self.block
        queries = tile + self.block * 2 * self.head_dim + 9 * vector
        own, own_keys = (self.compute_warpgroups * (tile + count * vector) for count in (0, 12))
        return own + self.query_stages * (tile + 6 * vector), own_keys + self.key_stages * queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call[C: (Config, VjpConfig)]:
    """Static options of a call.

    power: p.
    config: tile sizes.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU, or None.
    """

    power: int
    config: C
    interpret: Any


def choose(*, head_dim: int, value_dim: int, power: int, dtype) -> Config:
    """Returns the tile sizes for these shapes.

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.
    """
    sizes = _sizes(head_dim, value_dim, power, dtype)
    stages = next(n for n in (4, 3, 2) if Config(stages=n, **sizes).shared_bytes <= _SHARED_BYTES)
    return Config(stages=stages, **sizes)


def choose_vjp(*, head_dim: int, value_dim: int, power: int, dtype) -> VjpConfig:
    """Returns the tile sizes of the gradient kernels; raises the same errors as `choose`."""
    sizes = _sizes(head_dim, value_dim, power, dtype)

    def fits(stages, gradient):
        config = VjpConfig(**sizes, query_stages=stages, key_stages=stages)
        return config.shared_bytes[gradient] <= _SHARED_BYTES

    query_stages, key_stages = (next(n for n in (4, 3, 2) if fits(n, gradient)) for gradient in range(2))
    return VjpConfig(**sizes, query_stages=query_stages, key_stages=key_stages)


def _sizes(head_dim, value_dim, power, dtype):
    """Returns the padded sizes that the kernels use."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise NotImplementedError(
            f"query, key and value are {jnp.dtype(dtype)}; the kernel multiplies bfloat16 or float16"
        )
    if power % 2 or not 2 <= power <= 16:
        raise NotImplementedError(f"power is {power}; the kernel takes even powers from 2 to 16")
    for name, size in (("head", head_dim), ("value", value_dim)):
        if size > _WIDTHS[-1]:
            raise NotImplementedError(f"{name} size is {size}; the kernel takes at most {_WIDTHS[-1]}")
    padded = (next(width for width in _WIDTHS if width >= size) for size in (head_dim, value_dim))
    return dict(zip(("head_dim", "value_dim"), padded))
