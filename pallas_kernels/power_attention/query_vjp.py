"""Gradient of the queries, and delta corrected by sums over keys of the gradient of a pair's log decay.

One thread block takes 128 queries of one head, a block of 64 for each of two warpgroups. A third warpgroup loads blocks
of 64 keys and values through a ring, first the diagonal ones, then backward in time. For each pair of blocks

    S = Q K^T,  dP = dO V^T,  dS_ij = s_ij^(p-1) c_j ((dP_ij - delta_i) g_i),  dQ += dS K.

c_j is the factor of the pair's weight that belongs to the key and to the blocks between. g_i is the query's factor over
its denominator, with a scale of its own that uses the full range of float16.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, ring, tensor_core
from pallas_kernels.power_attention import configs, pairs
from pallas_kernels.power_attention import vjp_operands as inputs
from pallas_kernels.power_attention.vjp_operands import KeyVector, QueryVector

_BLOCK = pairs.BLOCK


def query_vjp(operands: inputs.VjpOperands, *, time: int, dtype, call: configs.Call):
    """Returns the gradient of the queries [B, T, N, D], and the operands' delta with a correction, [B, N, n, 64].

    The sum of P (dP - delta) over a query's keys would be zero if delta were exact: what remains is added to it, so
    that errors of the output do not affect the gradients of keys.

    dtype: of the gradient.
    time: T, the number of real queries; they come last, except for the padding to whole blocks after them.
    """
    batch, _, heads, head_dim = operands.query.shape
    config = call.config
    count, stages, value_dim = configs.WARPGROUPS, config.query_stages, config.value_dim
    whole = -(-time // (count * _BLOCK)) * count * _BLOCK
    blocks, group = whole // (count * _BLOCK), heads // operands.key.shape[2]
    # Blocks of keys before the first query's.
    offset = (operands.key.shape[1] - whole) // _BLOCK
    grid = launch.heads_grid(batch, heads, blocks, 2 * operands.key.shape[1] * (head_dim + value_dim) / group)

    def body(gmem, smem):
        batch_row, head = lax.axis_index("batch"), launch.head_index(grid)
        kv_head = lax.div(head, jnp.int32(group))
        # The last queries attend to the most keys. They run first, so that short blocks fill the gaps at the end.
        block = (jnp.int32(blocks - 1) - lax.axis_index("block")) * count + offset
        last = block + count - 1
        begin = jnp.int32(0)
        if "first" in gmem:
            begin = gmem["first"][batch_row, kv_head, lax.div(block, jnp.int32(count))] * count
        steps = last - begin + 1

        def copy():
            # The block's queries and cotangents.
            for n in range(count):
                tokens = batch_row, pl.ds((block + n) * _BLOCK, _BLOCK), head
                for name in ("query", "dout"):
                    target = smem[f"{name}_smem"].at[n]
                    plgpu.copy_gmem_to_smem(gmem[name].at[tokens], target, smem["ready"])

            # Keys and values, backward from the last visible block.
            def copy_keys(step, slot):
                full, key_block = smem["full"].at[slot], last - step
                tokens = batch_row, pl.ds(key_block * _BLOCK, _BLOCK), kv_head
                for name in ("key", "value"):
                    plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[slot], full)
                columns = gmem["columns"].at[batch_row, kv_head, key_block, pl.ds(0, KeyVector.KEY_UNIT)]
                plgpu.copy_gmem_to_smem(columns, smem["column_smem"].at[slot], full)

            ring.fill(steps, stages, smem["free"], copy_keys)

        def compute(warpgroup, core):
            own = block + warpgroup
            plgpu.barrier_wait(smem["ready"])

            def sums(acc):
                rows, delta = (gmem[name].at[batch_row, head, own] for name in ("rows", "delta"))
                queries = _Queries(core, acc, (rows, delta), warpgroup, smem, call)
                delta = queries.corrected_delta(queries.all_keys(last - own, steps))
                launch.store(gmem["corrected"].at[batch_row, head, own - offset], delta)
                tokens = pl.ds((own - offset) * _BLOCK, _BLOCK)
                launch.store(gmem["dquery"].at[batch_row, tokens, head], queries.gradient().astype(dtype))

            core.accumulators(sums, head_dim)

        return copy, compute

    names = ("query", "key", "value", "dout", "columns", "rows", "delta", "first")
    output = launch.launch(
        body,
        {name: x for name in names if (x := getattr(operands, name)) is not None},
        {
            "dquery": jax.ShapeDtypeStruct((batch, whole, heads, head_dim), dtype),
            "corrected": jax.ShapeDtypeStruct((batch, heads, whole // _BLOCK, _BLOCK), jnp.float32),
        },
        {
            "query_smem": tensor_core.operand((count,), _BLOCK, head_dim, jnp.float16),
            "dout_smem": tensor_core.operand((count,), _BLOCK, value_dim, jnp.float16),
            "key_smem": tensor_core.operand((stages,), _BLOCK, head_dim, jnp.float16),
            "value_smem": tensor_core.operand((stages,), _BLOCK, value_dim, jnp.float16),
            "column_smem": plgpu.SMEM((stages, KeyVector.KEY_UNIT, _BLOCK), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=2 * count),
            "full": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
        },
        grid=grid,
        warpgroups=count,
        name="power_attention_query_vjp",
        interpret=call.interpret,
    )
    # Positions before the first query.
    delta = jnp.pad(output["corrected"], [(0, 0), (0, 0), (offset, 0), (0, 0)])
    return output["dquery"][:, :time], delta


class _Queries:
    """The 64 queries of one warpgroup, and their products with each block of keys."""

    def __init__(self, core, acc, own, warpgroup, smem, call):
        """own: rows and delta of the queries, in global memory."""
        self.core, self.acc = core, acc
        self.rows, delta = own
        self.delta = plgpu.load(delta, layout=tensor_core.PER_ROW, optimized=False)
        self.smem, self.power, self.config = smem, call.power, call.config
        self.query, self.dout = (smem[name].at[warpgroup] for name in ("query_smem", "dout_smem"))
        if call.config.operands_in_registers:
            self.query, self.dout = (plgpu.load(x, layout=pairs.LAYOUT) for x in (self.query, self.dout))

    def all_keys(self, passed, steps):
        """Returns the sum of dS S over all keys; the sums of dS K are added to the accumulator."""

        @pl.loop(jnp.int32(0), passed)
        def _pass(step):
            # A block that is visible only to later queries is skipped: free its slot as soon as it is full.
            slot = self._full(step)
            plgpu.barrier_arrive(self.smem["free"].at[slot])

        dlog = self._diagonal(passed)
        gradient = self._of_queries(QueryVector.EARLIER_GRADIENT)
        shift = gradient * self.delta

        def earlier(step, carry):
            between, dlog = carry
            slot = self._full(step)
            key, value = self._tiles(slot)
            scores, dweights = self.core.products((self.query, key), (self.dout, value))
            factor = self._of_keys(slot, KeyVector.LATER_FACTOR) * between
            slopes = pairs.slopes(scores, self.power) * pairs.by_column(factor)
            between *= self.smem["column_smem"][slot, KeyVector.BLOCK_DECAY, 0]
            return between, dlog + self._add(slot, scores, slopes, dweights, gradient, shift)

        return lax.fori_loop(passed + 1, steps, earlier, (jnp.float32(1), dlog))[1]

    def corrected_delta(self, dlog):
        """Returns delta plus the sum of P (dP - delta), from dlog, that of dS S.

        Its scale is that of g and of the keys' factors; weight over gradient takes the former out.
        """
        weight, gradient = (
            self._of_queries(n) for n in (QueryVector.DIAGONAL_WEIGHT, QueryVector.DIAGONAL_GRADIENT)
        )
        scale = jnp.where(
            gradient > 0, weight * 2.0**-inputs.WEIGHT_BITS / jnp.where(gradient > 0, gradient, 1.0), 0.0
        )
        return self.delta + dlog * scale

    def gradient(self):
        """Returns the gradient of the queries from the accumulator."""
        units = (self._of_queries(n) for n in (QueryVector.UNIT, QueryVector.SECOND_UNIT))
        return pairs.in_units(self.acc[...] * self.power, *units)

    def _diagonal(self, step):
        slot = self._full(step)
        key, value = self._tiles(slot)
        # One product after the other, to save registers.
        scores = self.core.product(self.query, key)
        parts = [self._of_queries(n) for n in (QueryVector.COARSE, QueryVector.FINE)]
        key_parts = [self._of_keys(slot, n) for n in (KeyVector.COARSE, KeyVector.FINE)]
        length = pairs.by_column(self._of_keys(slot, KeyVector.DIAGONAL_FACTOR))
        position = self._of_keys(slot, KeyVector.POSITION)
        factor = pairs.diagonal_factor(parts, key_parts, position, length, sign=1)
        slopes = pairs.slopes(scores, self.power) * factor
        dweights = self.core.product(self.dout, value)
        gradient = self._of_queries(QueryVector.DIAGONAL_GRADIENT)
        return self._add(slot, scores, slopes, dweights, gradient, gradient * self.delta)

    def _add(self, slot, scores, slopes, dweights, gradient, shift):
        """Adds dS K of one block of keys to the accumulator; returns sums of dS S."""
        dscores = slopes * (dweights * pairs.by_row(gradient) - pairs.by_row(shift))
        dlog = (dscores * scores).sum(1)
        key, _ = self._tiles(slot)
        self.core.add(self.acc, dscores.astype(jnp.float16), key)
        plgpu.barrier_arrive(self.smem["free"].at[slot])
        return dlog

    def _tiles(self, slot):
        return (self.smem[name].at[slot] for name in ("key_smem", "value_smem"))

    def _of_queries(self, index):
        return plgpu.load(self.rows.at[index], layout=tensor_core.PER_ROW, optimized=False)

    def _of_keys(self, slot, index):
        vector = self.smem["column_smem"].at[slot, index]
        return plgpu.load(vector, layout=tensor_core.PER_COLUMN, optimized=False)

    def _full(self, step):
        slot = ring.slot_of(step, self.config.query_stages)
        plgpu.barrier_wait(self.smem["full"].at[slot])
        return slot
