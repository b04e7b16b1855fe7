"""Seconds of several calls, taken in turns so that what else the machine does falls on all of them."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from sympow_jax import config
from sympow_jax.training import sharding, step

__all__ = ["Times", "alternate", "relative", "update"]

Times = dict[str, list[float]]


def alternate(calls: Mapping[str, Callable[[], None]], *, rounds: int) -> Times:
    """The seconds of every call in each round; each returns when its work is done, and is made once before."""
    times: Times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for number in range(rounds):
        # There and back, so that none is always the one behind the slowest.
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            began = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - began)
    return times


def relative(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles over rounds of the seconds of a call over those of another in the same round."""
    low, middle, high = np.percentile(np.array(seconds) / np.array(base), (25, 50, 75))
    return float(low), float(middle), float(high)


def update(settings: config.Config) -> Callable[[], None]:
    """A call that makes one update of a model on random tokens."""
    mesh = sharding.make_mesh(settings)
    state = step.init_state(settings, mesh)
    compiled = step.make_update(settings, mesh)
    shape = settings.data.batch_size, settings.data.context_length + 1
    tokens = np.random.default_rng(0).integers(settings.model.vocab_size, size=shape, dtype=np.int32)
    batch = sharding.place_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)

    def call() -> None:
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)

    return call
