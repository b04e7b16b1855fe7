"""Rotary position encodings, with rates that are fixed (rope) or depend on the data (learned rope).

The pair (2m, 2m + 1) of a head's dimensions, m from 0, is rotated by an angle position * theta_m, theta_m = 2 pi /
M^(2m/D), M the maximum document length (appendix A.1.2 of "Conformal Transformations for Symmetric Power Transformers",
Kumar et al. 2025, which counts m from 1). Angles are computed in integers, since a float32 sum of positions is off by
0.15 after 2^20 tokens. A position is a whole number and a 32-bit fraction, and a rate theta_m / (2 pi) is a 64-bit
fraction of a turn. Their product modulo one turn is exact to 2^-31 before it becomes a float32. The error of sine and
cosine is 3e-7 after 2^20 tokens, and nothing depends on how a sequence is split. Float64 inputs get float64 angles,
from integers of twice the size.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int, UInt
from sympow_jax.ops import arguments, documents, fixed_point, phase, sharding
from sympow_jax.ops.promotion import by_default_rules
from sympow_jax.ops.pytree import State

__all__ = [
    "LAYOUTS",
    "RotaryState",
    "learned_angles",
    "llama3_rates",
    "rope",
    "rope_angles",
    "rope_rates",
    "rotate",
    "sinusoidal",
]

LAYOUTS = ("pairs", "halves")
"""Dimensions that rotate together, m from 0: 2m and 2m + 1 in `pairs`, m and m + D/2 in `halves`."""

# (-1, 1) along an axis, the last or the one before, of two axes.
_SIGNS = {-1: np.array([[-1, 1]], np.float32), -2: np.array([[-1], [1]], np.float32)}


class RotaryState(State):
    """Learned position after a prefix of a document, and the document's segment id.

    There is one position per head, or one for each of its D/2 pairs.

    Attributes:
        whole: whole part of the position, in units of the rates.
        fraction: fractional part of the position, a uint32 in units of 2^-32 or a uint64 in units of 2^-64.
        segment: segment id of the document, -1 before the first token.
    """

    whole: Int[Array, "B K *pairs"]
    fraction: UInt[Array, "B K *pairs"]
    segment: Int[Array, " B"]

    @classmethod
    def zeros(
        cls, batch: int, kv_heads: int, pairs: int | None = None, *, dtype: Any = jnp.float32
    ) -> "RotaryState":
        """Returns the state before any token.

        Args:
            batch: number of rows.
            kv_heads: number of key/value heads.
            pairs: D/2 if every pair has a rate of its own.
            dtype: dtype of the angles, float32 or float64.
        """
        sizes = {"batch": batch, "kv_heads": kv_heads} | ({} if pairs is None else {"pairs": pairs})
        shape = tuple(arguments.check_sizes(**sizes).values())
        arguments.check_dtype("dtype", dtype)
        return cls(
            whole=jnp.zeros(shape, jnp.int32),
            fraction=jnp.zeros(shape, jnp.uint64 if jnp.dtype(dtype) == jnp.float64 else jnp.uint32),
            segment=jnp.full(shape[0], documents.NO_SEGMENT, jnp.int32),
        )

    @classmethod
    def layout(cls, by_pair: bool = False) -> "RotaryState":
        """Returns the axes of each array; `by_pair` is True if every pair has a rate of its own."""
        reached = "B K D" if by_pair else "B K"
        return cls(reached, reached, "B")  # type: ignore[arg-type]


def rope(
    x: Float[Array, "B T N D"],
    positions: Int[Array, "B T"],
    *,
    theta: Float[np.ndarray, " pairs"] | None = None,
    layout: str = "pairs",
) -> Float[Array, "B T N D"]:
    """Rotates queries or keys at fixed rates: R(positions * theta) x (Su et al. 2021). Positions are >= 0.

    `theta` is as in `rope_angles`, `layout` as in `rotate`.

    Raises:
        ValueError: the head size is odd, theta is not [D/2] rates, or the layout is unknown.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax.ops import rotary
        >>> x, positions = jnp.ones((1, 8, 4, 16)), jnp.arange(8)[None]
        >>> rotary.rope(x, positions).shape
        (1, 8, 4, 16)
    """
    x = arguments.to_array("x", x)
    arguments.check_axes("x", x, "[B, T, N, D]")
    dtype = np.promote_types(x.dtype, jnp.float32)
    return rotate(x, rope_angles(positions, x.shape[-1], theta=theta, dtype=dtype), layout=layout)


def rope_rates(
    head_dim: int, *, max_document_length: int = 65_536, base: float | None = None
) -> Float[np.ndarray, " pairs"]:
    """Returns the rates theta in radians per position, the fastest first; float64 [D/2].

    They are 2 pi / max_document_length^(2m/D) for m from 0 (Kumar et al. 2025), or base^(-2m/D) if a base is given (Su
    et al. 2021).

    Raises:
        ValueError: the head size is odd, or the base is not above 1.

    Examples:
        >>> from sympow_jax.ops import rotary
        >>> (rotary.rope_rates(4, max_document_length=256) / (2 * 3.141592653589793)).tolist()  # turns per token
        [1.0, 0.0625]
    """
    head_dim = arguments.check_even("head size", head_dim)
    exponents = -2 * np.arange(head_dim // 2) / head_dim
    if base is None:
        length = arguments.check_integer("max_document_length", max_document_length, 1)
        return 2 * np.pi * float(length) ** exponents
    return arguments.check_number("base", base, above=1) ** exponents  # later pairs rotate more slowly


def llama3_rates(
    theta: Float[np.ndarray, " pairs"],
    *,
    factor: float,
    low_frequency_factor: float,
    high_frequency_factor: float,
    original_length: int,
) -> Float[np.ndarray, " pairs"]:
    """Returns rates scaled as in Llama 3.1, for documents longer than those of the first training.

    A pair that makes more than `high_frequency_factor` turns in `original_length` tokens keeps its rate, and one that
    makes fewer than `low_frequency_factor` has it divided by `factor`. In between, the scale is linear in the turns.

    Examples:
        >>> import numpy as np
        >>> from sympow_jax.ops import rotary
        >>> turns = 2 * np.pi / 8192 * np.array([0.5, 2.5, 8.0])
        >>> scaled = rotary.llama3_rates(
        ...     turns, factor=8, low_frequency_factor=1, high_frequency_factor=4, original_length=8192
        ... )
        >>> (scaled / turns).tolist()
        [0.125, 0.5625, 1.0]
    """
    arguments.check_array("theta", theta)
    factors = {
        "factor": factor,
        "low_frequency_factor": low_frequency_factor,
        "original_length": original_length,
    }
    for name, number in factors.items():
        arguments.check_number(name, number, above=0)
    arguments.check_number("high_frequency_factor", high_frequency_factor, above=low_frequency_factor)
    turns = theta * (original_length / (2 * np.pi))
    kept = np.clip((turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor), 0, 1)
    return theta * (kept + (1 - kept) / factor)


def rope_angles(
    positions: Int[Array, "B T"],
    head_dim: int,
    *,
    theta: Float[np.ndarray, " pairs"] | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "B T 1 {head_dim//2}"]:
    """Returns the angles positions * theta in radians, reduced to [-pi, pi], in float32 or float64.

    `theta` is D/2 rates from `rope_rates` or `llama3_rates`; None is `rope_rates(head_dim)`.

    Raises:
        ValueError: the head size is odd, or theta is not [D/2] rates.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax.ops import rotary
        >>> rotary.rope_angles(jnp.arange(8)[None], 16).shape
        (1, 8, 1, 8)
    """
    positions = arguments.to_array("positions", positions)
    arguments.check_positions("positions", positions, "[B, T]")
    arguments.check_dtype("dtype", dtype, ("float32", "float64"))
    return phase.fixed(positions[..., None], _checked_rates(theta, head_dim), dtype)


def learned_angles(
    rate: Float[Array, "B T K *pairs"],
    head_dim: int,
    *,
    theta: Float[np.ndarray, " pairs"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: RotaryState | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "B T K {head_dim//2}"], RotaryState]:
    """Returns the angles mu_i = mu_{i-1} + beta_i theta and the position after the last token.

    Section 3.2 of Kumar et al. 2025. Angles are in radians, reduced to [-pi, pi]. `rate` is beta = 1 + tanh(W x),
    anything in [0, 2]: one beta per head, [B, T, K], or one for each pair of its dimensions, [B, T, K, D/2]: mu_{i,m} =
    mu_{i-1,m} + beta_{i,m} theta_m, independent rotations, which the paper leaves to future work. Where betas are
    equal, so are the angles, bit for bit.

    beta is rounded to a multiple of 2^-32 and summed in integers, restarting with every document. The angles are
    therefore bitwise identical for any split of a sequence, and equal to those of `rope` at positions from 1 if beta is
    1. Angles are float64 if `rate` is, or if the state is one of float64 angles. Then beta is rounded to a multiple of
    2^-64. The gradient is that of the unrounded sum, d mu_i / d beta_j = theta for j <= i. No gradient flows through
    the state, which is integers. `axis_name` is a manual mesh axis over which time is sharded, in order. With it,
    `initial_state` is the state before the first device's tokens, and the returned position is the one after this
    device's tokens. A token whose beta is not finite has NaN angles. Without segment ids, the tokens continue the
    document of the state. `theta` is as in `rope_angles`.

    Raises:
        ValueError: the head size is odd, theta is not [D/2] rates, or shapes do not match.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax.ops import rotary
        >>> rate = jnp.ones((1, 8, 2))  # [B, T, K]; at rate 1 these are the angles of `rope` at positions from 1
        >>> angles, state = rotary.learned_angles(rate, 16)
        >>> angles.shape, state.whole.tolist()
        ((1, 8, 2, 8), [[8, 8]])
    """
    rates = _checked_rates(theta, head_dim)
    rate, segment_ids = arguments.to_arrays(rate=rate, segment_ids=segment_ids)
    if rate.ndim not in (3, 4) or rate.shape[3:] not in ((), (len(rates),)):
        raise ValueError(
            f"rate has shape {rate.shape}; it must be [B, T, K], one per head, or [B, T, K, {len(rates)}], one per pair"
        )
    expected = (rate.shape[0], *rate.shape[2:])
    if initial_state is not None and not isinstance(initial_state, RotaryState):
        raise ValueError(
            f"the state is a {type(initial_state).__name__}; make it with RotaryState.zeros{expected}"
        )
    if initial_state is not None and initial_state.whole.shape != expected:
        raise ValueError(
            f"rate has shape {rate.shape} and the state's positions {initial_state.whole.shape}; make the state with "
            f"RotaryState.zeros{expected}"
        )
    arguments.check_floating("rate", rate)
    if segment_ids is not None:
        arguments.check_segment_ids(segment_ids, rate.shape[:2])
        if initial_state is not None:
            arguments.check_ids_fit(segment_ids, initial_state)
    if axis_name is not None:
        arguments.check_axis_name(axis_name)
    plan = _Angles(arguments.Constant.of(rates), rate.ndim == 4, axis_name)
    return _learned_angles(plan, rate=rate, segment_ids=segment_ids, state=initial_state)


class _Angles(NamedTuple):
    """Static options of learned angles: rates, whether each pair has a beta of its own, and the time axis."""

    rates: arguments.Constant
    by_pair: bool
    axis_name: str | None


@sharding.op(
    {"rate": "B T K D", "segment_ids": "B T"}, lambda plan: ("B T K D", RotaryState.layout(plan.by_pair))
)
def _learned_angles(plan, rate, segment_ids, state):
    rates, by_pair, axis_name = plan.rates.array(), plan.by_pair, plan.axis_name
    batch, time, *heads = rate.shape
    if state is None:
        state = RotaryState.zeros(batch, *heads, dtype=rate.dtype)
    if rate.dtype == jnp.float64 and fixed_point.bits(state.fraction) == 32:
        state = dataclasses.replace(state, fraction=state.fraction.astype(jnp.uint64) << 32)
    word = state.fraction.dtype
    dtype = jnp.dtype(f"float{fixed_point.bits(state.fraction)}")
    if segment_ids is None:
        segment_ids = jnp.broadcast_to(documents.continued(state.segment)[:, None], (batch, time))
    valid = (segment_ids >= 0).reshape(batch, time, *[1] * len(heads))
    rate = jnp.where(valid, rate.astype(dtype), 0)
    # Heads and pairs are one axis.
    steps = jax.lax.stop_gradient(rate).reshape(batch, time, -1)

    def reach(state):
        starts, _, last = documents.boundaries(segment_ids, state.segment)
        reached = state.whole.reshape(batch, -1), state.fraction.reshape(batch, -1)
        sums = fixed_point.running_sum(steps, reached, dtype=word)
        before = (documents.before_document(x, starts, first) for x, first in zip(sums, reached, strict=True))
        whole, fraction = (x.reshape(rate.shape) for x in fixed_point.subtract(sums, tuple(before)))
        return whole, fraction, starts, RotaryState(whole[:, -1], fraction[:, -1], last)

    def add(before, own):
        sums = (before.whole, before.fraction), (own.whole, own.fraction)
        return RotaryState(*fixed_point.add(*sums), own.segment)

    if axis_name is not None:
        state = documents.state_before(lambda state: reach(state)[-1], add, segment_ids, state, axis_name)
    whole, fraction, starts, state = reach(state)
    theta = jnp.asarray(rates, dtype)
    reached = (whole, fraction) if by_pair else (whole[..., None], fraction[..., None])

    def change(drate, angles, rate, starts, theta):
        """Returns the change of theta times the running sum of the rates before they are rounded."""

        def to_rates(gradient):
            if by_pair:
                by_pairs = (gradient * theta).reshape(*gradient.shape[:2], -1)
                return documents.sums_to_end(by_pairs, starts, axis_name).reshape(rate.shape)
            by_position = jnp.matmul(gradient, theta, precision=jax.lax.Precision.HIGHEST)
            return documents.sums_to_end(by_position, starts, axis_name)

        # Sums from the start of a document are the transpose of sums to its end, and reverse mode transposes again.
        return jax.linear_transpose(to_rates, angles)(drate)[0]

    # Integers have no NaN.
    finite = jnp.isfinite(rate if by_pair else rate[..., None])
    angles = jnp.where(finite, phase.fractional(*reached, rates), jnp.nan)
    return fixed_point.with_derivative(change, angles, rate, starts, theta), state


def rotate(
    x: Float[Array, "B T N D"], angles: Float[Array, "B T K D//2"], *, layout: str = "pairs"
) -> Float[Array, "B T N D"]:
    """Rotates each pair of dimensions by its angle; head n uses the angles of group n // (N / K).

    `layout` says which dimensions are a pair, as in `LAYOUTS`. Computed in float32 or wider and returned in the dtype
    of x.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax.ops import rotary
        >>> quarter = jnp.full((1, 1, 1, 1), jnp.pi / 2)
        >>> rotary.rotate(jnp.array([[[[1.0, 0.0]]]]), quarter).round(3).tolist()
        [[[[-0.0, 1.0]]]]
    """
    x, angles = arguments.to_arrays(x=x, angles=angles)
    for name, array in {"x": x, "angles": angles}.items():
        arguments.check_axes(name, array, "[B, T, N, D]" if name == "x" else "[B, T, K, D/2]")
        arguments.check_floating(name, array)
    arguments.check_even("the head size of x", x.shape[3])
    fit = all(n in (1, size) for n, size in zip(angles.shape, x.shape[:2]))
    if not fit or angles.shape[-1] != x.shape[-1] // 2 or not angles.shape[2] or x.shape[2] % angles.shape[2]:
        raise ValueError(
            f"angles has shape {angles.shape} and x {x.shape}; angles must be [B, T, K, D/2] with a K that divides the "
            f"{x.shape[2]} heads of x"
        )
    arguments.check_choice("layout", layout, LAYOUTS)
    return _rotate(layout, x=x, angles=angles)


@sharding.op({"x": "B T N D", "angles": "B T K D"}, lambda _: "B T N D")
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _rotate(layout, x, angles):
    """Rotates; the backward pass computes sines and cosines again."""
    batch, time, heads, head_dim = x.shape
    pairs = x.astype(np.promote_types(x.dtype, jnp.float32))
    split, axis = ((head_dim // 2, 2), -1) if layout == "pairs" else ((2, head_dim // 2), -2)
    # With an axis of size 1, XLA for GPUs writes sines and cosines to memory.
    group = (heads // angles.shape[2],) if heads > angles.shape[2] else ()
    pairs = pairs.reshape(batch, time, angles.shape[2], *group, *split)
    rotated = _turned(axis, pairs, jnp.expand_dims(angles[:, :, :, None] if group else angles, axis))
    return rotated.reshape(batch, time, heads, head_dim).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _turned(axis, pairs, angles):
    """Rotates the pairs along `axis` without separating their entries: y = x cos + (x swapped) (-sin, sin).

    The signs are those of the angles. XLA for GPUs would write sine and cosine of broadcast angles to memory, and read
    them again, which takes longer than computing them for each entry.
    """
    angles = angles * _SIGNS[axis]
    return pairs * jnp.cos(angles) + jnp.flip(pairs, axis) * jnp.sin(angles)


@_turned.defjvp
@by_default_rules
def _turned_jvp(axis, primals, tangents):
    """Returns R(a) dx + (dR(a)/da x) da, whose transpose is one pass of a GPU for queries, keys and angles.

    Gradients of x and of a share no intermediate result but sine and cosine, since XLA would write others to memory.
    These two are behind a barrier, or XLA for CPUs would compute them again for each gradient.
    """
    (pairs, angles), (dpairs, dangles) = primals, tangents
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    slope = jnp.flip(pairs, axis) * (_SIGNS[axis] * cos) - pairs * sin
    tangent = dpairs * cos - jnp.flip(dpairs * (_SIGNS[axis] * sin), axis) + slope * dangles
    return _turned(axis, pairs, angles), tangent


def sinusoidal(positions: Int[Array, "B T"], width: int) -> Float[Array, "B T M"]:
    """Returns the sine and cosine of positions / 10000^(2 m / M), interleaved (Vaswani et al. 2017, section 3.5).

    Raises:
        ValueError: the width is odd.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax.ops import rotary
        >>> rotary.sinusoidal(jnp.arange(2)[None], 4).round(1).tolist()[0][0]  # position 0
        [0.0, 1.0, 0.0, 1.0]
    """
    width = arguments.check_even("width", width)
    positions = arguments.to_array("positions", positions)
    arguments.check_positions("positions", positions)
    angles = phase.fixed(positions, 10_000.0 ** (-2 * np.arange(width // 2) / width))
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, width)


def _checked_rates(
    theta: Float[np.ndarray, " pairs"] | None, head_dim: int
) -> Float[np.ndarray, " {head_dim//2}"]:
    """Returns theta, or the default rates of a head size if it is None."""
    default = rope_rates(head_dim)
    if theta is None:
        return default
    theta = np.asarray(theta, np.float64)
    # `phase.fractional` multiplies fractions of a position by rates of less than a turn.
    if theta.shape != default.shape or not np.all((theta >= 0) & (theta <= 2 * np.pi)):
        raise ValueError(
            f"theta is {theta.tolist()}; it must be {len(default)} rates from 0 to 2 pi; make it with "
            f"rope_rates({head_dim})"
        )
    return theta
