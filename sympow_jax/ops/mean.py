"""Division of sums of weighted values by sums of weights."""

import enum
import functools

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from sympow_jax.array_types import Array, Float
from sympow_jax.ops.promotion import by_default_rules

__all__ = ["SAVED_AS", "STATES_SAVED_AS", "Division", "mean", "mean_vjp", "of_sums"]

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


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def mean(
    numerator: Float[Array, "*rest"],
    denominator: Float[Array, "*rest"],
    axis: int,
    division: Division = Division.POSITIVE,
) -> Float[Array, "*rest"]:
    """Returns numerator / denominator, zero where `division` requires it; the denominator has size 1 along `axis`.

    JAX's own gradient squares the denominator, which overflows where weights are p-th powers of small keys.
    """
    some = _some(denominator, division)
    return jnp.where(some, numerator / jnp.where(some, denominator, 1), 0)


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
    some = _some(denominator, division)
    dnumerator = jnp.where(some, dout / jnp.where(some, denominator, 1), 0)
    return dnumerator, -(dnumerator * out).sum(axis, keepdims=True)


def _some(denominator, division):
    # A NaN sum counts as nonzero, so the mean is NaN and not zero.
    return denominator != 0 if division is Division.SIGNED else ~(denominator <= 0)


@mean.defjvp
@by_default_rules
def _mean_jvp(axis, division, primals, tangents):
    numerator, denominator = primals
    results = mean(numerator, denominator, axis, division), denominator
    out, denominator = (ad_checkpoint.checkpoint_name(x, SAVED_AS) for x in results)
    some = _some(denominator, division)
    change = tangents[0] - out * tangents[1]
    return out, jnp.where(some, change / jnp.where(some, denominator, 1), 0)
