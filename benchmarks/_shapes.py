"""Contenders and shapes that `benchmarks.kernels` compares, with the FLOPs and bytes of each row."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from sympow_jax import ops
from sympow_jax.ops import cost

WINDOW = 64

# The form whose FLOPs each contender is credited with; softmax attention multiplies as the attention form does.
CONTENDERS = {
    "attention/mosaic_gpu": "attention",
    "attention/xla": "attention",
    "chunked/mosaic_gpu": "chunked",
    "chunked/xla": "chunked",
    "step/mosaic_gpu": "step",
    "step/xla": "step",
    "softmax/cudnn": "attention",
    "softmax/tokamax": "attention",
    "jax-linear-attention": "linear",
    "retention": "chunked",
    "flash-linear-attention": "linear",
}
# Contenders that run in PyTorch, and the modules they need.
PEERS = {"retention": ("torch", "retention"), "flash-linear-attention": ("torch", "fla")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A contender and the sizes of its arguments: B, N = K, D = E, T and p.

    mode: `forward`, `training` (both passes) or `step`, in which `time` is the number of steps.
    chunk: tokens per chunk of `chunked/mosaic_gpu`; if None, the kernels choose.
    """

    part: str = ""
    contender: str
    mode: str = "forward"
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    power: int = 2
    chunk: int | None = None
    time: int


def flops(row: Row) -> float | None:
    """Counts the FLOPs of the whole batch with the exact number of features.

    Returns None for a step, which is bound by bytes.

    Every contender of a form is credited with the same work: that of the xla form's chunk (128) and window (64). Linear
    attention is credited with a chunk of 64 and no window. A longer chunk therefore earns no extra FLOPs.
    """
    form = CONTENDERS[row.contender]
    if form == "step":
        return None
    power, chunk, window = (1, 64, 0) if form == "linear" else (row.power, 128, WINDOW)
    per_token = cost.flops_per_token(
        "attention" if form == "attention" else "chunked",
        time=row.time,
        head_dim=row.head_dim,
        value_dim=row.head_dim,
        power=power,
        chunk=chunk,
        exact_window=window,
        backward=row.mode == "training",
    )
    return row.batch * row.heads * row.time * per_token


def step_bytes(row: Row) -> float:
    """Counts the bytes that one step of the whole batch has to move, in float32.

    They are: the state, read in every step; the state, read and written once more every W steps, to fold the window
    into it; and the 3 W / 2 tokens that a window holds on average.
    """
    features = ops.symmetric_power_dim(row.head_dim, row.power)
    state = 4 * row.batch * row.heads * features * (row.head_dim + 1)
    window_bytes = 4 * row.batch * row.heads * 3 * WINDOW / 2 * (2 * row.head_dim + 1)
    return state * (1 + 2 / WINDOW) + window_bytes


def _rows(
    part: str, contenders: Iterable[str], *, modes=("forward",), times: Iterable[int], **sizes
) -> list[Row]:
    """Returns a row for each contender in each mode at each time."""
    return [
        Row(part=part, contender=contender, mode=mode, time=time, **sizes)
        for mode in modes
        for time in times
        for contender in contenders
    ]


_STEPS = 256
_STEP = ("step/mosaic_gpu", "step/xla")
_PEERS = ("jax-linear-attention", "softmax/tokamax", "retention", "flash-linear-attention")


def _brief() -> Iterator[Row]:
    """Yields the rows that decide between implementations, most important first."""
    chunked, attention, softmax = "chunked/mosaic_gpu", "attention/mosaic_gpu", "softmax/cudnn"
    both = ("training", "forward")
    for time in (65_536, 4096, 8192, 16_384, 2048, 1024, 262_144):
        names = (chunked, attention, softmax) if time <= 65_536 else (chunked, softmax)
        yield from _rows("brief", names, modes=both, times=(time,))
    yield from _rows("brief", _STEP, modes=("step",), batch=64, times=(_STEPS,))
    for time in (8192, 65_536, 1024):
        yield from _rows("brief", (attention, softmax), modes=both, power=4, times=(time,))
    for head_dim in (32, 128):
        names, times = (chunked, attention, softmax), (4096, 16_384, 65_536)
        yield from _rows("brief", names, modes=("training",), head_dim=head_dim, times=times)
    for head_dim in (16, 32):
        sizes: dict[str, Any] = {"power": 4, "head_dim": head_dim, "times": (8192, 65_536)}
        yield from _rows("brief", (chunked, attention), modes=("training",), **sizes)
    yield from _rows("brief", ("retention",), modes=("training",), times=(1024, 4096, 16_384, 65_536))
    yield from _rows("brief", (chunked,), times=(1_048_576,))
    yield from _rows("brief", ("chunked/xla",), modes=("training",), times=(65_536,))
    yield from _rows("brief", _STEP, modes=("step",), times=(_STEPS,))
    # What is left completes the comparison: peers, other head sizes forward, and the longest row with gradients.
    peers = ("jax-linear-attention", "flash-linear-attention", "softmax/tokamax")
    yield from _rows("brief", peers, modes=("training",), times=(65_536, 8192))
    for head_dim in (32, 128):
        names = (chunked, attention, softmax)
        yield from _rows("brief", names, head_dim=head_dim, times=(65_536, 8192, 1024))
    yield from _rows("brief", (chunked,), modes=("training",), times=(1_048_576,))
    yield from _rows("brief", (softmax,), times=(1_048_576,))


PARTS = {
    "brief": list(_brief()),
    "peers": _rows(
        "peers",
        ("chunked/mosaic_gpu", "softmax/cudnn", *_PEERS),
        modes=("forward", "training"),
        times=tuple(2**n for n in range(10, 19)),
    ),
    # Chunks that the cost model compares. None is its choice, so the table shows whether another is faster.
    "chunks": [
        Row(
            part="chunks", contender="chunked/mosaic_gpu", mode="training", head_dim=d, chunk=chunk, time=time
        )
        for time in (65_536, 8192, 262_144)
        for d, chunks in {64: (384, 768, 1152, 1536), 32: (192, 384, 768), 128: (512, 1024, 2048)}.items()
        for chunk in (None, *chunks)
    ],
}
# Every kind of row, on shapes small enough for a CPU.
_SMALL: dict[str, Any] = {"heads": 2, "head_dim": 8, "times": (128,)}
SMOKE = [
    *_rows("brief", ("attention/mosaic_gpu", "attention/xla"), modes=("training",), power=4, **_SMALL),
    *_rows("brief", ("chunked/mosaic_gpu", "chunked/xla", "softmax/cudnn"), **_SMALL),
    *_rows("brief", _STEP, modes=("step",), batch=2, heads=2, head_dim=8, times=(160,)),
    *_rows("peers", _PEERS, **_SMALL),
]
