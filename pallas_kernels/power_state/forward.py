"""Power attention through states, on Hopper GPUs: update, then query."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import layout as layouts
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import quartic, segments
from pallas_kernels.power_state import query as query_kernel
from pallas_kernels.power_state import update as update_kernel

__all__ = ["power_state"]


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
    window: int = 64,
    state_dtype=jnp.float16,
    interpret=None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """The chunked form of power attention: exact near each query, through features for everything older.

    Query i's output is sum_j w_ij v_j / sum_j w_ij over j <= i with w_ij = exp(G_i - G_j) (q_i . k_j)^p, where G sums
    log_decay along time; zero where all weights are.

    query: bfloat16 [B, T, N, D]; key: bfloat16 [B, T, K, D]; value: bfloat16 [B, T, K, E]; N a multiple of K. At
        p = 2, D is filled up with zeros to 32, 64 or 128 and E to 64 or 128, at their cost; at p = 4 to 16 or 32.
    log_decay: float32 [B, T, K], at most 0; below -87 it is a boundary that nothing crosses, which is how a document
        starts. None is no decay.
    folds: bool [B, T]; positions where it is False never enter a state, nor does their decay. Only the last positions
        of a row may be excluded. None excludes the last `window`.
    initial_state: float32 kv [B, K, F, E] and norm [B, K, F], the features phi of positions before the first: in
        canonical order, non-decreasing indices lexicographically, with phi(q) . phi(k) = (q . k)^p. None is zero.
    chunk: positions between states; None is `chunk_for` T. window: positions before each chunk that its queries see
        exactly.
    state_dtype: what states between chunks are stored in, and operands of the products with them rounded to: float16,
        with powers of two kept apart, or bfloat16. Relative rounding error 2^-12 or 2^-9, independent in each entry.
        float32 is stored as the sum of two float16, with an error of 2^-22 at most, for twice the bytes and products.
        Products of a key and a value, and of two entries of a query, are rounded to the 16 bits in any case.
        At p = 4 only float16.
    interpret: parameters of the GPU interpreter, or None to run on a GPU.

    Returns the output bfloat16 [B, T, N, E]; the denominators sum_j w_ij, float32 [B, T, N], of queries divided by the
    powers of two that bring their largest entries into [1/2, 1); and the state of the positions that `folds` let in,
    like `initial_state`. Sums are float32. Raises NotImplementedError, naming the constraint, for what the kernels
    cannot do. Has no derivative of its own.
    """
    batch, time, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    chunk = chunk or configs.chunk_for(power=power, head_dim=head_dim, time=time)
    config = configs.choose(
        power=power,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=jnp.result_type(query, key, value),
        chunk=chunk,
        window=window,
        state_dtype=state_dtype,
    )
    if log_decay is None:
        log_decay = jnp.zeros(key.shape[:3], jnp.float32)
    if folds is None:
        folds = jnp.broadcast_to(jnp.arange(time) < time - window, (batch, time))
    options = {"config": config, "chunk": chunk, "window": window, "interpret": interpret}
    if power == 4:
        return quartic.power_state(query, key, value, log_decay, folds, initial_state, **options)
    operand, terms = configs.operands(state_dtype)
    layout, start, start_norm = _start(initial_state, key, value)
    arrays = preparation.prepare(
        _fill(query, layout.head_dim),
        _fill(key, layout.head_dim),
        _fill(value, start.shape[2]),
        log_decay,
        folds,
        # XLA folds the largest of many constant zeros while it compiles, for seconds a layer.
        jnp.zeros(len(start)) if initial_state is None else jnp.abs(start).max((1, 2, 3)),
        start_norm,
        layout=layout,
        chunk=chunk,
        window=window,
        state_dtype=operand,
    )
    states, final = _states(arrays, start, layout, config, chunk, terms, interpret)
    out, denominator = query_kernel.query_states(
        arrays.query,
        arrays.scalars,
        states,
        _split(arrays.norm[:, :-1], jnp.bfloat16, 2),
        arrays.key,
        arrays.value,
        arrays.decay,
        arrays.scale,
        layout=layout,
        **options,
    )
    out = jnp.swapaxes(out.reshape(batch, heads, *out.shape[1:])[:, :, :time, :value_dim], 1, 2)
    denominator = jnp.swapaxes(denominator.reshape(batch, heads, -1)[:, :, :time], 1, 2)
    unscale = jnp.exp2(arrays.shift[:, -1].astype(jnp.float32))
    kv = layouts.to_canonical(final[:, :, :value_dim], layout, head_dim) * unscale[:, None, None]
    norm = layouts.norm_to_canonical(arrays.norm[:, -1, :head_dim, :head_dim]) * unscale[:, None]
    return out, denominator, (kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1))


def _start(initial_state, key, value):
    """The layout of features, and the initial state in it: [H, 16, E, P] and Z [H, D, D], sizes filled up."""
    batch, _, kv_heads, head_dim = key.shape
    width, value_width = configs.filled(head_dim, value.shape[-1])
    layout, heads = layouts.Layout(width), batch * kv_heads
    if initial_state is None:
        start = jnp.zeros((heads, layouts.TILE, value_width, layout.width), jnp.float32)
        return layout, start, jnp.zeros((heads, width, width), jnp.float32)
    kv, norm = (x.reshape(heads, *x.shape[2:]) for x in initial_state)
    start = layouts.from_canonical(_fill(kv, value_width), layout, head_dim)
    norm = layouts.norm_from_canonical(norm, head_dim)
    return layout, start, jnp.pad(norm, [(0, 0)] + [(0, width - head_dim)] * 2)


def _states(arrays, start, layout, config, chunk, terms, interpret):
    """The state before each chunk [H, n, 16, terms E, P] and the last one [H, 16, E, P], both divided by 2^shift."""
    blocks = len(start) * update_kernel.blocks(layout, config, start.shape[2])
    count = configs.segments(blocks=blocks, chunks=arrays.carry.shape[1])
    start = numerics.scaled(start, -arrays.shift[:, :1, None, None])
    start = jnp.swapaxes(start.reshape(*start.shape[:3], layout.sections, -1), 2, 3)
    initial = jnp.zeros((len(start), count, *start.shape[1:]), jnp.float32).at[:, 0].set(start)
    states, finals = update_kernel.update(
        arrays.update_key,
        arrays.update_value,
        arrays.carry,
        initial,
        layout=layout,
        config=config,
        chunk=chunk,
        terms=terms,
        interpret=interpret,
    )
    finals = jnp.swapaxes(finals, 3, 4).reshape(*finals.shape[:3], -1, layout.width)
    if count == 1 or terms == 1:
        return segments.join(states, finals, arrays.log2_carry)
    whole = states.reshape(*states.shape[:3], terms, -1, layout.width).astype(jnp.float32).sum(3)
    whole, final = segments.join(whole, finals, arrays.log2_carry)
    return _split(whole, states.dtype, terms), final


def _split(x, dtype, terms):
    """x [..., A, B] as what rounding takes and leaves, terms on top of each other, [..., terms A, B]."""
    parts = []
    for _ in range(terms - 1):
        # A conversion there and back is one that the compiler may leave out.
        rounded = lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        parts.append(rounded.astype(dtype))
        x = x - rounded
    return jnp.concatenate([*parts, x.astype(dtype)], -2)


def _fill(x, size):
    """Zeros behind the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
