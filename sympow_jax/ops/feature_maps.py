"""Feature maps phi with phi(q) . phi(k) equal to a kernel of q and k.

The recurrent state of an attention layer holds sum_j phi(k_j) v_j^T, so the length of phi is the size of the state.
The power maps are those of "Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024), sections 3 and 4.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float
from sympow_jax.ops import arguments, target
from sympow_jax.ops.promotion import by_default_rules

__all__ = [
    "elu_plus_one",
    "monomials",
    "multiplicities",
    "symmetric_power",
    "symmetric_power_dim",
    "tensor_power",
]


def tensor_power(x: Float[Array, "*batch D"], power: int) -> Float[Array, "*batch F"]:
    """Returns the p-fold tensor product of x with itself: phi(q) . phi(k) = (q . k)^p, F = D^p.

    Entry (i_1, ..., i_p), in row-major order, is x[i_1] * ... * x[i_p].

    Raises:
        ValueError: `power` is below 1, or the features of one vector would exceed the device's memory.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> ops.tensor_power(jnp.array([1.0, 2.0]), 2).tolist()
        [1.0, 2.0, 2.0, 4.0]
    """
    power = arguments.check_power(power, even=False)
    x = arguments.to_array("x", x)
    arguments.check_floating("x", x)
    _require_size(x.shape[-1], power, lambda: x.shape[-1] ** power * x.dtype.itemsize)
    return _tensor_power(power, x)


def _require_symmetric_size(head_dim: int, power: int) -> None:
    # `multiplicities` needs four arrays of float64 with at most F elements.
    _require_size(head_dim, power, lambda: 32 * symmetric_power_dim(head_dim, power))


def _require_size(head_dim: int, power: int, needed: Callable[[], int]) -> None:
    """Raises ValueError if D^p is beyond float64, or the `needed()` bytes of one vector beyond the device's memory.

    `needed` is called after the first check, because its number may take long to compute.
    """
    if power * math.log2(max(head_dim, 2)) >= 1024:
        raise ValueError(
            f"power is {power} and the vectors have {head_dim} elements; the factors of their features would be beyond "
            f"float64; use a smaller power"
        )
    if (size := needed()) > (available := target.memory_bytes()):
        raise ValueError(
            f"the features of power {power} of vectors of {head_dim} elements take {size:,} bytes and the device has "
            f"{available:,}; use a smaller power or vectors"
        )


@functools.partial(jax.jit, static_argnums=0)
@by_default_rules
def _tensor_power(power, x):
    features = x
    for _ in range(power - 1):
        features = (features[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
    return features


def symmetric_power(x: Float[Array, "*batch D"], power: int) -> Float[Array, "*batch F"]:
    """Returns the p-th symmetric power of x: phi(q) . phi(k) = (q . k)^p with F = binomial(D + p - 1, p).

    There is one feature for each non-decreasing index i_1 <= ... <= i_p, in lexicographic order: the monomial x[i_1] *
    ... * x[i_p] times the square root of p! / (c_1! ... c_D!). This is the number of orders in which the tensor product
    repeats the monomial (c_d counts how often d occurs).

    Raises:
        ValueError: `power` is below 1, or the features of one vector would exceed the device's memory.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key = jnp.array([1.0, 2.0]), jnp.array([3.0, 1.0])
        >>> phi = ops.symmetric_power(query, 2), ops.symmetric_power(key, 2)
        >>> round(float(phi[0] @ phi[1]), 3), float((query @ key) ** 2)
        (25.0, 25.0)
    """
    power = arguments.check_power(power, even=False)
    x = arguments.to_array("x", x)
    arguments.check_floating("x", x)
    _require_symmetric_size(x.shape[-1], power)
    return _symmetric_power(power, x)


@functools.partial(jax.jit, static_argnums=0)
@by_default_rules
def _symmetric_power(power, x):
    weight = jnp.asarray(np.sqrt(multiplicities(x.shape[-1], power)), x.dtype)
    return jnp.moveaxis(monomials(jnp.moveaxis(x, -1, 0), power), 0, -1) * weight


def symmetric_power_dim(head_dim: int, power: int) -> int:
    """Returns F = binomial(D + p - 1, p), the number of features of `symmetric_power`.

    Raises:
        ValueError: `power` is below 1.

    Examples:
        >>> from sympow_jax import ops
        >>> ops.symmetric_power_dim(64, 2)
        2080
    """
    power = arguments.check_power(power, even=False)
    head_dim = arguments.check_integer("head_dim", head_dim, 0)
    return math.comb(head_dim + power - 1, power)


def monomials(x: Float[Array, "D *rest"], power: int) -> Float[Array, "F *rest"]:  # noqa: F821
    """Returns the distinct monomials of degree p in the leading axis of x, in the order of `symmetric_power`.

    The feature axis comes first so that products are contiguous in the remaining axes.

    Raises:
        ValueError: `power` is below 1, or the monomials of one vector would exceed the device's memory.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax.ops import feature_maps
        >>> feature_maps.monomials(jnp.array([2.0, 3.0]), 2).tolist()
        [4.0, 6.0, 9.0]
    """
    power = arguments.check_power(power, even=False)
    x = arguments.to_array("x", x)
    _require_symmetric_size(len(x), power)
    return _monomials(power, x)


@functools.partial(jax.jit, static_argnums=0)
@by_default_rules
def _monomials(power, x):
    if power == 1:
        return x
    # Two gathers in one fusion: a product for each index compiles 15 times as long.
    left, right = factors(len(x), power)
    return _monomials(power // 2, x)[left] * _monomials(power - power // 2, x)[right]


@functools.cache
def factors(head_dim: int, power: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the monomials of degrees p // 2 and p - p // 2 whose product is each of degree p > 1."""
    indices = indices_of(head_dim, power)
    return position(head_dim, indices[:, : power // 2]), position(head_dim, indices[:, power // 2 :])


def indices_of(head_dim: int, power: int) -> np.ndarray:
    """Returns the non-decreasing indices of each monomial in order, [F, p]."""
    indices = np.arange(head_dim, dtype=np.int32)[:, None]
    for degree in range(2, power + 1):
        starts = suffix_starts(head_dim, degree - 1)
        indices = np.concatenate([np.insert(indices[start:], 0, i, axis=1) for i, start in enumerate(starts)])
    return indices


def position(head_dim: int, indices: np.ndarray) -> np.ndarray:
    """Returns the place in the order of `symmetric_power` of monomials with these non-decreasing indices [..., p].

    It is the begin of the monomials with the same first index, plus the place of the other factors among those of
    degree p - 1 that start with this index or later.
    """
    place = indices[..., -1]
    for degree in range(2, indices.shape[-1] + 1):
        first = indices[..., -degree]
        starts = np.array(suffix_starts(head_dim, degree - 1))
        sizes = symmetric_power_dim(head_dim, degree - 1) - starts
        place = (np.cumsum(sizes) - sizes)[first] + place - starts[first]
    return place.astype(np.int32)


@functools.cache
def suffix_starts(head_dim: int, power: int) -> tuple[int, ...]:
    """Returns, for each i, the index of the first monomial of degree p whose indices are all at least i."""
    total = math.comb(head_dim + power - 1, power)
    return tuple(total - math.comb(head_dim - i + power - 1, power) for i in range(head_dim))


@functools.cache
def multiplicities(head_dim: int, power: int) -> np.ndarray:
    """Returns how often the tensor power repeats each monomial: p! / (c_1! ... c_D!), float64, in order [F].

    Raises:
        ValueError: `power` is below 1, a number is beyond float64, or all of them would exceed the device's memory.

    Examples:
        >>> from sympow_jax.ops import feature_maps
        >>> feature_maps.multiplicities(2, 2).tolist()
        [1.0, 2.0, 1.0]
    """
    power = arguments.check_power(power, even=False)
    head_dim = arguments.check_integer("head_dim", head_dim, 0)
    _require_symmetric_size(head_dim, power)
    count = np.ones(head_dim)
    run = np.ones(head_dim)  # how often the first index opens the monomial: x_i x_i x_j has a run of 2
    for degree in range(2, power + 1):
        counts, runs = [], []
        starts = suffix_starts(head_dim, degree - 1)
        for i, start in enumerate(starts):
            # The suffix begins with the monomials that themselves open with i.
            after = starts[i + 1] if i + 1 < head_dim else len(count)
            same = np.arange(start, len(count)) < after
            opening = np.where(same, run[start:] + 1, 1)
            counts.append(count[start:] * (degree / opening))
            runs.append(opening)
        count, run = np.concatenate(counts), np.concatenate(runs)
    count.setflags(write=False)
    return count


def elu_plus_one(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Returns elu(x) + 1, the feature map of "Transformers are RNNs" (Katharopoulos et al. 2020): exp(x) for x < 0.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> ops.elu_plus_one(jnp.array([0.0, 2.0])).tolist()
        [1.0, 3.0]
    """
    x = arguments.to_array("x", x)
    arguments.check_floating("x", x)
    return _elu_plus_one(x)


@jax.jit
@by_default_rules
def _elu_plus_one(x):
    # exp(x) rather than elu(x) + 1, which rounds small features to zero. Its overflow for positive x would make
    # gradients NaN; `minimum(x, 0)` would halve that at zero.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))
