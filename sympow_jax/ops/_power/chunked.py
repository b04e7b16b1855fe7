"""The chunked form: exact attention near each query, features for everything older, memory linear in time.

One head at a time (callers `vmap`), time last. Chunk c holds positions [cC, cC + C). Its queries see the keys of
the block [cC - W, cC + C) exactly; the state they see lags behind and holds the positions before the block.
Afterwards the first C positions of the block are folded into it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint

from sympow_jax.array_types import Array, Bool, Float
from sympow_jax.ops._power import decay as decays
from sympow_jax.ops._power import features
from sympow_jax.ops._power import mean as means

__all__ = ["Settings", "chunked"]


class Settings(NamedTuple):
    """What is static: the power, chunk C and window W in positions, the precision of products, and the division."""

    power: int
    chunk: int
    window: int
    precision: jax.lax.Precision
    division: means.Division = means.Division.POSITIVE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked(
    settings: Settings,
    query: Float[Array, "G D X"],
    key: Float[Array, "D X"],
    value: Float[Array, "E X"],
    log_decay: Float[Array, " X"] | None,
    folds: Bool[Array, " X"],
    state: features.Groups,
) -> tuple[Float[Array, "G E X"], features.Groups]:
    """The weighted mean of values for the G query heads of one key head, and the state after the last fold.

    Without division float sums [G, E + 1, X] in place of the mean, to which others may be added.

    X is a multiple of the chunk. `log_decay` is `decay.bounded`; None is no decay and no boundary. Positions where
    `folds` is False never enter the state. `state` is that of `features`; the last column is the normaliser.

    Differentiable in query, key, value, log_decay and state. Saved for the backward pass: the arguments, the output,
    one denominator a query and the final state; states and features between are computed again. Of sums, neither.
    """
    results, final = _forward(settings, query, key, value, log_decay, folds, state)
    return results[0], final


def _forward(settings, query, key, value, log_decay, folds, state):
    blocks = _Blocks(settings, query, key, value, log_decay, folds, state[0].dtype)

    def step(state, index):
        block = blocks[index]
        weights, _ = _near_weights(settings, block)
        sums = jnp.einsum("ek,gqk->geq", block.value, weights, precision=settings.precision)
        far = features.query(
            blocks.weighted(state), _columns(block.query), settings.power, settings.precision
        )
        sums += block.to_query * _groups(far, len(query))
        state = _folded(settings, state, block)
        if settings.division is means.Division.NONE:
            return state, (sums,)
        denominator = sums[:, -1:]
        out = means.mean(sums[:, :-1], denominator, 1, settings.division)
        return state, (out.astype(value.dtype), denominator)

    final, results = jax.lax.scan(step, state, blocks.indices)
    return tuple(map(_joined, results)), final


def _chunked_fwd(settings, query, key, value, log_decay, folds, state):
    results, final = _forward(settings, query, key, value, log_decay, folds, state)
    final = tuple(ad_checkpoint.checkpoint_name(x, means.STATES_SAVED_AS) for x in final)
    divided = None
    if settings.division is not means.Division.NONE:
        divided = results = tuple(ad_checkpoint.checkpoint_name(x, means.SAVED_AS) for x in results)
    return (results[0], final), (query, key, value, log_decay, folds, state, divided, final)


def _chunked_bwd(settings, residuals, cotangents):
    query, key, value, log_decay, folds, state, divided, final = residuals
    dsums, dfinal = cotangents
    if divided is not None:
        out, denominator = divided
        dsums = means.mean_vjp(out, denominator, dsums.astype(denominator.dtype), 1, settings.division)
        dsums = jnp.concatenate(dsums, 1)

    blocks = _Blocks(settings, query, key, value, log_decay, folds, state[0].dtype)
    dquery_far, reads = _read_states(settings, blocks, dsums, state)
    dquery_near, (dkey, dvalue, ddecay), dstate = _write_states(
        settings, blocks, dsums, reads, dfinal, sum(map(jnp.vdot, dfinal, final))
    )
    return (
        _joined(dquery_far + dquery_near).astype(query.dtype),
        _joined(dkey).astype(key.dtype),
        _joined(dvalue).astype(value.dtype),
        None if log_decay is None else _joined(ddecay),
        None,
        dstate,
    )


chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _read_states(settings, blocks, dsums, state):
    """dq through the states, which are computed again, and each chunk's share of d/d(log of its state)."""

    def step(state, index):
        block = blocks[index]
        cotangent = block.to_query * blocks.of_queries(dsums, index)
        dquery = features.query_vjp(
            blocks.weighted(state),
            _columns(block.query),
            _columns(cotangent),
            settings.power,
            settings.precision,
        )
        dquery = _groups(dquery, len(block.query))
        return _folded(settings, state, block), (dquery, (block.query * dquery).sum((0, 1)) / settings.power)

    _, (dquery, reads) = jax.lax.scan(step, state, blocks.indices)
    return dquery, reads


