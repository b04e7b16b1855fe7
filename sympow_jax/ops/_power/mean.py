"""The division of sums of weighted values by sums of weights."""

import functools

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from sympow_jax.array_types import Array, Float

__all__ = ["SAVED_AS", "STATES_SAVED_AS", "mean", "mean_vjp"]

# What policies of `jax.checkpoint` know by that the backward pass reads: means and denominators, and states.
SAVED_AS = "power_attention_out"
STATES_SAVED_AS = "power_attention_states"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def mean(
    numerator: Float[Array, "*rest"], denominator: Float[Array, "*rest"], axis: int
) -> Float[Array, "*rest"]:
    """numerator / denominator, zero where no weight is positive; the denominator has size 1 along `axis`.

    JAX's own gradient squares the denominator, which overflows where weights are p-th powers of small keys.
    """
    some = denominator > 0
    return jnp.where(some, numerator / jnp.where(some, denominator, 1), 0)


def mean_vjp(out, denominator, dout, axis):
    """With o = n / d: dn = do / d and dd = -(dn . o)."""
    some = denominator > 0
    dnumerator = jnp.where(some, dout / jnp.where(some, denominator, 1), 0)
    return dnumerator, -(dnumerator * out).sum(axis, keepdims=True)


def _mean_fwd(numerator, denominator, axis):
    results = mean(numerator, denominator, axis), denominator
    out, denominator = (ad_checkpoint.checkpoint_name(x, SAVED_AS) for x in results)
    return out, (out, denominator)


def _mean_bwd(axis, residuals, dout):
    return mean_vjp(*residuals, dout, axis)


mean.defvjp(_mean_fwd, _mean_bwd)
