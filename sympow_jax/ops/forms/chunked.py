"""The chunked form: exact attention near each query, features for all older tokens, memory linear in time.

Functions take one head (callers `vmap`). C is `plan.chunk` and W is `plan.exact_window`. Chunk c holds positions
[cC, cC + C). Its queries attend exactly to the keys of the block [cC - W, cC + C). They read the state after the
positions before that block. Afterwards the state is updated with the first C positions of the block.

Sequences have time first. The loops read stacks of their chunks, which have time last and are made outside the loops:
XLA would merge a transposition inside into everything that reads the block, which prevents vectorization on CPUs. And
to transpose a sequence as a whole would take more time per token the longer it is, because its rows are far apart.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from sympow_jax.array_types import Array, Bool, Float
from sympow_jax.ops import decays, derivatives, layout, means, plans
from sympow_jax.ops.forms import features


@functools.partial(derivatives.custom_vjp, static=1)
def chunked(
    plan: plans.Plan,
    query: Float[Array, "X G D"],
    key: Float[Array, "X D"],
    value: Float[Array, "X E"],
    log_decay: Float[Array, " X"] | None,
    enters_state: Bool[Array, " X"],
    state: features.Groups,
    differentiated: bool = False,
):
    """Returns the weighted means [X, G, L] for the query heads of one key head, and the state after its last update.

    L is E, in the dtype of the state. With `Division.NONE` it is E + 1, for sums in place of the means, to which other
    sums may be added.

    X is a multiple of the chunk. `log_decay` comes from `decays.bounded`; None means no decay and no document boundary.
    Positions where `enters_state` is False never enter the state. `state` has the layout of `features`; the last column
    is the normalizer.

    Differentiable in query, key, value, log_decay and state. Saved for the backward pass, and also returned if
    `differentiated`: the arguments, the output, one denominator per query and the final state. Intermediate states and
    features are recomputed. With `Division.NONE` the output and the denominator are not saved.
    """
    blocks = _Blocks(plan, query, key, value, log_decay, enters_state, state[0].dtype)

    def step(state, index):
        block = blocks[index]
        # The exact part, then what the queries read from the state.
        weights, _ = block.weights_and_scores()
        sums = jnp.einsum("ek,gqk->geq", block.value, weights, precision=plan.precision)
        from_state = features.query(
            features.weighted(state, blocks.feature_weights),
            layout.merge_heads(block.query),
            plan.power,
            plan.precision,
        )
        sums += block.from_start * layout.split_heads(from_state, query.shape[1])
        state = block.updated(state)
        if plan.division is means.Division.NONE:
            return state, (sums,)
        denominator = sums[:, -1:]
        # Not rounded to the values' dtype, or a query of few keys and small weights gets a gradient of rounding errors.
        return state, (means.mean(sums[:, :-1], denominator, 1, plan.division), denominator)

    final, results = jax.lax.scan(step, state, blocks.indices)
    results = tuple(map(blocks.join, results))
    if not differentiated:
        return results[0], final
    final = tuple(ad_checkpoint.checkpoint_name(x, means.STATES_SAVED_AS) for x in final)
    divided = None
    if plan.division is not means.Division.NONE:
        divided = results = tuple(ad_checkpoint.checkpoint_name(x, means.SAVED_AS) for x in results)
    # Sums of weights have values of width 0. As a residual within `shard_map`, an empty array would be an argument of
    # the backward pass, and jax 0.11 crashes when it compiles a `shard_map` with an empty argument.
    saved = value if value.shape[1] else None
    return (results[0], final), (query, key, saved, log_decay, enters_state, state, divided, final)


def chunked_vjp(plan, residuals, cotangents):
    """Returns the gradients of `chunked` from what it saved and the gradients of its results."""
    query, key, value, log_decay, enters_state, state, divided, final = residuals
    value = key[:, :0] if value is None else value
    dsums, dfinal = cotangents
    denominator = None
    if divided is not None:
        out, denominator = divided
        dsums = jnp.concatenate(means.mean_vjp(out, denominator, dsums, 2, plan.division), 2)

    blocks = _Blocks(plan, query, key, value, log_decay, enters_state, state[0].dtype)
    dsums = blocks.stack(dsums)
    denominator = None if denominator is None else blocks.stack(denominator)

    def read_step(state, index):
        """Recomputes the state; returns dq through it, and d/d(log of the state) as each query reads it."""
        block = blocks[index]
        cotangent = block.from_start * blocks.cut_queries(dsums, index)
        dquery = features.query_vjp(
            features.weighted(state, blocks.feature_weights),
            layout.merge_heads(block.query),
            layout.merge_heads(cotangent),
            plan.power,
            plan.precision,
        )
        dquery = layout.split_heads(dquery, len(block.query))
        dlog_read = (block.query * dquery).sum(1) / plan.power
        return block.updated(state), (dquery, dlog_read)

    _, (dquery_from_state, dlog_reads) = jax.lax.scan(read_step, state, blocks.indices)
    # The derivative in the log of the final state.
    dlog_final = sum(jnp.vdot(d, s, precision=plan.precision) for d, s in zip(dfinal, final))
    dquery_in_window, (dkey, dvalue, ddecay), dstate = _other_gradients(
        plan, blocks, dsums, denominator, dlog_reads, dfinal, dlog_final
    )
    return (
        blocks.join(dquery_from_state + dquery_in_window).astype(query.dtype),
        blocks.join(dkey).astype(key.dtype),
        blocks.join(dvalue).astype(value.dtype),
        None if log_decay is None else blocks.join(ddecay),
        None,
        dstate,
    )


chunked.defvjp(functools.partial(chunked.fun, differentiated=True), chunked_vjp)


def _other_gradients(
    plan: plans.Plan,
    blocks: "_Blocks",
    dsums: Float[Array, "n G E+1 C"],
    denominator: Float[Array, "n G 1 C"] | None,
    dlog_reads: Float[Array, "n G C"],
    dfinal: features.Groups,
    dlog_final: Float[Array, ""],
):
    """Computes dq of the exact parts, the gradients of keys, values and decays, and that of the initial state.

    The scan runs backward over chunks. It carries dS, the gradient of the state S after the chunk; the gradients of the
    first W positions of the block, to which the chunk before adds; and <dS, S>, the derivative in the log of S.

    Gradients of log decays need no products of their own. A weight has degree p in query and key, so q_i . dq_i / p
    sums the gradients with respect to the logarithms of i's weights, and k_j . dk_j / p those of j's. The log decay at
    t contributes to every pair with a query at or after t and a key before t:

        dlog[t] = sum_{i >= t} dlog_query[i] - sum_{j >= t} dlog_key[j]

    over the queries i, with what they read of the state, and keys j of the block. If token t
    enters the state in this step, <dS, S> - sum_{j >= t} k_j . dk_j / p is added, over the keys that enter it, with
    their gradients through the state.
    """
    chunk, exact_window, power, precision = plan.chunk, plan.exact_window, plan.power, plan.precision

    def step(carry, inputs):
        dstate, later_gradients, dlog_state = carry
        index, dlog_read = inputs
        block = blocks[index]

        # The exact part: its queries attend to all keys of the block.
        dsums_block = blocks.cut_queries(dsums, index)
        denominator_block = None if denominator is None else blocks.cut_queries(denominator, index)
        dquery, dkey, dvalue, dlog_query, dlog_key = block.exact_vjp(
            dsums_block, denominator_block, dlog_read
        )
        dlog_read = dlog_read.sum(0)
        dlog_block = (-dlog_key).at[exact_window:].add(dlog_query + dlog_read)

        # The first C positions of the block enter the state, whose gradient gives theirs.
        key, value = block.key[:, :chunk], block.value[:, :chunk] * block.to_end
        dkey_by_state = features.query_vjp(dstate, key, value, power, precision)
        dvalue_by_state = features.query(dstate, key, power, precision)[:-1] * block.to_end
        dlog_by_state = (key * dkey_by_state).sum(0) / power
        ddecay_by_state = blocks.enters_state_at(index) * (dlog_state - decays.sums_from(dlog_by_state))
        gradients = (
            dkey.at[:, :chunk].add(dkey_by_state),
            dvalue.at[:, :chunk].add(dvalue_by_state),
            decays.sums_from(dlog_block).at[:chunk].add(ddecay_by_state),
        )

        # Queries of the next chunk attend to the last W keys of this block too.
        gradients = [g.at[..., chunk:].add(later) for g, later in zip(gradients, later_gradients)]

        # The state before the chunk: as it is carried to the next one, and as the queries read it.
        cotangent = features.fold(
            layout.merge_heads(block.from_start * dsums_block),
            layout.merge_heads(block.query),
            power,
            precision,
        )
        by_queries = features.weighted(cotangent, blocks.feature_weights)
        carry = (
            tuple(block.across * r + d for r, d in zip(dstate, by_queries)),
            [g[..., :exact_window] for g in gradients],
            dlog_state - dlog_by_state.sum() + dlog_read.sum(),
        )
        return carry, (dquery, [g[..., exact_window:] for g in gradients])

    dtype = dfinal[0].dtype
    width, value_width = blocks.key.shape[1], blocks.value.shape[1]
    shapes = (width, exact_window), (value_width, exact_window), (exact_window,)
    zeros = [jnp.zeros_like(dsums, dtype, shape=shape) for shape in shapes]
    (dstate, _, _), (dquery, gradients) = jax.lax.scan(
        step, (dfinal, zeros, dlog_final.astype(dtype)), (blocks.indices, dlog_reads), reverse=True
    )
    return dquery, gradients, dstate


class _Block(NamedTuple):
    """Queries of one chunk, the keys and values they attend to exactly (with a row of ones below), and decays."""

    plan: plans.Plan
    query: Float[Array, "G D C"]
    key: Float[Array, "D C+W"]
    value: Float[Array, "E+1 C+W"]
    # Decays, by the names of `ops.decays`.
    within: Float[Array, "C C+W"]  # from each key to each query, zero if the key is masked
    from_start: Float[Array, " C"]  # of the state, as each query reads it
    to_end: Float[Array, " C"]  # of each of the first C keys, as it enters the state
    across: Float[Array, ""]  # of the state, from this block to the next

    def weights_and_scores(self):
        """Returns the weights of the exact part, with their decays, and its scores."""
        scores = jnp.einsum("gdq,dk->gqk", self.query, self.key, precision=self.plan.precision)
        return self.within * jax.lax.integer_pow(scores, self.plan.power), scores

    def exact_vjp(
        self,
        dsums: Float[Array, "G E+1 C"],
        denominator: Float[Array, "G 1 C"] | None,
        dlog_read: Float[Array, "G C"],
    ):
        """Returns the gradients of the exact part, and sums of d/d(log weight) by query and by key.

        Scaling all weights of a query does not change its mean, so the gradients of their logarithms, including those
        through the state (`dlog_read`), sum to zero. What they sum to in floating point comes from rounding in the
        gradient of the denominator, a term of every weight's gradient. This sum over the denominator is subtracted from
        the gradients of the weights here. It matters where one weight outweighs all others: the gradient of its key is
        then the difference of nearly equal numbers. None as denominator subtracts nothing.
        """
        power, precision = self.plan.power, self.plan.precision
        weights, scores = self.weights_and_scores()
        dweights = jnp.einsum("geq,ek->gqk", dsums, self.value, precision=precision)
        if denominator is not None:
            error = (dweights * weights).sum(-1) + dlog_read
            dweights -= means.mean(error[..., None], denominator.swapaxes(1, 2), -1, self.plan.division)
        dscores = dweights * self.within * power * jax.lax.integer_pow(scores, power - 1)
        # Scores keep their layout, queries first. For dq only the result is transposed.
        dquery = jnp.einsum("gqk,dk->gqd", dscores, self.key, precision=precision).swapaxes(1, 2)
        dkey = jnp.einsum("gqk,gdq->dk", dscores, self.query, precision=precision)
        dvalue = jnp.einsum("geq,gqk->ek", dsums[:, :-1], weights, precision=precision)
        dlog = dweights * weights
        return dquery, dkey, dvalue, dlog.sum((0, 2)), dlog.sum((0, 1))

    def updated(self, state: features.Groups) -> features.Groups:
        """Returns the state updated with the first C keys."""
        chunk = self.query.shape[-1]
        new = features.fold(
            self.value[:, :chunk] * self.to_end, self.key[:, :chunk], self.plan.power, self.plan.precision
        )
        return tuple(self.across * s + n for s, n in zip(state, new))


class _Blocks:
    """Blocks of a sequence, indexed and sliced on demand."""

    def __init__(self, plan, query, key, value, log_decay, enters_state, dtype):
        chunk, exact_window = plan.chunk, plan.exact_window
        count = len(query) // chunk
        self.plan, self.dtype = plan, dtype
        self.indices = jnp.arange(count)
        self.query = self.stack(query)
        to_whole_chunks = ((exact_window, -exact_window % chunk), (0, 0))
        self.key, self.value = (self.stack(jnp.pad(x, to_whole_chunks)) for x in (key, value))
        self.enters_state = jnp.pad(enters_state, (exact_window, 0))
        self.feature_weights = features.weights(key.shape[1], plan.power, dtype)
        self.has_decay = log_decay is not None
        if self.has_decay:
            positions = self.indices[:, None] * chunk + jnp.arange(chunk + exact_window)
            block_log_decay = jnp.pad(log_decay, (exact_window, 0))[positions]
            folded = jnp.where(self.enters_state[positions[:, :chunk]], block_log_decay[:, :chunk], 0)
            self.coarse, self.fine = decays.split(block_log_decay)
            self.from_start = decays.exp((self.coarse + self.fine)[:, exact_window:])
            self.to_end = decays.exp(decays.sums_after(folded))
            self.across = decays.exp(folded.sum(-1))

    def __getitem__(self, index) -> _Block:
        chunk, exact_window = self.plan.chunk, self.plan.exact_window
        visible = jnp.tri(chunk, chunk + exact_window, exact_window, bool)
        enters_state = self.enters_state_at(index).astype(self.dtype)
        if self.has_decay:
            coarse, fine = jax.lax.optimization_barrier((self.coarse[index], self.fine[index]))
            queries = coarse[exact_window:, None], fine[exact_window:, None]
            within = decays.within(queries, (coarse, fine), visible)
            from_start, to_end, across = (
                self.from_start[index],
                self.to_end[index] * enters_state,
                self.across[index],
            )
        else:
            within = visible.astype(self.dtype)
            from_start, to_end, across = jnp.ones(chunk, self.dtype), enters_state, jnp.ones((), self.dtype)
        value = self.cut(self.value, index, chunk + exact_window)
        return _Block(
            plan=self.plan,
            query=self.cut_queries(self.query, index),
            key=self.cut(self.key, index, chunk + exact_window),
            value=jnp.concatenate([value, jnp.ones_like(value, shape=(1, chunk + exact_window))]),
            within=within,
            from_start=from_start,
            to_end=to_end,
            across=across,
        )

    def cut_queries(self, stack, index):
        """Returns the chunk's queries, or what belongs to them."""
        return self.cut(stack, index, self.plan.chunk)

    def enters_state_at(self, index):
        """Returns which of the first C positions of the block update the state."""
        return jax.lax.dynamic_slice_in_dim(self.enters_state, index * self.plan.chunk, self.plan.chunk)

    def stack(self, sequence: Float[Array, "X ..."]) -> Float[Array, "n ... C"]:
        """Returns the chunks of a sequence."""
        chunks = sequence.reshape(len(sequence) // self.plan.chunk, self.plan.chunk, *sequence.shape[1:])
        return jnp.moveaxis(chunks, 1, -1)

    def join(self, stack: Float[Array, "n ... C"]) -> Float[Array, "X ..."]:
        """Inverts `stack`."""
        chunks = jnp.moveaxis(stack, -1, 1)
        # A size of -1 fails for empty arrays.
        return chunks.reshape(chunks.shape[0] * chunks.shape[1], *chunks.shape[2:])

    def cut(self, stack, index, length):
        """Returns `length` positions from the beginning of a chunk, with time last."""
        part = jax.lax.dynamic_slice_in_dim(stack, index, -(-length // self.plan.chunk))
        part = layout.join_chunks(part)[..., :length]
        # Without the barrier XLA repeats the slice in every fusion that reads it, which prevents vectorization on CPUs.
        return jax.lax.optimization_barrier(part.astype(self.dtype))
