"""Inputs for testing and timing every implementation of power attention, and error measures."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

GRADIENTS = ("query", "key", "value", "log_decay")


@dataclasses.dataclass(frozen=True)
class Case:
    """Combination of options of `power_attention`; `arrays` draws its arrays.

    decay: none, mixed (0 to -1e4) or gentle, per key head; channels (mixed) or gentle channels, per value channel.
    """

    power: int = 2
    head_dim: int = 16
    value_dim: int = 16
    time: int = 129
    scale: float = 1.0
    decay: str = "mixed"
    segments: str = "none"
    group: int = 1

    def __str__(self):
        return "-".join(f"{name}{value}" for name, value in dataclasses.asdict(self).items())


def arrays(case: Case, *, batch=2, kv_heads=1, seed=0, dtype="float32") -> dict[str, np.ndarray | None]:
    """Returns arguments of the op in float64, with values that `dtype` represents exactly, and `dout`."""
    random = np.random.default_rng(seed)
    time = case.time

    def normal(heads, width, scale=1.0):
        drawn = (scale * random.normal(size=(batch, time, heads, width))).astype("float32")
        if dtype == "bfloat16":
            drawn = (drawn.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return drawn.astype("float64")

    heads = kv_heads * case.group
    drawn = {
        "query": normal(heads, case.head_dim, case.scale),
        "key": normal(kv_heads, case.head_dim, case.scale),
        "value": normal(kv_heads, case.value_dim),
        "log_decay": None,
        "segment_ids": None,
        "dout": normal(heads, case.value_dim),
    }
    shape = (batch, time, kv_heads) + (case.value_dim,) * ("channels" in case.decay)
    if case.decay in ("mixed", "channels"):
        steps = np.array([0, -1e-4, -0.3, -20, -1e4], "float32")
        drawn["log_decay"] = random.choice(steps, size=shape).astype("float64")
    elif case.decay in ("gentle", "gentle channels"):
        drawn["log_decay"] = -random.exponential(0.01, shape).astype("float32").astype("float64")
    if case.segments != "none":
        drawn["segment_ids"] = _segments(case.segments, batch, time, random)
    return drawn


def lengths(shape: tuple[int, ...], octaves: int, *, seed=0) -> np.ndarray:
    """Returns powers of two between 2^-octaves and 2^octaves, by which some vectors are longer than others."""
    return 2.0 ** np.random.default_rng(seed).integers(-octaves, octaves, shape, endpoint=True)


def _segments(kind, batch, time, random):
    """Returns documents that start at multiples of 64 (`edges`), or anywhere with padding between (`padded`)."""
    if kind == "edges":
        return np.broadcast_to(np.arange(time) // 64 % 2, (batch, time)).astype(np.int32)
    ids = np.cumsum(random.random((batch, time)) < 0.04, 1) % 3
    return np.where(random.random((batch, time)) < 0.15, -1, ids).astype(np.int32)


def pairwise(factors: dict[str, tuple], keep=lambda case: True) -> list[Case]:
    """Returns cases in which every pair of values of two factors occurs, where `keep` allows it."""
    names = list(factors)
    candidates = [Case(**dict(zip(names, values))) for values in itertools.product(*factors.values())]
    candidates = [case for case in candidates if keep(case)]
    pairs = [
        {((a, getattr(case, a)), (b, getattr(case, b))) for a, b in itertools.combinations(names, 2)}
        for case in candidates
    ]
    wanted, chosen = set().union(*pairs), []
    while wanted:
        best = max(range(len(candidates)), key=lambda i: len(pairs[i] & wanted))
        chosen.append(candidates[best])
        wanted -= pairs[best]
    return chosen


def cast(drawn, dtype):
    """Returns arguments in a dtype; decays of bfloat16 arguments in float32."""
    decay_dtype = "float32" if dtype == "bfloat16" else dtype
    return {
        name: x
        if x is None or name == "segment_ids"
        else jnp.asarray(x, decay_dtype if name == "log_decay" else dtype)
        for name, x in drawn.items()
    }


@functools.partial(jax.jit, static_argnames=("op", "options"))
def compiled(drawn, *, op, options):
    """Returns the output of an op and its gradients for the cotangent `dout`, leaving out arguments that are None.

    options: a tuple of names and values.
    """
    given = {name: x for name, x in drawn.items() if x is not None and name != "dout"}
    fixed = {name: given.pop(name) for name in ("segment_ids",) if name in given}

    def loss(given):
        out = op(**given, **fixed, **dict(options))
        return (out * drawn["dout"]).sum(dtype=jnp.promote_types(out.dtype, jnp.float32)), out

    gradients, out = jax.grad(loss, has_aux=True)(given)
    return {"out": out} | gradients


def outputs_and_gradients(op, drawn, dtype, **options):
    with jax.enable_x64(dtype == "float64"):
        return jax.device_get(compiled(cast(drawn, dtype), op=op, options=tuple(options.items())))


def errors(actual, expected, drawn):
    assert actual.keys() == expected.keys()
    return {name: error(actual[name], expected[name], natural_size(name, drawn)) for name in expected}


def check(actual, expected, drawn, dtype, plain=None):
    """Checks errors of the output and of gradients.

    plain: returns the results of the plain formula in float32. It overflows if p-th powers of long queries do, which
        implementations must not; where a score is all but zero, its gradients lose precision too, which implementations
        may.
    """
    lost = functools.cache(lambda: errors(plain(), expected, drawn))
    for name, value in errors(actual, expected, drawn).items():
        bound = {"float64": 1e-10, "bfloat16": 1e-2 if name == "out" else 2e-2}.get(
            dtype, 2e-6 if name == "out" else 1e-5
        )
        if not value <= bound and plain is not None and dtype == "float32" and np.isfinite(lost()[name]):
            bound = max(bound, 4 * lost()[name])
        assert value <= bound, (name, value, bound)


def error(actual, expected, natural=0.0) -> float:
    """Returns RMS(a - b) / RMS(b).

    If b nearly vanishes relative to its natural size, returns RMS(a - b) divided by that size.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = _rms(expected)
    return _rms(actual - expected) / (size if size > 1e-6 * natural else natural or 1.0)


def natural_size(name: str, drawn) -> float:
    """Returns the RMS that a gradient would have without cancellation.

    This is the output times its cotangent, divided by the argument.
    """
    if name == "out":
        return 0.0
    return _rms(drawn["dout"]) / (_rms(drawn[name]) if name in ("query", "key") else 1.0)


def _rms(x):
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
