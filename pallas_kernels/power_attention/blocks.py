"""Values, decays and lengths of each block of keys, as the forward kernel multiplies them: one launch.

Everything is relative to the block alone, so that no sum over time is needed before the kernel: lengths to the block's
longest key, values to its largest one. The kernel brings the blocks that it adds to one unit.
"""

import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, tensor_core
from pallas_kernels.power_attention import configs, pairs, sequence

# Blocks of keys per thread block: two are four warpgroups, which limits registers to 128 per thread.
_TOGETHER = 2
# The largest value of a block is near 2^15: float16 ends just below 2^16.
VALUE_BITS = 15


class Vector(enum.IntEnum):
    """Vectors over the tokens of a block, in the order of `Blocks.vectors`."""

    # The sum of log decays from the block's start, in two parts (`numerics.coarse`), and the decay.
    COARSE = 0
    FINE = 1
    FROM_START = 2
    # The p-th power of the key's length over the longest.
    LENGTH = 3


class Scalar(enum.IntEnum):
    """Numbers of a block, in the order in which they follow its factors in `Blocks.columns`."""

    # Exponents of a bound on the block's weighted values before decay, and of the weight of the longest key.
    SUM_UNIT = 0
    WEIGHT_UNIT = 1
    # The decay over the block, and its logarithm to base 2.
    DECAY = 2
    LOG_DECAY = 3
    # Exponent of the largest value.
    VALUE_UNIT = 4


class Blocks(NamedTuple):
    """Operands of the forward kernel by block of keys.

    decayed_value: values times their key's factor and 2^(VALUE_BITS - SUM_UNIT + WEIGHT_UNIT), float16; equal to
        `plain_value` if weights are scaled by row, since these then include the factor.
    plain_value: values times 2^(VALUE_BITS - VALUE_UNIT), float16.
    columns: the factors of the keys for queries of later blocks, then every `Scalar`, repeated 64 times.
    vectors: see `Vector`.
    """

    decayed_value: jax.Array  # [B, S, K, E]
    plain_value: jax.Array  # [B, S, K, E]
    columns: jax.Array  # [B, K, n, 4, C]
    vectors: jax.Array  # [B, K, 4, S]


def scalar_at(scalar: Scalar) -> tuple[int, int]:
    """Returns the place of a number among the columns of a block."""
    row, place = divmod(scalar * pairs.BLOCK, configs.BLOCK)
    return 1 + row, place


