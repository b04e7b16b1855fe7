"""Tests of the pool of workers: ends in the middle of their work, signals, errors."""

import errno
import functools
import itertools
import multiprocessing
import os
import signal
import time
from multiprocessing.context import SpawnProcess

import numpy as np
import pytest

from sympow_jax.data.corpus import processes

pytestmark = pytest.mark.robust


class Zeros:
    """Worker that returns as many zeros as asked for, more than a pipe holds."""

    def __call__(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"{count} is negative")
        return np.zeros(count, np.uint8)


class Call:
    """Worker that calls an item."""

    def __call__(self, function):
        return function()


class Unpicklable:
    """Object that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("this cannot be pickled")


class Broken:
    def __init__(self):
        raise ValueError("cannot begin")


def test_processes_answer_after_signals_and_end():
    with processes.pool(Zeros, workers=2, setting="--workers") as submit:
        assert len(submit(1).result()) == 1
        for process, number in itertools.product(
            multiprocessing.active_children(), (signal.SIGINT, signal.SIGTERM)
        ):
            os.kill(process.pid, number)
        futures = [submit(size) for size in (1 << 24, 3, -1, 1 << 24, 1 << 24, 1 << 24)]
        assert [len(future.result()) for future in futures[:2]] == [1 << 24, 3]
        with pytest.raises(ValueError, match=r"^-1 is negative$"):
            futures[2].result()
    assert not multiprocessing.active_children()


def test_more_workers_than_a_machine_can_have():
    with (
        pytest.raises(ValueError, match=r"^data\.workers is 1000000, but .*; set at most \d+, 16 per core$"),
        processes.pool(Zeros, workers=1_000_000, setting="data.workers"),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_ends_is_an_error(number):
    def use() -> None:
        with processes.pool(Call, workers=2, setting="data.workers") as submit:
            submit(functools.partial(time.sleep, 60))
            submit(functools.partial(signal.raise_signal, number)).result()

    with pytest.raises(ValueError, match=r"^a worker process ended .*; repeat .* with fewer data\.workers"):
        use()
    assert not multiprocessing.active_children()


def test_what_cannot_be_pickled_is_an_error_and_the_worker_continues():
    with processes.pool(Call, workers=1, setting="data.workers") as submit:
        with pytest.raises(TypeError, match="this cannot be pickled"):
            submit(Unpicklable()).result()
        assert submit(int).result() == 0


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch):
    def fail(process):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(SpawnProcess, "start", fail)
    with (
        pytest.raises(ValueError, match=r"^cannot start a worker process: Resource .*; set fewer data\.w"),
        processes.pool(Zeros, workers=2, setting="data.workers") as submit,
    ):
        submit(1).result()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_at_the_start_of_a_worker(workers):
    with (
        pytest.raises(ValueError, match=r"^cannot begin$"),
        processes.pool(Broken, workers=workers, setting="--workers") as submit,
    ):
        submit(1).result()
