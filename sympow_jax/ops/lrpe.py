"""Linearized relative positional encoding: queries and keys multiplied by W_s, with W_{t-s} = W_s^H W_t.

"Linearized Relative Positional Encoding" (Qin et al. 2023): W_s = P^H Lambda^(s) P (equations 22 to 24), with a basis P
and a core Lambda, both unitary. Queries and keys are multiplied by Lambda^(s) P only, since P P^H drops out of their
product (equation 75). In the basis `identity`, rotary encodings are the core `orthogonal`, PermuteFormer the core
`permutation` without its decay, and cosFormer the core `unitary` with the rates `cosine`.
"""

import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import arguments, derivatives, layout, phase, rotary, sharding

__all__ = ["BASES", "CORES", "KINDS", "encode", "householder", "permutation", "rates"]

CORES = ("orthogonal", "unitary", "permutation", "mixed")
"""Names of the cores Lambda."""
BASES = ("identity", "householder", "odd_even", "fourier")
"""Names of the bases P."""
KINDS = ("a", "b", "c", "rope", "cosine")
"""Names of the kinds of fixed rates."""

_SEED = 20_23_07_18  # of the paper's date
_HIGHEST = jax.lax.Precision.HIGHEST


def encode(
    x: Float[Array, "B T N D"],
    positions: Int[Array, "B T"],
    *,
    core: str,
    basis: str,
    rates: Float[np.ndarray, " R"] | Float[Array, " R"] | Float[Array, "K R"] | None = None,
    householder: Float[Array, " D"] | Float[Array, "K D"] | None = None,
    permutation: Int[np.ndarray, " D"] | Int[np.ndarray, "K D"] | Int[Array, "K D"] | None = None,
    identity_dim: int = 0,
) -> Float[Array, "B T N D"] | Float[Array, "B T N 2*D"]:
    """Computes Lambda^(s) P x for queries or keys x at positions s >= 0.

    The dot product of a query encoded at s and a key encoded at t is the real part of q^H W_{t-s} k.

    The core `orthogonal` rotates the pairs (x_{2k}, x_{2k+1}), k from 0, by s alpha_k and leaves the last
    `identity_dim` dimensions unchanged (solution 2). `mixed` rotates only the first D // 2 dimensions, rounded up to
    even. `unitary` multiplies dimension k by exp(i s alpha_k) (solution 1). `permutation` gives dimension i the value
    of dimension pi^s(i) (solution 3).

    The basis `householder` is I - 2 v v^T / (v^T v) (equation 73). `odd_even` sends dimension k of the first half to 2k
    and of the second to 2k + 1 (the paper's pseudocode; its equation 74 is misprinted and not a permutation). `fourier`
    is the unitary discrete Fourier transform.

    The core `unitary` and the basis `fourier` are complex: the real parts come first, followed by the imaginary parts.
    That doubles the head size, and with it the state of an attention with a recurrent form.

    `rates` are the alpha in radians per position. A NumPy array is fixed, a JAX array is learned, for all heads or with
    one row for each of K groups of heads; head n belongs to group n // (N / K). `householder` is v, which must not be
    zero, with the same two shapes. So is `permutation`, pi, of integers; the values of a JAX array are not checked.
    `householder` and `permutation` default to the functions of that name. Each of the three is an error with a core or
    basis that does not use it, except for the empty rates of the core `permutation`. Phases are right at any position
    below 2^31 (`ops.phase`). Computed in float32 or wider and returned in the dtype of x.

    Raises:
        ValueError: a name is unknown, the core does not support the head size or `identity_dim`, shapes or dtypes do
            not match, a NumPy array has an invalid value, or an argument would not be used.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax.ops import lrpe
        >>> rates = lrpe.rates("orthogonal", 16, kind="rope")
        >>> x, positions = jnp.ones((1, 8, 4, 16)), jnp.arange(8)[None]
        >>> lrpe.encode(x, positions, core="orthogonal", basis="identity", rates=rates).shape
        (1, 8, 4, 16)
    """
    x, positions = arguments.to_arrays(x=x, positions=positions)
    arguments.check_axes("x", x, "[B, T, N, D]")
    arguments.check_floating("x", x)
    arguments.check_positions("positions", positions, "[B, T]")
    head_dim = x.shape[-1]
    arguments.check_choice("basis", basis, BASES)
    rotated = _rotated_size(core, head_dim, identity_dim)
    if householder is not None:
        if basis != "householder":
            raise ValueError(
                f"householder is given and basis is {basis!r}; leave it out, or use basis 'householder'"
            )
        _require_rows("householder", householder, head_dim, x.shape[2])
        arguments.check_floating("householder", householder)
        if isinstance(householder, np.ndarray) and not (
            np.isfinite(householder).all() and householder.any(-1).all()
        ):
            raise ValueError(f"householder is {householder.tolist()}; it must be finite and not zero")
    fixed_rates = fixed_permutation = None
    if core == "permutation":
        permutation = _checked_permutation(permutation, head_dim, x.shape[2])
        if rates is not None and np.size(rates):
            raise ValueError("rates are given, but core 'permutation' has none; leave them out")
        rates = None
        if isinstance(permutation, np.ndarray):
            fixed_permutation, permutation = arguments.Constant.of(permutation), None
    else:
        if permutation is not None:
            raise ValueError(
                f"permutation is given and core is {core!r}; leave it out, or use core 'permutation'"
            )
        if rates is None:
            raise ValueError(f"rates is None, but core {core!r} needs rates; make them with lrpe.rates")
        _require_rows("rates", rates, rotated if core == "unitary" else rotated // 2, x.shape[2])
        arguments.check_floating("rates", rates)
        if isinstance(rates, np.ndarray):
            if not np.isfinite(rates).all():
                raise ValueError(f"rates are {rates.tolist()}; they must be finite")
            fixed_rates, rates = arguments.Constant.of(rates), None
    plan = _Plan(core, basis, fixed_rates, fixed_permutation)
    arrays = {"rates": rates, "householder": householder, "permutation": permutation}
    return _encode(plan, x=x, positions=positions, **arrays)


class _Plan(NamedTuple):
    """Static options of an encoding: names, and fixed rates and permutations."""

    core: str
    basis: str
    rates: arguments.Constant | None
    permutation: arguments.Constant | None


@sharding.op({"x": "B T N D", "positions": "B T"}, lambda plan: "B T N D")
def _encode(plan, x, positions, rates, householder, permutation):
    parts = _transformed(x.astype(np.promote_types(x.dtype, jnp.float32)), plan.basis, householder)
    if plan.core == "permutation":
        cycles = _Cycles.of(permutation if plan.permutation is None else plan.permutation.array())
        parts = [_permuted(part, positions, cycles) for part in parts]
    else:
        # [B, T, K, R], K = 1 if all heads share the rates
        dtype = parts[0].dtype
        if plan.rates is None:
            angles = phase.learned(positions, rates, dtype=dtype)
        else:
            rates = plan.rates.array()
            angles = phase.fixed(positions, rates, dtype)
        angles = angles if rates.ndim == 2 else angles[:, :, None]
        if plan.core == "unitary":
            # Each complex dimension times exp(i angle)
            grouped = [layout.by_group(part, angles.shape[2]) for part in parts]
            cos, sin = jnp.cos(angles)[:, :, :, None], jnp.sin(angles)[:, :, :, None]
            real, imaginary = grouped[0] * cos, grouped[0] * sin
            if len(parts) > 1:
                real, imaginary = real - grouped[1] * sin, imaginary + grouped[1] * cos
            parts = [real.reshape(x.shape), imaginary.reshape(x.shape)]
        elif rotated := 2 * angles.shape[-1]:
            # The leading pairs of dimensions rotate, and the rest stays.
            parts = [
                jnp.concatenate([rotary.rotate(part[..., :rotated], angles), part[..., rotated:]], axis=-1)
                if rotated < x.shape[-1]
                else rotary.rotate(part, angles)
                for part in parts
            ]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype) if len(parts) > 1 else parts[0].astype(x.dtype)


