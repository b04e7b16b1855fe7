"""Worker processes that read and tokenize data."""

import atexit
import concurrent.futures
import contextlib
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
        make: returns the function of an item. Every worker calls it once. Processes need `make`, items and results that
            can be pickled.
        workers: number of processes; 0 for a thread of this process.
        setting: setting that `workers` was given as, for errors.

    Raises:
        ValueError: there are more than 16 workers per core. Without processes, `make` raised it. From a future, `make`
            or the function raised it, or a process was killed or cannot be started.
        RuntimeError: from a future, `make` or the function raised another exception in a process. The message is its
            traceback. Without processes, the exception itself is raised.
    """
    cores = os.cpu_count() or 1
    if workers > _PER_CORE * cores:
        raise ValueError(
            f"{setting} is {workers}, but this machine has {cores} cores; set at most {_PER_CORE * cores}"
        )
    # A forked process would share the locks of JAX's threads.
    context = multiprocessing.get_context("spawn")
    started: list[SpawnProcess] = []
    # The connection to each process that has no item, or the error of one that could not be started.
    idle: queue.SimpleQueue[Connection | OSError] = queue.SimpleQueue()
    ended = threading.Event()

    def connect() -> Connection:
        # Each thread starts one process, which inherits that the thread blocks signals. No signal can interrupt the
        # start either, because Python handles signals in the main thread.
        multiprocessing.resource_tracker.ensure_running()  # first, because it unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, make), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process ends the connection
        started.append(process)
        if ended.is_set():
            process.kill()
        return ours

    def start() -> None:
        try:
            idle.put(connect())
        except OSError as error:  # a thread that fails to start breaks the pool and prints a traceback
            idle.put(error)

    def ask(item: Item) -> Result:
        connection = idle.get()
        if isinstance(connection, OSError):
            idle.put(connection)
            raise ValueError(
                f"cannot start a worker process: {connection.strerror or connection}; set fewer {setting}, or raise "
                f"this limit of the machine"
            )
        try:
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

    threads = (
        concurrent.futures.ThreadPoolExecutor(workers, initializer=start)
        if workers
        else concurrent.futures.ThreadPoolExecutor(1)
    )
    function = ask if workers else make()

    def end() -> None:
        ended.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()  # ends the wait of its thread
        threads.shutdown()
        for process in started:
            process.join()

    # A generator that uses a pool may never be closed. When Python exits, multiprocessing sends each daemon process a
    # SIGTERM, which these block, and waits for its end. Functions registered later run first, so that `end` kills them.
    atexit.register(end)
    try:
        yield lambda item: threads.submit(function, item)
    finally:
        end()
        atexit.unregister(end)  # not before, because a second Ctrl-C may interrupt `end`


def _work(connection: Connection, make: Callable[[], Callable[[Any], Any]]) -> None:
    """Answers the items of a connection, each with its result or an error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function: Callable[[Any], Any] | None = None
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while True:
            item = connection.recv()
            result: Any
            try:
                if function is None:
                    function = make()  # not before, because the answer to the first item reports its errors
                result = function(item)
            except ValueError as error:
                result = ValueError(str(error))
            except Exception:
                result = RuntimeError(traceback.format_exc())
            connection.send(result)


def _end_with_parent() -> None:
    """Waits for the parent process to end, and then ends this one, even in the middle of an item."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
