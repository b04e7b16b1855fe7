"""The attention form: every pair of a query and an earlier key, in blocks, without a T x T array.

Functions take one head (callers `vmap`), time last. The X keys are X / C blocks, the T queries the last T / C of them.
Within the diagonal block, decays are differences of exact sums. Between a query and a key of different blocks, the
decay is a product of three factors that are at most 1: one per query, one per key and one for the blocks between. Off
the diagonal, therefore, no pair needs its own exponential.
"""

import functools

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import decays, derivatives, layout, plans


def _all_pairs(plan, query, key, value, log_decay, first=None):
    """Computes `sums` with a T x T array of weights; those of the blocks before `first` are zero."""
    del first
    query, key, value = (x.astype(log_decay.dtype) for x in (query, key, value))
    coarse, fine = decays.split(log_decay)
    earlier = len(log_decay) - query.shape[-1]
    visible = jnp.tri(query.shape[-1], len(coarse), earlier, dtype=bool)
    decay = decays.within((coarse[earlier:, None], fine[earlier:, None]), (coarse, fine), visible)
    scores = jnp.einsum("gdq,dk->gqk", query, key, precision=plan.precision)
    weights = decay * jax.lax.integer_pow(scores, plan.power)
    return jnp.einsum("ek,gqk->geq", value, weights, precision=plan.precision)


@functools.partial(derivatives.custom_vjp, static=1, plain=_all_pairs)
def sums(
    plan: plans.Plan,
    query: Float[Array, "G D T"],
    key: Float[Array, "D X"],
    value: Float[Array, "E X"],
    log_decay: Float[Array, " X"],
    first: Int[Array, ""],
) -> Float[Array, "G E T"]:
    """Returns sum_j b_ij (q_i . k_j)^p v_j over the keys up to each query; nothing is divided.

    `value` includes the row of ones of the denominator. T and X are multiples of the block, `log_decay` comes from
    `decays.bounded`, and blocks of keys before block `first` are skipped. Differentiable in all arguments except
    `first`. Only the arguments are saved for the backward pass. Reverse mode of a derivative is that of all pairs at
    once.
    """
    pairs = _Pairs(plan, query, key, value, log_decay)

    def row(_, i):
        q = pairs.cut(query, i)
        diagonal = i + pairs.offset
        in_block = pairs.product(
            pairs.value(diagonal), pairs.weights(q, diagonal)[0] * pairs.within(diagonal)
        )

        def column(n, carry):
            earlier, log_across = carry
            j = diagonal - 1 - n
            weights, _ = pairs.weights(q, j)
            earlier += pairs.product(pairs.value(j) * pairs.to_end(j, log_across), weights)
            return earlier, log_across + pairs.total[j]

        earlier, _ = jax.lax.fori_loop(
            0,
            jnp.maximum(diagonal - first, 0),
            column,
            (jnp.zeros_like(in_block), jnp.zeros_like(in_block, shape=())),
        )
        return None, in_block + pairs.from_start[i] * earlier

    _, out = jax.lax.scan(row, None, jnp.arange(len(pairs.from_start), dtype=jnp.int32))
    return layout.join_chunks(out)


def _gradients_of_all_pairs(plan, query, key, value, log_decay, dsums, first):
    del first
    return jax.vjp(functools.partial(_all_pairs, plan), query, key, value, log_decay)[1](dsums)


