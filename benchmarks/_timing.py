"""Measures time on the device: by calls enqueued one after another, and by kernel times from CUPTI."""

import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

ROUNDS = 10
# Long compared to the clock's resolution and the last call's latency.
SAMPLE_SECONDS = 0.02
CONTENDER_SECONDS = 3.0
# Below the number of calls that XLA lets a host enqueue before it blocks (32): a blocked host would look slow.
IN_FLIGHT = 16
# If enqueueing takes more than this fraction of a sample, the host and not the device determined its length.
_HOST_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds per call, and whether the device had to wait for the host."""

    seconds: float
    host_bound: bool


def queued(call: Callable, inputs: Sequence[tuple], calls: int) -> Sample:
    """Measures the seconds per call of a JAX function over `calls` calls enqueued without waiting, cycling `inputs`.

    The host waits once, at the end. Its work for one call therefore overlaps with the device's work on the call before,
    and is hidden if the device takes longer.
    """
    begin = time.perf_counter()
    for number in range(calls):
        result = call(*inputs[number % len(inputs)])
    enqueued = time.perf_counter()
    jax.block_until_ready(result)
    end = time.perf_counter()
    return Sample((end - begin) / calls, enqueued - begin > _HOST_SHARE * (end - begin))


def samples(sampler: Callable[[int], Sample]) -> list[Sample]:
    """Takes several samples from a sampler, which is called with a number of calls."""
    first = sampler(1).seconds
    calls = min(max(int(SAMPLE_SECONDS / first), 1), IN_FLIGHT)
    rounds = min(max(int(CONTENDER_SECONDS / (first * calls)), 2), ROUNDS)
    return [sampler(calls) for _ in range(rounds)]


def medians[Key](calls: Mapping[Key, Callable], rounds: int) -> dict[Key, float]:
    """Returns the median seconds of each argumentless call; compiles first, then takes turns and blocks on each.

    Each is called once untimed in its turn: after a call that has freed gigabytes, the next one waits for its memory.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            jax.block_until_ready(call())
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def spread(seconds: Sequence[float]) -> float:
    """Returns the relative difference between the medians of even and odd samples, as a measure of noise."""
    halves = statistics.median(seconds[::2]), statistics.median(seconds[1::2])
    return abs(halves[0] - halves[1]) / statistics.median(seconds)


def kernel_seconds(call: Callable, inputs: Sequence[tuple], runs: int = 5) -> dict[str, float] | None:
    """Returns each kernel's seconds in a call, from the run with the median sum; None without CUPTI.

    Gaps between kernels, and copies that are not kernels, are not counted.
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


def traced_seconds(call: Callable[[], None]) -> dict[str, float]:
    """Returns the seconds of each kernel and copy of one call on a GPU, longest first.

    They come from a profiler trace. Unlike `kernel_seconds`, it calls only once, so arguments may be donated. The call
    must wait for its results. Empty on other devices.
    """
    total: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                # Lines of a GPU are its streams; the others repeat the streams' events by op, module or step.
                streams = [line for line in plane.lines if line.name.startswith("Stream")]
                for event in (event for line in streams for event in line.events):
                    total[event.name] = total.get(event.name, 0.0) + event.duration_ns / 1e9
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def ceilings(*, size: int, copied: int) -> dict[str, float]:
    """Measures FLOP/s of a `size`^3 bfloat16 product and bytes/s of a pass over `copied` bytes on this device.

    Bytes read and bytes written both count. Inputs are random, because products of zeros run faster.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys[:2])
    words = jax.random.bits(keys[2], (copied // 4,), jnp.uint32)
    # `invert` is a copy that XLA cannot elide by aliasing the result to the argument.
    calls = {"matmul": (jax.jit(jnp.matmul), (left, right)), "copy": (jax.jit(jnp.invert), (words,))}
    taken = {}
    for name, (call, arguments) in calls.items():
        jax.block_until_ready(call(*arguments))
        sampler = functools.partial(queued, call, [arguments])
        taken[name] = statistics.median(sample.seconds for sample in samples(sampler))
    return {"flops": 2 * size**3 / taken["matmul"], "bytes": 2 * 4 * words.size / taken["copy"]}
