"""The backward pass of power attention through states, on Hopper GPUs.

With R_c the gradient with respect to the state after chunk c, the dual state, and u = do / denominator,

    R_{c-1} = exp(decay over c) R_c + sum over queries of c of exp(g) phi(q) u^T,

which is the update walking chunks backwards, with queries for keys and u for values. From states and dual states one
kernel computes the gradients of queries, another those of keys and values. Each also sums the gradients with respect
to the logarithms of weights, by query and by key: the gradient of the decays needs no more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import forward
from pallas_kernels.power_state import key_vjp as key_kernel
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import prepare_vjp as preparation_vjp
from pallas_kernels.power_state import query_vjp as query_kernel

__all__ = ["Gradients", "power_state_vjp"]


class Gradients(NamedTuple):
    """With respect to the arguments of `power_state` of these names, in their dtypes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None
    initial_state: tuple[jax.Array, jax.Array]


def power_state_vjp(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    denominator: jax.Array,
    saved: forward.Saved,
    dout: jax.Array,
    dfinal: tuple[jax.Array, jax.Array] | None = None,
    *,
    power: int = 2,
    log_decay: jax.Array | None = None,
    folds: jax.Array | None = None,
    chunk: int,
    window: int = 64,
    state_dtype=jnp.float16,
    interpret=None,
) -> Gradients:
    """Gradients of `power_state`, from its arguments and what `power_state_fwd` returned for them.

    dout: bfloat16 [B, T, N, E]; dfinal: float32, like the final state; None is zero. Sums are float32, each in an order
    of its own that never changes. Memory beside arguments and results: dual states, as large as the saved ones.
    """
    (batch, time, _, head_dim), (kv_heads, value_dim) = query.shape, value.shape[2:]
    config = configs.choose(
        power=power,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=jnp.result_type(query, key, value),
        chunk=chunk,
        window=window,
        state_dtype=state_dtype,
    )
    decays = jnp.zeros(key.shape[:3], jnp.float32) if log_decay is None else log_decay
    if folds is None:
        folds = jnp.broadcast_to(jnp.arange(time) < time - window, (batch, time))
    operand, terms = configs.operands(state_dtype)
    layout, end, end_norm = forward.start_of(dfinal, key, value)
    query, key = (forward.fill(x, layout.head_dim) for x in (query, key))
    value, out, dout = (forward.fill(x, end.shape[2]) for x in (value, out, dout))

    of = preparation.tokens(query, key, value, decays, folds, chunk=chunk, window=window)
    mean = preparation_vjp.mean_of(out, denominator, dout, of.query.shape[1])
    dual = preparation_vjp.dual_of(of, mean, jnp.abs(end).max((1, 2, 3)))
    dual_norm = preparation.square_norms(
        dual.query, dual.carried.strength * dual.dnorm, dual.carried, end_norm
    )
    options = {"layout": layout, "config": config, "interpret": interpret}
    duals, first = forward.walk(
        *preparation.update_operands(dual.query, dual.value, dual.carried, layout, operand),
        dual.carried,
        end,
        chunk=dual.query.shape[2],
        terms=terms,
        **options,
    )
    states, norm, shift = (x.reshape(-1, *x.shape[2:]) for x in saved)
    dquery, of_queries = query_kernel.query_vjp(
        of.query,
        jnp.swapaxes(of.query, 1, 2).astype(operand),
        mean.dout,
        states,
        forward.split(norm, jnp.bfloat16, 2),
        of.key,
        of.value,
        of.decay,
        _rows_of_queries(of, mean, shift),
        chunk=chunk,
        window=window,
        **options,
    )
    chunks = -(-(time + window) // chunk)
    dkey, dvalue, of_keys = key_kernel.key_vjp(
        preparation_vjp.lengthened(of.key, chunks * chunk),
        _scalars_of_keys(of, chunks * chunk).astype(operand),
        preparation_vjp.lengthened(of.value, chunks * chunk),
        duals,
        forward.split(dual_norm[:, :-1], jnp.bfloat16, 2),
        of.query,
        mean.dout,
        _rows_of_keys(of, dual.carried.shift, chunks),
        preparation_vjp.columns(of, mean, window),
        chunk=chunk,
        window=window,
        **options,
    )
    ddecay = None
    if log_decay is not None:
        inner = _inner(
            of, states, norm, shift, duals, dual_norm, dual.carried.shift, layout, value_dim=end.shape[2]
        )
        sums = preparation_vjp.sums_of(of, of_queries, of_keys, inner, window)
        ddecay = preparation_vjp.decay_gradient(of, sums, window)
        ddecay = tokens_second(ddecay[:, window : window + time], batch)
    dquery = numerics.scaled(dquery, -of.query_exponent)[:, :time, :head_dim]
    dkey, dvalue = (x[:, window : window + time] for x in (dkey, dvalue))
    return Gradients(
        query=tokens_second(dquery, batch),
        key=tokens_second(dkey[..., :head_dim], batch),
        value=tokens_second(dvalue[..., :value_dim], batch),
        log_decay=ddecay,
        initial_state=forward.returned(
            first, dual_norm[:, -1], dual.carried.shift[:, -1], layout, (batch, kv_heads, head_dim, value_dim)
        ),
    )


def tokens_second(x, batch):
    """[B N, T, ...] -> [B, T, N, ...]."""
    return jnp.swapaxes(x.reshape(batch, -1, *x.shape[1:]), 1, 2)


def _rows_of_queries(of, mean, shift):
    """As `query_vjp.Rows`, float32 [B N, X / 64, 5, 64]."""
    group = len(of.query) // len(shift)
    scale = preparation.scaled_decay(of.from_state, shift[..., None]).reshape(len(shift), -1)
    scale = jnp.repeat(scale, group, 0)
    exponent = preparation.exponent_of(mean.dout)[..., 0]
    rows = query_kernel.Rows(
        narrow=numerics.scaled(jnp.ones_like(scale), -exponent),
        far=numerics.scaled(scale, exponent),
        far_norm=2 * scale * mean.delta,
        delta=mean.delta,
        inverse=mean.inverse,
    )
    return preparation_vjp.vectors(*rows)


def _scalars_of_keys(of, length):
    """Keys with largest entries in [1/2, 1), time last, [H, D, Y]; zeros where no state is met."""
    return preparation_vjp.lengthened(preparation.time_last(of.old_key), length, axis=2)


def _rows_of_keys(of, dual_shift, chunks):
    """As `key_vjp.Rows`, float32 [H, Y / 64, 9, 64], for keys in `chunks` chunks."""
    heads, count, chunk, _ = of.old_key.shape
    shift = jnp.flip(dual_shift[:, :count], 1)[..., None]
    key_exponent = of.old_exponent[..., 0]
    value_exponent = preparation.exponent_of(of.old_value)[..., 0]

    def met(exponent):
        x = preparation.scaled_decay(of.to_state, shift + exponent)
        return preparation_vjp.lengthened(x.reshape(heads, -1), chunks * chunk)

    def narrow(exponent):
        exponent = preparation_vjp.lengthened(exponent.reshape(heads, -1), chunks * chunk)
        return numerics.scaled(jnp.ones(exponent.shape, jnp.float32), -exponent)

    rows = key_kernel.Rows(
        narrow(key_exponent),
        narrow(value_exponent),
        met(key_exponent + value_exponent),
        2 * met(0),
        met(2 * key_exponent),
        *preparation_vjp.decays_of_keys(of, chunks),
    )
    return preparation_vjp.vectors(*rows)


def _inner(of, states, norm, shift, duals, dual_norm, dual_shift, layout, *, value_dim):
    """The state before each chunk, decayed over it, times the gradient with respect to the one after it, [H, n]."""
    count = states.shape[1]

    def whole(x):
        return x.astype(jnp.float32).reshape(*x.shape[:3], -1, value_dim, layout.width).sum(3)

    duals, dual_norm, dual_shift = (jnp.flip(x[:, :count], 1) for x in (duals, dual_norm, dual_shift))
    inner = (whole(states) * whole(duals) * layout.weights).sum((2, 3, 4)) + (norm * dual_norm).sum((2, 3))
    return preparation.scaled_decay(of.over_chunk, (shift + dual_shift).astype(jnp.float32)) * inner
