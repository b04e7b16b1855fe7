"""Products with the monomials of symmetric-power features.

Functions take one head, time last: x [D, C] holds C vectors, and m(x_c) are the monomials of degree p of a vector, in
the order of `feature_maps.symmetric_power`. Their weights, the numbers of orders of a monomial's factors, multiply the
state when it is queried, which costs F * E products rather than F * C.

A state here is a tuple of [F_g, E] sums of m(k_j) v_j^T over groups g of monomials: products need the features of one
group at a time, unless a caller keeps them for two products. With this layout only one of the three products, the
query, transposes an operand, and that operand is the state, not the features.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float
from sympow_jax.ops import derivatives, feature_maps, layout, target

Groups = tuple[Array, ...]

# A group has at least this many features: one large matrix product beats several small ones. There are at most eight.
_GROUP = 4096
# Vectors per step of `fold_all`.
_FOLDED = 128


def query(state: Groups, x: Float[Array, "D C"], power: int, precision) -> Float[Array, "E C"]:
    """Returns sum_f state[f, e] m_f(x_c)."""
    return read(state, monomials(power, x), precision)


def fold(value: Float[Array, "E C"], x: Float[Array, "D C"], power: int, precision) -> Groups:
    """Returns sum_c m_f(x_c) value[e, c]."""
    return write(value, monomials(power, x), precision)


def read(state: Groups, found: Groups, precision) -> Float[Array, "E C"]:
    """Returns `query` of the vectors whose monomials are `found`, for a caller that uses them twice."""
    parts = zip(state, found, strict=True)
    return typing.cast(Array, sum(jnp.matmul(s.T, m, precision=precision) for s, m in parts))


def write(value: Float[Array, "E C"], found: Groups, precision) -> Groups:
    """Returns `fold` of the vectors whose monomials are `found`."""
    return tuple(jnp.matmul(m, value.T, precision=precision) for m in found)


def query_vjp(
    state: Groups, x: Float[Array, "D C"], cotangent: Float[Array, "E C"], power: int, precision
) -> Float[Array, "D C"]:
    """Returns the gradient of sum(cotangent * query(state, x)) with respect to x."""
    _, vjp = jax.vjp(functools.partial(monomials, power), x)
    return vjp(tuple(jnp.matmul(s, cotangent, precision=precision) for s in state))[0]


def weights(head_dim: int, power: int, dtype) -> Groups:
    """Returns the factor by which each feature of a state is multiplied before it is queried, [F_g, 1] per group."""
    weight = feature_maps.multiplicities(head_dim, power)[:, None]
    return tuple(jnp.asarray(w, dtype) for w in np.split(weight, _splits(head_dim, power)))


def weighted(state: Groups, weights: Groups) -> Groups:
    """Returns the state times the weights of its features."""
    return tuple(s * w for s, w in zip(state, weights, strict=True))


def zeros(
    like: Float[Array, "..."], lead: tuple[int, ...], head_dim: int, value_dim: int, power: int, dtype
) -> Groups:
    """Returns an empty state with leading axes `lead`, varying over manual mesh axes as `like` does."""
    ends = (*_splits(head_dim, power), feature_maps.symmetric_power_dim(head_dim, power))
    sizes = np.diff(ends, prepend=0).tolist()
    return tuple(jnp.zeros_like(like, dtype, shape=(*lead, size, value_dim)) for size in sizes)


def from_canonical(state: Float[Array, "*rest F E"], head_dim: int, power: int) -> Groups:
    """Converts a state over the features of `feature_maps.symmetric_power` to one of plain monomials."""
    root = np.sqrt(feature_maps.multiplicities(head_dim, power))[:, None]
    return tuple(jnp.split(state / jnp.asarray(root, state.dtype), _splits(head_dim, power), -2))


def to_canonical(state: Groups, head_dim: int, power: int) -> Float[Array, "*rest F E"]:
    """Inverts `from_canonical`."""
    root = np.sqrt(feature_maps.multiplicities(head_dim, power))[:, None]
    plain = jnp.concatenate(state, -2)
    return plain * jnp.asarray(root, plain.dtype)


def from_kv_and_norm(
    kv: Float[Array, "*rest F E"], norm: Float[Array, "*rest F"], head_dim: int, power: int
) -> Groups:
    """Converts the sums of a state to groups of [F_g, E + 1], whose last column is the normalizer."""
    return from_canonical(jnp.concatenate([kv, norm[..., None]], -1), head_dim, power)


def to_kv_and_norm(sums: Groups, head_dim: int, power: int) -> dict[str, Array]:
    """Inverts `from_kv_and_norm`."""
    both = to_canonical(sums, head_dim, power)
    return {"kv": both[..., :-1], "norm": both[..., -1]}


def fold_all(value: Float[Array, "E C"], x: Float[Array, "D C"], *, power: int, precision) -> Groups:
    """Returns `fold` of any number of vectors, in chunks whose features the backward pass computes again."""

    @jax.checkpoint
    def chunk(v, k):
        return fold(v, k, power, precision)

    def step(state, inputs):
        return tuple(s + n for s, n in zip(state, chunk(*inputs))), None

    inputs = tuple(layout.split_chunks(part, _FOLDED) for part in (value, x.astype(value.dtype)))
    start = zeros(value, (), len(x), len(value), power, value.dtype)
    return jax.lax.scan(step, start, inputs)[0]


@functools.partial(derivatives.custom_vjp, static=1)
def monomials(power: int, x: Float[Array, "D C"]) -> Groups:
    """Returns every monomial of degree p, [F_g, C] per group."""
    if power == 1:
        return (x,)
    lower, upper = feature_maps.monomials(x, power // 2), feature_maps.monomials(x, power - power // 2)
    splits = _splits(len(x), power)
    left, right = (np.split(table, splits) for table in feature_maps.factors(len(x), power))
    return tuple(lower[i] * upper[j] for i, j in zip(left, right))


def _monomials_bwd(power, arguments, cotangents):
    """Returns sum_f n cotangent[f x_d] f(x) for each d, over the monomials f of degree p - 1.

    x_d is n times a factor of f x_d.
    """
    if power == 1:
        return cotangents
    (x,) = arguments
    cotangent = jnp.concatenate(cotangents)
    before = feature_maps.monomials(x, power - 1)
    index, exponent = _raised(len(x), power)

    def of_dimension(tables):
        index, exponent = tables
        return (cotangent[index] * (exponent[:, None] * before)).sum(0)

    # A loop takes a CPU a quarter of the time of one fusion of all dimensions. A GPU would launch each of its steps.
    batch = None if target.device().platform == "cpu" else len(x)
    return (jax.lax.map(of_dimension, (index, exponent.astype(x.dtype)), batch_size=batch),)


monomials.defvjp(None, _monomials_bwd)


@functools.cache
def _raised(head_dim: int, power: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of f x_d, and how often x_d is a factor of it, for monomials f of degree p - 1: [D, F]."""
    others = feature_maps.indices_of(head_dim, power - 1)
    shape = (head_dim, len(others))
    dimension = np.broadcast_to(np.arange(head_dim, dtype=np.int32)[:, None, None], (*shape, 1))
    joined = np.concatenate([dimension, np.broadcast_to(others, (*shape, power - 1))], -1)
    exponent = (joined == dimension).sum(-1)
    return feature_maps.position(head_dim, np.sort(joined, -1)), exponent


@functools.cache
def _splits(head_dim: int, power: int) -> tuple[int, ...]:
    """Returns the indices of the first feature of each group after the first group."""
    if power == 1:  # the vectors themselves
        return ()
    features = feature_maps.symmetric_power_dim(head_dim, power)
    groups = min(8, max(1, features // _GROUP))
    return tuple(features * group // groups for group in range(1, groups))
