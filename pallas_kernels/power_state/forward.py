"""Power attention through states, on Hopper GPUs: update, then query."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import segments
from pallas_kernels.power_state.quartic import forward as quartic
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import query as query_kernel
from pallas_kernels.power_state.square import update as update_kernel

__all__ = [
    "attend",
    "chosen",
    "fold",
    "power_state",
    "power_state_fwd",
    "returned",
    "start_of",
    "stored_start",
    "walk",
    "whole",
]


def power_state(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    power: int = 2,
    log_decay: jax.Array | None = None,
    folds: jax.Array | None = None,
    initial_state: tuple[jax.Array, jax.Array] | None = None,
    chunk: int | None = None,
    exact_window: int = 64,
    state_dtype=jnp.float16,
    interpret=None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes the chunked form of power attention: exact near each query, through features for all older tokens.

    Query i's output is sum_j w_ij v_j / sum_j w_ij over j <= i with w_ij = exp(G_i - G_j) (q_i . k_j)^p, where G sums
    log_decay along time; it is zero if all weights are zero.

    It has no derivative of its own: use `power_state_vjp` in a custom_vjp. Sums are float32.

    Args:
        query: bfloat16 [B, T, N, D], N a multiple of K. At p = 2, D is padded with zeros to 32, 64 or 128 and E to 64
            or 128, at the cost of those sizes; at p = 4 to 16 or 32.
        key: bfloat16 [B, T, K, D].
        value: bfloat16 [B, T, K, E].
        power: p, 2 or 4.
        log_decay: float32 [B, T, K], at most 0; a value below -87 is a boundary that no pair crosses, which is how a
            document starts. None means no decay.
        folds: bool [B, T]; positions where it is False never enter a state, and neither does their decay. Only the last
            positions of a row may be excluded. None excludes the last `exact_window`.
        initial_state: float32 kv [B, K, F, E] and norm [B, K, F] of the positions before the first. The features phi
            are in canonical order, non-decreasing indices lexicographically, with phi(q) . phi(k) = (q . k)^p. None
            means zero.
        chunk: positions between states; None uses the result of `choose`.
        exact_window: positions before each chunk that its queries attend to exactly, at most a chunk.
        state_dtype: dtype of stored states and of the operands of products with them: float16, with separate
            power-of-two scales, or bfloat16. The relative rounding error is 2^-12 or 2^-9, independent in each entry.
            float32 is stored as the sum of two float16, with an error of at most 2^-22, for twice the bytes and
            products. Products of a key and a value, and of two entries of a query, are rounded to 16 bits in any case.
            At p = 4 only float16.
        interpret: parameters of the GPU interpreter, or None to run on a GPU.

    Returns:
        The output, bfloat16 [B, T, N, E]; the denominators sum_j w_ij, float32 [B, T, N], of queries divided by the
        powers of two that bring their largest entries into [1/2, 1); and the state of the positions where `folds` is
        True, like `initial_state`.

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.
    """
    if log_decay is None:
        log_decay = jnp.zeros(key.shape[:3], jnp.float32)
    if folds is None:
        folds = jnp.broadcast_to(jnp.arange(key.shape[1]) < key.shape[1] - exact_window, key.shape[:2])
    options = {"power": power, "exact_window": exact_window, "state_dtype": state_dtype}
    chunk = chosen(key, value, chunk=chunk, **options).chunk
    results, _ = power_state_fwd(
        query,
        key,
        value,
        log_decay,
        folds,
        initial_state,
        chunk=chunk,
        interpret=interpret,
        **options,
    )
    return results


def power_state_fwd(query, key, value, log_decay, folds, initial_state=None, **options):
    """Returns (results of `power_state`, Saved); its backward pass reads both."""
    saved, final = fold(key, value, log_decay, folds, initial_state, **options)
    return (*attend(query, key, value, log_decay, folds, saved, **options), final), saved


def fold(
    key, value, log_decay, folds, initial_state=None, *, power, chunk, exact_window, state_dtype, interpret
):
    """Returns the states before each chunk, and the final state, like `initial_state`.

    Arguments as in `power_state`.
    """
    config = chosen(key, value, power=power, chunk=chunk, exact_window=exact_window, state_dtype=state_dtype)
    if power == 4:
        arguments = key, value, log_decay, folds, initial_state, config, chunk, exact_window, interpret
        return quartic.fold(*arguments)
    batch, _, kv_heads, head_dim = key.shape
    operand, terms = configs.operands(state_dtype)
    layout, start, start_norm = start_of(initial_state, key, value)
    of = preparation.tokens(
        preparation.fill(key, layout.head_dim),
        preparation.fill(value, start.shape[2]),
        log_decay,
        folds,
        chunk=chunk,
        exact_window=exact_window,
    )
    carried = preparation.carried_keys(of, preparation.size_of(start, initial_state), power)
    states, final = walk(
        *preparation.update_operands(of.old_key, of.old_value, carried, operand),
        carried,
        start,
        layout=layout,
        config=config,
        chunk=chunk,
        terms=terms,
        interpret=interpret,
    )
    norm = preparation.square_norms(of.old_key, carried.strength, carried, start_norm)
    saved = preparation.Saved.of(states, norm, carried.shift, batch)
    sizes = batch, kv_heads, head_dim, value.shape[-1]
    return saved, returned(final, norm[:, -1], carried.shift[:, -1], layout, sizes)


