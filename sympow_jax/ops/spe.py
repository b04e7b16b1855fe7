"""Stochastic positional encoding by sines: relative positions for attention that is linear in time.

"Relative Positional Encoding for Transformers with Linear Complexity" (Liutkus et al. 2021), its sineSPE (section 3.2).
Queries and keys become R random sums of their dimensions. The expected value of their dot product over the noise is a
dot product weighted in every dimension d by a template P_d of the distance.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import arguments, layout, phase, sharding

__all__ = ["encode"]

_HIGHEST = jax.lax.Precision.HIGHEST


def encode(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    *,
    frequencies: Float[Array, "K D sines"],
    phases: Float[Array, "K D sines"],
    gains: Float[Array, "K D sines"],
    noise: Float[Array, "K D 2*sines R"],
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T K R"]]:
    """Encodes queries and keys so that E[q . k] = sum_d q_d k_d P_d(t - s).

    The query is at t and the key at s, and the expectation is over normal noise. P_d(tau) = sum_j gain_j^2
    cos(2 pi f_j tau + phase_j); `frequencies` are in turns per position, `phases` in radians. The R realizations are
    the head size of the encoded vectors, and so of a state. Their error falls as 1 / sqrt(R).

    `noise` is independent and standard normal, first the noise of the cosines, then that of the sines. It is the same
    for queries and keys and at every position, and must not change during the lifetime of a state. The paper draws anew
    for every batch; a caller who keeps one draw trains and evaluates with one fixed random kernel near P. Head n uses
    the parameters and noise of key head n // (N / K). Phases are right at any position from 0 to 2^31 (`ops.phase`).
    The gradient with respect to a frequency is a difference of terms as large as the positions, and its float32 error
    grows with them. The paper's gate, which mixes in an unencoded part, is left out.

    Computed in float32 or wider, returned in the dtypes of `query` and `key`.

    Raises:
        ValueError: shapes do not match.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from sympow_jax.ops import spe
        >>> query, key = jnp.ones((2, 1, 8, 4, 16))
        >>> sines = jnp.full((4, 16, 3), 0.1)  # frequencies, phases and gains of 3 sines: [K, D, sines]
        >>> noise = jax.random.normal(jax.random.key(0), (4, 16, 6, 32))
        >>> query, key = spe.encode(
        ...     query, key, jnp.arange(8)[None], frequencies=sines, phases=sines, gains=sines, noise=noise
        ... )
        >>> query.shape
        (1, 8, 4, 32)
    """
    query, key, positions, frequencies, phases, gains, noise = arguments.to_arrays(
        query=query,
        key=key,
        positions=positions,
        frequencies=frequencies,
        phases=phases,
        gains=gains,
        noise=noise,
    )
    arguments.check_axes("query", query, "[B, T, N, D]")
    arguments.check_axes("key", key, "[B, T, K, D]")
    heads, (kv_heads, head_dim) = query.shape[2], key.shape[2:]
    if query.shape[-1] != head_dim or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads of size {query.shape[-1]} and key {kv_heads} of size {head_dim}; sizes must "
            f"agree and the key's heads divide the query's"
        )
    shapes = {"frequencies": frequencies.shape, "phases": phases.shape, "gains": gains.shape}
    sines = frequencies.shape[-1]
    for name, shape in shapes.items():
        if shape != (kv_heads, head_dim, sines):
            raise ValueError(
                f"{name} has shape {shape}; it must be [{kv_heads}, {head_dim}, {sines}], K by D by sines"
            )
    if noise.ndim != 4 or noise.shape[:3] != (kv_heads, head_dim, 2 * sines):
        raise ValueError(
            f"noise has shape {noise.shape}; it must be [{kv_heads}, {head_dim}, {2 * sines}, realizations], since "
            f"each of {sines} sines has a cosine too"
        )
    arguments.check_positions("positions", positions, "[B, T]")
    arguments.check_same_length(query, key)
    if any(n not in (1, size) for n, size in zip(positions.shape, query.shape)):
        raise ValueError(
            f"positions has shape {positions.shape}; it must be {query.shape[:2]}, one per token"
        )
    return _encode(
        None,
        query=query,
        key=key,
        positions=positions,
        frequencies=frequencies,
        phases=phases,
        gains=gains,
        noise=noise,
    )


@sharding.op({"query": "B T N D", "key": "B T K D"}, lambda _: ("B T N R", "B T K R"))
def _encode(_, query, key, positions, frequencies, phases, gains, noise):
    dtype = np.promote_types(np.promote_types(query.dtype, key.dtype), jnp.float32)
    # Phases rotate the noise of the queries, so that queries and keys can use the same cosines and sines.
    cos, sin = (wave(phases.astype(dtype))[..., None] for wave in (jnp.cos, jnp.sin))
    even, odd = jnp.split(noise.astype(dtype), 2, axis=2)
    rotated = jnp.concatenate([even * cos + odd * sin, odd * cos - even * sin], axis=2)
    scale = jnp.concatenate([gains, gains], axis=-1).astype(dtype)[..., None] * noise.shape[-1] ** -0.5

    waves = _waves(positions, frequencies, dtype)
    return _mixed(query, waves, scale * rotated), _mixed(key, waves, scale * noise.astype(dtype))


def _waves(positions, frequencies, dtype):
    """Returns cosines and sines of 2 pi f s, [B, T, K, D, 2 * sines]."""
    angles = phase.learned(positions, frequencies, unit="turns", dtype=dtype)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _mixed(x, waves, mixing):
    """Returns the sum over d and j of x_d waves_dj mixing_djr, [B, T, N, R]."""
    kv_heads, head_dim, width, realizations = mixing.shape
    groups = layout.by_group(x, kv_heads).astype(waves.dtype)
    waving = (groups[..., None] * waves[:, :, :, None]).reshape(*groups.shape[:-1], head_dim * width)
    mixing = mixing.reshape(kv_heads, head_dim * width, realizations)
    mixed = jnp.einsum("BTKGX,KXR->BTKGR", waving, mixing, precision=_HIGHEST)
    return mixed.reshape(*x.shape[:3], realizations).astype(x.dtype)
