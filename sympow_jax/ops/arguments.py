"""Checks of the arguments of every op, made before anything is traced, with one-line error messages.

Arrays may be abstract (`jax.ShapeDtypeStruct`) in every check. `to_arrays` comes first where values are needed, and
`to_shapes` where they are not.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_INT32 = np.iinfo(np.int32)


class Sizes(TypedDict):
    """Sizes of the state of an attention, as `PowerState.zeros` takes them."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int


class Constant(NamedTuple):
    """A NumPy array as a static option of a compiled function, which must be hashable."""

    shape: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> "Constant":
        """Returns the shape and the values of the array."""
        return cls(array.shape, tuple(array.ravel().tolist()))

    def array(self) -> np.ndarray:
        """Returns the array."""
        return np.array(self.values).reshape(self.shape)


_OPTIONAL = ("log_decay", "segment_ids")


def to_arrays(**arguments) -> list[Any]:
    """Returns the arguments as JAX arrays, in order; None stays None for `_OPTIONAL` ones.

    Raises:
        ValueError: an argument is not an array, or segment ids do not fit in int32.
    """
    return [None if x is None and name in _OPTIONAL else to_array(name, x) for name, x in arguments.items()]


def to_shapes(**arguments) -> list[Any]:
    """Returns the shapes and dtypes of `to_arrays`, also for abstract arrays; raises the same errors."""

    def shape(name, x):
        if x is None and name in _OPTIONAL:
            return None
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        array = to_array(name, x)
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    return [shape(name, x) for name, x in arguments.items()]


def to_array(name: str, x) -> jax.Array:
    """Returns a JAX or NumPy array as a JAX array.

    Raises:
        ValueError: it is not an array, or segment ids do not fit in int32.
    """
    check_array(name, x)
    if name == "segment_ids" and x.dtype == np.int64 and not isinstance(x, jax.core.Tracer):
        values = np.asarray(x)
        outside = values[(values < _INT32.min) | (values > _INT32.max)]
        # Converted, these would wrap around, and distinct ids could become equal.
        if outside.size:
            raise ValueError(
                f"{name} holds {outside[0]}; it must fit in int32, at most {_INT32.max}; number the documents from 0"
            )
        return jnp.asarray(x, jnp.int32)
    # Calling asarray on a JAX array takes as long as all checks together.
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def check_array(name: str, x) -> None:
    """Raises ValueError unless x is a JAX or NumPy array."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be an array; pass jnp.asarray({name})")
    if x.dtype.kind in "OSUMm":
        raise ValueError(f"{name} has dtype {x.dtype}; it must be an array of numbers")


def to_segment_ids(segment_ids, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the segment ids of a layer or model as a JAX array; raises ValueError unless they have this shape."""
    if segment_ids is None:
        return None
    segment_ids = to_array("segment_ids", segment_ids)
    check_segment_ids(segment_ids, shape)
    return segment_ids


