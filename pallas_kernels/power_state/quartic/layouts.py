"""The order of degree-4 features inside the kernels: pairs times suffixes of pairs.

Let y be the M = D (D + 1) / 2 products x_a x_b, a <= b, sorted by a. A monomial of degree 4 with indices i1 <= i2 <= i3
<= i4 is the scalar y(i1, i2) times the entry y(i3, i4), and i3 >= i2. A scalar therefore multiplies a suffix of y, the
same for all scalars with one second index. y is padded with zeros in front and cut into blocks of 48 columns, and
scalars are sorted by their second index. Each block b is then needed by the first scalars only, up to the last whose
suffix reaches b.

Scalars come in stacks of 64 / E, whose rows (scalar, value) fill the 64 rows of a product of the tensor core. Stacks
come in units of `UNIT` with one block, and each thread block of the update has one unit. D = 32 has 66,816 features in
stacks that are needed, for 52,360 distinct monomials; D = 16 has 8,256 for 3,876. Features that occur a second time, in
columns before the suffix of their scalar, have weight zero.

The canonical order is that of non-decreasing indices, lexicographically, each monomial times the square root of its
multiplicity (24 over the factorials of how often each index occurs), so that phi(q) . phi(k) = (q . k)^4.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

# Sizes of heads and values that the kernels support; others are padded with zeros.
SIZES = (16, 32)
# Columns of a block: three steps of depth 16 in the query. Fewer cost shared memory, more cost features.
COLUMNS = 48
# Stacks of a unit: two warpgroups hold 6 each, 288 columns, in their accumulators.
UNIT = 12
# Stacks that a query reads at once, a divisor of UNIT.
STEP = 3
# Scalars whose gradients are computed at once, and their columns in a step of the tensor core, with padding.
SCALARS = 12
SCALAR_COLUMNS = 16
# Multiplicities are at most 24: divided by 2^WEIGHT_BITS, they do not make states larger.
WEIGHT_BITS = 5
# Rows of a product of the tensor core.
_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Features of vectors of size `head_dim` for values of size `value_dim`, a divisor of 64."""

    head_dim: int
    value_dim: int

    @property
    def per_stack(self) -> int:
        """Number of scalars of a stack."""
        return _ROWS // self.value_dim

    @property
    def width(self) -> int:
        """Number P of features of a stack."""
        return self.per_stack * COLUMNS

    @property
    def products(self) -> int:
        """Number M of products of two entries."""
        return math.comb(self.head_dim + 1, 2)

    @property
    def blocks(self) -> int:
        """Number of blocks of y."""
        return -(-self.products // COLUMNS)

    @property
    def rows(self) -> int:
        """Number of entries of y, including the zeros before them."""
        return self.blocks * COLUMNS

    @functools.cached_property
    def suffixes(self) -> np.ndarray:
        """First column of y that a scalar of each second index multiplies, int32 [D]."""
        after = self.head_dim - np.arange(self.head_dim)
        return (self.rows - after * (after + 1) // 2).astype(np.int32)

    @functools.cached_property
    def scalars(self) -> np.ndarray:
        """Both indices of each scalar, int32 [M, 2], the second non-decreasing."""
        return np.array([(low, high) for high in range(self.head_dim) for low in range(high + 1)], np.int32)

    @functools.cached_property
    def needed(self) -> np.ndarray:
        """Number of stacks that need each block, int32 [blocks]."""
        reach = self.suffixes[self.scalars[:, 1]] < (np.arange(self.blocks)[:, None] + 1) * COLUMNS
        return (-(-reach.sum(1) // self.per_stack)).astype(np.int32)

    @functools.cached_property
    def units(self) -> np.ndarray:
        """Block and first scalar of each unit, int32 [units, 2], blocks in order."""
        return np.array(
            [
                (block, first * self.per_stack)
                for block, count in enumerate(self.needed)
                for first in range(0, count, UNIT)
            ],
            np.int32,
        )

    def steps(self, stacks: int) -> np.ndarray:
        """Returns the steps of `stacks` stacks by block of y, int32 [blocks, 3]; `stacks` is a divisor of `UNIT`.

        Columns: first stack, number of steps, number of steps of earlier blocks.
        """
        units, steps = -(-self.needed // UNIT), -(-self.needed // stacks)
        first, before = (np.cumsum(units) - units) * UNIT, np.cumsum(steps) - steps
        return np.stack([first, steps, before], -1).astype(np.int32)

    @property
    def stacks(self) -> int:
        """Number U of stacks of a state: those of all units."""
        return len(self.units) * UNIT

    @property
    def scalar_rows(self) -> int:
        """Number of scalars, including the zeros after them that the last units read."""
        return int(self.units[:, 1].max()) + UNIT * self.per_stack

    @functools.cached_property
    def indices(self) -> np.ndarray:
        """All four indices of each feature, int32 [U, 64 / E, 48, 4]; D stands for a zero."""
        scalars = np.full((self.scalar_rows, 2), self.head_dim)
        scalars[: self.products] = self.scalars
        vector = np.full((self.rows, 2), self.head_dim)
        vector[self.rows - self.products :] = np.stack(pairs(self.head_dim), -1)
        within = np.arange(UNIT * self.per_stack)
        scalar = scalars[self.units[:, 1:] + within].reshape(self.stacks, self.per_stack, 1, 2)
        column = vector.reshape(self.blocks, 1, COLUMNS, 2)[np.repeat(self.units[:, 0], UNIT)]
        shape = (self.stacks, self.per_stack, COLUMNS, 2)
        parts = [np.broadcast_to(part, shape) for part in (scalar, column)]
        return np.concatenate(parts, -1).astype(np.int32)

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """Multiplicities of the features, zero where one is not to count, float32 [U, 64 / E, 48]."""
        counted = (self.indices < self.head_dim).all(-1) & (self.indices[..., 2] >= self.indices[..., 1])
        return np.where(counted, _multiplicity(np.sort(self.indices, -1)), 0).astype(np.float32)

    @functools.cached_property
    def canonical(self) -> np.ndarray:
        """Canonical position of each feature, int32 [U, 64 / E, 48]; undefined where the weight is zero."""
        return _position(np.where(self.weights[..., None] > 0, self.indices, 0), self.head_dim)


def layout_for(head_dim: int, value_dim: int) -> Layout:
    """Returns the layout of the smallest supported sizes that hold these."""
    return Layout(*(next(size for size in SIZES if wanted <= size) for wanted in (head_dim, value_dim)))


def canonical_of(head_dim: int, layout: Layout) -> np.ndarray:
    """Returns the positions of the canonical features of size `head_dim` among those of the layout's size."""
    return np.flatnonzero((_quadruples(layout.head_dim) < head_dim).all(-1)).astype(np.int32)


def pairs(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and second indices of the entries of y."""
    return np.triu_indices(head_dim)


def side_by_side(state: jax.Array, layout: Layout) -> jax.Array:
    """Converts stacks in accumulator layout, [..., 64, 48], to [..., E, P], with their scalars side by side."""
    split = state.reshape(*state.shape[:-2], layout.per_stack, layout.value_dim, COLUMNS)
    return jnp.swapaxes(split, -3, -2).reshape(*state.shape[:-2], layout.value_dim, layout.width)


def from_canonical(state: jax.Array, layout: Layout) -> jax.Array:
    """Converts a state of canonical features [..., F, E] to plain monomials in the layout, [..., U, 64, 48]."""
    plain = state / jnp.asarray(_roots(layout.head_dim)[:, None], state.dtype)
    placed = jnp.where(layout.weights[..., None] > 0, jnp.take(plain, layout.canonical, axis=-2), 0)
    return jnp.swapaxes(placed, -1, -2).reshape(*state.shape[:-2], layout.stacks, _ROWS, COLUMNS)


def to_canonical(state: jax.Array, layout: Layout) -> jax.Array:
    """Inverts `from_canonical`."""
    counted = np.flatnonzero(layout.weights)
    order = counted[np.argsort(layout.canonical.ravel()[counted])]
    split = state.reshape(*state.shape[:-2], layout.per_stack, layout.value_dim, COLUMNS)
    plain = jnp.swapaxes(split, -1, -2).reshape(*state.shape[:-3], -1, layout.value_dim)
    return jnp.take(plain, order.astype(np.int32), axis=-2) * jnp.asarray(
        _roots(layout.head_dim)[:, None], state.dtype
    )


def norm_from_canonical(norm: jax.Array, layout: Layout) -> jax.Array:
    """Converts a normalizer of canonical features [..., F] to the matrix Z of sums of y y^T, [..., rows, rows]."""
    plain = norm / jnp.asarray(_roots(layout.head_dim), norm.dtype)
    entries = np.stack(pairs(layout.head_dim), -1)
    shape = (len(entries), len(entries), 2)
    both = np.concatenate(
        [np.broadcast_to(entries[:, None], shape), np.broadcast_to(entries[None], shape)], -1
    )
    matrix = jnp.take(plain, _position(np.sort(both, -1), layout.head_dim), axis=-1)
    front = layout.rows - layout.products
    return jnp.pad(matrix, [(0, 0)] * (matrix.ndim - 2) + [(front, 0)] * 2)


def norm_to_canonical(matrix: jax.Array, layout: Layout) -> jax.Array:
    """Inverts `norm_from_canonical`."""
    low, high = pairs(layout.head_dim)
    place = np.zeros((layout.head_dim, layout.head_dim), np.int32)
    place[low, high] = layout.rows - layout.products + np.arange(layout.products)
    i1, i2, i3, i4 = _quadruples(layout.head_dim).T
    flat = matrix.reshape(*matrix.shape[:-2], -1)
    plain = jnp.take(flat, place[i1, i2] * layout.rows + place[i3, i4], axis=-1)
    return plain * jnp.asarray(_roots(layout.head_dim), matrix.dtype)


@functools.cache
def _quadruples(head_dim: int) -> np.ndarray:
    """Returns all non-decreasing indices in canonical order, int32 [F, 4]."""
    return np.array(list(itertools.combinations_with_replacement(range(head_dim), 4)), np.int32)


def _position(indices: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns the canonical position of non-decreasing indices [..., 4]."""
    digits = head_dim ** np.arange(3, -1, -1)
    return np.searchsorted(_quadruples(head_dim) @ digits, indices @ digits).astype(np.int32)


def _multiplicity(indices: np.ndarray) -> np.ndarray:
    """Returns the number of orders of non-decreasing indices [..., 4], float64 [...]."""
    orders, run = np.full(indices.shape[:-1], 24.0), np.ones(indices.shape[:-1])
    for before, after in itertools.pairwise(np.moveaxis(indices, -1, 0)):
        run = np.where(before == after, run + 1, 1)
        orders /= run
    return orders


def _roots(head_dim: int) -> np.ndarray:
    """Returns square roots of multiplicities in canonical order, [F]."""
    return np.sqrt(_multiplicity(_quadruples(head_dim)))
