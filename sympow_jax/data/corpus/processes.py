"""Worker processes that read and tokenize data."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["pool"]

# Processes per core. More than one, because those that read over a network wait.
_PER_CORE = 16
# Ctrl-C and the notices that `training` and `prepare` handle.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def pool[Item, Result](
    make: Callable[[], Callable[[Item], Result]], *, workers: int, setting: str
) -> Iterator[Callable[[Item], concurrent.futures.Future[Result]]]:
    """Yields a function that sends an item to a worker and returns the future of its result.

    At the end, processes are killed in the middle of their work, but a thread finishes its item. Worker processes end
    when this process ends. They ignore the signals that stop a run, because this process needs data until it has saved
    a checkpoint.

    Args:
        make: returns the function of an item. Every worker calls it before its first item. Processes need `make`, items
            and results that can be pickled.
        workers: number of processes; 0 for a thread of this process.
        setting: setting that `workers` was given as, for errors.

    Raises:
        ValueError: there are more than 16 workers per core. From a future, a process ended or cannot be started.
    """
    cores = os.cpu_count() or 1
    if workers > _PER_CORE * cores:
        raise ValueError(
            f"{setting} is {workers}, but this machine has {cores} cores; set at most {_PER_CORE * cores}, "
            f"{_PER_CORE} per core"
        )
    if not workers:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            try:
                function = make()
                yield lambda item: thread.submit(function, item)
            finally:
                thread.shutdown(cancel_futures=True)
        return
    before = set(multiprocessing.active_children())
    # A forked process would share the locks of JAX's threads.
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(make,)
    )
    children: set[multiprocessing.process.BaseProcess] = set()

    def submit(item: Item) -> concurrent.futures.Future[Result]:
        # An item may start a process, which inherits that this thread blocks signals.
        multiprocessing.resource_tracker.ensure_running()  # first, because it unblocks signals
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            return executor.submit(_call, item)
        except OSError as error:
            raise ValueError(
                f"cannot start a worker process: {error.strerror or error}; set fewer {setting}, or raise this limit "
                f"of the machine"
            ) from error
        finally:
            children.update(set(multiprocessing.active_children()) - before)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield submit
    except concurrent.futures.process.BrokenProcessPool as error:
        raise ValueError(
            f"a worker process ended in the middle of its work (often killed for lack of memory); repeat the command, "
            f"which continues, with fewer {setting} if memory is short"
        ) from error
    finally:
        # The executor itself waits for all items that it has passed on, and only terminates, which workers ignore.
        for child in children:
            child.kill()
        # The last end of the pipe of results, so that the executor does not wait for the rest of one.
        executor._result_queue._writer.close()  # type: ignore[attr-defined]
        executor.shutdown(cancel_futures=True)


_make: Callable[[], Callable[[Any], Any]] | None = None
_function: Callable[[Any], Any] | None = None


def _begin(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _make
    _make = make
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _call(item: Any) -> Any:
    global _function
    if _function is None:
        assert _make is not None
        _function = _make()  # not in `_begin`, whose errors would be logged and not returned
    return _function(item)


def _end_with_parent() -> None:
    """Waits for the parent process to end, and then ends this one, even in the middle of an item."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