def _write_states(settings, blocks, dsums, reads, dfinal, dlog_final):
    """Everything else, with the gradient R of the state running against time.

    Gradients of log decays need no products of their own: a weight has degree p in query and key, so q_i . dq_i / p
    sums the gradients with respect to the logarithms of i's weights, and k_j . dk_j / p those of j's. The decay at t
    is in the weights of the pairs on either side of it: for position t of a block, the sum over its queries from t on
    minus the sum over its keys from t on, plus, where t is folded, <R, S> of the state that it is folded into.
    """
    chunk, window, power, precision = settings.chunk, settings.window, settings.power, settings.precision

    def step(carry, inputs):
        dstate, tail, dlog_state = carry
        index, read = inputs
        block = blocks[index]
        dsums_block = blocks.of_queries(dsums, index)
        dquery, dkey, dvalue, dlog_query, dlog_key = _near_vjp(settings, block, dsums_block)
        dlog_near = (-dlog_key).at[window:].add(dlog_query + read)

        old, value = block.key[:, :chunk], block.value[:, :chunk] * block.to_state
        dkey_far = features.query_vjp(dstate, old, value, power, precision)
        dvalue_far = features.query(dstate, old, power, precision)[:-1] * block.to_state
        dlog_far = (old * dkey_far).sum(0) / power
        ddecay_far = blocks.folds_at(index) * (dlog_state - _sums_from(dlog_far))
        gradients = (
            dkey.at[:, :chunk].add(dkey_far),
            dvalue.at[:, :chunk].add(dvalue_far),
            _sums_from(dlog_near).at[:chunk].add(ddecay_far),
        )
        # Later chunks saw the last W keys of this block too.
        gradients = [g.at[..., chunk:].add(later) for g, later in zip(gradients, tail)]
        cotangent = features.fold(
            _columns(block.to_query * dsums_block), _columns(block.query), power, precision
        )
        carry = (
            tuple(block.carry * r + d for r, d in zip(dstate, blocks.weighted(cotangent))),
            [g[..., :window] for g in gradients],
            dlog_state - dlog_far.sum() + read.sum(),
        )
        return carry, (dquery, [g[..., window:] for g in gradients])

    dtype = dfinal[0].dtype
    width, value_width = blocks.key.shape[0], blocks.value.shape[0]
    shapes = (width, window), (value_width, window), (window,)
    tail = [jnp.zeros_like(dsums, dtype, shape=shape) for shape in shapes]
    (dstate, _, _), (dquery, gradients) = jax.lax.scan(
        step, (dfinal, tail, dlog_final.astype(dtype)), (blocks.indices, reads), reverse=True
    )
    return dquery, gradients, dstate


class _Block(NamedTuple):
    """One chunk's queries, the keys and values it sees exactly (a row of ones below), and its decays."""

    query: Float[Array, "G D C"]
    key: Float[Array, "D C+W"]
    value: Float[Array, "E+1 C+W"]
    near: Float[Array, "C C+W"]  # from each key to each query, zero where the query does not see it
    to_query: Float[Array, " C"]  # from the state to each query
    to_state: Float[Array, " C"]  # from each of the first C keys to the state it is folded into
    carry: Float[Array, ""]  # from the state to the next


