"""Products with symmetric-power features, built from a few outer products without gathers.

Functions take one head, time last: x [D, C] holds C vectors. Indices are cut into tiles. A monomial of degree p is a
product of a left factor of degree p // 2 whose last index is in tile a, and a right factor whose indices are in tile a
or later: one outer product for each a. Where indices share a tile, a monomial may occur more than once. Its weight is
its multiplicity divided by its number of occurrences. The weight multiplies the state when it is queried, which costs F
* E products rather than F * C.

A state here is a tuple of [F_g, E] sums of m(k_j) v_j^T over groups g of plain monomials. With this layout only one of
the three products, the query, transposes an operand, and that operand is the state, not the features.
"""

import functools
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float
from sympow_jax.ops import feature_maps, layout
from sympow_jax.ops.promotion import by_default_rules

__all__ = [
    "fold",
    "fold_all",
    "from_canonical",
    "from_kv_and_norm",
    "query",
    "query_vjp",
    "to_canonical",
    "to_kv_and_norm",
    "weighted",
    "weights",
    "zeros",
]

Groups = tuple[Array, ...]

# Small products are joined until they have this many features: one large matrix product beats several small ones.
_GROUP = 4096
# Vectors per step of `fold_all`.
_FOLDED = 128


def query(state: Groups, x: Float[Array, "D C"], power: int, precision) -> Float[Array, "E C"]:
    """Returns sum_f state[f, e] m_f(x_c)."""
    parts = zip(state, _monomials(x, power))
    return typing.cast(Array, sum(jnp.matmul(s.T, m, precision=precision) for s, m in parts))


def fold(value: Float[Array, "E C"], x: Float[Array, "D C"], power: int, precision) -> Groups:
    """Returns sum_c m_f(x_c) value[e, c]."""
    return tuple(jnp.matmul(m, value.T, precision=precision) for m in _monomials(x, power))


def query_vjp(
    state: Groups, x: Float[Array, "D C"], cotangent: Float[Array, "E C"], power: int, precision
) -> Float[Array, "D C"]:
    """Returns the gradient of sum(cotangent * query(state, x)) with respect to x."""
    _, vjp = jax.vjp(functools.partial(_monomials, power=power), x)
    return vjp(tuple(jnp.matmul(s, cotangent, precision=precision) for s in state))[0]


def weights(head_dim: int, power: int, dtype) -> Groups:
    """Returns the factor by which each feature of a state is multiplied before it is queried, [F_g, 1] per group."""
    canonical, occurrences, _ = _table(head_dim, power)
    weight = (feature_maps.multiplicities(head_dim, power) / occurrences)[canonical]
    return tuple(jnp.asarray(w[:, None], dtype) for w in np.split(weight, _splits(head_dim, power)))


def weighted(state: Groups, weights: Groups) -> Groups:
    """Returns the state times the weights of its features."""
    return tuple(s * w for s, w in zip(state, weights, strict=True))


def zeros(
    like: Float[Array, "..."], lead: tuple[int, ...], head_dim: int, value_dim: int, power: int, dtype
) -> Groups:
    """Returns an empty state with leading axes `lead`, varying over manual mesh axes as `like` does."""
    ends = (*_splits(head_dim, power), len(_table(head_dim, power)[0]))
    sizes = np.diff(ends, prepend=0).tolist()
    return tuple(jnp.zeros_like(like, dtype, shape=(*lead, size, value_dim)) for size in sizes)


def from_canonical(state: Float[Array, "*rest F E"], head_dim: int, power: int) -> Groups:
    """Converts a state over the features of `feature_maps.symmetric_power` to one of plain monomials."""
    canonical, _, _ = _table(head_dim, power)
    root = np.sqrt(feature_maps.multiplicities(head_dim, power))[:, None]
    plain = jnp.take(state / jnp.asarray(root, state.dtype), canonical, axis=-2)
    return tuple(jnp.split(plain, _splits(head_dim, power), -2))


def to_canonical(state: Groups, head_dim: int, power: int) -> Float[Array, "*rest F E"]:
    """Inverts `from_canonical`."""
    _, _, first = _table(head_dim, power)
    root = np.sqrt(feature_maps.multiplicities(head_dim, power))[:, None]
    plain = jnp.take(jnp.concatenate(state, -2), first, axis=-2)
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


