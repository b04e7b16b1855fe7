"""Sums over the state and the exact window for each query, with one read for all query heads of a key head.

Blocks of one warpgroup share the state of a head; TMA loads tiles of rows into a ring in shared memory. A thread holds
the sums of its columns over its rows. Rows are added across threads once, at the end. Queries get unit scale, and for
p = 2 each block computes the features of its rows from them. One more block processes the window: it adds the new
token, computes weights (q . k)^p times decay, and treats values like rows of the state. Nothing is rounded to less than
float32. The kernel is bound by memory: for a tile of 16 KB, a warp executes 50 instructions per query head, while its
share of bandwidth takes 1,200 cycles.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics
from pallas_kernels.power_step import configs, squares


class Operands(NamedTuple):
    """A query, the state before its token, and the token. The window is float32, and zero where there is no token."""

    query: jax.Array  # [B, K, G, D]
    kv: jax.Array  # float32 [B, K, F, E], sums of phi(k) v^T
    norm: jax.Array  # float32 [B, K, F], sums of phi(k)
    key: jax.Array  # [B, K, D], of the token
    value: jax.Array  # [B, K, E]
    log_decay: jax.Array  # float32 [B, K]
    slot: (
        jax.Array
    )  # int32 [B], the number of tokens in the window, which is the slot of the new one; 2W for none
    keys: jax.Array  # [B, 2W, K, D]
    values: jax.Array  # [B, 2W, K, E]
    log_decays: jax.Array  # [B, 2W, K]
    # float32 [B, K, G, F], phi(q) of queries of unit scale, in the order of kv's rows; None for p = 2
    features: jax.Array | None = None


def read(operands: Operands, *, power: int, interpret=None):
    """Returns sums of values weighted by (q . k)^p, and of the weights, over the tokens of state and window.

    The token is written to the window, whose memory the new window reuses if it is not needed any more. The state and
    the window are read once for all query heads of a key head. Queries are rescaled by a power of two, which cancels in
    the quotient of the sums. `choose` documents the supported sizes. Not differentiable.

    Returns:
        numerator and denominator [B, K, G, E], of which the second is the same in every column, and the new `keys`,
        `values` and `log_decays`.
    """
    (batch, kv_heads, group, head_dim), value_dim = operands.query.shape, operands.kv.shape[-1]
    slots = operands.keys.shape[1]
    config = configs.choose(operands.query.shape, operands.kv, exact_window=slots // 2, power=power)
    parts, window_tile, padded = config.parts + 1, config.window_tile, head_dim + 2 * squares.ROWS
    offsets = [g * padded + squares.ROWS for g in range(group)]

    def body(*refs, queries, features):
        *inputs, totals, across = refs
        x = Operands(*inputs)
        batch, head, part = (lax.axis_index(name) for name in ("batch", "head", "part"))
        sums = _Sums(group, value_dim)

        def put_queries():
            for g in range(group):
                query = _unit_scale(_row(x.query.at[batch, head, g]))
                squares.put(queries.at[pl.ds(g * padded, padded)], query)

        def store(results):
            for g, (total, weight) in enumerate(results):
                weight = jnp.broadcast_to(weight.sum(), (value_dim,))
                weight = plgpu.layout_cast(weight, configs.layout(value_dim).reduce(0))
                launch.store(totals.at[batch, head, part, g, 0], total.sum(0))
                launch.store(totals.at[batch, head, part, g, 1], weight)

        @pl.when(part < config.parts)
        def _state():
            first = part * config.tiles

            def copies(step):
                rows = pl.ds((first + step) * config.tile, config.tile)
                sources = x.kv.at[batch, head, rows], x.norm.at[batch, head, rows]
                return sources if x.features is None else (*sources, x.features.at[batch, head, :, rows])

            def put_features(block):
                begin = first * config.tile + block * squares.ROWS
                for g, phi in enumerate(squares.features(queries, offsets, begin, head_dim)):
                    features[g, pl.ds(block * squares.ROWS, squares.ROWS)] = phi

            def prepare():
                if x.features is None:
                    put_queries()
                    pl.loop(0, features.shape[1] // squares.ROWS)(put_features)

            def add(step, refs, totals):
                rows, norm, *weights = refs
                weights = weights or [features.at[:, pl.ds(step * config.tile, config.tile)]]
                return sums.add((rows, *weights, norm), totals)

            shapes = [(config.tile, value_dim), (config.tile,), (group, config.tile)]
            shapes = shapes[: 2 + (x.features is not None)]
            count = jnp.minimum(-(-x.kv.shape[2] // config.tile) - first, config.tiles)
            store(_through_ring(copies, shapes, count, config.stages, prepare, add, sums.zeros()))

        def attend_to_window(decays):
            slot = x.slot[batch]
            key, value = (_row(token.at[batch, head]) for token in (x.key, x.value))
            new = jnp.maximum(x.log_decay[batch, head], numerics.FLOOR - 1)
            count = jnp.minimum(slot, slots - 1) // window_tile + 1

            def copies(step):
                tokens = pl.ds(step * window_tile, window_tile)
                return x.values.at[batch, tokens, head], x.keys.at[batch, tokens, head]

            def prepare():
                put_queries()
                layout, step = configs.layout(slots, 1), configs.chunk_rows(slots, 1)
                log_decay = plgpu.load(
                    x.log_decays.at[batch, :, head], layout=layout.reduce(0), optimized=False
                )
                position = plgpu.broadcasted_iota(jnp.int32, (slots,), 0, layout=layout.reduce(0))
                log_decay = jnp.where(position == slot, new, log_decay)
                across[batch, head] = numerics.decay(log_decay.sum())
                # Kernels have no cumulative sum, so each token sums over those after it.
                terms = configs.spread(log_decay, (step, slots), 1, 1)
                row = plgpu.broadcasted_iota(jnp.int32, terms.shape, 0, layout=layout)
                column = plgpu.broadcasted_iota(jnp.int32, terms.shape, 1, layout=layout)
                for begin in range(0, decays.shape[0], step):
                    decays[pl.ds(begin, step)] = numerics.decay(
                        jnp.where(column > row + begin, terms, 0).sum(1)
                    )

            def add(step, refs, totals):
                rows, key_rows = refs
                place = slot - step * window_tile

                @pl.when((place >= 0) & (place < window_tile) & (slot < slots))
                def _put_token():
                    rows[place] = value
                    key_rows[place] = key

                weights = features.at[:, pl.ds(0, window_tile)]
                factors = decays.at[pl.ds(step * window_tile, window_tile)]
                _weigh(key_rows, queries, offsets, factors, weights, power)
                return sums.add((rows, weights, None), totals)

            shapes = [(window_tile, value_dim), (window_tile, head_dim)]
            stages = min(2 * config.tile // window_tile, -(-slots // window_tile))
            store(_through_ring(copies, shapes, count, stages, prepare, add, sums.zeros()))

            @pl.when(slot < slots)
            def _put_token():
                launch.store(x.keys.at[batch, slot, head], key)
                launch.store(x.values.at[batch, slot, head], value)
                x.log_decays[batch, slot, head] = new

        @pl.when(part == config.parts)
        def _window():
            most = max(window_tile, configs.chunk_rows(slots, 1))
            pl.run_scoped(attend_to_window, plgpu.SMEM((-(-slots // most) * most,), jnp.float32))

    # A kernel updates references in place.
    window = {name: jax.new_ref(getattr(operands, name)) for name in ("keys", "values", "log_decays")}
    # Features of all rows of a block, or weights of a tile of the window.
    rows = max(config.tiles * config.tile if operands.features is None else 0, window_tile)
    memory = {"queries": (group * padded,), "features": (group, -(-rows // squares.ROWS) * squares.ROWS)}
    # Numerators and denominators of each block of a head, of which the last has the window; and the decay from the
    # state to the query.
    results = (batch, kv_heads, parts, group, 2, value_dim), (batch, kv_heads)
    totals, across = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results),
        scratch_types={name: plgpu.SMEM(shape, jnp.float32) for name, shape in memory.items()},
        grid=(parts, kv_heads, batch),
        grid_names=("part", "head", "batch"),
        kernel_name="power_step_read",
        compiler_params=configs.COMPILER,
        **launch.interpreted(interpret),
    )(*(window.get(name, x) for name, x in operands._asdict().items() if x is not None))
    totals = across[..., None, None, None] * totals[:, :, :-1].sum(2) + totals[:, :, -1]
    return totals[..., 0, :], totals[..., 1, :], tuple(map(jax.freeze, window.values()))


def _row(ref):
    """Loads a vector from global memory as float32."""
    return plgpu.load(ref, layout=configs.line(ref.shape[-1]), optimized=False).astype(jnp.float32)


def _unit_scale(query):
    """Returns the query times the power of two that brings its largest entry into [1/2, 1)."""
    for _ in range(2):  # The first product makes a subnormal number normal.
        first, second = numerics.factors(-numerics.normal_exponent(jnp.abs(query).max()))
        query = query * first * second
    return query


class _Sums:
    """Sums over rows in registers: for each query head, one of a chunk of rows and one of their weights."""

    def __init__(self, group, width):
        self.group, self.shape = group, (configs.chunk_rows(width), width)
        self.layout = configs.layout(width)

    def zeros(self):
        total = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)
        weight = plgpu.layout_cast(jnp.zeros(self.shape[:1], jnp.float32), self.layout.reduce(1))
        return ((total, weight),) * self.group

    def add(self, refs, totals):
        """Adds a tile: rows [tile, width], weights [G, tile], and norm [tile], or None for ones."""
        rows, weights, norm = refs
        for begin in range(0, rows.shape[0], self.shape[0]):
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


def _weigh(keys, queries, offsets, decay, weights, power):
    """Computes weights[g, w] = (query[g] . keys[w])^p decay[w], from and into shared memory."""
    width = keys.shape[1]
    layout = configs.layout(width)
    k = plgpu.load(keys, layout=layout)
    factor = plgpu.load(decay, layout=layout.reduce(1), optimized=False)
    for g, offset in enumerate(offsets):
        q = plgpu.load(queries.at[pl.ds(offset, width)], layout=layout.reduce(0), optimized=False)
        score = (k * configs.spread(q, k.shape, 1)).sum(1)
        weights[g, :] = functools.reduce(operator.mul, [score * score] * (power // 2)) * factor
    plgpu.commit_smem()


def _through_ring(copies, shapes, count, stages, prepare, add, total):
    """Calls total = add(step, refs, total) for `count` steps, with `stages` of them in flight, after prepare().

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

        prepare()

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