def check_attention(
    query,
    key,
    value,
    log_decay,
    segment_ids,
    *,
    step: bool = False,
    may_be_per_channel: bool = False,
    causal: bool = True,
    may_lack_values: bool = False,
) -> Sizes:
    """Returns the sizes of a state; raises ValueError for shapes or dtypes that do not match each other.

    Args:
        query: [B, T, N, D], or [B, N, D] of a step.
        key: [B, S, K, D] with S >= T, or [B, K, D].
        value: [B, S, K, E], or [B, K, E].
        log_decay: [B, S, K] or [B, K], per value channel [B, S, K, E] or [B, K, E], or None.
        segment_ids: [B, S] or [B], or None.
        step: the arrays are those of one token.
        may_be_per_channel: log_decay may have the shape of value.
        causal: if False, log_decay must be None.
        may_lack_values: E may be 0.
    """
    lead, key_lead = ("B", "B") if step else ("B, T", "B, S")
    arrays = {"query": query, "key": key, "value": value}
    axes = {"query": f"[{lead}, N, D]", "key": f"[{key_lead}, K, D]", "value": f"[{key_lead}, K, E]"}
    for name, array in arrays.items():
        check_axes(name, array, axes[name])
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    heads, (kv_heads, head_dim) = query.shape[-2], key.shape[-2:]
    if any(jax.export.is_symbolic_dim(size) for size in (*query.shape[1:], *key.shape[1:], *value.shape[1:])):
        raise ValueError(
            f"shapes are {shapes}; only the batch may be symbolic; export with a concrete length, and pad to it with "
            f"negative segment_ids"
        )
    if key.shape[:-1] != value.shape[:-1] or key.shape[0] != query.shape[0] or head_dim != query.shape[-1]:
        raise ValueError(
            f"shapes do not fit: {shapes}; they must be query {axes['query']}, key {axes['key']}, value {axes['value']}"
        )
    if 0 in (*query.shape, *key.shape) or (0 in value.shape and not may_lack_values):
        raise ValueError(f"shapes are {shapes}; every size must be at least 1")
    if not step and key.shape[1] < query.shape[1]:
        swapped = f"[{query.shape[0]}, {query.shape[1]}, T, {head_dim}]"
        hint = (
            f" (if axes 1 and 2 are heads and time, as in {swapped}, swap them)" if heads == kv_heads else ""
        )
        raise ValueError(
            f"key has {key.shape[1]} tokens and query {query.shape[1]}; there must be a key for each query{hint}"
        )
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads and key {kv_heads}; N must be a multiple of K")
    if len({array.dtype for array in arrays.values()}) > 1 or query.dtype.name not in _DTYPES:
        dtypes = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise ValueError(
            f"dtypes are {dtypes}; they must be equal and one of {', '.join(_DTYPES)}; convert with astype"
        )
    if log_decay is not None:
        if not causal:
            raise ValueError(
                "log_decay is given and causal is False; decays run in one direction; leave one of them out"
            )
        allowed = {key.shape[:-1]: "one per token and key head"}
        if may_be_per_channel:
            allowed[value.shape] = "one per value channel"
        if log_decay.shape not in allowed:
            expected = ", or ".join(f"{shape}, {what}" for shape, what in allowed.items())
            raise ValueError(f"log_decay has shape {log_decay.shape}; it must be {expected}")
        check_floating("log_decay", log_decay)
    if segment_ids is not None:
        check_segment_ids(segment_ids, key.shape[:-2])
    return {
        "batch": query.shape[0],
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": value.shape[-1],
    }


def check_state(state: Any, kind: type[Any], make: str, shapes: Mapping[str, tuple[int, ...]], dtype) -> None:
    """Raises ValueError unless a state is a `kind` whose arrays have these shapes and can hold sums in `dtype`.

    Args:
        state: the state passed to an op.
        kind: the class of its states.
        make: the call that makes the right state.
        shapes: shapes by the path of an attribute; the first is that of sums.
        dtype: the dtype in which the op accumulates.
    """
    if not isinstance(state, kind):
        raise ValueError(f"the state is a {type(state).__name__}; make it with {make}")
    arrays = {name: operator.attrgetter(name)(state) for name in shapes}
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise ValueError(
                f"the shape of the state's {name} is {array.shape}; these inputs need {shapes[name]}; make it with "
                f"{make}"
            )
    sums = next(iter(arrays.values()))
    if sums.dtype not in (dtype, jnp.bfloat16):
        raise ValueError(
            f"the state has dtype {sums.dtype}; it must be {dtype}, in which inputs of this dtype accumulate, or "
            f"bfloat16; make it with {make}"
        )


def check_ids_fit(segment_ids, state: Any) -> None:
    """Raises ValueError for segment ids of more bits than those of the state, which would change its dtype."""
    if segment_ids is not None and segment_ids.dtype.itemsize > state.segment.dtype.itemsize:
        raise ValueError(
            f"segment_ids has dtype {segment_ids.dtype} and the state {state.segment.dtype}; convert them with astype"
        )


