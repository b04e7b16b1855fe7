"""Expressive attention computed block by block with a custom gradient, without a T x T array.

Time is cut into blocks of C keys, or R queries, the first axis of every array. H is batch times key/value heads, G the
number of query heads per key head. A pair's weight is u^2 / (1 + z^2) with u = s z / m: z is the score, s^2 the decay
between the two and m the row's largest s min(|z|, 1) so far. That is the weight over m^2, which cancels in the division
by the sum of weights. A row's largest weight is therefore between 1/2 and 1 however small its scores are: s |z| >=
2^-126 is enough in float32, where z^2 alone would vanish below 2^-63.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import decays, derivatives, means


class Settings(NamedTuple):
    """Static options of a call: whether later keys are masked, and the precision of products."""

    causal: bool
    precision: jax.lax.Precision


class Blocks(NamedTuple):
    """J blocks of keys and I blocks of queries, which are the last positions.

    All arrays have one dtype, except documents and ranges. The queries of a block are the last R positions of a block
    of keys; R = C unless I = 1.

    Attributes:
        half_decay: halves of the log decays, from `decays.bounded`; None means no decay. Gradients have None in every
            field without one.
        query_document, key_document: a query attends to a key only if the two are equal; None if all pairs are visible.
        ranges: for each block of queries, the first block of keys it attends to and the end (exclusive) of the range.
            If causal, the end is the diagonal block, which is always included.
    """

    query: Float[Array, "I H D G R"]
    key: Float[Array, "J H D C"]
    value: Float[Array, "J H E C"]
    half_decay: Float[Array, "J H C"] | None
    query_document: Int[Array, "I H R"] | None
    key_document: Int[Array, "J H C"] | None
    ranges: Int[Array, "I 2"]


def weight(z: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """Returns z^2 / (1 + z^2), with derivatives that neither cancel at large z nor are undefined at 0."""
    large = jnp.abs(z) > 1
    small_z, large_z = jnp.where(large, 0, z), jnp.where(large, z, 1)
    return jnp.where(large, 1 / (1 + large_z**-2), small_z**2 / (1 + small_z**2))


def _all_pairs(settings: Settings, blocks: Blocks):
    """Computes `attend` with a T x S array of weights; zeros in place of its sums of weights and m."""
    query, key, value = (jnp.moveaxis(x, 0, -2) for x in blocks[:3])
    count, rows = query.shape[-2:]
    query, key, value = (x.reshape(*x.shape[:-2], -1) for x in (query, key, value))
    # The queries are at the last of the positions of the keys.
    time, key_time = query.shape[-1], key.shape[-1]
    visible = jnp.ones((1, time, key_time), bool)
    if settings.causal:
        visible = jnp.tri(time, key_time, key_time - time, dtype=bool)[None]
    if blocks.query_document is not None and blocks.key_document is not None:
        documents = (jnp.moveaxis(x, 0, -2) for x in (blocks.query_document, blocks.key_document))
        of_query, of_key = (x.reshape(x.shape[0], -1) for x in documents)
        visible &= of_query[:, :, None] == of_key[:, None]
    visible = visible[:, None]
    z = jnp.einsum("hdgt,hds->hgts", query, key, precision=settings.precision)
    weights = weight(z)
    if blocks.half_decay is not None:
        half = jnp.moveaxis(blocks.half_decay, 0, -2)
        coarse, fine = decays.split(half.reshape(half.shape[0], -1))
        within = (coarse[:, -time:, None] - coarse[:, None]) + (fine[:, -time:, None] - fine[:, None])
        weights *= decays.exp(jnp.where(visible, 2 * within[:, None], -jnp.inf))
    weights = jnp.where(visible, weights, 0)
    total = weights.sum(-1, keepdims=True)
    weights /= jnp.where(total == 0, 1, total)
    out = jnp.einsum("hgts,hes->hegt", weights, value, precision=settings.precision)
    out = jnp.moveaxis(out.reshape(*out.shape[:-1], count, rows), -2, 0)
    # The output does not depend on m, which cancels, and gradients have derivatives of their own, not through the sums.
    empty = jnp.zeros_like(out[:, :, :1])
    return out, empty, empty


@functools.partial(derivatives.custom_vjp, static=1, plain=_all_pairs)
def attend(
    settings: Settings, blocks: Blocks
) -> tuple[Float[Array, "I H E G R"], Float[Array, "I H 1 G R"], Float[Array, "I H 1 G R"]]:
    """Returns the weighted means of values, zero where all weights are zero; the sum of weights and m of every row.

    These are saved for the backward pass, in addition to the arguments; only the means have a gradient. Reverse mode of
    a derivative is that of all pairs at once.
    """
    pairs = _Pairs(settings, blocks)
    tiny = np.finfo(pairs.dtype).tiny

    def row(_, i):
        rows = pairs.rows(i)

        def add(carry, j, log_across, diagonal):
            numerator, denominator, largest = carry
            z, s = pairs.scores(rows, j, log_across, diagonal)
            size = jnp.minimum(jnp.abs(z), pairs.bound)
            reach = jnp.minimum(size, 1)
            of_block = (reach if s is None else reach * s).max(1, keepdims=True)
            # The output does not depend on m.
            new = jax.lax.stop_gradient(jnp.maximum(largest, of_block))
            u = size * (1 / new if s is None else s * (1 / new))
            weights = u * u / (1 + size * size)
            # 1 for all but a row's first blocks.
            shrink = jnp.square(largest / new)
            numerator = numerator * shrink + pairs.product("hek,hkgq->hegq", pairs.value(j), weights)
            return numerator, denominator * shrink + weights.sum(1, keepdims=True), new

        _, heads, _, group, block = blocks.query.shape
        empty = jnp.zeros_like(blocks.query, shape=(heads, 1, group, block))
        wide = jnp.zeros_like(blocks.query, shape=(heads, blocks.value.shape[2], group, block))
        numerator, denominator, largest = pairs.over_keys(i, add, (wide, empty, empty + tiny))
        some = denominator > 0
        out = jnp.where(some, numerator / jnp.where(some, denominator, 1), 0)
        return None, (out, denominator, largest)

    return jax.lax.scan(row, None, jnp.arange(len(blocks.query), dtype=jnp.int32))[1]


def _gradients_of_all_pairs(settings, blocks, out, denominator, largest, dout) -> Blocks:
    del out, denominator, largest

    def pairs(query, key, value, half_decay):
        changed = {"query": query, "key": key, "value": value, "half_decay": half_decay}
        return _all_pairs(settings, blocks._replace(**changed))[0]

    gradients = jax.vjp(pairs, blocks.query, blocks.key, blocks.value, blocks.half_decay)[1](dout)
    return Blocks(*gradients, None, None, None)  # type: ignore[arg-type, call-arg]


@functools.partial(derivatives.custom_vjp, static=1, plain=_gradients_of_all_pairs)
def attend_vjp(settings, blocks, out, denominator, largest, dout) -> Blocks:
    """Returns the gradients of `attend`."""
    largest = jax.lax.stop_gradient(largest)  # they do not depend on m
    pairs = _Pairs(settings, blocks)

    def row(carry, i):
        rows = pairs.rows(i)
        some = denominator[i] > 0
        d = jnp.where(some, dout[i] / jnp.where(some, denominator[i], 1), 0)
        mean = (d * out[i]).sum(1, keepdims=True)

        def add(carry, j, log_across, diagonal):
            dquery, dkeys, dvalues, drow, dcolumns = carry
            z, s = pairs.scores(rows, j, log_across, diagonal)
            z = jnp.clip(z, -pairs.bound, pairs.bound)
            factor = 1 / largest[i] if s is None else s * (1 / largest[i])
            u, h = z * factor, 1 / (1 + z * z)
            weights = u * u * h
            dweights = pairs.product("hek,hegq->hkgq", pairs.value(j), d) - mean
            dz = dweights * (2 * u * h) * (h * factor)
            dquery += pairs.product("hdk,hkgq->hdgq", pairs.key(j), dz)
            dkeys = dkeys.at[j].add(pairs.product("hdgq,hkgq->hdk", rows.query, dz))
            dvalues = dvalues.at[j].add(pairs.product("hegq,hkgq->hek", d, weights))
            if dcolumns is not None:
                dlog = dweights * weights
                drow += dlog.sum((1, 2))
                dcolumns = dcolumns.at[j].add(dlog.sum((2, 3)))
            return dquery, dkeys, dvalues, drow, dcolumns

        drow = None
        if blocks.half_decay is not None:
            drow = jnp.zeros_like(blocks.query, shape=(blocks.key.shape[1], blocks.query.shape[-1]))
        start = (jnp.zeros_like(blocks.query[i]), *carry[:2], drow, carry[2])
        dquery, dkeys, dvalues, drow, dcolumns = pairs.over_keys(i, add, start)
        return (dkeys, dvalues, dcolumns), (dquery, drow)

    arrays = (blocks.key, blocks.value, blocks.half_decay)
    start = jax.tree.map(jnp.zeros_like, arrays)
    (dkey, dvalue, dcolumns), (dquery, drows) = jax.lax.scan(
        row, start, jnp.arange(len(blocks.query), dtype=jnp.int32)
    )
    dhalf = None
    if dcolumns is not None:
        missing = [most - some for most, some in zip(dcolumns.shape, drows.shape)]
        dsums = jnp.pad(drows, [(some, 0) for some in missing]) - dcolumns
        totals = dsums.sum(-1)
        later = jnp.cumsum(totals[::-1], 0)[::-1] - totals
        dhalf = 2 * (decays.sums_from(dsums) + later[..., None])
    return Blocks(dquery, dkey, dvalue, dhalf, None, None, None)  # type: ignore[arg-type]


def _attend_fwd(settings, blocks):
    results = tuple(ad_checkpoint.checkpoint_name(x, means.SAVED_AS) for x in attend(settings, blocks))
    return results, (blocks, *results)


attend.defvjp(
    _attend_fwd,
    lambda settings, residuals, cotangents: (attend_vjp(settings, *residuals, cotangents[0]),),
)


class _Rows(NamedTuple):
    """One block of queries; `from_start` is the square root of the decay from before the block."""

    query: Float[Array, "H D G R"]
    document: Int[Array, "H R"] | None
    from_start: Float[Array, "H R"] | None


class _Pairs:
    """Scores and decays of pairs, computed per pair of block indices."""

    def __init__(self, settings, blocks):
        self._settings, self._blocks, self.dtype = settings, blocks, blocks.query.dtype
        # For |z| at or above this bound z^2 / (1 + z^2) rounds to 1, and at the bound z^2 does not overflow.
        self.bound = 2.0 ** (np.finfo(self.dtype).maxexp // 2 - 1)
        self._offset = len(blocks.key) - len(blocks.query)
        length = blocks.key.shape[-1]
        self._places = slice(
            length - blocks.query.shape[-1], None
        )  # positions of the queries among the keys of their block
        self._earlier = np.triu(np.ones((length, length), bool))[:, None, self._places]
        if (half := blocks.half_decay) is not None:
            self._coarse, self._fine = decays.split(half)
            self._after, self._totals = decays.sums_after(half), half.sum(-1)

    def key(self, j):
        return self._blocks.key[j]

    def value(self, j):
        return self._blocks.value[j]

    def rows(self, i):
        blocks, start = self._blocks, None
        if blocks.half_decay is not None:
            start = decays.exp(self._coarse[i + self._offset] + self._fine[i + self._offset])[:, self._places]
        document = None if blocks.query_document is None else blocks.query_document[i]
        return _Rows(blocks.query[i], document, start)

    def product(self, equation, left, right):
        return jnp.einsum(equation, left, right, precision=self._settings.precision)

    def over_keys(self, i, add, carry):
        """Folds `carry = add(carry, j, log_across, diagonal)` over the key blocks j visible to query block i.

        `log_across` is the sum of halved log decays over the blocks between the two.
        """
        start, stop = self._blocks.ranges[i]
        if not self._settings.causal:
            return jax.lax.fori_loop(start, stop, lambda j, carry: add(carry, j, None, False), carry)
        carry = add(carry, stop, None, True)
        log_across = None if self._blocks.half_decay is None else jnp.zeros_like(self._totals[0])

        def left(n, carry):
            carry, log_across = carry
            j = stop - 1 - n
            carry = add(carry, j, log_across, False)
            return carry, None if log_across is None else log_across + self._totals[j]

        return jax.lax.fori_loop(0, stop - start, left, (carry, log_across))[0]

    def scores(self, rows, j, log_across, diagonal):
        """Returns scores [H, C, G, R], zero for masked pairs, and the square roots of decays or None."""
        z = self.product("hdk,hdgq->hkgq", self.key(j), rows.query)
        if rows.document is not None:
            same = self._blocks.key_document[j][:, :, None] == rows.document[:, None, :]
            z = jnp.where(same[:, :, None], z, 0)
        if diagonal:
            z = jnp.where(self._earlier, z, 0)
        if self._blocks.half_decay is None:
            return z, None
        if not diagonal:
            to_end = decays.exp(self._after[j] + log_across[:, None])
            return z, to_end[:, :, None, None] * rows.from_start[:, None, None]
        differences = (
            x[:, None, None, self._places] - x[:, :, None, None] for x in (self._coarse[j], self._fine[j])
        )
        return z, decays.exp(jnp.where(self._earlier, sum(differences), 0))
