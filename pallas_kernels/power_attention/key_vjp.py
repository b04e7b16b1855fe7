"""Gradients of keys and values, and sums over queries of the gradient of a pair's log decay.

One thread block takes 128 keys of one head, a block of 64 for each of two warpgroups. A third warpgroup loads blocks of
64 queries and cotangents of every query head of the group through a ring, starting at the keys' own position. For each
pair of blocks, with keys in rows,

    S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q',

with P_ij = s_ij^p c_j f_i and dS_ij = s_ij^(p-1) c_j (dP_ij - delta_i) g_i as in the pass over queries. f_i and g_i are
the factors of a pair's weight that belong to the query and to the blocks between, over the query's denominator. g_i has
a scale of its own, which Q' undoes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products, ring
from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import pairs
from pallas_kernels.power_attention import vjp_operands as inputs

__all__ = ["key_vjp", "sums"]

_BLOCK = pairs.BLOCK


def key_vjp(
    operands: inputs.VjpOperands,
    *,
    positions: slice,
    power: int,
    config: configs.VjpConfig,
    interpret=None,
):
    """Returns float32 sums of dS^T Q' [B, S, K, D], of P^T dO [B, S, K, E] and of P (dP - delta) [B, S, K].

    They are in the scales of the operands.

    positions: of the keys, without the padding to whole blocks.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    options = {"power": power, "config": config, "interpret": interpret}
    found: dict[str, jax.Array] = {}
    for results in config.key_results:
        found |= sums(operands, results=results, **options)
    dkey, dvalue = (found[name][:, positions] for name in ("dkey", "dvalue"))
    return dkey, dvalue, jnp.moveaxis(found["dlog"][..., positions], 1, 2)


