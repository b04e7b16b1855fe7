"""Tests of the pool of workers: ends in the middle of their work, signals, errors."""

import errno
import itertools
import multiprocessing
import os
import signal
from multiprocessing.context import SpawnProcess

import numpy as np
import pytest

from sympow_jax.data import processes


class Zeros:
    """Worker that returns as many zeros as asked for, more than a pipe holds."""

    def __call__(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"{count} is negative")
        return np.zeros(count, np.uint8)


class Broken:
    def __init__(self):
        raise ValueError("cannot begin")


def test_processes_end_in_the_middle_of_results_and_get_no_signal_before():
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
        pytest.raises(ValueError, match=r"^data\.workers is 1000000, but .*; set at most \d+$"),
        processes.pool(Zeros, workers=1_000_000, setting="data.workers"),
    ):
        pass


def test_a_kill_in_the_middle_of_a_result_is_an_error():
    with processes.pool(Zeros, workers=1, setting="data.workers") as submit:
        futures = [submit(1 << 26) for _ in range(3)]
        futures[0].result()
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ValueError, match=r"^a worker process was killed, .* fewer data\.workers$"):
            futures[2].result()
    assert not multiprocessing.active_children()


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch, caplog):
    def fail(process):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(SpawnProcess, "start", fail)
    with processes.pool(Zeros, workers=2, setting="data.workers") as submit:
        for future in [submit(1) for _ in range(4)]:
            with pytest.raises(
                ValueError,
                match=r"^cannot start a worker process: Resource temporarily unavailable; set fewer data\.workers, or",
            ):
                future.result()
    assert not caplog.records


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_at_the_start_of_a_worker(workers):
    with (
        pytest.raises(ValueError, match=r"^cannot begin$"),
        processes.pool(Broken, workers=workers, setting="--workers") as submit,
    ):
        submit(1).result()
