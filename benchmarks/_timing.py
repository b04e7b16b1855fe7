"""Time on the device: calls enqueued behind each other, taken in turn, and the kernels that CUPTI saw."""

import contextlib
import dataclasses
import fcntl
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

__all__ = [
    "LOCK",
    "Sample",
    "ceilings",
    "exclusive",
    "in_turn",
    "kernel_seconds",
    "medians",
    "queued",
    "spread",
    "turns",
]

# Names the file by whose lock workers take turns on the device; without it there is one worker.
LOCK = "SYMPOW_BENCHMARK_LOCK"
ROUNDS = 10
# A sample is long beside the clock's resolution and the last call's latency.
SAMPLE_SECONDS = 0.02
CONTENDER_SECONDS = 3.0
# Below what XLA lets a host enqueue before it makes it wait (32), which would look like a slow host.
IN_FLIGHT = 16
# Share of a sample spent on enqueueing from which the host, not the device, set its length.
_HOST_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds a call, and whether the device had to wait for the host."""

    seconds: float
    host_bound: bool


@contextlib.contextmanager
def turns(jobs: int) -> Iterator[None]:
    """Lets the processes started within, if there are several, take turns on the device and share its memory.

    Two benchmarks share it where both are started with the same file in `LOCK` and without preallocation.
    """
    if jobs == 1 or LOCK in os.environ:
        yield
        return
    with tempfile.NamedTemporaryFile() as lock:
        inherited = {LOCK: lock.name, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        before = {name: os.environ.get(name) for name in inherited}
        os.environ |= inherited
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Holds the device, as far as other workers are concerned: they compile meanwhile."""
    if (path := os.environ.get(LOCK)) is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def queued(call: Callable, inputs: Sequence[tuple], calls: int) -> Sample:
    """Seconds of one of `calls` calls of a JAX function enqueued behind each other, `inputs` taking turns.

    The host waits once, at the end, so that what it spends on a call is hidden behind the device's work on the one
    before, where that is longer.
    """
    begin = time.perf_counter()
    for number in range(calls):
        result = call(*inputs[number % len(inputs)])
    enqueued = time.perf_counter()
    jax.block_until_ready(result)
    end = time.perf_counter()
    return Sample((end - begin) / calls, enqueued - begin > _HOST_SHARE * (end - begin))


def in_turn(
    samplers: Mapping[str, Callable[[int], Sample]], *, announce=lambda name: None
) -> dict[str, list[Sample]]:
    """Several samples of each sampler, which is called with a number of calls; they take turns.

    What changes the speed of the machine changes it for all of them. `announce` hears whose turn it is.
    """
    plans: dict[str, tuple[int, int]] = {}
    samples: dict[str, list[Sample]] = {name: [] for name in samplers}
    for name, sampler in samplers.items():
        announce(name)
        first = sampler(1).seconds
        calls = min(max(int(SAMPLE_SECONDS / first), 1), IN_FLIGHT)
        plans[name] = calls, min(max(int(CONTENDER_SECONDS / (first * calls)), 2), ROUNDS)
    for number in range(ROUNDS):
        for name, sampler in samplers.items():
            calls, rounds = plans[name]
            if number < rounds:
                announce(name)
                samples[name].append(sampler(calls))
    return samples


def medians(calls: Mapping[str, Callable], rounds: int) -> dict[str, float]:
    """Median seconds of each call of no arguments, compiled before; the calls take turns, each waited for."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def spread(seconds: Sequence[float]) -> float:
    """How far the medians of every other sample are apart, relative: the same thing timed twice."""
    halves = statistics.median(seconds[::2]), statistics.median(seconds[1::2])
    return abs(halves[0] - halves[1]) / statistics.median(seconds)


def kernel_seconds(call: Callable, inputs: Sequence[tuple], runs: int = 5) -> dict[str, float] | None:
    """Seconds of each kernel of a call, by name, from the run whose sum is the median; None without CUPTI.

    Gaps between kernels, and copies that are no kernels, are not in it.
    """
    if jax.default_backend() != "gpu":
        return None
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.measure(call, aggregate=False)
    seen = []
    for number in range(runs):
        _, kernels = measured(*inputs[number % len(inputs)])
        if not kernels:
            return None
        seen.append(kernels)
    seen.sort(key=lambda kernels: sum(milliseconds for _, milliseconds in kernels))
    total: dict[str, float] = {}
    for name, milliseconds in seen[runs // 2]:
        total[name] = total.get(name, 0) + milliseconds / 1e3
    return total


def ceilings(*, size: int, copied: int) -> dict[str, float]:
    """What this device reaches: FLOP/s of a bfloat16 product of `size`^3, bytes/s of a pass over `copied` bytes.

    Bytes are those read and those written. Inputs are random: products of zeros run faster.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys[:2])
    words = jax.random.bits(keys[2], (copied // 4,), jnp.uint32)
    # A copy that XLA cannot turn into another name for its argument.
    calls = {"matmul": (jax.jit(jnp.matmul), (left, right)), "copy": (jax.jit(jnp.invert), (words,))}
    samplers: dict[str, Callable[[int], Sample]] = {}
    for name, (call, arguments) in calls.items():
        jax.block_until_ready(call(*arguments))
        samplers[name] = functools.partial(queued, call, [arguments])
    with exclusive():
        taken = in_turn(samplers)
    best = {name: statistics.median(sample.seconds for sample in samples) for name, samples in taken.items()}
    return {"flops": 2 * size**3 / best["matmul"], "bytes": 2 * 4 * words.size / best["copy"]}
