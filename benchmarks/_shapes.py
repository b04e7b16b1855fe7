"""Contenders and shapes that `benchmarks.kernels` compares, with the FLOPs and bytes of each shape."""

import dataclasses
from collections.abc import Iterable, Iterator

from sympow_jax.ops._recurrent import cost

__all__ = [
    "CONTENDERS",
    "FIELDS",
    "PARTS",
    "PEERS",
    "SMOKE",
    "Comparison",
    "Shape",
    "flops",
    "rows",
    "step_bytes",
]

WINDOW = 64

# The form whose FLOPs each contender is credited with; softmax attention multiplies as the attention form does.
CONTENDERS = {
    "attention/mosaic_gpu": "attention",
    "attention/kernel": "attention",
    "attention/xla": "attention",
    "chunked/mosaic_gpu": "chunked",
    "chunked/kernel": "chunked",
    "chunked/xla": "chunked",
    "step/mosaic_gpu": "step",
    "step/xla": "step",
    "softmax/cudnn": "attention",
    "jax-linear-attention": "linear",
    "retention": "chunked",
    "retention compiled": "chunked",
    "flash-linear-attention": "linear",
}
# Contenders that run in PyTorch, and the modules they need.
PEERS = {
    "retention": ("torch", "retention"),
    "retention compiled": ("torch", "retention"),
    "flash-linear-attention": ("torch", "fla"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one comparison: B, N = K, D = E, T and p.

    mode: `forward`, `training` (both passes) or `step`, in which `time` is the number of steps.
    """

    mode: str = "forward"
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    power: int = 2
    time: int


FIELDS = tuple(field.name for field in dataclasses.fields(Shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contenders that are timed on one shape."""

    part: str
    shape: Shape
    contenders: tuple[str, ...]


def flops(shape: Shape, contender: str) -> float | None:
    """Counts the FLOPs of the whole batch with the exact number of features.

    Returns None for a step, which is bound by bytes.

    Every contender of a form is credited with the same work: that of the xla form's chunk (128) and window (64). Linear
    attention is credited with a chunk of 64 and no window. A longer chunk therefore earns no extra FLOPs.
    """
    form = CONTENDERS[contender]
    if form == "step":
        return None
    linear = form == "linear"
    per_token = cost.flops_per_token(
        "chunked" if linear else form,
        time=shape.time,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        power=1 if linear else shape.power,
        chunk=64 if linear else cost.default_chunk("chunked"),
        exact_window=0 if linear else WINDOW,
        backward=shape.mode == "training",
    )
    return shape.batch * shape.heads * shape.time * per_token


def step_bytes(shape: Shape) -> float:
    """Counts the bytes that one step of the whole batch has to move, in float32.

    They are: the state, read in every step; the state, read and written once more every W steps, to fold the window
    into it; and the 3 W / 2 tokens that a window holds on average.
    """
    state = cost.state_bytes(
        batch=shape.batch,
        kv_heads=shape.heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        power=shape.power,
    )
    window_bytes = 4 * shape.batch * shape.heads * 3 * WINDOW / 2 * (2 * shape.head_dim + 1)
    return state * (1 + 2 / WINDOW) + window_bytes


def rows(comparisons: Iterable[Comparison]) -> list[dict]:
    """Returns a description of a row for each contender of the comparisons."""
    return [
        {"part": comparison.part, "contender": name, **dataclasses.asdict(comparison.shape)}
        for comparison in comparisons
        for name in comparison.contenders
    ]


# 1,024 to 262,144 tokens.
_TIMES = tuple(2**n for n in range(10, 19))
_STEPS = 256
_ATTENTION = ("attention/mosaic_gpu", "attention/kernel", "attention/xla", "softmax/cudnn")
_CHUNKED = ("chunked/mosaic_gpu", "chunked/kernel", "chunked/xla", "softmax/cudnn")
_STEP = ("step/mosaic_gpu", "step/xla")
_PEERS = ("jax-linear-attention", "retention", "retention compiled", "flash-linear-attention")


def _attention() -> Iterator[Comparison]:
    for power in (2, 4):
        for head_dim in (64, 128):
            yield from _lengths("attention", _ATTENTION, power=power, head_dim=head_dim)


def _chunked() -> Iterator[Comparison]:
    for power, head_dim in ((2, 64), (2, 32), (2, 128), (4, 16), (4, 32)):
        yield from _lengths("chunked", _CHUNKED, power=power, head_dim=head_dim)


def _lengths(part, contenders, **sizes):
    for mode in ("forward", "training"):
        for time in _TIMES:
            yield _comparison(part, contenders, mode=mode, time=time, **sizes)


def _step() -> Iterator[Comparison]:
    for batch in (64, 1):
        yield _comparison("step", _STEP, mode="step", batch=batch, time=_STEPS)


def _peers() -> Iterator[Comparison]:
    yield from _lengths("peers", ("chunked/mosaic_gpu", "softmax/cudnn", *_PEERS))


def _training_shapes() -> Iterator[Comparison]:
    """Yields batches of 65,536 tokens for the 124M model's 12 heads, at the papers' contexts."""
    for power, ours in ((2, _CHUNKED), (4, _ATTENTION)):
        for time in (1024, 4096, 8192, 65_536):
            sizes = {"batch": 65_536 // time, "heads": 12, "time": time, "power": power}
            yield _comparison("training-shapes", ours, mode="training", **sizes)


def _brief() -> Iterator[Comparison]:
    """Yields the comparisons that decide between implementations, most important first."""
    chunked, attention, softmax = "chunked/mosaic_gpu", "attention/mosaic_gpu", "softmax/cudnn"
    for time in (65_536, 8192, 16_384, 4096, 1024, 262_144):
        for mode in ("training", "forward"):
            names = (chunked, attention, softmax) if time <= 65_536 else (chunked, softmax)
            yield _comparison("brief", names, mode=mode, time=time)
    yield _comparison("brief", _STEP, mode="step", batch=64, time=_STEPS)
    for time in (8192, 65_536, 1024):
        for mode in ("training", "forward"):
            yield _comparison("brief", (attention, softmax), mode=mode, power=4, time=time)
    for head_dim in (32, 128):
        for time in (4096, 16_384, 65_536):
            yield _comparison(
                "brief", (chunked, attention, softmax), mode="training", head_dim=head_dim, time=time
            )
    for head_dim in (16, 32):
        for time in (8192, 65_536):
            yield _comparison(
                "brief", (chunked, attention), mode="training", power=4, head_dim=head_dim, time=time
            )
    for time in (1024, 4096, 16_384, 65_536):
        yield _comparison("brief", ("retention",), mode="training", time=time)
    yield _comparison("brief", (chunked,), time=1_048_576)
    yield _comparison("brief", ("chunked/xla",), mode="training", time=65_536)
    yield _comparison("brief", _STEP, mode="step", batch=1, time=_STEPS)


def _comparison(part, contenders, **sizes) -> Comparison:
    shape = Shape(**sizes)
    if shape.mode != "forward":
        # Kernels that are called directly, without the op, have no derivative.
        contenders = tuple(name for name in contenders if not name.endswith("/kernel"))
    return Comparison(part=part, shape=shape, contenders=contenders)


def _smoke() -> Iterator[Comparison]:
    """Yields every kind of comparison, on shapes small enough for a CPU."""
    small = {"heads": 2, "head_dim": 8, "time": 128}
    yield _comparison("attention", _ATTENTION, mode="training", power=4, **small)
    yield _comparison("chunked", _CHUNKED, **small)
    yield _comparison("step", _STEP, mode="step", batch=2, heads=2, head_dim=8, time=160)
    yield _comparison("peers", _PEERS, **small)


PARTS = {
    "attention": tuple(_attention()),
    "chunked": tuple(_chunked()),
    "step": tuple(_step()),
    "peers": tuple(_peers()),
    "training-shapes": tuple(_training_shapes()),
    "brief": tuple(_brief()),
}
SMOKE = tuple(_smoke())