def attend(query, key, value, log_decay, folds, saved, *, power, chunk, exact_window, state_dtype, interpret):
    """Returns the output and the denominators, from the states before each chunk.

    Arguments as in `power_state`.
    """
    config = chosen(key, value, power=power, chunk=chunk, exact_window=exact_window, state_dtype=state_dtype)
    if power == 4:
        return quartic.attend(
            query, key, value, log_decay, folds, saved, config, chunk, exact_window, interpret
        )
    batch, time, *_ = query.shape
    value_dim = value.shape[-1]
    width, value_width = configs.filled(query.shape[-1], value_dim)
    of = preparation.tokens(
        preparation.fill(key, width),
        preparation.fill(value, value_width),
        log_decay,
        folds,
        chunk=chunk,
        exact_window=exact_window,
    )
    unit, _ = preparation.queries(preparation.fill(query, width), chunk)
    states, norm, shift = saved.by_head()
    out, denominator = query_kernel.query_states(
        unit,
        jnp.swapaxes(unit, 1, 2).astype(states.dtype),
        states,
        preparation.split(norm, jnp.bfloat16, 2),
        of.key,
        of.value,
        of.decay,
        preparation.scale_of(of, shift),
        layout=layouts.Layout(width),
        config=config,
        chunk=chunk,
        exact_window=exact_window,
        interpret=interpret,
    )
    out, denominator = (preparation.tokens_second(x, batch)[:, :time] for x in (out, denominator))
    return out[..., :value_dim], denominator


def chosen(key, value, **options):
    """Returns `config.choose` for these arrays."""
    batch, time, kv_heads, head_dim = key.shape
    sizes = {"head_dim": head_dim, "value_dim": value.shape[-1], "time": time, "heads": batch * kv_heads}
    return configs.choose(**sizes, dtype=jnp.result_type(key, value), **options)


def returned(state, norm, shift, layout, sizes):
    """Converts a stored state and its normalizer to canonical order: the inverse of `start_of`.

    state: [H, 16, E, P] and norm: Z [H, D, D], both divided by 2^shift [H]. sizes: B, K, D and E before padding.
    """
    batch, kv_heads, head_dim, value_dim = sizes
    unscale = jnp.exp2(shift.astype(jnp.float32))
    kv = layouts.to_canonical(state[:, :, :value_dim], layout, head_dim) * unscale[:, None, None]
    norm = layouts.norm_to_canonical(norm[:, :head_dim, :head_dim]) * unscale[:, None]
    return kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1)


def start_of(initial_state, key, value):
    """Returns the layout of features, and the initial state in it: [H, 16, E, P] and Z [H, D, D], with padded sizes."""
    batch, _, kv_heads, head_dim = key.shape
    width, value_width = configs.filled(head_dim, value.shape[-1])
    layout, heads = layouts.Layout(width), batch * kv_heads
    if initial_state is None:
        start = jnp.zeros((heads, layouts.TILE, value_width, layout.width), jnp.float32)
        return layout, start, jnp.zeros((heads, width, width), jnp.float32)
    kv, norm = (x.reshape(heads, *x.shape[2:]) for x in initial_state)
    start = layouts.from_canonical(preparation.fill(kv, value_width), layout, head_dim)
    norm = layouts.norm_from_canonical(norm, head_dim)
    return layout, start, jnp.pad(norm, [(0, 0)] + [(0, width - head_dim)] * 2)


def stored_start(state, key, value, power):
    """Converts a state (kv, norm) to the layout of stored states, but in float32 and in its own scale."""
    if power == 4:
        return quartic.stored_start(state, key, value)
    return start_of(state, key, value)[1:]


def whole(states, terms):
    """Returns states [H, n, ..., terms E, P] in float32, as the sum of their terms."""
    shape = *states.shape[:-2], terms, states.shape[-2] // terms, states.shape[-1]
    return states.astype(jnp.float32).reshape(shape).sum(-3)


def walk(key, value, carried, start, *, layout, config, chunk, terms, interpret):
    """Returns the state before each chunk [H, n, 16, terms E, P] and the last one [H, 16, E, P], divided by 2^shift.

    key, value: operands of the update kernel, of n chunks; start: [H, 16, E, P], the state before the first.
    """
    count = config.segments
    start = numerics.scaled(start, -carried.shift[:, :1, None, None])
    start = jnp.swapaxes(start.reshape(*start.shape[:3], layout.sections, -1), 2, 3)
    initial = jnp.zeros((len(start), count, *start.shape[1:]), jnp.float32).at[:, 0].set(start)
    states, finals = update_kernel.update(
        key,
        value,
        carried.carry,
        initial,
        layout=layout,
        config=config,
        chunk=chunk,
        terms=terms,
        interpret=interpret,
    )
    finals = jnp.swapaxes(finals, 3, 4).reshape(*finals.shape[:3], -1, layout.width)
    if count == 1 or terms == 1:
        return segments.join(states, finals, carried.log2_carry, interpret=interpret)
    joined, final = segments.join(whole(states, terms), finals, carried.log2_carry, interpret=interpret)
    return preparation.split(joined, states.dtype, terms), final
