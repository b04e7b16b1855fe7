"""Gradients of keys and values, and sums over queries of the gradient of a pair's log decay.

One thread block takes 128 keys of one head, a block of 64 for each of two warpgroups. A third warpgroup loads blocks of
64 queries and cotangents of every query head of the group through a ring, starting at the keys' own position. For each
pair of blocks, with keys in rows,

    S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q',

with P_ij = s_ij^p c_j f_i and dS_ij = s_ij^(p-1) c_j (dP_ij - delta_i) g_i as in the pass over queries. c_j includes
the decay over the blocks between. f_i is the query's factor, over its denominator; g_i is f_i with a scale of its own,
which Q' undoes.
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


def key_vjp(operands: inputs.VjpOperands, *, positions: slice, dtype, call: configs.Call):
    """Returns the gradients of keys [B, S, K, D] and values [B, S, K, E], and sums P (dP - delta).

    The sums [B, K, S] are float32, with S padded to whole blocks.

    positions: of the keys, without the padding to whole blocks.
    dtype: of both gradients.
    """
    found: dict[str, jax.Array] = {}
    for results in call.config.key_results:
        found |= sums(operands, results=results, dtype=dtype, call=call)
    dkey, dvalue = (found[name][:, positions] for name in ("dkey", "dvalue"))
    return dkey, dvalue, found["dlog"]


def sums(
    operands: inputs.VjpOperands,
    *,
    results: tuple[str, ...],
    dtype,
    call: configs.Call,
):
    """Runs one kernel; returns `dkey` with `dlog` [B, K, S], or `dvalue`, or all of them, by name.

    S is padded to whole blocks.
    """
    batch, length, heads, _ = operands.key.shape
    config = call.config
    count, stages = configs.WARPGROUPS, config.key_stages
    group = operands.query.shape[2] // heads
    sizes = {"dkey": config.head_dim, "dvalue": config.value_dim}
    # Sizes of the tiles that are loaded in every step, and of those that are loaded once.
    moving = {"query": config.head_dim, "dout": config.value_dim}
    kept = {"key": config.head_dim}
    if "dkey" in results:
        moving["rescaled_query"], kept["value"] = config.head_dim, config.value_dim
    grid = launch.heads_grid(
        batch, heads, length // (count * _BLOCK), 2 * group * length * sum(moving.values())
    )

    def body(gmem, smem):
        batch_row, head = lax.axis_index("batch"), launch.head_index(grid)
        # The first keys have the most queries that attend to them, so they run first.
        block = lax.axis_index("block") * count
        # Blocks of queries of one head that attend to any of the keys.
        end = jnp.int32(length // _BLOCK)
        if "last" in gmem:
            end = (gmem["last"][batch_row, head, lax.axis_index("block")] + 1) * count
        steps = end - block

        def copy():
            # The block's keys and values.
            for n in range(count):
                tokens = batch_row, pl.ds((block + n) * _BLOCK, _BLOCK), head
                for name in kept:
                    target = smem[f"{name}_smem"].at[n]
                    plgpu.copy_gmem_to_smem(gmem[name].at[tokens], target, smem["ready"])
                columns = gmem["columns"].at[batch_row, head, block + n]
                plgpu.copy_gmem_to_smem(columns, smem["columns_smem"].at[n], smem["ready"])

            # Per head of the group, the queries that attend to any of them.
            def copy_queries(step, slot):
                query_head = head * group + lax.div(step, steps)
                query_block, full = block + lax.rem(step, steps), smem["full"].at[slot]
                tokens = batch_row, pl.ds(query_block * _BLOCK, _BLOCK), query_head
                for name in moving:
                    plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[slot], full)
                vectors = pl.ds(0, QueryVector.UNIT)  # all but the units
                rows = gmem["rows"].at[batch_row, query_head, query_block, vectors]
                plgpu.copy_gmem_to_smem(rows, smem["rows_smem"].at[slot], full)
                delta = gmem["delta"].at[batch_row, query_head, query_block]
                plgpu.copy_gmem_to_smem(delta, smem["delta_smem"].at[slot], full)

            ring.fill(steps * group, stages, smem["free"], copy_queries)

        def compute(warpgroup, core):
            plgpu.barrier_wait(smem["ready"])

            def sums_over_queries(*accumulators):
                by_name = dict(zip(results, accumulators))
                keys = _Keys(core, by_name, warpgroup, smem, steps, call)
                dlog = plgpu.layout_cast(jnp.zeros((_BLOCK,), jnp.float32), tensor_core.PER_ROW)
                dlog = lax.fori_loop(jnp.int32(0), jnp.int32(group), keys.all_queries, dlog)
                tokens = pl.ds((block + warpgroup) * _BLOCK, _BLOCK)
                if "dkey" in results:
                    launch.store(gmem["dlog"].at[batch_row, head, tokens], keys.in_units(dlog, "dlog"))
                for name, acc in by_name.items():
                    result = keys.in_units(acc[...], name)
                    launch.store(gmem[name].at[batch_row, tokens, head], result.astype(dtype))

            core.accumulators(sums_over_queries, *(sizes[name] for name in results))

        return copy, compute

    names = (*moving, *kept, "rows", "delta", "columns", "last")
    outputs = {name: jax.ShapeDtypeStruct((batch, length, heads, sizes[name]), dtype) for name in results}
    if "dkey" in results:
        outputs["dlog"] = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    tiles = [(count, kept), (stages, moving)]
    scratch = {
        f"{name}_smem": tensor_core.operand((lead,), _BLOCK, size, jnp.float16)
        for lead, tile_sizes in tiles
        for name, size in tile_sizes.items()
    }
    return launch.launch(
        body,
        {name: x for name in names if (x := getattr(operands, name)) is not None},
        outputs,
        scratch
        | {
            "delta_smem": plgpu.SMEM((stages, _BLOCK), jnp.float32),
            "rows_smem": plgpu.SMEM((stages, QueryVector.UNIT, _BLOCK), jnp.float32),
            "columns_smem": plgpu.SMEM((count, *operands.columns.shape[3:]), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=count * (len(kept) + 1)),
            "full": plgpu.Barrier(num_arrivals=len(moving) + 2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
        },
        grid=grid,
        warpgroups=count,
        name="power_attention_key_vjp" if "dkey" in results else "power_attention_value_vjp",
        interpret=call.interpret,
    )


class _Keys:
    """The 64 keys of one warpgroup, and their products with each block of queries."""

    def __init__(self, core, accumulators, warpgroup, smem, steps, call):
        self.core, self.accumulators, self.warpgroup = core, accumulators, warpgroup
        self.smem, self.steps, self.power, self.config = smem, steps, call.power, call.config
        self.key = smem["key_smem"].at[warpgroup]
        self.value = smem["value_smem"].at[warpgroup] if "dkey" in accumulators else None

    def all_queries(self, head, dlog):
        """Adds the queries of one head of the group to dlog, which it returns, and to the accumulators."""
        begin = head * self.steps
        own = begin + self.warpgroup

        @pl.loop(begin, own)
        def _pass(step):
            # Queries before all keys of the warpgroup are skipped: free their slot as soon as it is full.
            slot = self._full(step)
            plgpu.barrier_arrive(self.smem["free"].at[slot])

        dlog = self._diagonal(own, dlog)
        factor = self._of_keys(KeyVector.LATER_FACTOR)

        def later(step, carry):
            between, dlog = carry
            slot = self._full(step)
            scores, dweights = self._products(slot)
            slopes = pairs.slopes(scores, self.power) * pairs.by_row(factor * between)
            between *= self.smem["rows_smem"][slot, QueryVector.BLOCK_DECAY, 0]
            return between, self._add(
                slot, scores, slopes, dweights, dlog, QueryVector.EARLIER_WEIGHT, QueryVector.EARLIER_GRADIENT
            )

        return lax.fori_loop(own + 1, begin + self.steps, later, (jnp.float32(1), dlog))[1]

    def in_units(self, sums, name):
        """Returns a result from its sums."""
        units = {
            "dkey": (KeyVector.KEY_UNIT, KeyVector.SECOND_KEY_UNIT),
            "dvalue": (KeyVector.VALUE_UNIT, KeyVector.SECOND_VALUE_UNIT),
            "dlog": (KeyVector.LOG_UNIT, KeyVector.SECOND_LOG_UNIT),
        }
        sums = sums * self.power if name == "dkey" else sums
        return pairs.in_units(sums, *map(self._of_keys, units[name]))

    def _diagonal(self, step, dlog):
        slot = self._full(step)
        scores, dweights = self._products(slot)
        parts = [self._of_keys(n) for n in (KeyVector.COARSE, KeyVector.FINE)]
        query_parts = [self._of_queries(slot, n) for n in (QueryVector.COARSE, QueryVector.FINE)]
        length = pairs.by_row(self._of_keys(KeyVector.DIAGONAL_FACTOR))
        position = self._of_queries(slot, QueryVector.POSITION)
        factor = pairs.diagonal_factor(parts, query_parts, position, length, sign=-1)
        slopes = pairs.slopes(scores, self.power) * factor
        return self._add(
            slot, scores, slopes, dweights, dlog, QueryVector.DIAGONAL_WEIGHT, QueryVector.DIAGONAL_GRADIENT
        )

    def _products(self, slot):
        """Returns the scores and, if the gradient of keys is requested, the gradient of the weights.

        Keys and values stay in shared memory: with keys in registers, the kernel would spill.
        """
        query, dout = (self.smem[name].at[slot] for name in ("query_smem", "dout_smem"))
        if self.value is None:
            return self.core.product(self.key, query), None
        return self.core.products((self.key, query), (self.value, dout))

    def _add(self, slot, scores, slopes, dweights, dlog, weight, gradient):
        """Adds one block of queries to the accumulators; returns dlog with sums of P (dP - delta) added."""
        pending = []
        if "dkey" in self.accumulators:
            delta = plgpu.load(
                self.smem["delta_smem"].at[slot], layout=tensor_core.PER_COLUMN, optimized=False
            )
            dweights = dweights - pairs.by_column(delta)
            # The barrier forces one step after the other, to save registers.
            scores, slopes, dweights = lax.optimization_barrier((scores, slopes, dweights))
        weights = slopes * scores * pairs.by_column(self._of_queries(slot, weight))
        if "dvalue" in self.accumulators:
            pending.append((self.accumulators["dvalue"], weights.astype(jnp.float16), "dout_smem"))
        if "dkey" in self.accumulators:
            dlog += (weights * dweights).sum(1)
            dlog, slopes, dweights = lax.optimization_barrier((dlog, slopes, dweights))
            dscores = slopes * dweights * pairs.by_column(self._of_queries(slot, gradient))
            pending.append((self.accumulators["dkey"], dscores.astype(jnp.float16), "rescaled_query_smem"))
        for n, (acc, operand, name) in enumerate(pending):
            wait = len(pending) - 1 - n
            self.core.add(acc, operand, self.smem[name].at[slot], wait=wait)
        plgpu.barrier_arrive(self.smem["free"].at[slot])
        return dlog

    def _of_keys(self, index):
        vector = self.smem["columns_smem"].at[self.warpgroup, index]
        return plgpu.load(vector, layout=tensor_core.PER_ROW, optimized=False)

    def _of_queries(self, slot, index):
        vector = self.smem["rows_smem"].at[slot, index]
        return plgpu.load(vector, layout=tensor_core.PER_COLUMN, optimized=False)

    def _full(self, step):
        slot = ring.slot_of(step, self.config.key_stages)
        plgpu.barrier_wait(self.smem["full"].at[slot])
        return slot
