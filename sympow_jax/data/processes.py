"""Worker processes that read and tokenize data."""

import atexit
import concurrent.futures
import contextlib
import functools
import multiprocessing
import multiprocessing.resource_tracker
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

__all__ = ["pool"]

# Processes per core. More than one, because those that read over a network wait.
_PER_CORE = 16
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def pool[Item, Result](
    make: Callable[[], Callable[[Item], Result]], *, workers: int, setting: str
) -> Iterator[Callable[[Item], concurrent.futures.Future[Result]]]:
    """Yields a function that sends an item to a worker and returns the future of its result.

    At the end, processes are killed in the middle of their work, but a thread finishes its item. Processes also end
    with this process, however it ends. Signals that stop a run never reach them: this process needs data until it has
    saved, and it alone reports the end.

    Args:
        make: returns the function of an item. Every worker calls it once. Processes need `make`, items and results that
            can be pickled.
        workers: number of processes; 0 for a thread of this process.
        setting: setting that `workers` was given as, for errors.

    Raises:
        ValueError: there are more than 16 workers for each core; or a worker was killed. Futures raise the latter, and
            the errors of `make` and of its function.
    """
    cores = os.cpu_count() or 1
    if workers > _PER_CORE * cores:
        raise ValueError(
            f"{setting} is {workers}, but this machine has {cores} cores; set at most {_PER_CORE * cores}"
        )
    # A forked process would share the locks of JAX's threads.
    context = multiprocessing.get_context("spawn")
    started: list[SpawnProcess] = []
    # An error stands for a process that could not be started.
    idle: queue.SimpleQueue[Connection | OSError] = queue.SimpleQueue()
    ended = threading.Event()

    def start() -> None:
        # Each thread starts one process, which inherits that the thread blocks signals. No signal can interrupt the
        # start either, because Python handles signals in the main thread.
        multiprocessing.resource_tracker.ensure_running()  # first, because it unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make), daemon=True)
            process.start()
        except OSError as error:
            idle.put(error)
            return
        theirs.close()  # so that the end of the process ends the connection
        started.append(process)
        if ended.is_set():
            process.kill()
        idle.put(ours)

    def ask(item: Item) -> Result:
        connection = idle.get()
        try:
            if isinstance(connection, OSError):
                raise ValueError(
                    f"cannot start a worker process: {connection.strerror or connection}; set fewer {setting}, or "
                    f"raise this limit of the machine"
                )
            connection.send(item)
            result = connection.recv()
        except (EOFError, OSError):
            raise ValueError(
                f"a worker process was killed, perhaps because memory was short; repeat the command, which continues, "
                f"if need be with fewer {setting}"
            ) from None
        finally:
            idle.put(connection)
        if isinstance(result, Exception):
            raise result
        return result

    def end() -> None:
        ended.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()  # ends the wait of its thread
        threads.shutdown()
        for process in started:
            process.join()

    threads = (
        concurrent.futures.ThreadPoolExecutor(workers, initializer=start)
        if workers
        else concurrent.futures.ThreadPoolExecutor(1)
    )
    function = ask if workers else make()
    # A generator that uses a pool may never be closed, and multiprocessing waits for processes when Python exits.
    atexit.register(end)
    try:
        yield lambda item: threads.submit(function, item)
    finally:
        end()
        atexit.unregister(end)  # not before, because a second Ctrl-C may interrupt `end`


def _work(connection: Connection, make: Callable[[], Callable[[Any], Any]]) -> None:
    """Answers the items of a connection, each with its result or an error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    made = functools.cache(make)  # called within `try`, so that its errors are answers
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while True:
            item = connection.recv()
            result: Any
            try:
                result = made()(item)
            except ValueError as error:
                result = ValueError(str(error))
            except Exception:
                result = RuntimeError(traceback.format_exc())
            connection.send(result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
