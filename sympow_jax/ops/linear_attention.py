"""Linear attention: the weight of key j for query i is phi(q_i) . phi(k_j).

"Transformers are RNNs" (Katharopoulos et al. 2020). phi may depend on the position. Positional maps of features are
those of "RoFormer" (Su et al. 2021, equation 19) and "Linearized Relative Positional Encoding" (Qin et al. 2023).
Linear attention is power attention of mapped queries and keys, with power 1 or, where phi is a power, that power: it
shares forms, windows and states with `power_attention`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import (
    arguments,
    containment,
    cost,
    feature_maps,
    means,
    plans,
    power_state,
    preparation,
    sharding,
)
from sympow_jax.ops import attend as recurrent
from sympow_jax.ops.forms import bidirectional
from sympow_jax.ops.promotion import by_default_rules
from sympow_jax.ops.pytree import State
from sympow_jax.ops.tokens import ONE, SEQUENCE, Tokens

_ELEMENTWISE = {"elu": feature_maps.elu_plus_one, "relu": jax.nn.relu, "identity": lambda x: x}
_POWERS = {"symmetric": feature_maps.symmetric_power, "tensor": feature_maps.tensor_power}
_NORMALIZERS = ("unrotated", "rotated")

Rotate = Callable[[Float[Array, "B T H F"]], Float[Array, "B T H L"]]


class LinearState(State):
    """State of linear attention after a prefix of a document; a pytree that the caller holds.

    Attributes:
        numerator: state of the weighted values, over features after `rotate`.
        denominator: state of the weights, over features before `rotate` and without values. None if the normalizer of
            `numerator` is the denominator.
    """

    numerator: power_state.PowerState
    denominator: power_state.PowerState | None

    @classmethod
    def zeros(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        *,
        feature_map: str = "elu",
        power: int = 2,
        rotated_dim: int | None = None,
        normalizer: str = "unrotated",
        exact_window: int = 64,
        dtype=jnp.float32,
    ) -> "LinearState":
        """Returns the state before any token.

        rotated_dim: the length of features after `rotate`, twice that of phi if `rotate` is complex; None without
            `rotate`.

        Without `rotate`, the feature map `tensor` has the state of `symmetric`, which is the same kernel.

        Raises:
            ValueError: the window or a size is negative, or the state would exceed the device's memory.
        """
        kernel = _Kernel.named(feature_map, power)
        arguments.check_choice("normalizer", normalizer, _NORMALIZERS)
        exact_window = arguments.check_integer("exact_window", exact_window, 0)
        arguments.check_dtype("dtype", dtype)

        # With rotated features, those of the numerator are its `head_dim`.
        arguments.check_sizes(head_dim=head_dim, rotated_dim=0 if rotated_dim is None else rotated_dim)

        def zeros(head_dim, value_dim, *, power):
            sizes = arguments.check_sizes(
                batch=batch, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim
            ) | {"power": power, "exact_window": exact_window}
            cost.require_memory(**sizes, itemsize=jnp.dtype(dtype).itemsize)
            return power_state.zeros(**sizes, dtype=dtype)

        if rotated_dim is None:
            return cls(zeros(head_dim, value_dim, power=kernel.power), None)
        numerator = zeros(rotated_dim, value_dim, power=1)
        return cls(numerator, None if normalizer == "rotated" else zeros(head_dim, 0, power=kernel.power))

    @classmethod
    def layout(cls, *, separate: bool) -> "LinearState":
        """Returns the axes of each array; `separate` is True if there is a denominator."""
        one = power_state.PowerState.layout()
        return cls(one, one if separate else None)

    @property
    def exact_window(self) -> int:
        """Window size W: every query attends exactly to at least its last W keys."""
        return self.numerator.exact_window


def linear_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K E"],
    *,
    feature_map: str = "elu",
    power: int = 2,
    rotate: Rotate | None = None,
    normalizer: str = "unrotated",
    causal: bool = True,
    log_decay: Float[Array, "B S K"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    form: str | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    exact_window: int = 64,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
) -> Float[Array, "B T N E"] | tuple[Float[Array, "B T N E"], LinearState]:
    """Computes sum_j b_ij rotate(phi(q_i)) . rotate(phi(k_j)) v_j / sum_j b_ij phi(q_i) . phi(k_j) in value's dtype.

    b_ij = exp(G_i - G_j) for j <= i, and G is the running sum of log_decay. If weights have one sign, the output is
    zero where all weights are zero, as in `power_attention`. The feature map `identity`, odd powers, and features after
    `rotate` in the denominator give weights of both signs, whose sum may be negative or nearly zero. The division is
    then by the sum itself, without an epsilon, and the output is zero only if the sum is exactly zero.

    Args:
        query: as in `power_attention`, which documents the shared arguments in full.
        key: S == T, or S >= T in the attention form without a state.
        value: E may differ from D.
        feature_map: phi: `elu` is elu(x) + 1, `relu`, `identity`, or the `symmetric` or `tensor` power of degree
            `power`, with phi(q) . phi(k) = (q . k)^power. Without `rotate`, powers are computed as in
            `power_attention`.
        power: degree of `symmetric` and `tensor`, at least 1; other feature maps ignore it.
        rotate: position-dependent linear map of features, which may change their length: a function from [B, T, H, F]
            to [B, T, H, L]. It is called with the features of all queries (H = N), then of all keys (H = K). If there
            are more keys than queries, it must accept both lengths. It must know the positions of the tokens itself.
        normalizer: `unrotated` is the denominator above, which cannot vanish for positive features (equation 19 of
            RoFormer); `rotated` has the weights of the numerator. They are the same without `rotate`.
        causal: if False, attention is bidirectional within a document, at a cost linear in T. With segment ids its
            backward pass saves one state per chunk. It supports no decays, states, forms, window or `axis_name`, and
            needs equal numbers of keys and queries. `reference` is then the formula over T x T pairs.
        log_decay: natural logarithm of the gate, at most 0 (not checked).
        segment_ids: a document starts where the id changes; negative ids are padding.
        form: `attention`, `chunked` or `recurrent`; None chooses. All agree to rounding.
        implementation: `reference`, `xla`, or None, which chooses; `mosaic_gpu` for even powers without `rotate`.
        chunk_size: tokens per chunk; None chooses. Changes only speed. Must be None in the recurrent form.
        exact_window: every query attends exactly to at least this many of its last keys.
        initial_state: made by `LinearState.zeros` or returned by an earlier call.
        return_state: return (output, state after the last token).
        axis_name: a manual mesh axis over which time is sharded in order, as in `power_attention`; `rotate` must then
            know the positions before the shard.

    Raises:
        ValueError: for sizes, dtypes or names that do not match, and for a state larger than memory.
        NotImplementedError: if a named implementation, or `causal=False`, does not support the request.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 32, 4, 16))  # [B, T, N, D]
        >>> out, state = ops.linear_attention(query, key, value, feature_map="elu", return_state=True)
        >>> out.shape, state.numerator.kv.shape
        ((1, 32, 4, 16), (1, 4, 16, 16))
    """
    kernel = _Kernel.named(feature_map, power)
    arguments.check_choice("normalizer", normalizer, _NORMALIZERS)
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    arguments.check_attention(*tokens)
    # Remove padding before features are computed: their gradients would be NaN.
    if segment_ids is not None:
        query, key = _without_padding(None, tokens=tokens)
        tokens = tokens._replace(query=query, key=key)
    causal = arguments.check_flag("causal", causal)
    return_state = arguments.check_flag("return_state", return_state)
    if not causal:
        if chunk_size is not None:
            chunk_size = arguments.check_integer("chunk_size", chunk_size, 1)
        absent = {
            "log_decay": log_decay,
            "initial_state": initial_state,
            "axis_name": axis_name,
            "form": form,
        }
        bidirectional.require_supported(
            tokens, implementation, absent | {"return_state": return_state or None}
        )

    def attend(tokens, *, state, power, division):
        if not causal:
            plan = bidirectional.Plan(power, division, implementation, chunk_size)
            return bidirectional.attend(plan, tokens=tokens), None
        plan = plans.make(
            tokens,
            state,
            power=power,
            form=form,
            implementation=implementation,
            chunk_size=chunk_size,
            exact_window=exact_window,
            return_state=return_state,
            axis_name=axis_name,
            division=division,
        )
        return recurrent.attend(plan, tokens=tokens, state=state)

    out, state = _mean(attend, kernel, tokens, rotate, normalizer, initial_state)
    return (out, state) if return_state else out


def linear_attention_step(
    query: Float[Array, "B N D"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K E"],
    state: LinearState,
    *,
    feature_map: str = "elu",
    power: int = 2,
    rotate: Rotate | None = None,
    normalizer: str = "unrotated",
    log_decay: Float[Array, "B K"] | None = None,
    segment_ids: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N E"], LinearState]:
    """Computes `linear_attention` for the next token of each row; returns its output and the state after it.

    `rotate` is called with features [B, 1, H, F]. Arguments and errors are those of `linear_attention`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 4, 16))  # one token: [B, N, D]
        >>> out, state = ops.linear_attention_step(query, key, value, ops.LinearState.zeros(1, 4, 16, 16))
        >>> out.shape
        (1, 4, 16)
    """
    kernel = _Kernel.named(feature_map, power)
    arguments.check_choice("normalizer", normalizer, _NORMALIZERS)
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    arguments.check_attention(*tokens, step=True)
    if segment_ids is not None:
        query, key = _token_without_padding(None, tokens=tokens)
        tokens = tokens._replace(query=query, key=key)

    def rotate_token(features):
        return _rotated(rotate, features[:, None])[:, 0]

    def attend(tokens, *, state, power, division):
        plan = plans.make_step(tokens, state, power=power, implementation=implementation, division=division)
        return recurrent.attend_step(plan, tokens=tokens, state=state)

    return _mean(attend, kernel, tokens, rotate and rotate_token, normalizer, state)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """Kernel with phi = `expand` after `map`, so that phi(q) . phi(k) = (map(q) . map(k))^power.

    division: POSITIVE if no weight of this kernel is negative, else SIGNED.
    """

    feature_map: str
    power: int
    division: means.Division

    @classmethod
    def named(cls, feature_map: str, power: int) -> "_Kernel":
        """Returns the kernel of a feature map; raises ValueError for an unknown name or an invalid power."""
        arguments.check_choice("feature_map", feature_map, (*_ELEMENTWISE, *_POWERS))
        signed, positive = means.Division.SIGNED, means.Division.POSITIVE
        if feature_map in _ELEMENTWISE:
            return cls(feature_map, 1, signed if feature_map == "identity" else positive)
        power = arguments.check_power(power, even=False)
        return cls(feature_map, power, signed if power % 2 else positive)

    def map(self, x):
        """Applies the elementwise part of phi."""
        return _ELEMENTWISE.get(self.feature_map, lambda x: x)(x)

    def expand(self, x):
        """Applies the power to an output of `map`."""
        return _POWERS[self.feature_map](x, power=self.power) if self.feature_map in _POWERS else x


def _mean(attend, kernel, tokens, rotate, normalizer, state):
    """Returns the output and the state after it.

    attend(tokens, state=, power=, division=) returns means or sums, with the power of q . k as weights, and a
    PowerState or None.
    """
    query, key, value, *_ = tokens

    def with_features(query, key, value=value):
        return tokens._replace(query=query, key=key, value=value)

    def check_state(rotated_dim, separate):
        is_step = query.ndim == 3
        if state is None and not is_step:
            return
        batch, (kv_heads, head_dim), value_dim = query.shape[0], key.shape[-2:], value.shape[-1]
        sizes = f"{batch}, {kv_heads}, {head_dim}, {value_dim}"
        make = f"LinearState.zeros({sizes}, rotated_dim={rotated_dim}, ...)"
        if isinstance(state, LinearState) and separate != (state.denominator is not None):
            has = "no" if separate else "a"
            raise ValueError(
                f"the state has {has} denominator of its own, which does not fit rotate and normalizer; make it with "
                f"{make}"
            )
        features = feature_maps.symmetric_power_dim(head_dim, kernel.power)
        shapes = {"numerator.kv": (batch, kv_heads, rotated_dim or features, value_dim)}
        if isinstance(state, LinearState):
            shapes["numerator.keys"] = batch, 2 * state.exact_window, kv_heads, rotated_dim or head_dim
        if separate:
            shapes["denominator.kv"] = (batch, kv_heads, features, 0)
        dtype = np.promote_types(query.dtype, jnp.float32)
        arguments.check_state(state, LinearState, make, shapes, dtype)

    if rotate is None:
        query, key = _mapped(kernel, query), _mapped(kernel, key)
        check_state(rotated_dim=None, separate=False)
        first = None if state is None else state.numerator
        out, final = attend(
            with_features(query, key), state=first, power=kernel.power, division=kernel.division
        )
        return out, LinearState(final, None)

    # Both sums use the same scale, which cancels in the mean.
    (query, features), (key, key_features) = (
        _expanded((kernel, scaled), x) for x, scaled in ((query, True), (key, False))
    )
    rotated = _rotated(rotate, features), _rotated(rotate, key_features)
    if rotated[0].shape[-1] != rotated[1].shape[-1]:
        raise ValueError(
            f"rotate returns {rotated[0].shape[-1]} features for queries and {rotated[1].shape[-1]} for keys; "
            f"the numbers must be equal"
        )
    separate = normalizer == "unrotated"
    check_state(rotated_dim=rotated[1].shape[-1], separate=separate)
    first = (None, None) if state is None else (state.numerator, state.denominator)
    if not separate:
        out, final = attend(with_features(*rotated), state=first[0], power=1, division=means.Division.SIGNED)
        return out, LinearState(final, None)
    sums = functools.partial(attend, division=means.Division.NONE)
    values, numerator = sums(with_features(*rotated), state=first[0], power=1)
    weights, denominator = sums(with_features(query, key, value[..., :0]), state=first[1], power=kernel.power)
    out = _divided((kernel.division, value.dtype), values, weights)
    return out, LinearState(numerator, denominator)


@sharding.op({"tokens": SEQUENCE}, lambda _: ("B T N D", "B S K D"))
def _without_padding(_, tokens):
    return containment.without_padding(tokens)[:2]


@sharding.op({"tokens": ONE}, lambda _: ("B N D", "B K D"))
def _token_without_padding(_, tokens):
    return containment.without_padding(tokens)[:2]


@functools.partial(jax.jit, static_argnums=0)
@by_default_rules
def _mapped(kernel, x):
    return kernel.map(x)


@functools.partial(jax.jit, static_argnums=0)
@by_default_rules
def _expanded(plan, x):
    """Returns x after the map, scaled if requested, and its features."""
    kernel, scaled = plan
    mapped = kernel.map(x)
    mapped = preparation.unit_scale(mapped) if scaled else mapped
    return mapped, kernel.expand(mapped)


@functools.partial(jax.jit, static_argnums=0)
@by_default_rules
def _divided(plan, values, weights):
    """Returns the mean from sums of weighted values and sums of weights.

    The last column of `values` is a normalizer that is dropped.
    """
    division, dtype = plan
    values, weights = sharding.same_variation((values, weights))
    return means.mean(values[..., :-1], weights, -1, division).astype(dtype)


def _rotated(rotate, features):
    if not callable(rotate):
        raise ValueError(f"rotate is {rotate!r}; it must be a function of features")
    rotated = arguments.to_array("the result of rotate", rotate(features))
    if rotated.shape[:-1] != features.shape[:-1] or rotated.dtype != features.dtype:
        raise ValueError(
            f"rotate maps features {features.dtype} {features.shape} to {rotated.dtype} {rotated.shape}; only their "
            f"length may change"
        )
    return rotated
