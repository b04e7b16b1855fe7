"""Gradient of the queries, and sums over keys of the gradient of a pair's log decay.

One thread block takes 128 queries of one head, a block of 64 for each of two warpgroups. A third warpgroup loads blocks
of 64 keys and values through a ring, first the diagonal ones, then backward in time. For each pair of blocks

    S = Q K^T,  dP = dO V^T,  dS_ij = s_ij^(p-1) c_j ((dP_ij - delta_i) g_i),  dQ += dS K.

c_j is the factor of the pair's weight that belongs to the key and to the blocks between. g_i is the query's factor over
its denominator, with a scale of its own that uses the full range of float16.
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

__all__ = ["query_vjp"]

_BLOCK = pairs.BLOCK


def query_vjp(
    operands: inputs.VjpOperands, *, time: int, power: int, config: configs.VjpConfig, interpret=None
):
    """Returns sums of dS K [B, T, N, D] and of dS S [B, T, N], float32, in the scales of the operands' rows.

    time: T, the number of real queries; they come last, except for the padding to whole blocks after them.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    batch, _, heads, head_dim = operands.query.shape
    count, stages, value_dim = config.compute_warpgroups, config.query_stages, config.value_dim
    whole = -(-time // (count * _BLOCK)) * count * _BLOCK
    names = ("query", "key", "value", "dout", "columns", "rows", "first")
    arrays = [getattr(operands, name) for name in names]
    scratch = {
        "query_smem": products.operand((count,), _BLOCK, head_dim, jnp.float16),
        "dout_smem": products.operand((count,), _BLOCK, value_dim, jnp.float16),
        "key_smem": products.operand((stages,), _BLOCK, head_dim, jnp.float16),
        "value_smem": products.operand((stages,), _BLOCK, value_dim, jnp.float16),
        "column_smem": plgpu.SMEM((stages, *operands.columns.shape[3:]), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2 * count),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
    }
    if interpret is not None:
        shapes = ((_BLOCK, head_dim), (_BLOCK, _BLOCK), (_BLOCK, _BLOCK))
        scratch["interpreted"] = [plgpu.SMEM((count, *shape), jnp.float32) for shape in shapes]
    kernel = plgpu.kernel(
        functools.partial(_body, names=names, power=power, config=config),
        out_type=(
            jax.ShapeDtypeStruct((batch, whole, heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, whole), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(heads, whole // (count * _BLOCK), batch),
        grid_names=("head", "block", "batch"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name="power_attention_query_vjp",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    dquery, dlog = kernel(*arrays)
    return dquery[:, :time], jnp.moveaxis(dlog[..., :time], 1, 2)


def _body(*refs, names, power, config, interpreted=None, **smem):
    gmem = dict(zip((*names, "dquery", "dlog"), refs, strict=True))
    count = config.compute_warpgroups
    head = lax.axis_index("head")
    blocks = gmem["dquery"].shape[1] // (count * _BLOCK)
    offset = (gmem["key"].shape[1] - gmem["dquery"].shape[1]) // _BLOCK
    # The last queries attend to the most keys. They run first, so that short blocks fill the gaps at the end.
    block = (jnp.int32(blocks - 1) - lax.axis_index("block")) * count + offset
    place = {
        "batch": lax.axis_index("batch"),
        "head": head,
        "key_head": lax.div(head, jnp.int32(gmem["query"].shape[2] // gmem["key"].shape[2])),
        "block": block,
        "top": block + count - 1,
    }
    begin = gmem["first"][place["batch"], place["key_head"], lax.div(block, jnp.int32(count))] * count
    steps = place["top"] - begin + 1
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == count)
    def _load():
        plgpu.set_max_registers(config.load_registers, action="decrease")
        _copy(gmem, smem, place, steps, config)

    @pl.when(warpgroup < count)
    def _compute():
        plgpu.set_max_registers(config.compute_registers, action="increase")
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        own = place["block"] + warpgroup
        plgpu.barrier_wait(smem["ready"])

        def rows(acc):
            queries = _Queries(acc, own, warpgroup, gmem, smem, place, power, config, held and held[1:])
            dlog = queries.all_keys(place["top"] - own, steps)
            positions = pl.ds((own - offset) * _BLOCK, _BLOCK)
            pairs.store(gmem["dlog"].at[place["batch"], head, positions], dlog)
            pairs.store(gmem["dquery"].at[place["batch"], positions, head], acc[...])

        products.with_accumulators(rows, [(_BLOCK, config.head_dim)], held and held[:1])


def _copy(gmem, smem, place, steps, config):
    """Copies the block's queries and cotangents, then keys and values, backward from the last visible block."""
    for n in range(config.compute_warpgroups):
        tokens = place["batch"], pl.ds((place["block"] + n) * _BLOCK, _BLOCK), place["head"]
        for name in ("query", "dout"):
            plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[n], smem["ready"])

    def copy(step, slot):
        block, full = place["top"] - step, smem["full"].at[slot]
        tokens = place["batch"], pl.ds(block * _BLOCK, _BLOCK), place["key_head"]
        for name in ("key", "value"):
            plgpu.copy_gmem_to_smem(gmem[name].at[tokens], smem[f"{name}_smem"].at[slot], full)
        columns = gmem["columns"].at[place["batch"], place["key_head"], block]
        plgpu.copy_gmem_to_smem(columns, smem["column_smem"].at[slot], full)

    ring.fill(steps, config.query_stages, smem["free"], copy)


class _Queries:
    """The 64 queries of one warpgroup, and their products with each block of keys."""

    def __init__(self, acc, own, warpgroup, gmem, smem, place, power, config, interpreted):
        self.acc, self.smem, self.power, self.config = acc, smem, power, config
        self.interpreted = interpreted
        self.query, self.dout = (
            pairs.left_operand(smem[name].at[warpgroup], config) for name in ("query_smem", "dout_smem")
        )
        self.rows = gmem["rows"].at[place["batch"], place["head"], own]

    def all_keys(self, passed, steps):
        """Returns the sum of dS S over all keys; the sums of dS K are added to the accumulator."""

        @pl.loop(jnp.int32(0), passed)
        def _pass(step):
            # A block that is visible only to later queries is skipped: free its slot as soon as it is full.
            slot = self._full(step)
            plgpu.barrier_arrive(self.smem["free"].at[slot])

        dlog = self._diagonal(passed)
        slope = self._of_queries(inputs.FAR_SLOPE)
        shift = slope * self._of_queries(inputs.DELTA)

        def far(step, carry):
            between, dlog = carry
            slot = self._full(step)
            key, value = self._tiles(slot)
            scores, dweights = pairs.two_products(self.query, key, self.dout, value, self.interpreted)
            factor = self._of_keys(slot, inputs.FAR_FACTOR) * between
            slopes = pairs.slopes(scores, self.power) * pairs.by_column(factor)
            between *= self.smem["column_smem"][slot, inputs.KEY_BETWEEN, 0]
            return between, dlog + self._add(slot, scores, slopes, dweights, slope, shift)

        return lax.fori_loop(passed + 1, steps, far, (jnp.float32(1), dlog))[1]

    def _diagonal(self, step):
        slot = self._full(step)
        key, value = self._tiles(slot)
        # One product after the other, to save registers.
        scores = pairs.product(self.query, key, self.interpreted)
        parts = [self._of_queries(n) for n in (inputs.QUERY_COARSE, inputs.QUERY_FINE)]
        key_parts = [self._of_keys(slot, n) for n in (inputs.KEY_COARSE, inputs.KEY_FINE)]
        length = pairs.by_column(self._of_keys(slot, inputs.NEAR_FACTOR))
        position = self._of_keys(slot, inputs.KEY_POSITION)
        factor = pairs.near_factor(parts, key_parts, position, length, sign=1)
        slopes = pairs.slopes(scores, self.power) * factor
        dweights = pairs.product(self.dout, value, self.interpreted)
        slope = self._of_queries(inputs.NEAR_SLOPE)
        return self._add(slot, scores, slopes, dweights, slope, slope * self._of_queries(inputs.DELTA))

    def _add(self, slot, scores, slopes, dweights, slope, shift):
        """Adds dS K of one block of keys to the accumulator; returns sums of dS S."""
        dscores = slopes * (dweights * pairs.by_row(slope) - pairs.by_row(shift))
        dlog = (dscores * scores).sum(1)
        key, _ = self._tiles(slot)
        products.accumulate(self.acc, dscores.astype(jnp.float16), key, self.interpreted)
        plgpu.barrier_arrive(self.smem["free"].at[slot])
        return dlog

    def _tiles(self, slot):
        return (self.smem[name].at[slot] for name in ("key_smem", "value_smem"))

    def _of_queries(self, index):
        return plgpu.load(self.rows.at[index], layout=pairs.PER_ROW, optimized=False)

    def _of_keys(self, slot, index):
        vector = self.smem["column_smem"].at[slot, index]
        return plgpu.load(vector, layout=pairs.PER_COLUMN, optimized=False)

    def _full(self, step):
        slot = ring.slot_of(step, self.config.query_stages)
        plgpu.barrier_wait(self.smem["full"].at[slot])
        return slot