def rates(
    core: str,
    head_dim: int,
    *,
    kind: str,
    identity_dim: int = 0,
    reference_length: int = 1024,
    max_document_length: int = 65_536,
) -> Float[np.ndarray, " R"]:
    """Returns the fixed rates alpha, in radians per position, float64.

    There is one per pair, or one per dimension for the core `unitary`. For R rates over d dimensions, the kinds of the
    paper's pseudocode are, with t from 0 and L the `reference_length`: `a` is 10000^(-2 t / d), `b` is pi (t + 1) / (2
    L R), `c` is pi / (2 L (t + 1)). `rope` is 2 pi / M^(2 t / d), with M the `max_document_length`: the rates of
    `rotary.rope`. `cosine` is pi / (2 L) for every t: with the core `unitary`, products are q . k cos(pi (t - s) / (2
    L)), the weights of cosFormer (Qin et al. 2022, equation 35 of the LRPE paper), which are not negative for
    non-negative vectors at distances up to L. The pseudocode divides `b` and `c` by the length of the current
    sequence, which is unknown if the sequence will be continued. The core `permutation` has no rates, R = 0.

    Raises:
        ValueError: a name is unknown, the core does not support a size, or a length is not a positive integer.

    Examples:
        >>> from sympow_jax.ops import lrpe
        >>> lrpe.rates("orthogonal", 8, kind="a").round(4).tolist()
        [1.0, 0.1, 0.01, 0.001]
    """
    arguments.check_choice("kind", kind, KINDS)
    reference_length = arguments.check_integer("reference_length", reference_length, 1)
    max_document_length = arguments.check_integer("max_document_length", max_document_length, 1)
    rotated = _rotated_size(core, head_dim, identity_dim)
    count = {"permutation": 0, "unitary": rotated}.get(core, rotated // 2)
    index = np.arange(count)
    if kind == "a":
        return 10_000.0 ** (-2 * index / rotated)
    if kind == "b":
        return np.pi / 2 / reference_length * (index + 1) / max(1, count)
    if kind == "c":
        return np.pi / 2 / reference_length / (index + 1)
    if kind == "cosine":
        return np.full(count, np.pi / 2 / reference_length)
    return 2 * np.pi * float(max_document_length) ** (-2 * index / rotated)


def permutation(head_dim: int, *, heads: int | None = None) -> Int[np.ndarray, " D"] | Int[np.ndarray, "K D"]:
    """Returns the fixed permutation pi of a head size, or one for each of `heads`.

    It is the same at every call. Row 0 is the same with and without `heads`.

    Examples:
        >>> from sympow_jax.ops import lrpe
        >>> sorted(lrpe.permutation(4).tolist())
        [0, 1, 2, 3]
        >>> lrpe.permutation(4, heads=2).shape
        (2, 4)
    """
    head_dim = arguments.check_integer("head_dim", head_dim, 1)
    rows = 1 if heads is None else arguments.check_integer("heads", heads, 1)
    bits = _random_bits(rows * head_dim).reshape(-1, head_dim)
    drawn = np.argsort(bits, axis=-1, kind="stable")
    return drawn[0] if heads is None else drawn


def householder(head_dim: int) -> Float[np.ndarray, " D"]:
    """Returns the fixed Householder vector v, of length 1, of a head size.

    It was drawn once from a normal distribution.

    Examples:
        >>> from sympow_jax.ops import lrpe
        >>> v = lrpe.householder(4)
        >>> round(float(v @ v), 6)
        1.0
    """
    head_dim = arguments.check_integer("head_dim", head_dim, 1)
    uniform = (_random_bits(head_dim) >> 11).astype(np.float64) * 2.0**-53 + 2.0**-54
    normal = np.array([statistics.NormalDist().inv_cdf(u) for u in uniform])
    return normal / np.linalg.norm(normal)


def _random_bits(count: int) -> np.ndarray:
    # NumPy guarantees the raw bits of a generator across versions, but not the distributions derived from them.
    return np.random.PCG64(_SEED).random_raw(count)


def _rotated_size(core: str, head_dim: int, identity_dim: int) -> int:
    """Returns the number of leading dimensions that the core acts on.

    Raises:
        ValueError: the core does not support the head size.
    """
    arguments.check_choice("core", core, CORES)
    head_dim = arguments.check_integer("head_dim", head_dim, 0)
    identity_dim = arguments.check_integer("identity_dim", identity_dim)
    if identity_dim and core != "orthogonal":
        raise ValueError(
            f"identity_dim is {identity_dim}; only core 'orthogonal' has an identity part, not {core!r}"
        )
    if not 0 <= identity_dim <= head_dim:
        raise ValueError(f"identity_dim is {identity_dim}; it must be between 0 and the head size {head_dim}")
    if core == "mixed" and head_dim < 3:
        raise ValueError(f"head size is {head_dim}; core 'mixed' needs at least 3")
    if core == "orthogonal" and (head_dim - identity_dim) % 2:
        raise ValueError(
            f"head size is {head_dim} and identity_dim {identity_dim}; core 'orthogonal' rotates pairs of the other "
            f"dimensions, whose number must be even"
        )
    if core == "mixed":
        return (head_dim // 2 + 1) // 2 * 2
    return head_dim - identity_dim


def _require_rows(name: str, array, width: int, heads: int) -> None:
    """Raises ValueError unless it is an array [width], or [K, width] for K groups of heads."""
    arguments.check_array(name, array)
    shape = array.shape
    groups = shape[0] if len(shape) == 2 else 1
    if shape[-1:] != (width,) or len(shape) > 2 or not groups or heads % groups:
        raise ValueError(
            f"{name} has shape {shape}; it must be [{width}], or [K, {width}] with a K that divides the {heads} heads"
        )


def _transformed(x, basis: str, v) -> list:
    """Returns P x as its real part, and its imaginary part if it has one."""
    head_dim = x.shape[-1]
    if basis == "householder":
        v = jnp.asarray(householder(head_dim) if v is None else v).astype(x.dtype)
        v = v.reshape(-1, 1, head_dim)
        # x - 2 v (v . x) / (v . v)
        grouped = layout.by_group(x, v.shape[0])
        share = jnp.sum(grouped * v, axis=-1, keepdims=True) * (2 / jnp.sum(v * v, axis=-1, keepdims=True))
        return [(grouped - share * v).reshape(x.shape)]
    if basis == "odd_even":
        half = head_dim - head_dim // 2
        pairs = jnp.stack([x[..., : head_dim // 2], x[..., half:]], axis=-1)
        return [jnp.concatenate([pairs.reshape(*x.shape[:-1], -1), x[..., head_dim // 2 : half]], axis=-1)]
    if basis == "fourier":
        # The unitary discrete Fourier transform, symmetric, as two real matrices. A matrix product can be sharded over
        # batch and heads; XLA gathers the operand of an FFT.
        index = np.arange(head_dim)
        angles = -2 * np.pi / head_dim * (np.outer(index, index) % head_dim)
        transform = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)]) / np.sqrt(head_dim), x.dtype)
        return [jnp.matmul(x, part, precision=_HIGHEST) for part in transform]
    return [x]


def _checked_permutation(pi, head_dim: int, heads: int) -> np.ndarray | Array:
    """Returns the permutation, or the default.

    Raises:
        ValueError: the shape or dtype is wrong, or a row of a NumPy array is no permutation.
    """
    pi = permutation(head_dim) if pi is None else pi
    _require_rows("permutation", pi, head_dim, heads)
    if not jnp.issubdtype(pi.dtype, jnp.integer):
        raise ValueError(f"permutation has dtype {pi.dtype}; it must be an integer dtype, such as int32")
    if isinstance(pi, np.ndarray) and (np.sort(pi, -1) != np.arange(head_dim)).any():
        raise ValueError(f"permutation is {pi.tolist()}; it must hold each of 0 to {head_dim - 1} once")
    return pi


class _Cycles(NamedTuple):
    """Cycles of each permutation, concatenated, and the place of each dimension in them."""

    order: Int[Array, "K D"] | Int[np.ndarray, "K D"]
    start: Int[Array, "K D"] | Int[np.ndarray, "K D"]
    offset: Int[Array, "K D"] | Int[np.ndarray, "K D"]
    length: Int[Array, "K D"] | Int[np.ndarray, "K D"]

    @classmethod
    def of(cls, pi) -> "_Cycles":
        """Returns the cycles of permutations [D] or [K, D], NumPy or JAX arrays, in log2(D) steps."""
        xp: Any = np if isinstance(pi, np.ndarray) else jnp
        pi = pi.reshape(-1, pi.shape[-1])
        dimension = xp.broadcast_to(xp.arange(pi.shape[-1]), pi.shape)

        def along(combine, x, step):
            """Combines x of each dimension with that of all dimensions that repeated steps lead to."""
            for _ in range(pi.shape[-1].bit_length()):
                x = combine(x, xp.take_along_axis(x, step, -1))
                step = xp.take_along_axis(step, step, -1)
            return x

        # A cycle begins at its least dimension. An offset is the number of steps back to there.
        first = along(xp.minimum, dimension, pi)
        begins = first == dimension
        back = xp.where(begins, dimension, xp.argsort(pi, -1))
        offset = along(xp.add, xp.where(begins, 0, 1), back)
        length = along(xp.maximum, offset, pi) + 1
        order = xp.lexsort((offset, first), axis=-1)
        return cls(order, xp.argsort(order, -1) - offset, offset, length)

    def permute(self, x, positions, direction: int):
        """Returns x with dimension pi^s(i), or pi^-s(i), at place i, by arithmetic within the cycle of i."""
        order, start, offset, length = (jnp.asarray(part, jnp.int32) for part in self)
        groups, head_dim = order.shape
        steps = direction * (positions.astype(jnp.int32)[..., None, None] % length)
        # Orders of all groups in one vector, because a gather from a vector is the cheapest.
        row = head_dim * jnp.arange(groups, dtype=jnp.int32)[:, None]
        index = order.ravel()[row + start + (offset + steps) % length]
        permuted = jnp.take_along_axis(
            layout.by_group(x, groups), index[:, :, :, None], axis=-1, mode="promise_in_bounds"
        )
        return permuted.reshape(x.shape)


@derivatives.custom_vjp
def _permuted(x, positions, cycles: _Cycles):
    """Returns x with dimension pi^s(i) at place i."""
    return cycles.permute(x, positions, 1)


# The transpose is the inverse, which is also a gather; JAX's gradient of a gather would be a scatter.
_permuted.defvjp(
    lambda x, positions, cycles: (cycles.permute(x, positions, 1), (positions, cycles)),
    lambda residuals, gradient: (residuals[1].permute(gradient, residuals[0], -1), None, None),
    lambda residuals, changes: residuals[1].permute(changes[0], residuals[0], 1),
)
