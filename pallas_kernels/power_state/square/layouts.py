"""The order of degree-2 features inside the kernels: cyclic windows of tiles.

The D indices are cut into n = D / 16 tiles. Index i of tile a multiplies the window of tiles a, a+1, ..., cyclically,
so that every unordered pair of tiles occurs once:

    phi(x)[j, column] = x[i] * x[b],   i = 16 a + j,   b = (16 a + column - offset_a) mod D

A part of the features is therefore one tile row times a scalar, without a gather. Group j takes the jth index of every
tile. The windows of its n scalars have the same total width P for every j, so group j is a matrix product of depth P. D
= 64 has 16 * 160 = 2,560 features for 2,080 distinct monomials, D = 128 has 9,216 for 8,256. A pair inside one tile
occurs in both orders, other pairs once: their monomials count twice when a query reads the state.

At D = 128 a group is too wide to be processed at once. Kernels that update states cut it into 4 sections, each with the
windows of tiles a and a + 4; sections differ only in where their windows begin. So does the gradient of
queries; the other kernels that read states cut it into parts of equal width, which may split windows.

The canonical order is that of non-decreasing indices, lexicographically, each monomial times the square root of its
multiplicity (1 for a square, 2 otherwise), so that phi(q) . phi(k) = (q . k)^2.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

# Columns of a register tile of the tensor core, and the depth of one of its 16-bit products.
TILE = 16


@dataclasses.dataclass(frozen=True)
class Window:
    """Indices that the scalars of one tile multiply: `width` from `begin` on, at columns from `offset` on."""

    begin: int
    offset: int
    width: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Columns of equal weight: index `scalar` + j times `width` indices from `vector` on, counted `weight` times."""

    scalar: int
    vector: int
    width: int
    weight: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Features of vectors of size `head_dim`, a multiple of 16. Raises ValueError for other sizes."""

    head_dim: int

    def __post_init__(self):
        if self.head_dim < TILE or self.head_dim % TILE:
            raise ValueError(f"head_dim is {self.head_dim}; it must be a multiple of {TILE}")

    @functools.cached_property
    def windows(self) -> tuple[Window, ...]:
        """Windows of all tiles, by section."""
        tiles, windows, offset = self.head_dim // TILE, [], 0
        for section in range(self.sections):
            for tile in range(section, tiles, self.sections):
                # With an even number of tiles, opposite tiles would be paired twice: only the first half pairs them.
                reach = (tiles + 1) // 2 + (tiles % 2 == 0 and tile < tiles // 2)
                windows.append(Window(tile * TILE, offset, reach * TILE))
                offset += reach * TILE
        return tuple(windows)

    @property
    def sections(self) -> int:
        """Number of sets of windows with the same widths, each shifted by one tile from the previous set."""
        return 4 if self.head_dim == 128 else 1

    @property
    def section(self) -> tuple[Window, ...]:
        """Windows of the first section."""
        return self.windows[: len(self.windows) // self.sections]

    @property
    def section_width(self) -> int:
        """Number of features of one section of a group."""
        return self.width // self.sections

    @property
    def section_rows(self) -> int:
        """Number of indices from the first to the last that a section multiplies."""
        return self.rows - (self.sections - 1) * TILE

    def pieces(self, begin: int, end: int) -> tuple[Piece, ...]:
        """Returns the columns from `begin` to `end`, in order."""
        pieces = []
        for window in self.windows:
            for first, last, weight in ((0, TILE, 1), (TILE, window.width, 2)):
                first, last = max(first, begin - window.offset), min(last, end - window.offset)
                if first < last:
                    pieces.append(Piece(window.begin, window.begin + first, last - first, weight))
        return tuple(pieces)

    @property
    def width(self) -> int:
        """Number P of features of one group."""
        return sum(window.width for window in self.windows)

    @property
    def features(self) -> int:
        """Number of all features: 16 groups of `width`."""
        return TILE * self.width

    @property
    def rows(self) -> int:
        """Length of vectors with D indices and the first indices repeated, so that no window wraps around."""
        return max(window.begin + window.width for window in self.windows)

    @functools.cached_property
    def indices(self) -> np.ndarray:
        """Both indices of each feature, int32 [16, P, 2]."""
        groups = np.arange(TILE)[:, None]
        columns = []
        for window in self.windows:
            vector = (window.begin + np.arange(window.width)) % self.head_dim
            scalar = np.broadcast_to(window.begin + groups, (TILE, window.width))
            columns.append(np.stack([scalar, np.broadcast_to(vector, scalar.shape)], -1))
        return np.concatenate(columns, 1).astype(np.int32)

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """Factor of each feature when a query reads the state, float32 [P]: 1 within a tile, 2 across tiles."""
        weights = np.full(self.width, 2, np.float32)
        for window in self.windows:
            weights[window.offset : window.offset + TILE] = 1
        return weights

    def canonical(self, head_dim: int) -> np.ndarray:
        """Returns canonical positions of features, int32 [16, P]; F for those with an index from `head_dim` on."""
        low, high = self.indices.min(-1), self.indices.max(-1)
        position = low * head_dim - low * (low - 1) // 2 + high - low
        return np.where(high < head_dim, position, head_dim * (head_dim + 1) // 2).astype(np.int32)


def from_canonical(state: jax.Array, layout: Layout, head_dim: int) -> jax.Array:
    """Converts a state of canonical features [..., F, E] of `head_dim` indices to plain monomials [..., 16, E, P].

    Indices of the layout from `head_dim` on are treated as zero.
    """
    plain = state / jnp.asarray(_roots(head_dim)[:, None], state.dtype)
    plain = jnp.pad(plain, [(0, 0)] * (plain.ndim - 2) + [(0, 1), (0, 0)])
    return jnp.swapaxes(jnp.take(plain, layout.canonical(head_dim), axis=-2), -1, -2)


def to_canonical(state: jax.Array, layout: Layout, head_dim: int) -> jax.Array:
    """Inverts `from_canonical`."""
    roots = _roots(head_dim)[:, None]
    _, first = np.unique(layout.canonical(head_dim), return_index=True)
    plain = jnp.swapaxes(state, -1, -2).reshape(*state.shape[:-3], layout.features, state.shape[-2])
    return jnp.take(plain, first[: len(roots)].astype(np.int32), axis=-2) * jnp.asarray(roots, state.dtype)


def norm_from_canonical(norm: jax.Array, head_dim: int) -> jax.Array:
    """Converts a normalizer of canonical features [..., F] to the symmetric matrix Z of q^T Z q, [..., D, D]."""
    low, high = np.triu_indices(head_dim)
    position = np.zeros((head_dim, head_dim), np.int32)
    position[low, high] = position[high, low] = np.arange(len(low))
    plain = norm / jnp.asarray(_roots(head_dim), norm.dtype)
    return jnp.take(plain, position, axis=-1)


def norm_to_canonical(matrix: jax.Array) -> jax.Array:
    """Inverts `norm_from_canonical`."""
    head_dim = matrix.shape[-1]
    low, high = np.triu_indices(head_dim)
    flat = matrix.reshape(*matrix.shape[:-2], -1)
    plain = jnp.take(flat, (low * head_dim + high).astype(np.int32), axis=-1)
    return plain * jnp.asarray(_roots(head_dim), matrix.dtype)


def _roots(head_dim: int) -> np.ndarray:
    """Returns square roots of multiplicities in canonical order, [F]."""
    low, high = np.triu_indices(head_dim)
    return np.sqrt(np.where(low == high, 1.0, 2.0))
