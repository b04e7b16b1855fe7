"""Shapes of arrays around the kernels, in plain JAX."""

import jax
import jax.numpy as jnp


def time_last(x):
    """Reshapes [H, n, C, D] to [H, D, X]."""
    return jnp.swapaxes(x, -1, -2).swapaxes(1, 2).reshape(len(x), x.shape[-1], -1)


def heads_first(x):
    """Reshapes [B, T, N, ...] to [HN, T, ...]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def from_heads_first(x, batch):
    """Reshapes [HN, T, ...] to [B, T, N, ...], the inverse of `heads_first`."""
    return jnp.swapaxes(x.reshape(batch, -1, *x.shape[1:]), 1, 2)


def pad(x, front, back):
    """Pads the second axis with zeros before and after."""
    return jnp.pad(x, [(0, 0), (front, back)] + [(0, 0)] * (x.ndim - 2))


def resized(x, length, axis=1):
    """Returns x truncated or zero-padded to a length of an axis."""
    x = jax.lax.slice_in_dim(x, 0, min(length, x.shape[axis]), axis=axis)
    return jnp.pad(x, [(0, length - n if a == axis else 0) for a, n in enumerate(x.shape)])


def fill(x, size):
    """Pads the last axis with zeros to `size`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def split(x):
    """Returns x [..., A, B] rounded to bfloat16, then the rounding errors in bfloat16: [..., 2 A, B]."""
    # The compiler may remove a conversion to the dtype and back, so use reduce_precision.
    rounded = jax.lax.reduce_precision(x, jnp.finfo(jnp.bfloat16).nexp, jnp.finfo(jnp.bfloat16).nmant)
    return jnp.concatenate([rounded.astype(jnp.bfloat16), (x - rounded).astype(jnp.bfloat16)], -2)


def unsplit(parts):
    """Returns x float32 [..., A, B] of `split`, exact to 2^-17."""
    rounded, errors = jnp.split(parts.astype(jnp.float32), 2, -2)
    return rounded + errors
