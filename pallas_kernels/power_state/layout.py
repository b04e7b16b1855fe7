"""The order of degree-2 features inside the kernels: cyclic windows of tiles.

The D indices are cut into n = D / 16 tiles. Index i of tile a multiplies the window of tiles a, a+1, ..., cyclically,
that holds every unordered pair of tiles once:

    phi(x)[j, column] = x[i] * x[b],   i = 16 a + j,   b = (16 a + column - offset_a) mod D

so a share of the features is one tile row times a scalar, with no gather. Group j takes the jth index of every tile;
the windows of its n scalars add up to the same width P for every j, so group j is one matrix product of depth P.
D = 64 has 16 * 160 = 2,560 features for 2,080 distinct monomials. A pair inside one tile occurs in both orders, other
pairs once: their monomials count twice when a query reads the state.

The canonical order is that of non-decreasing indices, lexicographically, each monomial times the square root of its
multiplicity (1 for a square, 2 otherwise), so that phi(q) . phi(k) = (q . k)^2.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "TILE",
    "Layout",
    "Window",
    "from_canonical",
    "norm_from_canonical",
    "norm_to_canonical",
    "to_canonical",
]

# Columns of a register tile of the tensor core, and the depth of one of its 16-bit products.
TILE = 16


@dataclasses.dataclass(frozen=True)
class Window:
    """What the scalars of one tile multiply: `width` indices from `begin` on, at columns from `offset` on."""

    begin: int
    offset: int
    width: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The features of vectors of size `head_dim`, a multiple of 16. Raises ValueError for other sizes."""

    head_dim: int

    def __post_init__(self):
        if self.head_dim < TILE or self.head_dim % TILE:
            raise ValueError(f"head_dim is {self.head_dim}; it must be a multiple of {TILE}")

    @functools.cached_property
    def windows(self) -> tuple[Window, ...]:
        """One window for each tile, in order."""
        tiles, windows, offset = self.head_dim // TILE, [], 0
        for tile in range(tiles):
            # Opposite tiles of an even number would meet twice: only the first half reaches across.
            reach = (tiles + 1) // 2 + (tiles % 2 == 0 and tile < tiles // 2)
            windows.append(Window(tile * TILE, offset, reach * TILE))
            offset += reach * TILE
        return tuple(windows)

    @property
    def width(self) -> int:
        """P, the features of one group."""
        return sum(window.width for window in self.windows)

    @property
    def features(self) -> int:
        """All features: 16 groups of `width`."""
        return TILE * self.width

    @property
    def rows(self) -> int:
        """D and the indices that the last windows see again: vectors of this length need no wrapping around."""
        return max(window.begin + window.width for window in self.windows)

    @functools.cached_property
    def indices(self) -> np.ndarray:
        """The two indices of each feature, int32 [16, P, 2]."""
        groups = np.arange(TILE)[:, None]
        columns = []
        for window in self.windows:
            vector = (window.begin + np.arange(window.width)) % self.head_dim
            scalar = np.broadcast_to(window.begin + groups, (TILE, window.width))
            columns.append(np.stack([scalar, np.broadcast_to(vector, scalar.shape)], -1))
        return np.concatenate(columns, 1).astype(np.int32)

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """What a query counts each feature for, float32 [P]: 1 within a tile, 2 across tiles."""
        weights = np.full(self.width, 2, np.float32)
        for window in self.windows:
            weights[window.offset : window.offset + TILE] = 1
        return weights

    @functools.cached_property
    def canonical(self) -> np.ndarray:
        """The canonical position of each feature, int32 [16, P]."""
        low, high = self.indices.min(-1), self.indices.max(-1)
        return (low * self.head_dim - low * (low - 1) // 2 + high - low).astype(np.int32)


def from_canonical(state: jax.Array, layout: Layout) -> jax.Array:
    """A state of canonical features [..., F, E] as plain monomials in the layout, [..., 16, E, P]."""
    plain = state / jnp.asarray(_roots(layout.head_dim)[:, None], state.dtype)
    return jnp.swapaxes(jnp.take(plain, layout.canonical, axis=-2), -1, -2)


def to_canonical(state: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `from_canonical`."""
    _, first = np.unique(layout.canonical, return_index=True)
    plain = jnp.swapaxes(state, -1, -2).reshape(*state.shape[:-3], layout.features, state.shape[-2])
    return jnp.take(plain, first.astype(np.int32), axis=-2) * jnp.asarray(
        _roots(layout.head_dim)[:, None], state.dtype
    )


def norm_from_canonical(norm: jax.Array, head_dim: int) -> jax.Array:
    """A normaliser of canonical features [..., F] as the symmetric matrix Z of q^T Z q, [..., D, D]."""
    low, high = np.triu_indices(head_dim)
    position = np.zeros((head_dim, head_dim), np.int32)
    position[low, high] = position[high, low] = np.arange(len(low))
    plain = norm / jnp.asarray(_roots(head_dim), norm.dtype)
    return jnp.take(plain, position, axis=-1)


def norm_to_canonical(matrix: jax.Array) -> jax.Array:
    """The inverse of `norm_from_canonical`."""
    head_dim = matrix.shape[-1]
    low, high = np.triu_indices(head_dim)
    flat = matrix.reshape(*matrix.shape[:-2], -1)
    plain = jnp.take(flat, (low * head_dim + high).astype(np.int32), axis=-1)
    return plain * jnp.asarray(_roots(head_dim), matrix.dtype)


def _roots(head_dim: int) -> np.ndarray:
    """Square roots of multiplicities in canonical order, [F]."""
    low, high = np.triu_indices(head_dim)
    return np.sqrt(np.where(low == high, 1.0, 2.0))
