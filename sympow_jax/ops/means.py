"""Division of sums of weighted values by sums of weights."""

import enum
import functools

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from sympow_jax.array_types import Array, Float
from sympow_jax.ops import derivatives

# Checkpoint names, for policies of `jax.checkpoint`, of the residuals: means and denominators, and states.
SAVED_AS = "power_attention_out"
STATES_SAVED_AS = "power_attention_states"


class Division(enum.Enum):
    """Rule for dividing sums of weighted values by sums of weights.

    POSITIVE: weights are not negative. If their sum is not positive, which only rounding can cause, the mean is zero.
    SIGNED: weights may be of either sign. The mean is zero only if their sum is exactly zero.
    NONE: no division. The sums themselves are returned, and queries are not rescaled.
    """

    POSITIVE = enum.auto()
    SIGNED = enum.auto()
    NONE = enum.auto()


def mean(
    numerator: Float[Array, "*rest"],
    denominator: Float[Array, "*rest"],
    axis: int,
    division: Division = Division.POSITIVE,
) -> Float[Array, "*rest"]:
    """Returns numerator / denominator, zero where `division` requires it; the denominator has size 1 along `axis`.

    JAX's own derivative squares the denominator, which overflows where weights are p-th powers of small keys.
    """
    return _mean(axis, division, numerator, denominator)


def of_sums(sums: Float[Array, "*rest"], axis: int, division: Division) -> Float[Array, "*rest"]:
    """Returns the mean from sums of weighted values and, last along `axis`, of weights.

    Without division it returns the sums unchanged.
    """
    if division is Division.NONE:
        return sums
    last = sums.shape[axis] - 1
    numerator, denominator = (
        jax.lax.slice_in_dim(sums, *ends, axis=axis) for ends in ((0, last), (last, last + 1))
    )
    return mean(numerator, denominator, axis, division)


def mean_vjp(out, denominator, dout, axis, division=Division.POSITIVE):
    """Returns the gradients of numerator and denominator.

    With o = n / d, dn = do / d and dd = -(dn . o).
    """
    dnumerator = _divided(division, dout, denominator)
    return dnumerator, -(dnumerator * out).sum(axis, keepdims=True)


def _divided(division, numerator, denominator):
    # A NaN sum counts as nonzero, so the mean is NaN and not zero.
    some = denominator != 0 if division is Division.SIGNED else ~(denominator <= 0)
    return jnp.where(some, numerator / jnp.where(some, denominator, 1), 0)


@functools.partial(derivatives.custom_vjp, static=2)
def _mean(axis, division, numerator, denominator):
    del axis
    return _divided(division, numerator, denominator)


def _mean_fwd(axis, division, numerator, denominator):
    results = _mean(axis, division, numerator, denominator), denominator
    out, denominator = (ad_checkpoint.checkpoint_name(x, SAVED_AS) for x in results)
    return out, (out, denominator)


def _mean_bwd(axis, division, residuals, dout):
    return mean_vjp(*residuals, dout, axis, division)


def _mean_jvp(axis, division, residuals, changes):
    del axis
    (out, denominator), (dnumerator, ddenominator) = residuals, changes
    return _divided(division, dnumerator - out * ddenominator, denominator)


_mean.defvjp(_mean_fwd, _mean_bwd, _mean_jvp)
