"""The gradients of keys and values, and sums over queries of the gradient by a pair's decay.

One thread block takes 128 keys of one head, a block of 64 for each of two warpgroups; a third warpgroup loads blocks of
64 queries and cotangents of every query head of the group through a ring, from the keys' own position on. For each pair
of blocks, keys in rows,

    S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q',

with P_ij = s_ij^p c_j f_i and dS_ij = s_ij^(p-1) c_j (dP_ij - delta_i) g_i as in the pass over queries: f_i and g_i are
what a pair's weight has of the query and of the blocks between, over the query's denominator, g_i in a unit of its own
that Q' undoes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import pairs
from pallas_kernels.power_attention import vjp_operands as inputs
from pallas_kernels.power_state import products, ring

__all__ = ["key_vjp"]

_BLOCK = pairs.BLOCK
# What a step loads.
_TILES = ("query", "unit_query", "dout")


def key_vjp(
    operands: inputs.VjpOperands,
    *,
    positions: slice,
    power: int,
    config: configs.VjpConfig,
    interpret=None,
):
    """Sums of dS^T Q' [B, S, K, D], of P^T dO [B, S, K, E] and of P (dP - delta) [B, S, K], float32.

    In the units of the operands.

    positions: of the keys, without those that fill up their block.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    batch, length, heads, head_dim = operands.key.shape
    count, stages, value_dim = config.compute_warpgroups, config.key_stages, config.value_dim
    names = (*_TILES, "key", "value", "columns", "rows", "last")
    arrays = [getattr(operands, name) for name in names]
    scratch = {
        "key_smem": products.operand((count,), _BLOCK, head_dim, jnp.float16),
        "value_smem": products.operand((count,), _BLOCK, value_dim, jnp.float16),
        "query_smem": products.operand((stages,), _BLOCK, head_dim, jnp.float16),
        "unit_query_smem": products.operand((stages,), _BLOCK, head_dim, jnp.float16),
        "dout_smem": products.operand((stages,), _BLOCK, value_dim, jnp.float16),
        "row_smem": plgpu.SMEM((stages, *operands.rows.shape[3:]), jnp.float32),
        "column_smem": plgpu.SMEM((count, *operands.columns.shape[3:]), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=3 * count),
        "full": plgpu.Barrier(num_arrivals=len(_TILES) + 1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
    }
    if interpret is not None:
        piece = _BLOCK // config.key_pieces
        shapes = ((_BLOCK, head_dim), (_BLOCK, value_dim), (_BLOCK, piece), (_BLOCK, piece))
        scratch["interpreted"] = [plgpu.SMEM((count, *shape), jnp.float32) for shape in shapes]
    kernel = plgpu.kernel(
        functools.partial(_body, names=names, power=power, config=config),
        out_type=(
            jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, length, heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        scratch_types=scratch,
        # The first keys are seen by the most queries, and go first.
        grid=(heads, length // (count * _BLOCK), batch),
        grid_names=("head", "block", "batch"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name="power_attention_key_vjp",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    dkey, dvalue, dlog = kernel(*arrays)
    return dkey[:, positions], dvalue[:, positions], jnp.moveaxis(dlog[..., positions], 1, 2)


def _body(*refs, names, power, config, interpreted=None, **smem):
    gmem = dict(zip((*names, "dkey", "dvalue", "dlog"), refs, strict=True))
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
        _copy(gmem, smem, place, config)

    @pl.when(warpgroup < count)
    def _compute():
        plgpu.set_max_registers(config.compute_registers, action="increase")
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        plgpu.barrier_wait(smem["ready"])

        def rows(dkey, dvalue):
            keys = _Keys(dkey, dvalue, warpgroup, gmem, smem, place, power, config, held and held[2:])
            dlog = plgpu.layout_cast(jnp.zeros((_BLOCK,), jnp.float32), pairs.PER_ROW)
            dlog = lax.fori_loop(jnp.int32(0), jnp.int32(place["group"]), keys.all_queries, dlog)
            positions = pl.ds((block + warpgroup) * _BLOCK, _BLOCK)
            pairs.store(gmem["dlog"].at[batch, head, positions], dlog)
            pairs.store(gmem["dkey"].at[batch, positions, head], dkey[...])
            pairs.store(gmem["dvalue"].at[batch, positions, head], dvalue[...])

        shapes = [(_BLOCK, config.head_dim), (_BLOCK, config.value_dim)]
        products.with_accumulators(rows, shapes, held and held[:2])


def _copy(gmem, smem, place, config):
    """The block's keys and values, then the queries of each head of the group that see any of them."""
    batch, head = place["batch"], place["head"]
    for n in range(config.compute_warpgroups):
        tokens = batch, pl.ds((place["block"] + n) * _BLOCK, _BLOCK), head
        for name in ("key", "value"):
            plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[n], smem["ready"])
        columns = gmem["columns"].at[batch, head, place["block"] + n]
        plgpu.copy_gmem_to_smem(columns, smem["column_smem"].at[n], smem["ready"])

    def copy(step, slot):
        query_head = head * place["group"] + lax.div(step, place["steps"])
        block, full = place["block"] + lax.rem(step, place["steps"]), smem["full"].at[slot]
        tokens = batch, pl.ds(block * _BLOCK, _BLOCK), query_head
        for name in _TILES:
            plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[slot], full)
        plgpu.copy_gmem_to_smem(gmem["rows"].at[batch, query_head, block], smem["row_smem"].at[slot], full)

    ring.fill(place["steps"] * place["group"], config.key_stages, smem["free"], copy)


class _Keys:
    """The 64 keys of one warpgroup, and what it does with each block of queries."""

    def __init__(self, dkey, dvalue, warpgroup, gmem, smem, place, power, config, interpreted):
        self.dkey, self.dvalue, self.warpgroup = dkey, dvalue, warpgroup
        self.smem, self.place, self.power, self.config = smem, place, power, config
        self.interpreted = interpreted
        self.key, self.value = (
            pairs.left_operand(smem[name].at[warpgroup], config) for name in ("key_smem", "value_smem")
        )
        self.factor = self._of_keys(inputs.FAR_FACTOR)

    def all_queries(self, head, dlog):
        """dlog and sums over the queries of one head of the group; other sums are in the accumulators."""
        begin = head * self.place["steps"]
        own = begin + self.warpgroup

        @pl.loop(begin, own)
        def _pass(step):
            # Queries before all keys of the warpgroup: their memory is free as soon as it is full.
            slot = self._full(step)
            plgpu.barrier_arrive(self.smem["free"].at[slot])

        dlog += self._add(self._full(own), self._near, inputs.NEAR_WEIGHT, inputs.NEAR_SLOPE)

        def far(step, carry):
            between, dlog = carry
            slot = self._full(step)
            total = self.smem["row_smem"][slot, inputs.QUERY_BETWEEN, 0]
            pairs_of = functools.partial(self._far, between=between)
            dlog += self._add(slot, pairs_of, inputs.FAR_WEIGHT, inputs.FAR_SLOPE)
            return between * total, dlog

        return lax.fori_loop(own + 1, begin + self.place["steps"], far, (jnp.float32(1), dlog))[1]

    def _add(self, slot, pairs_of, weight, slope):
        """Adds a block of queries to the accumulators; returns sums of P (dP - delta).

        pairs_of: of a slot and some of its queries, what gives scores, slopes and gradients of weights.
        """
        dlog, weights, dscores = 0.0, [], []
        piece = _BLOCK // self.config.key_pieces
        for begin in range(0, _BLOCK, piece):
            queries = slice(begin, begin + piece)
            scores, slopes, dweights = pairs_of(slot, queries)
            shares = slopes * scores * pairs.by_column(self._of_queries(slot, weight, queries))
            dweights = dweights - pairs.by_column(self._of_queries(slot, inputs.DELTA, queries))
            dlog += (shares * dweights).sum(1)
            dslopes = slopes * dweights * pairs.by_column(self._of_queries(slot, slope, queries))
            weights.append(shares.astype(jnp.float16))
            dscores.append(dslopes.astype(jnp.float16))
        weights, dscores = (x[0] if len(x) == 1 else jnp.concatenate(x, 1) for x in (weights, dscores))
        dout, unit_query = (self.smem[f"{name}_smem"].at[slot] for name in ("dout", "unit_query"))
        products.accumulate(self.dvalue, weights, dout, self.interpreted, wait=1)
        products.accumulate(self.dkey, dscores, unit_query, self.interpreted)
        plgpu.barrier_arrive(self.smem["free"].at[slot])
        return dlog

    def _far(self, slot, queries, between):
        query, dout = self._tiles(slot, queries)
        scores, dweights = pairs.two_products(self.key, query, self.value, dout, self.interpreted)
        factor = pairs.by_row(self.factor * between, scores.shape[1])
        return scores, lax.integer_pow(scores, self.power - 1) * factor, dweights

    def _near(self, slot, queries):
        query, dout = self._tiles(slot, queries)
        # One product after the other, since registers are few.
        one = self.interpreted and self.interpreted[:1]
        scores = pairs.product(self.key, query, one)
        parts = [self._of_keys(n) for n in (inputs.KEY_COARSE, inputs.KEY_FINE)]
        query_parts = [self._of_queries(slot, n, queries) for n in (inputs.QUERY_COARSE, inputs.QUERY_FINE)]
        length = pairs.by_row(self._of_keys(inputs.NEAR_FACTOR), scores.shape[1])
        position = self._of_queries(slot, inputs.QUERY_POSITION, queries)
        factor = pairs.near_factor(parts, query_parts, position, length, sign=-1)
        slopes = lax.integer_pow(scores, self.power - 1) * factor
        return scores, slopes, pairs.product(self.value, dout, one)

    def _tiles(self, slot, queries):
        return (self.smem[f"{name}_smem"].at[slot, queries] for name in ("query", "dout"))

    def _of_keys(self, index):
        vector = self.smem["column_smem"].at[self.warpgroup, index]
        return plgpu.load(vector, layout=pairs.PER_ROW, optimized=False)

    def _of_queries(self, slot, index, queries):
        vector = self.smem["row_smem"].at[slot, index, queries]
        return plgpu.load(vector, layout=pairs.PER_COLUMN, optimized=False)

    def _full(self, step):
        slot = ring.slot_of(step, self.config.key_stages)
        plgpu.barrier_wait(self.smem["full"].at[slot])
        return slot
