"""Times several calls in turns, so that other load on the machine affects all of them."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from sympow_jax import config, training
from sympow_jax.training import sharding

__all__ = ["Times", "alternate", "relative", "update"]

Times = dict[str, list[float]]


def alternate(calls: Mapping[str, Callable[[], None]], *, rounds: int) -> Times:
    """Measures the seconds of every call in each round, after one warm-up call; a call must block until done."""
    times: Times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for number in range(rounds):
        # The order alternates, so that no call always follows the slowest one.
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            began = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - began)
    return times


def relative(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Returns the quartiles over rounds of the ratio of one call's seconds to another's in the same round."""
    low, middle, high = np.percentile(np.array(seconds) / np.array(base), (25, 50, 75))
    return float(low), float(middle), float(high)


def update(settings: config.Config) -> Callable[[], None]:
    """Returns a function that makes one update of a model on random tokens."""
    mesh = sharding.make_mesh(settings)
    program = training.Program(settings, mesh)
    state = program.init_state()
    shape = settings.data.batch_size, settings.data.context_length + 1
    tokens = np.random.default_rng(0).integers(settings.model.vocab_size, size=shape, dtype=np.int32)
    batch = sharding.place_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)

    def call() -> None:
        nonlocal state
        state, metrics = program.update(state, batch)
        jax.block_until_ready(metrics)

    return call