def sums(
    operands: inputs.VjpOperands,
    *,
    results: tuple[str, ...],
    power: int,
    config: configs.VjpConfig,
    interpret=None,
):
    """Runs one kernel; returns `dkey` with `dlog` [B, K, S], or `dvalue`, or all of them, by name.

    S is padded to whole blocks.
    """
    batch, length, heads, _ = operands.key.shape
    count, stages = config.compute_warpgroups, config.key_stages
    sizes = {"dkey": config.head_dim, "dvalue": config.value_dim}
    # Sizes of the tiles that are loaded in every step, and of those that are loaded once.
    moving = {"query": config.head_dim, "dout": config.value_dim}
    kept = {"key": config.head_dim}
    if "dkey" in results:
        moving["unit_query"], kept["value"] = config.head_dim, config.value_dim
    names = (*moving, *kept, "rows", "columns", "last")
    scratch = {f"{name}_smem": products.operand((count,), _BLOCK, n, jnp.float16) for name, n in kept.items()}
    scratch |= {
        f"{name}_smem": products.operand((stages,), _BLOCK, n, jnp.float16) for name, n in moving.items()
    }
    scratch |= {
        "rows_smem": plgpu.SMEM((stages, *operands.rows.shape[3:]), jnp.float32),
        "columns_smem": plgpu.SMEM((count, *operands.columns.shape[3:]), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=count * (len(kept) + 1)),
        "full": plgpu.Barrier(num_arrivals=len(moving) + 1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
    }
    if interpret is not None:
        shapes = [(_BLOCK, sizes[name]) for name in results] + [(_BLOCK, _BLOCK)] * 2
        scratch["interpreted"] = [plgpu.SMEM((count, *shape), jnp.float32) for shape in shapes]
    out_type = {
        name: jax.ShapeDtypeStruct((batch, length, heads, sizes[name]), jnp.float32) for name in results
    }
    if "dkey" in results:
        out_type["dlog"] = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    body = functools.partial(
        _body,
        names=(*names, *out_type),
        results={name: sizes[name] for name in results},
        tiles=(tuple(kept), tuple(moving)),
        power=power,
        config=config,
    )
    kernel = plgpu.kernel(
        body,
        out_type=tuple(out_type.values()),
        scratch_types=scratch,
        # The first keys have the most queries that attend to them, so they run first.
        grid=(heads, length // (count * _BLOCK), batch),
        grid_names=("head", "block", "batch"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name="power_attention_key_vjp",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return dict(zip(out_type, kernel(*(getattr(operands, name) for name in names))))


def _body(*refs, names, results, tiles, power, config, interpreted=None, **smem):
    gmem = dict(zip(names, refs, strict=True))
    count = config.compute_warpgroups
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    block = lax.axis_index("block") * count
    place = {
        "batch": batch,
        "head": head,
        "block": block,
        "group": gmem["query"].shape[2] // gmem["key"].shape[2],
        "steps": (gmem["last"][batch, head, lax.axis_index("block")] + 1) * count - block,
    }
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == count)
    def _load():
        plgpu.set_max_registers(config.load_registers, action="decrease")
        _copy(gmem, smem, place, *tiles, config)

    @pl.when(warpgroup < count)
    def _compute():
        plgpu.set_max_registers(config.compute_registers, action="increase")
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        plgpu.barrier_wait(smem["ready"])

        def rows(*accumulators):
            accumulators = dict(zip(results, accumulators))
            keys = _Keys(accumulators, warpgroup, smem, place, power, config, held and held[len(results) :])
            dlog = plgpu.layout_cast(jnp.zeros((_BLOCK,), jnp.float32), pairs.PER_ROW)
            dlog = lax.fori_loop(jnp.int32(0), jnp.int32(place["group"]), keys.all_queries, dlog)
            positions = pl.ds((block + warpgroup) * _BLOCK, _BLOCK)
            if "dlog" in gmem:
                pairs.store(gmem["dlog"].at[batch, head, positions], dlog)
            for name, acc in accumulators.items():
                pairs.store(gmem[name].at[batch, positions, head], acc[...])

        shapes = [(_BLOCK, size) for size in results.values()]
        products.with_accumulators(rows, shapes, held and held[: len(results)])


def _copy(gmem, smem, place, kept, moving, config):
    """Copies the block's keys and values, then, per head of the group, the queries that attend to any of them."""
    batch, head = place["batch"], place["head"]
    for n in range(config.compute_warpgroups):
        tokens = batch, pl.ds((place["block"] + n) * _BLOCK, _BLOCK), head
        for name in kept:
            plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[n], smem["ready"])
        columns = gmem["columns"].at[batch, head, place["block"] + n]
        plgpu.copy_gmem_to_smem(columns, smem["columns_smem"].at[n], smem["ready"])

    def copy(step, slot):
        query_head = head * place["group"] + lax.div(step, place["steps"])
        block, full = place["block"] + lax.rem(step, place["steps"]), smem["full"].at[slot]
        tokens = batch, pl.ds(block * _BLOCK, _BLOCK), query_head
        for name in moving:
            plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[slot], full)
        plgpu.copy_gmem_to_smem(gmem["rows"].at[batch, query_head, block], smem["rows_smem"].at[slot], full)

    ring.fill(place["steps"] * place["group"], config.key_stages, smem["free"], copy)


class _Keys:
    """The 64 keys of one warpgroup, and their products with each block of queries."""

    def __init__(self, accumulators, warpgroup, smem, place, power, config, interpreted):
        self.accumulators, self.warpgroup = accumulators, warpgroup
        self.smem, self.place, self.power, self.config = smem, place, power, config
        self.interpreted = interpreted
        self.key = smem["key_smem"].at[warpgroup]
        self.value = smem["value_smem"].at[warpgroup] if "dkey" in accumulators else None

    def all_queries(self, head, dlog):
        """Adds the queries of one head of the group to dlog, which it returns, and to the accumulators."""
        begin = head * self.place["steps"]
        own = begin + self.warpgroup

        @pl.loop(begin, own)
        def _pass(step):
            # Queries before all keys of the warpgroup are skipped: free their slot as soon as it is full.
            slot = self._full(step)
            plgpu.barrier_arrive(self.smem["free"].at[slot])

        dlog = self._diagonal(own, dlog)
        # Load the keys only now, and not the values, to save registers.
        key = pairs.left_operand(self.key, self.config)
        factor = self._of_keys(inputs.FAR_FACTOR)

        def far(step, carry):
            between, dlog = carry
            slot = self._full(step)
            scores, dweights = self._products(slot, key)
            slopes = pairs.slopes(scores, self.power) * pairs.by_row(factor * between)
            between *= self.smem["rows_smem"][slot, inputs.QUERY_BETWEEN, 0]
            return between, self._add(
                slot, scores, slopes, dweights, dlog, inputs.FAR_WEIGHT, inputs.FAR_SLOPE
            )

        return lax.fori_loop(own + 1, begin + self.place["steps"], far, (jnp.float32(1), dlog))[1]

    def _diagonal(self, step, dlog):
        slot = self._full(step)
        scores, dweights = self._products(slot, self.key)
        parts = [self._of_keys(n) for n in (inputs.KEY_COARSE, inputs.KEY_FINE)]
        query_parts = [self._of_queries(slot, n) for n in (inputs.QUERY_COARSE, inputs.QUERY_FINE)]
        length = pairs.by_row(self._of_keys(inputs.NEAR_FACTOR))
        position = self._of_queries(slot, inputs.QUERY_POSITION)
        factor = pairs.near_factor(parts, query_parts, position, length, sign=-1)
        slopes = pairs.slopes(scores, self.power) * factor
        return self._add(slot, scores, slopes, dweights, dlog, inputs.NEAR_WEIGHT, inputs.NEAR_SLOPE)

    def _products(self, slot, key):
        """Returns the scores and, if the gradient of keys is requested, the gradient of the weights."""
        query, dout = (self.smem[name].at[slot] for name in ("query_smem", "dout_smem"))
        if self.value is None:
            return pairs.product(key, query, self.interpreted), None
        return pairs.two_products(key, query, self.value, dout, self.interpreted)

    def _add(self, slot, scores, slopes, dweights, dlog, weight, slope):
        """Adds one block of queries to the accumulators; returns dlog with sums of P (dP - delta) added."""
        under_way = []
        if "dkey" in self.accumulators:
            dweights = dweights - pairs.by_column(self._of_queries(slot, inputs.DELTA))
            # The barrier forces one step after the other, to save registers.
            scores, slopes, dweights = lax.optimization_barrier((scores, slopes, dweights))
        weights = slopes * scores * pairs.by_column(self._of_queries(slot, weight))
        if "dvalue" in self.accumulators:
            under_way.append((self.accumulators["dvalue"], weights.astype(jnp.float16), "dout_smem"))
        if "dkey" in self.accumulators:
            dlog += (weights * dweights).sum(1)
            dlog, slopes, dweights = lax.optimization_barrier((dlog, slopes, dweights))
            dscores = slopes * dweights * pairs.by_column(self._of_queries(slot, slope))
            under_way.append((self.accumulators["dkey"], dscores.astype(jnp.float16), "unit_query_smem"))
        for n, (acc, operand, name) in enumerate(under_way):
            wait = len(under_way) - 1 - n
            products.accumulate(acc, operand, self.smem[name].at[slot], self.interpreted, wait=wait)
        plgpu.barrier_arrive(self.smem["free"].at[slot])
        return dlog

    def _of_keys(self, index):
        vector = self.smem["columns_smem"].at[self.warpgroup, index]
        return plgpu.load(vector, layout=pairs.PER_ROW, optimized=False)

    def _of_queries(self, slot, index):
        vector = self.smem["rows_smem"].at[slot, index]
        return plgpu.load(vector, layout=pairs.PER_COLUMN, optimized=False)

    def _full(self, step):
        slot = ring.slot_of(step, self.config.key_stages)
        plgpu.barrier_wait(self.smem["full"].at[slot])
        return slot
