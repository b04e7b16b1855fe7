"""Sums over the state and the exact window for each query, with one read for all query heads of a key head.

Blocks of one warpgroup share the state of a head; TMA loads tiles of rows into a ring in shared memory. A thread holds
the sums of its columns over its rows. Rows are added across threads once, at the end. One more block processes the
window: its values are treated like rows of the state, with weights (q . k)^p computed in the kernel. Nothing is rounded
to less than float32. The kernel is bound by memory: for a tile of 16 KB, a warp executes 50 instructions per query
head, while its share of bandwidth takes 1,200 cycles.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch
from pallas_kernels.power_step import configs

__all__ = ["Operands", "read"]

# Products of keys and a query that a warpgroup holds at once, 32 per thread.
_PRODUCTS = 32 * 128


class Operands(NamedTuple):
    """Arrays that the kernel reads, float32."""

    features: jax.Array  # [B, K, G, F], of the queries, times the decay since the state
    kv: jax.Array  # [B, K, F, E]
    norm: jax.Array  # [B, K, F]
    query: jax.Array  # [B, K, G, D]
    keys: jax.Array  # [B, 2W, K, D]
    values: jax.Array  # [B, 2W, K, E]
    decay: jax.Array  # [B, K, 2W]


def read(operands: Operands, *, power: int, config: configs.Config, interpret=None):
    """Returns sums over rows of the state and of the window.

    These are numerators [B, K, P, G, E] and denominators [B, K, P, G, R]. The caller sums over P, the blocks that share
    a head, and over R, since these are small.
    """
    (batch, kv_heads, group, _), value_dim = operands.features.shape, operands.kv.shape[-1]
    parts = config.parts + 1
    # Weights beyond the window are zero; reads beyond the end of other arrays return zero.
    missing = -operands.decay.shape[-1] % config.tile
    operands = operands._replace(decay=jnp.pad(operands.decay, [(0, 0), (0, 0), (0, missing)]))
    shape = batch, kv_heads, parts, group

    def body(*refs):
        *inputs, numerator, denominator = refs
        features, kv, norm, query, keys, values, decay = Operands(*inputs)
        batch, head, part = (lax.axis_index(name) for name in ("batch", "head", "part"))
        sums = _Sums(group, value_dim, config.tile)

        def store(totals):
            for g, (total, weight) in enumerate(totals):
                launch.store(numerator.at[batch, head, part, g], total.sum(0))
                launch.store(denominator.at[batch, head, part, g], weight)

        @pl.when(part < config.parts)
        def _state():
            tiles = -(-kv.shape[2] // config.tile)
            first = part * config.tiles

            def copies(step):
                rows = pl.ds((first + step) * config.tile, config.tile)
                return kv.at[batch, head, rows], features.at[batch, head, :, rows], norm.at[batch, head, rows]

            count = jnp.minimum(jnp.int32(tiles) - first, config.tiles)
            tile, weights = (config.tile, value_dim), (group, config.tile)
            store(
                _through_ring(
                    copies, [tile, weights, weights[1:]], count, config.stages, sums.add, sums.zeros()
                )
            )

        @pl.when(part == config.parts)
        def _window():
            steps = decay.shape[2] // config.tile

            def copies(step):
                tokens = pl.ds(step * config.tile, config.tile)
                return values.at[batch, tokens, head], keys.at[batch, tokens, head]

            def with_weights(weights):
                def add(step, refs, totals):
                    rows, key_rows = refs
                    factors = decay.at[batch, head, pl.ds(step * config.tile, config.tile)]
                    _weigh(key_rows, query.at[batch, head], factors, weights, power)
                    return sums.add(step, (rows, weights, None), totals)

                shapes = [(config.tile, value_dim), (config.tile, keys.shape[3])]
                stages = min(2, steps)
                store(_through_ring(copies, shapes, jnp.int32(steps), stages, add, sums.zeros()))

            pl.run_scoped(with_weights, plgpu.SMEM((group, config.tile), jnp.float32))

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*shape, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((*shape, configs.chunk_rows(value_dim)), jnp.float32),
        ),
        grid=(parts, kv_heads, batch),
        grid_names=("part", "head", "batch"),
        kernel_name="power_step_read",
        compiler_params=configs.COMPILER,
        **launch.interpreted(interpret),
    )
    return kernel(*operands)


class _Sums:
    """Sums over rows in registers: for each query head, one of a chunk of rows and one of their weights."""

    def __init__(self, group, width, tile):
        self.group, self.shape, self.tile = group, (configs.chunk_rows(width), width), tile
        self.layout = configs.layout(width)

    def zeros(self):
        total = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)
        weight = plgpu.layout_cast(jnp.zeros(self.shape[:1], jnp.float32), self.layout.reduce(1))
        return ((total, weight),) * self.group

    def add(self, step, refs, totals):
        """Adds a tile: rows [tile, width], weights [G, tile], and norm [tile], or None for ones."""
        del step
        rows, weights, norm = refs
        for begin in range(0, self.tile, self.shape[0]):
            chunk = pl.ds(begin, self.shape[0])
            x = plgpu.load(rows.at[chunk], layout=self.layout, optimized=False)
            ones = None if norm is None else self._per_row(norm.at[chunk])
            added = []
            for g, (total, weight) in enumerate(totals):
                w = self._per_row(weights.at[g, chunk])
                total = total + configs.spread(w, x.shape, 0) * x
                added.append((total, weight + (w if ones is None else w * ones)))
            totals = tuple(added)
        return totals

    def _per_row(self, ref):
        return plgpu.load(ref, layout=self.layout.reduce(1), optimized=False)


def _weigh(keys, query, decay, weights, power):
    """Computes weights[g, w] = (query[g] . keys[w])^p decay[w], from and into shared memory."""
    tile, width = keys.shape
    layout, step = configs.layout(width), configs.chunk_rows(width)
    # Rows of keys whose products with a query are held in registers at once.
    rows = max(step, min(tile, _PRODUCTS // width) // step * step)
    for begin in range(0, tile, rows):
        chunk = pl.ds(begin, min(rows, tile - begin))
        k = plgpu.load(keys.at[chunk], layout=layout)
        factor = plgpu.load(decay.at[chunk], layout=layout.reduce(1), optimized=False)
        for g in range(query.shape[0]):
            q = plgpu.load(query.at[g], layout=layout.reduce(0), optimized=False)
            score = (k * configs.spread(q, k.shape, 1)).sum(1)
            weights[g, chunk] = functools.reduce(operator.mul, [score * score] * (power // 2)) * factor
    plgpu.commit_smem()


def _through_ring(copies, shapes, count, stages, add, total):
    """Calls total = add(step, refs, total) for `count` steps, with `stages` of them in flight.

    refs hold the data that copies(step) point to. One warpgroup loads and computes: a slot is refilled as soon as every
    thread has read it.
    """

    def scoped(full, *slots):
        def fetch(step):
            slot = lax.rem(step, jnp.int32(stages))
            for source, ref in zip(copies(step), slots, strict=True):
                plgpu.copy_gmem_to_smem(source, ref.at[slot], full.at[slot])

        for step in range(stages):
            pl.when(step < count)(functools.partial(fetch, jnp.int32(step)))

        def body(step, total):
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            total = add(step, [ref.at[slot] for ref in slots], total)
            plgpu.commit_smem()
            pl.when(step + stages < count)(lambda: fetch(step + stages))
            return total

        return lax.fori_loop(jnp.int32(0), count, body, total)

    barrier = plgpu.Barrier(num_arrivals=len(shapes), num_barriers=stages)
    memory = [plgpu.SMEM((stages, *shape), jnp.float32) for shape in shapes]
    return pl.run_scoped(scoped, barrier, *memory)