@functools.partial(derivatives.custom_vjp, static=1, plain=_gradients_of_all_pairs)
def sums_vjp(plan, query, key, value, log_decay, dsums, first):
    """Returns the gradients of `sums`."""
    pairs = _Pairs(plan, query, key, value, log_decay)
    block, dtype = plan.chunk, pairs.dtype
    rows = query.shape[-1] // block

    def row(carry, i):
        dkeys, dvalues, crossing = carry
        q, d = pairs.cut(query, i), pairs.cut(dsums, i)
        diagonal = i + pairs.offset
        dquery, dkey, dvalue, dlog_row, dlog_column = pairs.vjp(
            q, d, diagonal, pairs.value(diagonal), pairs.within(diagonal)
        )
        dkeys, dvalues = pairs.add(dkeys, dkey, diagonal), pairs.add(dvalues, dvalue, diagonal)
        in_block = decays.sums_from(dlog_row) - decays.sums_from(dlog_column)

        def column(n, carry):
            dquery_earlier, dkeys, dvalues, dlog_rows, dlog_columns, log_across = carry
            j = diagonal - 1 - n
            scale = pairs.to_end(j, log_across)
            dq, dk, dv, dlog_row, dlog_column = pairs.vjp(
                q, pairs.from_start[i] * d, j, pairs.value(j) * scale, None
            )
            return (
                dquery_earlier + dq,
                pairs.add(dkeys, dk, j),
                pairs.add(dvalues, dv * scale, j),
                dlog_rows + dlog_row,
                dlog_columns.at[j].set(dlog_column),
                log_across + pairs.total[j],
            )

        start = (
            jnp.zeros_like(dquery),
            dkeys,
            dvalues,
            jnp.zeros_like(dlog_row),
            jnp.zeros_like(dlog_column, shape=(len(pairs.total), block)),
            jnp.zeros_like(dlog_row, shape=()),
        )
        dquery_earlier, dkeys, dvalues, dlog_rows, dlog_columns, _ = jax.lax.fori_loop(
            0, jnp.maximum(diagonal - first, 0), column, start
        )
        # Pairs that cross t: in the query's block those with a later query, in the key's block those with an earlier
        # key, and all pairs whose key block is before t and whose query block is after it.
        by_column = dlog_columns.sum(-1)
        before = jnp.where(jnp.arange(len(by_column)) < diagonal, jnp.cumsum(by_column) - by_column, 0)
        crossing += before[:, None]
        crossing += decays.prefix_sums(dlog_columns) - dlog_columns
        crossing = crossing.at[diagonal].add(in_block + decays.sums_from(dlog_rows))
        return (dkeys, dvalues, crossing), dquery + dquery_earlier

    start = (
        jnp.zeros_like(key, dtype),
        jnp.zeros_like(value, dtype),
        jnp.zeros_like(log_decay, shape=(key.shape[-1] // block, block)),
    )
    (dkey, dvalue, ddecay), dquery = jax.lax.scan(row, start, jnp.arange(rows, dtype=jnp.int32))
    return (
        layout.join_chunks(dquery).astype(query.dtype),
        dkey.astype(key.dtype),
        dvalue.astype(value.dtype),
        ddecay.reshape(-1),
    )


def _sums_bwd(plan, arguments, dsums):
    *arrays, first = arguments
    return *sums_vjp(plan, *arrays, dsums, first), None


sums.defvjp(None, _sums_bwd)


class _Pairs:
    """Blocks of keys and queries by index, and the decays within and between them."""

    def __init__(self, plan, query, key, value, log_decay):
        self.plan, self.dtype = plan, log_decay.dtype
        self._key, self._value = key, value
        block = plan.chunk
        self.offset = (key.shape[-1] - query.shape[-1]) // block
        by_block = log_decay.reshape(-1, block)
        self.coarse, self.fine = decays.split(by_block)
        self.total = by_block.sum(-1)
        self.after = decays.sums_after(by_block)
        self.from_start = decays.exp(self.coarse + self.fine)[self.offset :]

    def cut(self, x, index):
        block = self.plan.chunk
        part = jax.lax.dynamic_slice_in_dim(x, index * block, block, -1)
        # As in the chunked form: slice once, not in every fusion that reads the slice.
        return jax.lax.optimization_barrier(part.astype(self.dtype))

    def value(self, j):
        return self.cut(self._value, j)

    def add(self, total, part, index):
        """Returns the total with a block's part added to its slice."""
        begin = index * self.plan.chunk
        sliced = jax.lax.dynamic_slice_in_dim(total, begin, self.plan.chunk, -1)
        return jax.lax.dynamic_update_slice_in_dim(total, sliced + part, begin, -1)

    def within(self, j):
        """Returns the decay from each key of block j to each query of it, zero where the key is later."""
        coarse, fine = self.coarse[j], self.fine[j]
        visible = jnp.tri(len(coarse), dtype=bool)
        return decays.within((coarse[:, None], fine[:, None]), (coarse, fine), visible)

    def to_end(self, j, log_across):
        """Returns the decay from each key of block j over the blocks after it, whose sum is `log_across`."""
        return decays.exp(self.after[j] + log_across)

    def weights(self, q, j):
        scores = jnp.einsum("gdq,dk->gqk", q, self.cut(self._key, j), precision=self.plan.precision)
        return jax.lax.integer_pow(scores, self.plan.power), scores

    def product(self, value, weights):
        return jnp.einsum("ek,gqk->geq", value, weights, precision=self.plan.precision)

    def vjp(self, q, d, j, value, decay):
        """Returns gradients of sum(d * value weights^T), and sums over keys and over queries of d/d(log weight)."""
        power, precision = self.plan.power, self.plan.precision
        key = self.cut(self._key, j)
        weights, scores = self.weights(q, j)
        dweights = jnp.einsum("geq,ek->gqk", d, value, precision=precision)
        slope = power * jax.lax.integer_pow(scores, power - 1)
        if decay is not None:
            weights, slope = weights * decay, slope * decay
        dscores, dlog = dweights * slope, dweights * weights
        return (
            jnp.einsum("gqk,dk->gdq", dscores, key, precision=precision),
            jnp.einsum("gqk,gdq->dk", dscores, q, precision=precision),
            jnp.einsum("geq,gqk->ek", d, weights, precision=precision),
            dlog.sum((0, 2)),
            dlog.sum((0, 1)),
        )
