"""The attention form: every pair of a query and an earlier key, in blocks, never a T x T array.

One head at a time (callers `vmap`), time last. The X keys are X / C blocks, the T queries the last T / C of them.
Within the diagonal block decays are differences of exact sums. Between a query and a key of different blocks the
decay is a product of three factors at most 1, one per query, one per key and one for the blocks between, so that
off the diagonal no pair needs an exponential.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops._power import decay as decays

__all__ = ["Settings", "sums"]


class Settings(NamedTuple):
    """What is static: the power, the block length C, and the precision of products."""

    power: int
    block: int
    precision: jax.lax.Precision


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sums(
    settings: Settings,
    query: Float[Array, "G D T"],
    key: Float[Array, "D X"],
    value: Float[Array, "E X"],
    log_decay: Float[Array, " X"],
    first: Int[Array, ""],
) -> Float[Array, "G E T"]:
    """sum_j b_ij (q_i . k_j)^p v_j over the keys up to each query: nothing is divided, `value` carries the ones.

    T and X are multiples of the block; `log_decay` is `decay.bounded`; blocks of keys before block `first` are
    skipped. Differentiable in all but `first`; only the arguments are saved for the backward pass.
    """
    return _sums(settings, query, key, value, log_decay, first)


def _sums(settings, query, key, value, log_decay, first):
    pairs = _Pairs(settings, query, key, value, log_decay)

    def row(_, i):
        q = pairs.cut(query, i)
        near = _product(
            settings, pairs.value(i + pairs.offset), pairs.weights(q, i + pairs.offset)[0] * pairs.near(i)
        )

        def column(n, carry):
            far, between = carry
            j = i + pairs.offset - 1 - n
            weights, _ = pairs.weights(q, j)
            far += _product(settings, pairs.value(j) * pairs.to_end(j, between), weights)
            return far, between + pairs.total[j]

        far, _ = jax.lax.fori_loop(
            0,
            jnp.maximum(i + pairs.offset - first, 0),
            column,
            (jnp.zeros_like(near), jnp.zeros_like(near, shape=())),
        )
        return None, near + pairs.from_start[i] * far

    _, out = jax.lax.scan(row, None, jnp.arange(query.shape[-1] // settings.block, dtype=jnp.int32))
    return _joined(out)


def _sums_fwd(settings, query, key, value, log_decay, first):
    return _sums(settings, query, key, value, log_decay, first), (query, key, value, log_decay, first)


def _sums_bwd(settings, residuals, dsums):
    query, key, value, log_decay, first = residuals
    pairs = _Pairs(settings, query, key, value, log_decay)
    block, dtype = settings.block, pairs.dtype
    rows = query.shape[-1] // block

    def row(carry, i):
        q, d = pairs.cut(query, i), pairs.cut(dsums, i)
        diagonal = i + pairs.offset
        dquery, dkey, dvalue, dlog_row, dlog_column = pairs.vjp(
            q, d, diagonal, pairs.value(diagonal), pairs.near(i)
        )
        dkeys, dvalues = _add(carry[0], dkey, diagonal, block), _add(carry[1], dvalue, diagonal, block)
        near = decays.suffix_sums(dlog_row) + dlog_row - decays.suffix_sums(dlog_column) - dlog_column

        def column(n, carry):
            dquery_far, dkeys, dvalues, dlog_rows, dlog_columns, between = carry
            j = diagonal - 1 - n
            scale = pairs.to_end(j, between)
            dq, dk, dv, dlog_row, dlog_column = pairs.vjp(
                q, pairs.from_start[i] * d, j, pairs.value(j) * scale, None
            )
            return (
                dquery_far + dq,
                _add(dkeys, dk, j, block),
                _add(dvalues, dv * scale, j, block),
                dlog_rows + dlog_row,
                dlog_columns.at[j].set(dlog_column),
                between + pairs.total[j],
            )

        start = (
            jnp.zeros_like(dquery),
            dkeys,
            dvalues,
            jnp.zeros_like(dlog_row),
            jnp.zeros_like(dlog_column, shape=(len(pairs.total), block)),
            jnp.zeros_like(dlog_row, shape=()),
        )
        dquery_far, dkeys, dvalues, dlog_rows, dlog_columns, _ = jax.lax.fori_loop(
            0, jnp.maximum(diagonal - first, 0), column, start
        )
        # What crosses t: in the query's block pairs with a later query, in the key's block pairs with an earlier
        # key, and every pair whose blocks lie on either side.
        by_column = dlog_columns.sum(-1)
        crossing = (
            carry[2]
            + jnp.where(jnp.arange(len(by_column)) < diagonal, jnp.cumsum(by_column) - by_column, 0)[:, None]
        )
        crossing += decays.prefix_sums(dlog_columns) - dlog_columns
        crossing = crossing.at[diagonal].add(near + decays.suffix_sums(dlog_rows) + dlog_rows)
        return (dkeys, dvalues, crossing), dquery + dquery_far

    start = (
        jnp.zeros_like(key, dtype),
        jnp.zeros_like(value, dtype),
        jnp.zeros_like(log_decay, shape=(key.shape[-1] // block, block)),
    )
    (dkey, dvalue, ddecay), dquery = jax.lax.scan(row, start, jnp.arange(rows, dtype=jnp.int32))
    return (
        _joined(dquery).astype(query.dtype),
        dkey.astype(key.dtype),
        dvalue.astype(value.dtype),
        ddecay.reshape(-1),
        None,
    )


sums.defvjp(_sums_fwd, _sums_bwd)


class _Pairs:
    """Blocks of keys and queries by index, and the decays within and between them."""

    def __init__(self, settings, query, key, value, log_decay):
        self.settings, self.dtype = settings, log_decay.dtype
        self._key, self._value = key, value
        block = settings.block
        self.offset = (key.shape[-1] - query.shape[-1]) // block
        by_block = log_decay.reshape(-1, block)
        self.coarse, self.fine = decays.split(by_block)
        self.total = by_block.sum(-1)
        self.after = decays.suffix_sums(by_block)
        self.from_start = decays.exp(self.coarse + self.fine)[self.offset :]

    def cut(self, x, index):
        block = self.settings.block
        part = jax.lax.dynamic_slice_in_dim(x, index * block, block, -1)
        # As in the chunked form: cut once, not in every fusion that reads the part.
        return jax.lax.optimization_barrier(part.astype(self.dtype))

    def value(self, j):
        return self.cut(self._value, j)

    def near(self, i):
        """Decay from each key to each query of the diagonal block, zero where the key is later."""
        coarse, fine = self.coarse[i + self.offset], self.fine[i + self.offset]
        between = (coarse[:, None] - coarse) + (fine[:, None] - fine)
        return jnp.where(np.tri(len(coarse), dtype=bool), decays.exp(between), 0)

    def to_end(self, j, between):
        """Decay from each key of block j over the blocks behind it, whose sum is `between`."""
        return decays.exp(self.after[j] + between)

    def weights(self, q, j):
        scores = jnp.einsum("gdq,dk->gqk", q, self.cut(self._key, j), precision=self.settings.precision)
        return jax.lax.integer_pow(scores, self.settings.power), scores

    def vjp(self, q, d, j, value, near):
        """Gradients of sum(d * value weights^T), and sums over keys and over queries of d/d(log weight)."""
        power, precision = self.settings.power, self.settings.precision
        key = self.cut(self._key, j)
        weights, scores = self.weights(q, j)
        dweights = jnp.einsum("geq,ek->gqk", d, value, precision=precision)
        slope = power * jax.lax.integer_pow(scores, power - 1)
        if near is not None:
            weights, slope = weights * near, slope * near
        dscores, dlog = dweights * slope, dweights * weights
        return (
            jnp.einsum("gqk,dk->gdq", dscores, key, precision=precision),
            jnp.einsum("gqk,gdq->dk", dscores, q, precision=precision),
            jnp.einsum("geq,gqk->ek", d, weights, precision=precision),
            dlog.sum((0, 2)),
            dlog.sum((0, 1)),
        )


def _product(settings, value, weights):
    return jnp.einsum("ek,gqk->geq", value, weights, precision=settings.precision)


def _add(total, part, index, block):
    """Adds a block's part in place."""
    begin = index * block
    sliced = jax.lax.dynamic_slice_in_dim(total, begin, block, -1)
    return jax.lax.dynamic_update_slice_in_dim(total, sliced + part, begin, -1)


def _joined(blocks):
    """[n, ..., C] -> [..., n * C]."""
    joined = jnp.moveaxis(blocks, 0, -2)
    return joined.reshape(
        *joined.shape[:-2], joined.shape[-2] * joined.shape[-1]
    )  # -1 fails where there is nothing