class _Blocks:
    """The blocks of a sequence by index, cut on demand."""

    def __init__(self, settings, query, key, value, log_decay, folds, dtype):
        chunk, window = settings.chunk, settings.window
        count = query.shape[-1] // chunk
        self.settings, self.dtype = settings, dtype
        self.indices = jnp.arange(count)
        self.query = query
        front = [(0, 0), (window, 0)]
        self.key, self.value, self.folds = (
            jnp.pad(key, front),
            jnp.pad(value, front),
            jnp.pad(folds, front[1:]),
        )
        self.weights = features.weights(query.shape[1], settings.power, dtype)
        self.has_decay = log_decay is not None
        if self.has_decay:
            cut = np.arange(count)[:, None] * chunk + np.arange(chunk + window)
            block = jnp.pad(log_decay, front[1:])[cut]
            folded = jnp.where(self.folds[cut[:, :chunk]], block[:, :chunk], 0)
            self.coarse, self.fine = decays.split(block)
            self.to_query = decays.exp((self.coarse + self.fine)[:, window:])
            self.to_state = decays.exp(decays.suffix_sums(folded))
            self.carry = decays.exp(folded.sum(-1))

    def __getitem__(self, index) -> _Block:
        chunk, window = self.settings.chunk, self.settings.window
        seen = np.arange(chunk)[:, None] + window >= np.arange(chunk + window)
        folds = self.folds_at(index).astype(self.dtype)
        if self.has_decay:
            coarse, fine = jax.lax.optimization_barrier((self.coarse[index], self.fine[index]))
            between = (coarse[window:, None] - coarse) + (fine[window:, None] - fine)
            near = jnp.where(seen, decays.exp(between), 0)
            to_query, to_state, carry = self.to_query[index], self.to_state[index] * folds, self.carry[index]
        else:
            near = jnp.asarray(seen, self.dtype)
            to_query, to_state, carry = jnp.ones(chunk, self.dtype), folds, jnp.ones((), self.dtype)
        value = self._cut(self.value, index, chunk + window)
        return _Block(
            query=self.of_queries(self.query, index),
            key=self._cut(self.key, index, chunk + window),
            value=jnp.concatenate([value, jnp.ones_like(value, shape=(1, chunk + window))]),
            near=near,
            to_query=to_query,
            to_state=to_state,
            carry=carry,
        )

    def weighted(self, state):
        """The state times the weights of its features."""
        return tuple(s * w for s, w in zip(state, self.weights))

    def of_queries(self, x, index):
        """The chunk's part of an array over queries."""
        return self._cut(x, index, self.settings.chunk)

    def folds_at(self, index):
        """Which of the first C positions of the block enter the state."""
        return jax.lax.dynamic_slice_in_dim(self.folds, index * self.settings.chunk, self.settings.chunk)

    def _cut(self, x, index, length):
        part = jax.lax.dynamic_slice_in_dim(x, index * self.settings.chunk, length, -1)
        # Left to itself, XLA cuts again in every fusion that reads the part, which then is not vectorised on CPUs.
        return jax.lax.optimization_barrier(part.astype(self.dtype))


def _near_weights(settings, block):
    scores = jnp.einsum("gdq,dk->gqk", block.query, block.key, precision=settings.precision)
    return block.near * jax.lax.integer_pow(scores, settings.power), scores


def _near_vjp(settings, block, dsums):
    """Gradients of the block's exact part, and sums of d/d(log weight) by query and by key."""
    weights, scores = _near_weights(settings, block)
    dweights = jnp.einsum("geq,ek->gqk", dsums, block.value, precision=settings.precision)
    power = settings.power
    dscores = dweights * block.near * power * jax.lax.integer_pow(scores, power - 1)
    # Products with scores as they lie, queries first: of dq, only the result needs to be transposed.
    dquery = jnp.einsum("gqk,dk->gqd", dscores, block.key, precision=settings.precision).swapaxes(1, 2)
    dkey = jnp.einsum("gqk,gdq->dk", dscores, block.query, precision=settings.precision)
    dvalue = jnp.einsum("geq,gqk->ek", dsums[:, :-1], weights, precision=settings.precision)
    dlog = dweights * weights
    return dquery, dkey, dvalue, dlog.sum((0, 2)), dlog.sum((0, 1))


def _folded(settings, state, block):
    value = block.value[:, : settings.chunk] * block.to_state
    key = block.key[:, : settings.chunk]
    new = features.fold(value, key, settings.power, settings.precision)
    return tuple(block.carry * s + n for s, n in zip(state, new))


def _sums_from(x):
    """Sums over each position and those behind it."""
    return decays.suffix_sums(x) + x


def _columns(x):
    """[G, A, C] -> [A, G * C]: the query heads of a group side by side."""
    return x[0] if len(x) == 1 else jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def _groups(x, count):
    """[A, G * C] -> [G, A, C]."""
    return x[None] if count == 1 else jnp.moveaxis(x.reshape(x.shape[0], count, -1), 1, 0)


def _joined(chunks):
    """[n, ..., C] -> [..., n * C]."""
    joined = jnp.moveaxis(chunks, 0, -2)
    return joined.reshape(
        *joined.shape[:-2], joined.shape[-2] * joined.shape[-1]
    )  # -1 fails where there is nothing