def _monomials(x: Float[Array, "D C"], power: int) -> Groups:
    """Returns every monomial of degree p at least once, [F_g, C] per group."""
    if power == 1:
        return (x,)
    products = [_outer(left, right) for left, right in _factors(x, power, _outer, jnp.concatenate)]
    begins = [0, *_splits(x.shape[0], power)]
    groups: dict[int, list[Array]] = {begin: [] for begin in begins}
    position = 0
    for product in products:
        begin = max(b for b in begins if b <= position)
        groups[begin].append(product)
        position += len(product)
    return tuple(g[0] if len(g) == 1 else jnp.concatenate(g) for g in groups.values())


def _factors(x, power, outer, concatenate):
    """Returns the left and right factors of each tile's outer product, for any definition of product."""
    tiles = _tiles(len(x), power)
    left, right = [x[tile] for tile in tiles], [x[tile.start :] for tile in tiles]
    for _ in range(power // 2 - 1):
        # Products whose last index lies in the tile: everything up to the tile, times the tile.
        left = [outer(concatenate(left[: a + 1]), x[tile]) for a, tile in enumerate(tiles)]
    for _ in range(power - power // 2 - 1):
        # Products whose first index lies in the tile or later: a suffix of those that start in each tile.
        starting = [outer(x[tile], after) for tile, after in zip(tiles, right)]
        ends = np.cumsum([0, *map(len, starting)])
        joined = concatenate(starting)
        right = [joined[end:] for end in ends[:-1]]
    return list(zip(left, right))


def _tiles(head_dim: int, power: int) -> list[slice]:
    """Returns the tiles of indices.

    They are few, so that programs stay small, and short, since sharing a tile repeats monomials.
    """
    length = -(-head_dim // (4 if power == 2 else 8))
    return [slice(begin, min(begin + length, head_dim)) for begin in range(0, head_dim, length)]


@jax.custom_vjp
def _outer(left: Float[Array, "L C"], right: Float[Array, "R C"]) -> Float[Array, "L*R C"]:
    """Returns the products of every left and right row."""
    return (left[:, None] * right[None]).reshape(-1, left.shape[-1])


def _outer_bwd(factors, cotangent):
    left, right = factors
    cotangent = cotangent.reshape(len(left), len(right), -1)
    return _sum(cotangent * right[None], 1), _sum(cotangent * left[:, None], 0)


_outer.defvjp(lambda left, right: (_outer(left, right), (left, right)), by_default_rules(_outer_bwd))


def _sum(x, axis):
    """Sums over a leading axis.

    A short sum begins with explicit additions, which XLA vectorizes on CPUs, unlike reductions. They are as few as
    possible: each term is a kernel of its own, so that more of them take longer to compile, and no less to run.
    """
    count = x.shape[axis]
    terms = next((n for n in (2, 3, 5, 7) if count % n == 0), 1) if count <= 64 else 1
    return functools.reduce(jnp.add, jnp.split(x, terms, axis)).sum(axis)


@functools.cache
def _splits(head_dim: int, power: int) -> tuple[int, ...]:
    """Returns the indices of the first feature of each group after the first group."""
    if power == 1:
        return ()
    splits, begin, end = [], 0, 0
    for left, right in _factors(_indices(head_dim), power, _joined_indices, np.concatenate):
        size = len(left) * len(right)
        if end > begin and end + size - begin > _GROUP:
            splits.append(end)
            begin = end
        end += size
    return tuple(splits)


@functools.cache
def _table(head_dim: int, power: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns each feature's canonical position, and the number and first of each canonical feature's occurrences.

    Positions are int32: with int64 the dtype would depend on whether the caller has enabled 64-bit types in JAX.
    """
    if power == 1:
        identity = np.arange(head_dim, dtype=np.int32)
        return identity, np.ones_like(identity), identity
    factors = _factors(_indices(head_dim), power, _joined_indices, np.concatenate)
    indices = np.concatenate(list(itertools.starmap(_joined_indices, factors)))
    # Read as digits of a number in base D, sorted indices are in lexicographic order.
    number = np.sort(indices, -1) @ head_dim ** np.arange(power - 1, -1, -1)
    _, first, canonical, occurrences = np.unique(
        number, return_index=True, return_inverse=True, return_counts=True
    )
    return canonical.astype(np.int32), occurrences, first.astype(np.int32)


def _indices(head_dim):
    return np.arange(head_dim, dtype=np.int64)[:, None]


def _joined_indices(left, right):
    """Returns the indices of every product of a left and a right factor, in the order of `_outer`."""
    shape = (len(left), len(right))
    left = np.broadcast_to(left[:, None], (*shape, left.shape[-1]))
    right = np.broadcast_to(right[None], (*shape, right.shape[-1]))
    return np.concatenate([left, right], -1).reshape(-1, left.shape[-1] + right.shape[-1])
