"""Fused causal kernel: scores, weights and weighted sums of values without a T x S array.

One thread block takes C queries of one head, one half per warpgroup. A third warpgroup loads blocks of keys and values
through a ring in shared memory. Scores S = Q K^T and sums P V run on the tensor cores (wgmma); P passes from one to the
other in registers. Blocks before the diagonal need p - 1 multiplications, one conversion and one multiply-add per pair,
and no exponential. From p = 8 on, two multiplications, a maximum and an addition replace the multiply-add.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import operands as inputs
from pallas_kernels.power_attention import sequence

__all__ = ["sums"]

_ROWS = configs.WARPGROUP_ROWS
_LAYOUT = plgpu.Layout.WGMMA
_PER_ROW, _PER_COLUMN = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
# The widest swizzle, in bytes of a row, that both wgmma and TMA support; rows of 96 elements use half of it.
_SWIZZLE_BYTES = 128
# Weights of the diagonal block, and all weights of high powers, are scaled per row so that the largest is 2^15.
_NEAR_BITS = 15
# Lower bound on a row's largest weight, so that its inverse stays finite.
_SMALLEST = 2.0**-100


def sums(operands: inputs.Operands, *, power: int, config: configs.Config, interpret=None):
    """Returns undivided sums of weighted values [B, T, N, E] and of weights [B, N, T], float32.

    They are in the operands' scales.

    interpret: `plgpu.InterpretGPUParams` to run on a CPU. Weights then pass through shared memory, since the
    interpreter does not support wgmma operands in registers.
    """
    batch, time, heads, _ = operands.query.shape
    blocks = time // config.block
    kernel = plgpu.kernel(
        functools.partial(_kernel, power=power, config=config, interpreted=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct((batch, time, heads, config.value_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
        ),
        scratch_types=_scratch(operands, config, interpret is not None),
        grid=(heads, blocks, batch),
        grid_names=("head", "block", "batch"),
        num_threads=config.compute_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="power_attention_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*operands)


def _scratch(operands, config, interpreted):
    block, stages, dtype = config.block, config.stages, operands.query.dtype
    scratch = {
        "query_tile": _tile((config.compute_warpgroups, _ROWS, config.head_dim), dtype),
        "key_ring": _tile((stages, block, config.head_dim), dtype),
        "value_ring": _tile((stages, block, config.value_dim), jnp.float16),
        "column_ring": plgpu.SMEM((stages, configs.column_length(block)), jnp.float32),
        "query_ready": plgpu.Barrier(num_barriers=config.compute_warpgroups),
        "key_ready": plgpu.Barrier(num_barriers=stages),
        "value_ready": plgpu.Barrier(num_barriers=stages),
        "column_ready": plgpu.Barrier(num_barriers=stages),
        "key_free": plgpu.Barrier(num_arrivals=config.compute_warpgroups, num_barriers=stages),
        "value_free": plgpu.Barrier(num_arrivals=config.compute_warpgroups, num_barriers=stages),
    }
    if interpreted:
        scratch["weight_tile"] = plgpu.SMEM((config.compute_warpgroups, _ROWS, block), jnp.float16)
    return scratch


def _tile(shape, dtype):
    swizzle = math.gcd(_SWIZZLE_BYTES, shape[-1] * 2)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)),
    )


def _kernel(
    query,
    key,
    far_value,
    near_value,
    columns,
    near,
    rows,
    first,
    numerator,
    denominator,
    *,
    power,
    config,
    interpreted,
    **scratch,
):
    batch, head = jax.lax.axis_index("batch"), jax.lax.axis_index("head")
    group = query.shape[2] // key.shape[2]
    kv_head = jax.lax.div(head, jnp.int32(group))
    blocks = query.shape[1] // config.block
    # The last queries attend to the most keys. They run first, so that short blocks fill the gaps at the end.
    block = jnp.int32(blocks - 1) - jax.lax.axis_index("block")
    diagonal = block + jnp.int32(key.shape[1] // config.block - blocks)
    begin = first[batch, kv_head, block]
    far_steps = diagonal - begin
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == config.compute_warpgroups)
    def _load():
        plgpu.set_max_registers(config.load_registers, action="decrease")
        sources = key, far_value, near_value, columns
        _load_blocks(*sources, batch, kv_head, begin, far_steps, config, scratch)

    @pl.when(warpgroup < config.compute_warpgroups)
    def _compute():
        plgpu.set_max_registers(config.compute_registers, action="increase")
        own = _Rows(block, warpgroup, config)
        tile = scratch["query_tile"].at[warpgroup]
        plgpu.copy_gmem_to_smem(query.at[batch, own.slice, head], tile, scratch["query_ready"].at[warpgroup])
        plgpu.barrier_wait(scratch["query_ready"].at[warpgroup])

        blocks_of_keys = _Blocks(tile, warpgroup, power, config, interpreted, scratch)
        far_sum, far_weight = blocks_of_keys.all_far(far_steps)
        near_sum, near_weight = blocks_of_keys.diagonal(
            far_steps, own, near.at[batch, kv_head], pl.ds(diagonal * config.block, config.block)
        )

        row_factors = rows.at[batch, kv_head]
        sum_factor = plgpu.load(row_factors.at[0, own.slice], layout=_PER_ROW, optimized=False)
        weight_factor = plgpu.load(row_factors.at[1, own.slice], layout=_PER_ROW, optimized=False)
        _store(numerator.at[batch, own.slice, head], far_sum * _by_row(sum_factor, far_sum) + near_sum)
        _store(denominator.at[batch, head, own.slice], far_weight * weight_factor + near_weight)


class _Rows:
    """Queries of one warpgroup: `start` within their block, `slice` within the sequence."""

    def __init__(self, block, warpgroup, config):
        self.start = warpgroup * _ROWS
        self.slice = pl.ds(block * config.block + self.start, _ROWS)


def _load_blocks(key, far_value, near_value, columns, batch, kv_head, begin, far_steps, config, scratch):
    """Fills the ring: earlier blocks in order of time, then the diagonal block with its undecayed values."""

    def load(step, _):
        slot = jax.lax.rem(step, jnp.int32(config.stages))
        tokens = batch, pl.ds((begin + step) * config.block, config.block), kv_head

        @pl.when(step >= config.stages)
        def _():
            plgpu.barrier_wait(scratch["key_free"].at[slot])

        plgpu.copy_gmem_to_smem(key.at[tokens], scratch["key_ring"].at[slot], scratch["key_ready"].at[slot])

        @pl.when(step >= config.stages)
        def _():
            plgpu.barrier_wait(scratch["value_free"].at[slot])

        def load_value(source):
            plgpu.copy_gmem_to_smem(
                source.at[tokens], scratch["value_ring"].at[slot], scratch["value_ready"].at[slot]
            )

        @pl.when(step < far_steps)
        def _():
            plgpu.copy_gmem_to_smem(
                columns.at[batch, kv_head, begin + step],
                scratch["column_ring"].at[slot],
                scratch["column_ready"].at[slot],
            )
            load_value(far_value)

        @pl.when(step == far_steps)
        def _():
            load_value(near_value)

        return ()

    jax.lax.fori_loop(jnp.int32(0), far_steps + 1, load, ())


class _Blocks:
    """Computation of one warpgroup on each block of keys in the ring."""

    def __init__(self, query_tile, warpgroup, power, config, interpreted, scratch):
        self.query_tile, self.warpgroup, self.power = query_tile, warpgroup, power
        self.config, self.interpreted = config, interpreted
        self.scratch = scratch

    def all_far(self, steps):
        """Returns the sums over all blocks before the diagonal one."""
        total = plgpu.layout_cast(jnp.zeros((_ROWS, self.config.value_dim), jnp.float32), _LAYOUT)
        weight = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _PER_ROW)
        if not inputs.scaled_by_row(self.power):
            return jax.lax.fori_loop(jnp.int32(0), steps, self._far, (total, weight))
        largest = plgpu.layout_cast(jnp.full((_ROWS,), _SMALLEST, jnp.float32), _PER_ROW)
        carry = total, weight, largest
        total, weight, largest = jax.lax.fori_loop(jnp.int32(0), steps, self._far_by_row, carry)
        return total * _by_row(largest * 2.0**-_NEAR_BITS, total), weight

    def _far(self, step, carry):
        """Adds one block before the diagonal."""
        total, weight = carry
        slot = self._slot(step)
        weights = self._weights(slot)
        plgpu.barrier_wait(self.scratch["column_ready"].at[slot])
        columns = self.scratch["column_ring"].at[slot]
        factors = plgpu.load(columns.at[pl.ds(0, self.config.block)], layout=_PER_COLUMN, optimized=False)
        sum_decay, weight_decay = columns[self.config.block], columns[self.config.block + 1]
        weight = weight * weight_decay + (weights * _by_column(factors, weights)).sum(1)
        total = self._add_product(total * sum_decay, weights.astype(jnp.float16), slot)
        return total, weight

    def _far_by_row(self, step, carry):
        """Adds one block before the diagonal, scaling each row of weights by its largest one so far."""
        total, weight, largest = carry
        slot = self._slot(step)
        weights = self._weights(slot)
        plgpu.barrier_wait(self.scratch["column_ready"].at[slot])
        columns = self.scratch["column_ring"].at[slot]
        factors = plgpu.load(columns.at[pl.ds(0, self.config.block)], layout=_PER_COLUMN, optimized=False)
        decay = columns[self.config.block + 1]
        weights *= _by_column(factors, weights)
        before = largest * decay
        largest = jnp.maximum(jnp.maximum(before, weights.max(1)), _SMALLEST)
        # Exactly 1 where the scale does not change, since errors of many blocks would accumulate.
        kept = jnp.where(before < largest, before / largest, 1.0)
        scaled = weights * _by_row(2.0**_NEAR_BITS / largest, weights)
        weight = weight * decay + weights.sum(1)
        total = self._add_product(total * _by_row(kept, total), scaled.astype(jnp.float16), slot)
        return total, weight, largest

    def diagonal(self, step, own, near, tokens):
        """Returns the sums over the queries' own block, whose weights need the mask and an exponential per pair."""
        slot = self._slot(step)
        weights = self._weights(slot)

        def per_row(index):
            part = near.at[index, pl.ds(tokens.start + own.start, _ROWS)]
            return _by_row(plgpu.load(part, layout=_PER_ROW, optimized=False), weights)

        def per_column(index):
            part = near.at[index, tokens]
            return _by_column(plgpu.load(part, layout=_PER_COLUMN, optimized=False), weights)

        decay = (per_row(0) - per_column(0)) + (per_row(1) - per_column(1))
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, weights.shape, axis, layout=_LAYOUT) for axis in (0, 1)
        )
        seen = (row + own.start >= column) & (decay >= sequence.FLOOR)
        weights = jnp.where(seen, weights * per_column(2) * jnp.exp(decay), 0.0)
        largest = jnp.maximum(weights.max(1), _SMALLEST)
        scaled = weights * _by_row(2.0**_NEAR_BITS / largest, weights)
        zeros = plgpu.layout_cast(jnp.zeros((_ROWS, self.config.value_dim), jnp.float32), _LAYOUT)
        total = self._add_product(zeros, scaled.astype(jnp.float16), slot)
        unit = largest * 2.0 ** -(_NEAR_BITS + inputs.VALUE_BITS)
        return total * _by_row(unit, total), weights.sum(1)

    def _slot(self, step):
        return jax.lax.rem(step, jnp.int32(self.config.stages))

    def _weights(self, slot):
        """Returns (q . k)^p for the warpgroup's queries and the block's keys."""
        plgpu.barrier_wait(self.scratch["key_ready"].at[slot])

        def product(scores):
            plgpu.wgmma(scores, self.query_tile, self.scratch["key_ring"].at[slot].transpose((1, 0)))
            return scores[...]

        scores = pl.run_scoped(product, plgpu.ACC((_ROWS, self.config.block), jnp.float32))
        plgpu.barrier_arrive(self.scratch["key_free"].at[slot])
        return jax.lax.integer_pow(scores, self.power)

    def _add_product(self, total, weights, slot):
        """Returns total + weights @ values, and frees the slot."""
        plgpu.barrier_wait(self.scratch["value_ready"].at[slot])
        values = self.scratch["value_ring"].at[slot]
        if self.interpreted:
            tile = self.scratch["weight_tile"].at[self.warpgroup]
            tile[...] = weights
            plgpu.commit_smem()

            def product(sums):
                plgpu.wgmma(sums, tile, values)
                return sums[...]

            total += pl.run_scoped(product, plgpu.ACC(total.shape, jnp.float32))
        else:
            total = pl.run_state(lambda sums: plgpu.wgmma(sums, weights, values))(plgpu.ACC.init(total))
        plgpu.barrier_arrive(self.scratch["value_free"].at[slot])
        return total


def _store(destination, value):
    """Stores to global memory, also if rows of 16 values do not fill cache lines."""
    if hasattr(plgpu, "store"):
        plgpu.store(destination, value, optimized=False)
    else:  # before jax 0.12, which has no `plgpu.store`
        destination[...] = value


def _by_row(x, like):
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def _by_column(x, like):
    return jax.lax.broadcast_in_dim(x, like.shape, [1])
