"""The order of degree-2 features inside the kernels: cyclic windows of tiles.

The D indices are cut into n = D / 16 tiles. Index i of tile a multiplies the window of tiles a, a+1, ..., cyclically,
that holds every unordered pair of tiles once:

    phi(x)[j, column] = x[i] * x[b],   i = 16 a + j,   b = (16 a + column - offset_a) mod D

so a share of the features is one tile row times a scalar, with no gather. Group j takes the jth index of every tile;
the windows of its n scalars add up to the same width P for every j, so group j is a matrix product of depth P.
D = 64 has 16 * 160 = 2,560 features for 2,080 distinct monomials, D = 128 has 9,216 for 8,256. A pair inside one tile
occurs in both orders, other pairs once: their monomials count twice when a query reads the state.

At D = 128 a group is too wide to be handled at once. Those who add to states cut it into 4 sections, the windows of
tiles a and a + 4 each, equal but for where they begin; those who read it, into parts of equal width, wherever that
cuts windows.

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
    "Piece",
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
class Piece:
    """Columns that are alike: index `scalar` + j times `width` indices from `vector` on, read `weight` times."""

    scalar: int
    vector: int
    width: int
    weight: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The features of vectors of size `head_dim`, a multiple of 16. Raises ValueError for other sizes."""

    head_dim: int

    def __post_init__(self):
        if self.head_dim < TILE or self.head_dim % TILE:
            raise ValueError(f"head_dim is {self.head_dim}; it must be a multiple of {TILE}")

    @functools.cached_property
    def windows(self) -> tuple[Window, ...]:
        """One window for each tile, by sections."""
        tiles, windows, offset = self.head_dim // TILE, [], 0
        for section in range(self.sections):
            for tile in range(section, tiles, self.sections):
                # Opposite tiles of an even number would meet twice: only the first half reaches across.
                reach = (tiles + 1) // 2 + (tiles % 2 == 0 and tile < tiles // 2)
                windows.append(Window(tile * TILE, offset, reach * TILE))
                offset += reach * TILE
        return tuple(windows)

    @property
    def sections(self) -> int:
        """Sets of windows of the same widths, each set a tile behind the one before."""
        return 4 if self.head_dim == 128 else 1

    @property
    def section(self) -> tuple[Window, ...]:
        """The windows of the first section."""
        return self.windows[: len(self.windows) // self.sections]

    @property
    def section_width(self) -> int:
        """Features of one section of a group."""
        return self.width // self.sections

    @property
    def section_rows(self) -> int:
        """Indices from the first to the last that a section sees."""
        return self.rows - (self.sections - 1) * TILE

    def pieces(self, begin: int, end: int) -> tuple[Piece, ...]:
        """The columns from `begin` to `end`, in order."""
        pieces = []
        for window in self.windows:
            for first, last, weight in ((0, TILE, 1), (TILE, window.width, 2)):
                first, last = max(first, begin - window.offset), min(last, end - window.offset)
                if first < last:
                    pieces.append(Piece(window.begin, window.begin + first, last - first, weight))
        return tuple(pieces)

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

    def canonical(self, head_dim: int) -> np.ndarray:
        """The canonical position of each feature of the first `head_dim` indices, int32 [16, P]; F for others."""
        low, high = self.indices.min(-1), self.indices.max(-1)
        position = low * head_dim - low * (low - 1) // 2 + high - low
        return np.where(high < head_dim, position, head_dim * (head_dim + 1) // 2).astype(np.int32)


def from_canonical(state: jax.Array, layout: Layout, head_dim: int) -> jax.Array:
    """A state of canonical features [..., F, E] of `head_dim` indices as plain monomials [..., 16, E, P].

    Indices of the layout from `head_dim` on are taken to be zero.
    """
    plain = state / jnp.asarray(_roots(head_dim)[:, None], state.dtype)
    plain = jnp.pad(plain, [(0, 0)] * (plain.ndim - 2) + [(0, 1), (0, 0)])
    return jnp.swapaxes(jnp.take(plain, layout.canonical(head_dim), axis=-2), -1, -2)


def to_canonical(state: jax.Array, layout: Layout, head_dim: int) -> jax.Array:
    """The inverse of `from_canonical`."""
    roots = _roots(head_dim)[:, None]
    _, first = np.unique(layout.canonical(head_dim), return_index=True)
    plain = jnp.swapaxes(state, -1, -2).reshape(*state.shape[:-3], layout.features, state.shape[-2])
    return jnp.take(plain, first[: len(roots)].astype(np.int32), axis=-2) * jnp.asarray(roots, state.dtype)


def norm_from_canonical(norm: jax.Array, head_dim: int) -> jax.Array:
    """A normalizer of canonical features [..., F] as the symmetric matrix Z of q^T Z q, [..., D, D]."""
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
