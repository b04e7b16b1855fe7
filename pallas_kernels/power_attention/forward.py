"""Fused causal kernel: scores, weights and weighted sums of values without a T x S array.

One thread block takes C queries of one head, one half per warpgroup. A third warpgroup loads blocks of keys and values
through a ring in shared memory. Scores S = Q K^T and sums P V run on the tensor cores (wgmma); P passes from one to the
other in registers. Per pair, blocks before the diagonal need the multiplications of a power by repeated squaring, one
conversion and one multiply-add, and no exponential. From p = 8 on, two multiplications, a maximum and an addition
replace the multiply-add.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, ring, tensor_core
from pallas_kernels.power_attention import blocks, configs, pairs
from pallas_kernels.power_attention.blocks import Scalar, Vector

# Weights of the diagonal block, and all weights of high powers, are scaled per row so that the largest is 2^15.
_WEIGHT_BITS = 15
# Lower bound on a row's largest weight, so that its inverse stays finite.
_SMALLEST = 2.0**-100
# Bits by which a block's values may be smaller than the sums before it without losing precision.
_SLACK_BITS = 40
# The unit of the sums may fall by this much from one block to the next: the factor stays a normal number.
_FALL_BITS = 120
# Exponent of the unit of sums over nothing.
_NO_UNIT = -30_000


class _Units(NamedTuple):
    """Exponents of the units of the sums of weighted values and of weights, and a bound on the former, all float32."""

    sum: jax.Array
    weight: jax.Array
    bound: jax.Array


class Operands(NamedTuple):
    """Arrays that the kernel reads, besides the values and factors of the keys.

    Queries are float16, as in the backward pass, whose scores must be the same to the bit: a weight that is alone in
    its sum is 1 in both passes, however small.
    """

    query: jax.Array  # [B, T, N, D], of length at most 2^h, h of `configs.query_bits`
    key: jax.Array  # float16 [B, S, K, D], of length at most 1
    query_exponent: jax.Array  # [B, N, T], of the lengths that were taken out of the queries
    # [B, K, T / C], the first block of keys that is visible to any query of a block; None if all are
    first: jax.Array | None


def means(
    operands: Operands,
    of_blocks: blocks.Blocks,
    *,
    dtype,
    save_residuals: bool,
    call: configs.Call,
):
    """Returns weighted means of values [B, T, N, E], zero where no weight is positive, by name: see `power_attention`.

    Args:
        operands: queries and keys.
        of_blocks: values and factors of the keys.
        dtype: of the means.
        save_residuals: whether to return `remainder`, `weight_sum` and `weight_exponent`.
        call: power and tile sizes.
    """
    query, key = operands.query, operands.key
    power, config = call.power, call.config
    batch, time, heads, head_dim = query.shape
    block, count, stages = configs.BLOCK, configs.WARPGROUPS, config.stages
    query_blocks, key_blocks = time // block, key.shape[1] // block
    group = heads // key.shape[2]
    # A head's queries share its group's keys and values.
    grid = launch.heads_grid(
        batch, heads, query_blocks, 2 * key.shape[1] * (head_dim + config.value_dim) / group
    )

    def body(gmem, smem):
        batch_row, head = lax.axis_index("batch"), launch.head_index(grid)
        kv_head = lax.div(head, jnp.int32(group))
        # The last queries attend to the most keys. They run first, so that short blocks fill the gaps at the end.
        query_block = jnp.int32(query_blocks - 1) - lax.axis_index("block")
        diagonal = query_block + jnp.int32(key_blocks - query_blocks)
        begin = gmem["first"][batch_row, kv_head, query_block] if "first" in gmem else jnp.int32(0)
        earlier_steps = diagonal - begin

        def copy():
            # Fill the ring: earlier blocks in order of time, then the diagonal block with its undecayed values.
            @pl.loop(jnp.int32(0), earlier_steps + 1)
            def _block(step):
                slot = ring.slot_of(step, config.stages)
                tokens = batch_row, pl.ds((begin + step) * block, block), kv_head
                reused = step >= config.stages
                pl.when(reused)(lambda: plgpu.barrier_wait(smem["key_free"].at[slot]))
                plgpu.copy_gmem_to_smem(
                    gmem["key"].at[tokens], smem["key_smem"].at[slot], smem["key_full"].at[slot]
                )
                pl.when(reused)(lambda: plgpu.barrier_wait(smem["value_free"].at[slot]))

                def copy_value(name):
                    target, full = smem["value_smem"].at[slot], smem["value_full"].at[slot]
                    plgpu.copy_gmem_to_smem(gmem[name].at[tokens], target, full)

                @pl.when(step < earlier_steps)
                def _earlier():
                    columns = gmem["columns"].at[batch_row, kv_head, begin + step]
                    plgpu.copy_gmem_to_smem(
                        columns, smem["column_smem"].at[slot], smem["column_full"].at[slot]
                    )
                    copy_value("decayed_value")

                pl.when(step == earlier_steps)(lambda: copy_value("plain_value"))

        def compute(warpgroup, core):
            start = warpgroup * pairs.BLOCK
            rows = pl.ds(query_block * block + start, pairs.BLOCK)
            tile, ready = smem["query_smem"].at[warpgroup], smem["query_ready"].at[warpgroup]
            plgpu.copy_gmem_to_smem(gmem["query"].at[batch_row, rows, head], tile, ready)
            plgpu.barrier_wait(ready)

            # Earlier blocks in order of time, then the diagonal one.
            queries = _Queries(core, tile, smem, power, config)
            earlier_sum, earlier_weight, units = queries.all_earlier(earlier_steps)
            columns = gmem["columns"].at[batch_row, kv_head, diagonal]
            weight_unit, value_unit = (
                columns[blocks.scalar_at(n)] for n in (Scalar.WEIGHT_UNIT, Scalar.VALUE_UNIT)
            )
            vectors = gmem["vectors"].at[batch_row, kv_head]
            diagonal_sum, diagonal_weight = queries.diagonal(
                earlier_steps, start, vectors, pl.ds(diagonal * block, block)
            )

            # Join both in units of the larger weight and of the larger value.
            weight_exponent = jnp.maximum(units.weight, weight_unit)
            value_exponent = jnp.maximum(units.sum - weight_exponent, value_unit)
            from_start = vectors.at[Vector.FROM_START, pl.ds(diagonal * block + start, pairs.BLOCK)]
            from_start = plgpu.load(from_start, layout=tensor_core.PER_ROW, optimized=False)
            weight = earlier_weight * (from_start * jnp.exp2(units.weight - weight_exponent))
            weight = weight + diagonal_weight * jnp.exp2(weight_unit - weight_exponent)
            sum_factor = from_start * jnp.exp2(
                units.sum - weight_exponent - value_exponent - blocks.VALUE_BITS
            )
            total = pairs.in_units(earlier_sum, sum_factor)
            total = total + diagonal_sum * jnp.exp2(
                weight_unit - weight_exponent + value_unit - value_exponent
            )

            # A NaN is a weight too: the mean is NaN, not zero.
            none = weight < jnp.finfo(jnp.float32).tiny
            mean = total / _by_row(jnp.where(none, 1.0, weight), total)
            mean = mean * _by_row(jnp.where(none, 0.0, 1.0), total)
            # In two steps, since the power itself might not be a normal number.
            mean = mean * jnp.exp2(_half(value_exponent)) * jnp.exp2(value_exponent - _half(value_exponent))
            out = mean.astype(dtype)
            launch.store(gmem["out"].at[batch_row, rows, head], out)
            if save_residuals:
                remainder = (mean - out.astype(jnp.float32)).astype(jnp.bfloat16)
                launch.store(gmem["remainder"].at[batch_row, rows, head], remainder)
                launch.store(gmem["weight_sum"].at[batch_row, head, rows], weight)
                lengths = gmem["query_exponent"].at[batch_row, head, rows]
                lengths = plgpu.load(lengths, layout=tensor_core.PER_ROW, optimized=False)
                exponent = power * (lengths - configs.query_bits(power)) + weight_exponent.astype(jnp.int32)
                launch.store(gmem["weight_exponent"].at[batch_row, head, rows], exponent)

        return copy, compute

    shape, by_head = (batch, time, heads, config.value_dim), (batch, heads, time)
    results = {"out": jax.ShapeDtypeStruct(shape, dtype)}
    if save_residuals:
        results |= {
            "remainder": jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            "weight_sum": jax.ShapeDtypeStruct(by_head, jnp.float32),
            "weight_exponent": jax.ShapeDtypeStruct(by_head, jnp.int32),
        }
    return launch.launch(
        body,
        {name: x for name, x in operands._asdict().items() if x is not None} | of_blocks._asdict(),
        results,
        {
            "query_smem": tensor_core.operand((count,), pairs.BLOCK, head_dim, jnp.float16),
            "key_smem": tensor_core.operand((stages,), block, head_dim, jnp.float16),
            "value_smem": tensor_core.operand((stages,), block, config.value_dim, jnp.float16),
            "column_smem": plgpu.SMEM((stages, *configs.COLUMNS), jnp.float32),
            "query_ready": plgpu.Barrier(num_barriers=count),
            "key_full": plgpu.Barrier(num_barriers=stages),
            "value_full": plgpu.Barrier(num_barriers=stages),
            "column_full": plgpu.Barrier(num_barriers=stages),
            "key_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
            "value_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
        },
        grid=grid,
        warpgroups=count,
        name="power_attention_forward",
        interpret=call.interpret,
    )


class _Queries:
    """The 64 queries of one warpgroup, and their products with each block of keys in the ring."""

    def __init__(self, core, query_smem, smem, power, config):
        self.core, self.query_smem, self.smem = core, query_smem, smem
        self.power, self.config = power, config

    def all_earlier(self, steps):
        """Returns the sums over all blocks before the diagonal one, of values and of weights, and their `_Units`."""
        total = plgpu.layout_cast(jnp.zeros((pairs.BLOCK, self.config.value_dim), jnp.float32), pairs.LAYOUT)
        weight = plgpu.layout_cast(jnp.zeros((pairs.BLOCK,), jnp.float32), tensor_core.PER_ROW)
        units = _Units(*[jnp.float32(_NO_UNIT)] * 3)
        if not configs.scaled_by_row(self.power):
            return lax.fori_loop(jnp.int32(0), steps, self._earlier, (total, weight, units))
        largest = plgpu.layout_cast(jnp.full((pairs.BLOCK,), _SMALLEST, jnp.float32), tensor_core.PER_ROW)
        carry = total, weight, units, largest
        total, weight, units, largest = lax.fori_loop(jnp.int32(0), steps, self._earlier_by_row, carry)
        # The sums so far are in units of values over each row's largest weight: multiply that weight back in.
        units = units._replace(sum=units.sum + units.weight)
        return pairs.in_units(total, largest * 2.0**-_WEIGHT_BITS), weight, units

    def _earlier(self, step, carry):
        """Adds one block before the diagonal."""
        total, weight, units = carry
        slot = self._slot(step)
        weights, joined = self._weights(slot, lambda: self._joined(slot, units))
        factors, units, (kept_sum, kept_weight), (added_sum, added_weight) = joined
        # The factor is nearly always 1, and multiplying by it skipped.
        rounded = lax.cond(
            added_sum < 1,
            lambda x: x * added_sum.astype(jnp.float16),
            lambda x: x,
            weights.astype(jnp.float16),
        )
        weight = weight * kept_weight + (weights * _by_column(factors, weights)).sum(1) * added_weight
        return self._add_product(total * kept_sum, rounded, slot), weight, units

    def _earlier_by_row(self, step, carry):
        """Adds one block before the diagonal, scaling each row of weights by its largest one so far."""
        total, weight, units, largest = carry
        slot = self._slot(step)
        weights, joined = self._weights(slot, lambda: self._joined(slot, units))
        factors, units, (kept_sum, kept_weight), (added_sum, added_weight) = joined
        weights *= _by_column(factors, weights)
        before = largest * kept_weight
        largest = jnp.maximum(jnp.maximum(before, weights.max(1) * added_weight), _SMALLEST)
        # Exactly 1 where the scale does not change, since errors of many blocks would accumulate.
        scale = jnp.where(before < largest, before / largest, 1.0) * kept_sum
        scaled = pairs.in_units(weights, added_sum * added_weight * 2.0**_WEIGHT_BITS / largest)
        weight = weight * kept_weight + weights.sum(1) * added_weight
        total = self._add_product(pairs.in_units(total, scale), scaled.astype(jnp.float16), slot)
        return total, weight, units, largest

    def _joined(self, slot, units):
        """Returns (factors, units, kept, added) for adding a block of keys to the sums.

        Those are the factors of its keys; the units of the sums after the block; the factors, of values and of weights,
        that convert the sums so far, with the block's decay; and those that convert the block's own sums.
        """
        plgpu.barrier_wait(self.smem["column_full"].at[slot])
        columns = self.smem["column_smem"].at[slot]
        factors = plgpu.load(columns.at[0], layout=tensor_core.PER_COLUMN, optimized=False)
        own = {n: columns[blocks.scalar_at(n)] for n in Scalar}
        decay = own[Scalar.DECAY]
        weight = jnp.maximum(units.weight, own[Scalar.WEIGHT_UNIT])
        kept_weight = decay * jnp.exp2(units.weight - weight)
        added_weight = jnp.exp2(own[Scalar.WEIGHT_UNIT] - weight)
        if configs.scaled_by_row(self.power):
            # The sums are of values over weights, which decay in the largest weight of their row. Their unit never
            # falls, since they are multiplied by that weight at the end.
            sum_unit = own[Scalar.VALUE_UNIT]
            bound = total = jnp.maximum(sum_unit, units.sum)
            kept_sum = jnp.exp2(units.sum - total)
        else:
            # The block's own unit, unless the sums are too large for it.
            sum_unit = own[Scalar.SUM_UNIT]
            decayed = units.bound + own[Scalar.LOG_DECAY]
            bound = jnp.maximum(sum_unit, decayed)
            least = jnp.maximum(_whole_above(decayed) - _SLACK_BITS, units.sum - _FALL_BITS)
            total = jnp.where(decay > 0, jnp.maximum(sum_unit, least), sum_unit)
            kept_sum = decay * jnp.exp2(jnp.minimum(units.sum - total, _FALL_BITS))
        kept, added = (kept_sum, kept_weight), (jnp.exp2(sum_unit - total), added_weight)
        return factors, _Units(total, weight, bound), kept, added

    def diagonal(self, step, start, vectors, tokens):
        """Returns the sums over the queries' own block, whose weights need the mask and an exponential per pair."""
        slot = self._slot(step)
        weights, _ = self._weights(slot)

        def per_row(index):
            part = vectors.at[index, pl.ds(tokens.start + start, pairs.BLOCK)]
            return _by_row(plgpu.load(part, layout=tensor_core.PER_ROW, optimized=False), weights)

        def per_column(index):
            part = vectors.at[index, tokens]
            return _by_column(plgpu.load(part, layout=tensor_core.PER_COLUMN, optimized=False), weights)

        coarse, fine = (per_row(n) - per_column(n) for n in (Vector.COARSE, Vector.FINE))
        decay = coarse + fine
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, weights.shape, axis, layout=pairs.LAYOUT) for axis in (0, 1)
        )
        seen = (row + start >= column) & (decay >= numerics.FLOOR)
        weights = jnp.where(seen, weights * per_column(Vector.LENGTH) * jnp.exp(decay), 0.0)
        largest = jnp.maximum(weights.max(1), _SMALLEST)
        scaled = pairs.in_units(weights, 2.0**_WEIGHT_BITS / largest)
        zeros = plgpu.layout_cast(jnp.zeros((pairs.BLOCK, self.config.value_dim), jnp.float32), pairs.LAYOUT)
        total = self._add_product(zeros, scaled.astype(jnp.float16), slot)
        unit = largest * 2.0 ** -(_WEIGHT_BITS + blocks.VALUE_BITS)
        return pairs.in_units(total, unit), weights.sum(1)

    def _slot(self, step):
        return ring.slot_of(step, self.config.stages)

    def _weights(self, slot, meanwhile=lambda: None):
        """Returns (q . k)^p for the warpgroup's queries and the block's keys, and what `meanwhile` returns."""
        plgpu.barrier_wait(self.smem["key_full"].at[slot])
        key = self.smem["key_smem"].at[slot]

        def compute(accumulator):
            self.core.add(accumulator, self.query_smem, key.T, wait=1)
            done = meanwhile()
            # Reading the accumulator waits for the product.
            return accumulator[...], done

        scores, done = self.core.accumulators(compute, key.shape[0])
        plgpu.barrier_arrive(self.smem["key_free"].at[slot])
        return lax.integer_pow(scores, self.power), done

    def _add_product(self, total, weights, slot):
        """Returns total + weights @ values, and frees the slot."""
        plgpu.barrier_wait(self.smem["value_full"].at[slot])
        total = self.core.sum(total, weights, self.smem["value_smem"].at[slot])
        plgpu.barrier_arrive(self.smem["value_free"].at[slot])
        return total


def _half(x):
    """Returns a whole number close to half of x."""
    return (x * 0.5).astype(jnp.int32).astype(jnp.float32)


def _whole_above(x):
    """Returns a whole number close to x and not below it."""
    return x.astype(jnp.int32).astype(jnp.float32) + 1


def _by_row(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def _by_column(x, like):
    return lax.broadcast_in_dim(x, like.shape, [1])
