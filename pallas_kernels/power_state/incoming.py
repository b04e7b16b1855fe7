"""States that only become known after their chunks were folded: those of earlier positions on another device.

Each device folds its own positions from nothing, the final states are combined over devices, and what arrives is added
to the states before each chunk; nothing is folded twice. The dual states of the backward pass, which come from later
positions, are met in the same way.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import forward
from pallas_kernels.power_state import prepare as preparation

__all__ = ["add_incoming"]


def add_incoming(
    saved: preparation.Saved,
    final: tuple[jax.Array, jax.Array],
    incoming: tuple[jax.Array, jax.Array],
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    folds: jax.Array,
    *,
    power: int,
    chunk: int,
    exact_window: int,
    state_dtype,
    reverse: bool = False,
) -> tuple[preparation.Saved, tuple[jax.Array, jax.Array]]:
    """What `forward.fold` would have returned with `incoming` for the initial state, from what it did without one.

    reverse: the same for `backward.fold_vjp`, with `incoming` for the gradient of the final state.
    """
    over = preparation.over_chunks(log_decay, folds, chunk=chunk, exact_window=exact_window)
    over = jnp.flip(over, 1) if reverse else over
    since = jnp.cumsum(jnp.pad(over, [(0, 0), (1, 0)]), 1)
    start, norm = forward.stored_start(incoming, key, value, power)
    states, norms, shifts = saved.by_head()

    # A scale for both: entries stay below 2^HEADROOM. The shift of an empty state means nothing: what arrives may be
    # so small that it would vanish in float16, or so large that it would not fit.
    least = jnp.finfo(jnp.float32).minexp
    shifts = jnp.where((states != 0).any((2, 3, 4)) | (norms != 0).any((2, 3)), shifts, least)
    size = jnp.log2(jnp.maximum(jnp.abs(start).max((1, 2, 3)), jnp.finfo(jnp.float32).tiny))[:, None]
    bound = jnp.logaddexp2(shifts + float(preparation.HEADROOM), since[:, :-1] + size)
    scale = jnp.maximum(jnp.ceil(bound).astype(jnp.int32) - preparation.HEADROOM, shifts)
    kept, added = jnp.exp2((shifts - scale).astype(jnp.float32)), jnp.exp2(since[:, :-1] - scale)

    operand, terms = configs.operands(state_dtype)
    whole = forward.whole(states, terms)
    whole = kept[..., None, None, None] * whole + added[..., None, None, None] * start[:, None]
    norms = kept[..., None, None] * norms + added[..., None, None] * norm[:, None]
    states = preparation.split(whole, operand, terms)
    saved = preparation.Saved(
        *(x.reshape(*y.shape) for x, y in zip((states, norms, scale), saved, strict=True))
    )
    decay = jnp.exp2(since[:, -1]).reshape(final[1].shape[:2])[..., None]
    kv, norm = final[0] + decay[..., None] * incoming[0], final[1] + decay * incoming[1]
    return saved, (kv, norm)
