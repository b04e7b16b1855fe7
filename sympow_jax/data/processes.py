"""Worker processes that read and tokenize data."""

import atexit
import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import pickle
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

    At the end, processes are killed in the middle of their work, but a thread finishes its item. If the pool is never
    closed, Python finishes the queued items before it exits. Worker processes end when this process ends. They ignore
    the signals that stop a run, because this process needs data until it has saved a checkpoint.

    Args:
        make: returns the function of an item. Every worker calls it before its first item, and before the next one if
            it raised. Processes need `make`, items and results that can be pickled.
        workers: number of processes; 0 for a thread of this process.
        setting: setting that `workers` was given as, for errors.

    Raises:
        ValueError: there are more than 16 workers per core. Without processes, `make` raised it. From a future, `make`
            or the function raised it, or a process ended or cannot be started.
        RuntimeError: from a future, `make` or the function raised another exception in a process, or the item or its
            result cannot be unpickled or pickled there. The message is the traceback. Without processes, the exception
            itself is raised.
    """
    cores = os.cpu_count() or 1
    if workers > _PER_CORE * cores:
        raise ValueError(
            f"{setting} is {workers}, but this machine has {cores} cores; set at most {_PER_CORE * cores}, "
            f"{_PER_CORE} per core"
        )
    # A forked process would share the locks of JAX's threads.
    context = multiprocessing.get_context("spawn")
    started: list[SpawnProcess] = []
    # Each process that has no item, with its connection, or the error of one that could not be started.
    idle: queue.SimpleQueue[tuple[Connection, SpawnProcess] | Exception] = queue.SimpleQueue()
    ended = threading.Event()

    def connect() -> tuple[Connection, SpawnProcess]:
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
        return ours, process

    def start() -> None:
        try:
            idle.put(connect())
        except Exception as error:  # a thread that fails to start breaks the pool and prints a traceback
            idle.put(error)

    def ask(item: Item) -> Result:
        request = pickle.dumps(item)
        worker = idle.get()
        if isinstance(worker, OSError):
            idle.put(worker)
            raise ValueError(
                f"cannot start a worker process: {worker.strerror or worker}; set fewer {setting}, or raise this limit "
                f"of the machine"
            )
        if isinstance(worker, Exception):
            idle.put(worker)
            raise worker
        connection, process = worker
        try:
            connection.send_bytes(request)
            reply = connection.recv_bytes()
        except (EOFError, OSError):
            process.join()
            raise ValueError(
                f"a worker process ended with exit code {process.exitcode} (-9 is a kill, often for lack of memory); "
                f"repeat the command, which continues, with fewer {setting} if memory is short"
            ) from None
        finally:
            idle.put(worker)
        result = pickle.loads(reply)
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

    # A generator that uses a pool may never be closed. When Python exits, it first waits for the threads, which finish
    # all items. Then multiprocessing sends each daemon process a SIGTERM, which these block, and waits for its end.
    # Functions registered later run first, so that `end` kills the processes, which are idle, before that.
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
            request = connection.recv_bytes()
            # Pickled within the try, so that a failure of that is a reply too.
            try:
                item = pickle.loads(request)
                if function is None:
                    function = make()  # not before, because the answer to the first item reports its errors
                reply = pickle.dumps(function(item))
            except ValueError as error:
                reply = pickle.dumps(ValueError(str(error)))
            except Exception:
                reply = pickle.dumps(RuntimeError(traceback.format_exc()))
            connection.send_bytes(reply)


def _end_with_parent() -> None:
    """Waits for the parent process to end, and then ends this one, even in the middle of an item."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