def prepare(key_exponent, value, log_decay, call: configs.Call) -> Blocks:
    """Returns the forward kernel's operands by block of keys.

    Args:
        key_exponent: [B, K, S] of `units.unit_lengths`.
        value: [B, S, K, E], 16-bit, zero at padding.
        log_decay: [B, K, S], at least `numerics.FLOOR` - 1.
        call: of the forward kernel.
    """
    power, block = call.power, configs.BLOCK
    batch, length, heads, size = value.shape
    count, halves = length // block, block // pairs.BLOCK
    shape = pairs.BLOCK, pairs.BLOCK
    types = {
        "plain_value": jax.ShapeDtypeStruct(value.shape, jnp.float16),
        "columns": jax.ShapeDtypeStruct((batch, heads, count, *configs.COLUMNS), jnp.float32),
        "vectors": jax.ShapeDtypeStruct((batch, heads, len(Vector), length), jnp.float32),
    }
    if not configs.scaled_by_row(power):
        types["decayed_value"] = types["plain_value"]

    def body(*refs, value_smem, result_smem, peaks, ready, full):
        warpgroup = lax.axis_index("warpgroup")
        index, half = lax.axis_index("blocks") * _TOGETHER + warpgroup // halves, warpgroup % halves
        own = [x.at[warpgroup] for x in (value_smem, result_smem, full)]
        of_block = [x.at[warpgroup // halves] for x in (peaks, ready)]
        pl.when(index < count)(lambda: of_half(refs, index, half, *own, *of_block))

    def of_half(refs, index, half, value_smem, result_smem, full, peaks, ready):
        exponents, values, decays, *results = refs
        out = dict(zip(types, results, strict=True))
        row, head = lax.axis_index("batch"), lax.axis_index("head")
        begin, start = index * block, half * pairs.BLOCK
        rows, tokens = pl.ds(start, pairs.BLOCK), pl.ds(begin + start, pairs.BLOCK)

        def by_column(ref):
            return pairs.by_column(plgpu.load(ref, layout=tensor_core.PER_COLUMN, optimized=False))

        # Each warpgroup has half of the values.
        plgpu.copy_gmem_to_smem(values.at[row, tokens, head], value_smem, full)
        plgpu.barrier_wait(full)

        def value():
            return plgpu.load(value_smem, layout=pairs.LAYOUT).astype(jnp.float32)

        peaks[rows] = jnp.abs(value()).max(1)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

        # Each half of the block, its own and the other, is broadcast over rows, so that a reduction over columns leaves
        # the same number in every row.
        both = rows, pl.ds((1 - half) * pairs.BLOCK, pairs.BLOCK)
        exponents = exponents.at[row, head, pl.ds(begin, block)]
        longest = jnp.maximum(*(by_column(exponents.at[part]).max(1) for part in both))

        def largest(part):
            # A value with NaN or infinity must not outweigh others.
            peak = by_column(peaks.at[part])
            return jnp.where(peak < jnp.inf, peak, 0.0)

        value_unit = _exponent(jnp.maximum(*(largest(part).max(1) for part in both)))

        def weighted(part):
            exponent = by_column(exponents.at[part])
            shorter = power * (exponent - pairs.by_row(longest))
            return (largest(part) * pairs.length_factor(exponent, shorter)).max(1)

        sum_unit = _exponent(jnp.maximum(*map(weighted, both)))

        # Sums of the decay from the start of the block and to its end.
        decays = decays.at[row, head, pl.ds(begin, block)]
        token, column = (plgpu.broadcasted_iota(jnp.int32, shape, n, layout=pairs.LAYOUT) for n in (0, 1))

        def in_parts(part):
            decay = by_column(decays.at[part])
            coarse = numerics.coarse(decay, block, -sequence.FORGET)
            return coarse, decay - coarse

        others = [x.sum(1) for x in in_parts(both[1])]
        is_later = lax.convert_element_type(half, jnp.float32)
        sums = [
            jnp.where(column <= token, x, 0.0).sum(1) + other * is_later
            for x, other in zip(in_parts(rows), others, strict=True)
        ]
        decay = by_column(decays.at[rows])
        after = jnp.where(column > token, decay, 0.0).sum(1) + sum(others) * (1 - is_later)
        total = decay.sum(1) + sum(others)
        own = plgpu.load(exponents.at[rows], layout=tensor_core.PER_ROW, optimized=False)
        length = pairs.length_factor(own, power * (own - longest))
        to_end = length * numerics.decay(after)
        vectors = {
            Vector.COARSE: sums[0],
            Vector.FINE: sums[1],
            Vector.FROM_START: numerics.decay(sums[0] + sums[1]),
            Vector.LENGTH: length,
        }
        for vector, x in vectors.items():
            launch.store(out["vectors"].at[row, head, vector, tokens], x)
        launch.store(out["columns"].at[row, head, index, 0, rows], to_end)

        weight_unit = power * longest
        scalars = {
            Scalar.SUM_UNIT: (sum_unit + weight_unit).astype(jnp.float32),
            Scalar.WEIGHT_UNIT: weight_unit.astype(jnp.float32),
            Scalar.DECAY: numerics.decay(total),
            Scalar.LOG_DECAY: total * (1 / math.log(2)),
            Scalar.VALUE_UNIT: value_unit.astype(jnp.float32),
        }

        @pl.when(half == 0)
        def _numbers():
            for scalar, x in scalars.items():
                line, place = scalar_at(scalar)
                launch.store(out["columns"].at[row, head, index, line, pl.ds(place, pairs.BLOCK)], x)

        def store(name, x):
            target = result_smem.at[("plain_value", "decayed_value").index(name)]
            target[...] = x.astype(jnp.float16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(target, out[name].at[row, tokens, head])

        store("plain_value", pairs.scaled(value(), VALUE_BITS - value_unit))
        if "decayed_value" in out:
            store("decayed_value", pairs.scaled(pairs.in_units(value(), to_end), VALUE_BITS - sum_unit))

        plgpu.wait_smem_to_gmem(0)

    results = plgpu.kernel(
        body,
        out_type=tuple(types.values()),
        scratch_types={
            "value_smem": tensor_core.operand((_TOGETHER * halves,), pairs.BLOCK, size, value.dtype),
            "result_smem": tensor_core.operand((_TOGETHER * halves, 2), pairs.BLOCK, size, jnp.float16),
            "peaks": plgpu.SMEM((_TOGETHER, block), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=halves, num_barriers=_TOGETHER),
            "full": plgpu.Barrier(num_barriers=_TOGETHER * halves),
        },
        grid=(batch, -(-count // _TOGETHER), heads),
        grid_names=("batch", "blocks", "head"),
        num_threads=_TOGETHER * halves,
        thread_name="warpgroup",
        kernel_name="power_attention_blocks",
        **launch.interpreted(call.interpret),
    )(key_exponent, value, log_decay)
    found = dict(zip(types, results))
    return Blocks(**({"decayed_value": found["plain_value"]} | found))


def _exponent(x):
    """Returns int32 e with x in [2^(e - 1), 2^e), or `sequence.NOTHING` for 0."""
    return jnp.where(x > 0, numerics.normal_exponent(x), sequence.NOTHING)
