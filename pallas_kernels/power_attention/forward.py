"""Fused causal kernel: scores, weights and weighted sums of values without a T x S array.

One thread block takes C queries of one head, one half per warpgroup. A third warpgroup loads blocks of keys and values
through a ring in shared memory. Scores S = Q K^T and sums P V run on the tensor cores (wgmma); P passes from one to the
other in registers. Blocks before the diagonal need p - 1 multiplications, one conversion and one multiply-add per pair,
and no exponential. From p = 8 on, two multiplications, a maximum and an addition replace the multiply-add.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, ring, tensor_core
from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import operands as inputs
from pallas_kernels.power_attention import pairs, sequence

__all__ = ["means"]

_ROWS = tensor_core.ROWS
_LAYOUT = plgpu.Layout.WGMMA
_PER_ROW, _PER_COLUMN = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
# Weights of the diagonal block, and all weights of high powers, are scaled per row so that the largest is 2^15.
_WEIGHT_BITS = 15
# Lower bound on a row's largest weight, so that its inverse stays finite.
_SMALLEST = 2.0**-100


def means(
    operands: inputs.Operands, *, power: int, config: configs.Config, dtype, exact: bool, interpret=None
):
    """Returns `out`, weighted means of values [B, T, N, E], and `denominator`, sums of weights [B, N, T].

    A mean is zero if no weight is positive. The sums of weights are float32, in the operands' scales.

    dtype: of `out`. exact: whether to return `remainder`, what rounding took from the means, in bfloat16.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    batch, time, heads, head_dim = operands.query.shape
    block, count, stages = config.block, config.compute_warpgroups, config.stages
    blocks, key_blocks = time // block, operands.key.shape[1] // block
    group = heads // operands.key.shape[2]
    # A head's queries share its group's keys and values.
    head_bytes = 2 * operands.key.shape[1] * (head_dim + config.value_dim) / group
    grid = launch.heads_grid(batch, heads, blocks, head_bytes)

    def body(gmem, smem):
        batch_row, head = lax.axis_index("batch"), launch.head_index(grid)
        kv_head = lax.div(head, jnp.int32(group))
        # The last queries attend to the most keys. They run first, so that short blocks fill the gaps at the end.
        query_block = jnp.int32(blocks - 1) - lax.axis_index("block")
        diagonal = query_block + jnp.int32(key_blocks - blocks)
        begin = gmem["first"][batch_row, kv_head, query_block]
        earlier_steps = diagonal - begin

        def copy():
            _copy_blocks(gmem, smem, batch_row, kv_head, begin, earlier_steps, config)

        def compute(warpgroup, core):
            start = warpgroup * _ROWS
            rows = pl.ds(query_block * block + start, _ROWS)
            tile, ready = smem["query_smem"].at[warpgroup], smem["query_ready"].at[warpgroup]
            plgpu.copy_gmem_to_smem(gmem["query"].at[batch_row, rows, head], tile, ready)
            plgpu.barrier_wait(ready)

            # Earlier blocks in order of time, then the diagonal one.
            queries = _Queries(core, tile, smem, power, config)
            earlier_sum, earlier_weight = queries.all_earlier(earlier_steps)
            diagonal_sum, diagonal_weight = queries.diagonal(
                earlier_steps, start, gmem["diagonal"].at[batch_row, kv_head], pl.ds(diagonal * block, block)
            )

            # Join both in the scales of the rows.
            factors = gmem["rows"].at[batch_row, kv_head]
            sum_factor, weight_factor = (
                plgpu.load(factors.at[n, rows], layout=_PER_ROW, optimized=False) for n in range(2)
            )
            total = earlier_sum * _by_row(sum_factor, earlier_sum) + diagonal_sum
            weight = earlier_weight * weight_factor + diagonal_weight
            pairs.store(gmem["denominator"].at[batch_row, head, rows], weight)

            # A NaN is a weight too: the mean is NaN, not zero.
            none = weight < jnp.finfo(jnp.float32).tiny
            mean = total / _by_row(jnp.where(none, 1.0, weight), total)
            mean = mean * _by_row(jnp.where(none, 0.0, 1.0), total)
            for n in range(2):
                mean = mean * gmem["unit"][batch_row, kv_head, n]
            out = mean.astype(dtype)
            pairs.store(gmem["out"].at[batch_row, rows, head], out)
            if exact:
                remainder = (mean - out.astype(jnp.float32)).astype(jnp.bfloat16)
                pairs.store(gmem["remainder"].at[batch_row, rows, head], remainder)

        return copy, compute

    shape = batch, time, heads, config.value_dim
    return launch.launch(
        body,
        operands._asdict(),
        {
            "out": jax.ShapeDtypeStruct(shape, dtype),
            "denominator": jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
        }
        | ({"remainder": jax.ShapeDtypeStruct(shape, jnp.bfloat16)} if exact else {}),
        {
            "query_smem": tensor_core.operand((count,), _ROWS, head_dim, operands.query.dtype),
            "key_smem": tensor_core.operand((stages,), block, head_dim, operands.key.dtype),
            "value_smem": tensor_core.operand((stages,), block, config.value_dim, jnp.float16),
            "column_smem": plgpu.SMEM((stages, configs.column_length(block)), jnp.float32),
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
        interpret=interpret,
    )


def _copy_blocks(gmem, smem, batch_row, kv_head, begin, earlier_steps, config):
    """Fills the ring: earlier blocks in order of time, then the diagonal block with its undecayed values."""

    @pl.loop(jnp.int32(0), earlier_steps + 1)
    def _block(step):
        slot = ring.slot_of(step, config.stages)
        tokens = batch_row, pl.ds((begin + step) * config.block, config.block), kv_head
        reused = step >= config.stages
        pl.when(reused)(lambda: plgpu.barrier_wait(smem["key_free"].at[slot]))
        plgpu.copy_gmem_to_smem(gmem["key"].at[tokens], smem["key_smem"].at[slot], smem["key_full"].at[slot])
        pl.when(reused)(lambda: plgpu.barrier_wait(smem["value_free"].at[slot]))

        def copy_value(name):
            target, full = smem["value_smem"].at[slot], smem["value_full"].at[slot]
            plgpu.copy_gmem_to_smem(gmem[name].at[tokens], target, full)

        @pl.when(step < earlier_steps)
        def _earlier():
            columns = gmem["columns"].at[batch_row, kv_head, begin + step]
            plgpu.copy_gmem_to_smem(columns, smem["column_smem"].at[slot], smem["column_full"].at[slot])
            copy_value("decayed_value")

        pl.when(step == earlier_steps)(lambda: copy_value("plain_value"))


class _Queries:
    """The 64 queries of one warpgroup, and their products with each block of keys in the ring."""

    def __init__(self, core, query_smem, smem, power, config):
        self.core, self.query_smem, self.smem = core, query_smem, smem
        self.power, self.config = power, config

    def all_earlier(self, steps):
        """Returns the sums over all blocks before the diagonal one."""
        total = plgpu.layout_cast(jnp.zeros((_ROWS, self.config.value_dim), jnp.float32), _LAYOUT)
        weight = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _PER_ROW)
        if not inputs.scaled_by_row(self.power):
            return lax.fori_loop(jnp.int32(0), steps, self._earlier, (total, weight))
        largest = plgpu.layout_cast(jnp.full((_ROWS,), _SMALLEST, jnp.float32), _PER_ROW)
        carry = total, weight, largest
        total, weight, largest = lax.fori_loop(jnp.int32(0), steps, self._earlier_by_row, carry)
        return total * _by_row(largest * 2.0**-_WEIGHT_BITS, total), weight

    def _earlier(self, step, carry):
        """Adds one block before the diagonal."""
        total, weight = carry
        slot = self._slot(step)
        weights = self._weights(slot)
        plgpu.barrier_wait(self.smem["column_full"].at[slot])
        columns = self.smem["column_smem"].at[slot]
        factors = plgpu.load(columns.at[pl.ds(0, self.config.block)], layout=_PER_COLUMN, optimized=False)
        sum_decay, weight_decay = columns[self.config.block], columns[self.config.block + 1]
        weight = weight * weight_decay + (weights * _by_column(factors, weights)).sum(1)
        total = self._add_product(total * sum_decay, weights.astype(jnp.float16), slot)
        return total, weight

    def _earlier_by_row(self, step, carry):
        """Adds one block before the diagonal, scaling each row of weights by its largest one so far."""
        total, weight, largest = carry
        slot = self._slot(step)
        weights = self._weights(slot)
        plgpu.barrier_wait(self.smem["column_full"].at[slot])
        columns = self.smem["column_smem"].at[slot]
        factors = plgpu.load(columns.at[pl.ds(0, self.config.block)], layout=_PER_COLUMN, optimized=False)
        decay = columns[self.config.block + 1]
        weights *= _by_column(factors, weights)
        before = largest * decay
        largest = jnp.maximum(jnp.maximum(before, weights.max(1)), _SMALLEST)
        # Exactly 1 where the scale does not change, since errors of many blocks would accumulate.
        kept = jnp.where(before < largest, before / largest, 1.0)
        scaled = weights * _by_row(2.0**_WEIGHT_BITS / largest, weights)
        weight = weight * decay + weights.sum(1)
        total = self._add_product(total * _by_row(kept, total), scaled.astype(jnp.float16), slot)
        return total, weight, largest

    def diagonal(self, step, start, vectors, tokens):
        """Returns the sums over the queries' own block, whose weights need the mask and an exponential per pair."""
        slot = self._slot(step)
        weights = self._weights(slot)

        def per_row(index):
            part = vectors.at[index, pl.ds(tokens.start + start, _ROWS)]
            return _by_row(plgpu.load(part, layout=_PER_ROW, optimized=False), weights)

        def per_column(index):
            part = vectors.at[index, tokens]
            return _by_column(plgpu.load(part, layout=_PER_COLUMN, optimized=False), weights)

        decay = (per_row(0) - per_column(0)) + (per_row(1) - per_column(1))
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, weights.shape, axis, layout=_LAYOUT) for axis in (0, 1)
        )
        seen = (row + start >= column) & (decay >= sequence.FLOOR)
        weights = jnp.where(seen, weights * per_column(2) * jnp.exp(decay), 0.0)
        largest = jnp.maximum(weights.max(1), _SMALLEST)
        scaled = weights * _by_row(2.0**_WEIGHT_BITS / largest, weights)
        zeros = plgpu.layout_cast(jnp.zeros((_ROWS, self.config.value_dim), jnp.float32), _LAYOUT)
        total = self._add_product(zeros, scaled.astype(jnp.float16), slot)
        unit = largest * 2.0 ** -(_WEIGHT_BITS + inputs.VALUE_BITS)
        return total * _by_row(unit, total), weights.sum(1)

    def _slot(self, step):
        return ring.slot_of(step, self.config.stages)

    def _weights(self, slot):
        """Returns (q . k)^p for the warpgroup's queries and the block's keys."""
        plgpu.barrier_wait(self.smem["key_full"].at[slot])
        scores = self.core.product(self.query_smem, self.smem["key_smem"].at[slot])
        plgpu.barrier_arrive(self.smem["key_free"].at[slot])
        return lax.integer_pow(scores, self.power)

    def _add_product(self, total, weights, slot):
        """Returns total + weights @ values, and frees the slot."""
        plgpu.barrier_wait(self.smem["value_full"].at[slot])
        total = self.core.sum(total, weights, self.smem["value_smem"].at[slot])
        plgpu.barrier_arrive(self.smem["value_free"].at[slot])
        return total


def _by_row(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def _by_column(x, like):
    return lax.broadcast_in_dim(x, like.shape, [1])