def check_segment_ids(segment_ids, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless segment ids are signed integers of this shape."""
    if segment_ids.shape != shape:
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; it must be {shape}, one per token")
    if not jnp.issubdtype(segment_ids.dtype, jnp.signedinteger):
        raise ValueError(
            f"segment_ids has dtype {segment_ids.dtype}; it must be a signed integer dtype, such as int32; negative "
            f"ids are padding"
        )


def check_same_length(query, key, condition: str = "") -> None:
    """Raises ValueError, which states the condition, unless there is one key for each query."""
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key has {key.shape[1]} tokens and query {query.shape[1]}; they must be equal{condition}; pass a "
            f"query for each key"
        )


def check_power(power, *, even: bool = True) -> int:
    """Returns the power as a Python int; raises ValueError unless it is positive and, if requested, even."""
    power = check_integer("power", power, None if even else 1)
    if even and (power <= 0 or power % 2):
        raise ValueError(f"power is {power}; it must be positive and even, so that no weight is negative")
    return power


def check_sizes(**sizes) -> dict[str, Any]:
    """Returns sizes of axes as Python ints; raises ValueError unless they are symbolic or integers of at least 0."""
    return {
        name: size if jax.export.is_symbolic_dim(size) else check_integer(name, size, 0)
        for name, size in sizes.items()
    }


def check_integer(name: str, value, minimum: int | None = None) -> int:
    """Returns an integer as a Python int; raises ValueError for anything else or below the minimum.

    Arrays of an integer, without axes, are accepted unless they are traced.
    """
    expected = "an integer" if minimum is None else f"an integer of at least {minimum}"
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} is {value}; it must be {expected}")
    try:
        number = operator.index(value)
    except TypeError:
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"{name} is {_described(value)}; it must be {expected} known when tracing; mark it static, as in "
                f"jax.jit(f, static_argnames={name!r})"
            ) from None
        raise ValueError(f"{name} is {value!r}; it must be {expected}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} is {number}; it must be at least {minimum}")
    return number


def check_number(name: str, value, above: float = -math.inf) -> float:
    """Returns a Python float; raises ValueError unless the value is a finite number above the given one."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not above < value < math.inf:
        least = "" if above == -math.inf else f" above {above}"
        raise ValueError(f"{name} is {value!r}; it must be a finite number{least}")
    return float(value)


def check_dtype(name: str, dtype, choices: Sequence[str] = _DTYPES) -> None:
    """Raises ValueError unless it names one of the dtypes, by default those that ops compute with."""
    try:
        known = jnp.dtype(dtype).name in choices and dtype is not None
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"{name} is {dtype!r}; it must be one of {', '.join(choices)}")


def check_choice(name: str, value, choices: Sequence[str | None]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if isinstance(value, str | None) and value in choices:
        return
    described = _described(value) if isinstance(value, jax.Array) else repr(value)
    raise ValueError(f"{name} is {described}; it must be one of {', '.join(map(repr, choices))}")


def check_flag(name: str, value) -> bool:
    """Returns a bool; raises ValueError for anything else, a traced value included."""
    if not isinstance(value, (bool, np.bool_)):
        described = _described(value) if isinstance(value, jax.Array) else repr(value)
        raise ValueError(f"{name} is {described}; it must be True or False, known when tracing")
    return bool(value)


def check_even(name: str, size) -> int:
    """Returns the size as a Python int; raises ValueError if it is odd, as rotations act on pairs of dimensions."""
    size = check_integer(name, size, 0)
    if size % 2:
        raise ValueError(f"{name} is {size}; it must be even, since rotations act on pairs of dimensions")
    return size


def check_axes(name: str, array, axes: str) -> None:
    """Raises ValueError unless the array has the rank of the axes, written as "[B, T, N, D]"."""
    rank = axes.count(",") + 1
    if array.ndim == rank:
        return
    missing = axes.startswith("[B, ") and array.ndim == rank - 1
    remedy = f"; add the batch axis with {name}[None] if that is what is missing" if missing else ""
    raise ValueError(f"{name} has shape {array.shape}; it must be {axes}{remedy}")


def check_axis_name(axis_name) -> None:
    """Raises ValueError unless a mesh axis of this name is manual in the current context."""
    remedy = "it must name an axis of the jax.shard_map in which the op is called, or be left out"
    if not isinstance(axis_name, str):
        raise ValueError(f"axis_name is {axis_name!r}; {remedy}")
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name is {axis_name!r}, which is not a manual mesh axis here; {remedy}"
        ) from None


def check_floating(name: str, array) -> None:
    """Raises ValueError unless the array's dtype is one of the floating-point dtypes that ops compute with."""
    if array.dtype.name not in _DTYPES:
        raise ValueError(
            f"{name} has dtype {array.dtype}; it must be one of {', '.join(_DTYPES)}; convert with astype"
        )


def check_positions(name: str, positions, axes: str | None = None) -> None:
    """Raises ValueError unless positions are integers and, if axes are given, of that rank."""
    if axes is not None:
        check_axes(name, positions, axes)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {positions.dtype}; it must be an integer dtype, such as int32")


def _described(value: jax.Array) -> str:
    if isinstance(value, jax.core.Tracer):
        return "traced"
    return f"an array of shape {value.shape} and dtype {value.dtype}"
