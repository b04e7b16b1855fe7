"""Worker processes that read and tokenize data."""

import concurrent.futures
import contextlib
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

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
    when this process ends. They ignore the signals that stop a run, which needs data until it has saved a checkpoint.

    Args:
        make: returns the function of an item, once for every worker. It, items and results are pickled for processes.
        workers: number of processes; 0 for a thread of this process.
        setting: setting that `workers` was given as, for errors.

    Raises:
        ValueError: there are more than 16 workers per core, or a process cannot be started. From a future, it ended.
    """
    cores = os.cpu_count() or 1
    if workers > _PER_CORE * cores:
        raise ValueError(
            f"{setting} is {workers}, but this machine has {cores} cores; set at most {_PER_CORE * cores}, "
            f"{_PER_CORE} per core"
        )
    # One thread for each process, with a pipe of its own, which ends when the process does. (The executor of processes
    # has one pipe for all results, and would wait for the rest of a result whose process was killed.)
    idle: queue.SimpleQueue[multiprocessing.connection.Connection] = queue.SimpleQueue()
    children: list[multiprocessing.process.BaseProcess] = []
    context = multiprocessing.get_context("spawn")  # a forked process would share the locks of JAX's threads
    function = None if workers else make()

    def call(item: Item) -> Result:
        if function is not None:
            return function(item)
        pipe = idle.get()
        try:
            pipe.send(item)
            result, failure = pipe.recv()
        except (EOFError, OSError) as error:
            raise ValueError(
                f"a worker process ended in the middle of its work (often killed for lack of memory); repeat the "
                f"command, which continues, with fewer {setting} if memory is short"
            ) from error
        finally:
            idle.put(pipe)
        if failure is not None:
            raise failure
        return result

    multiprocessing.resource_tracker.ensure_running()  # now, because its start unblocks signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # which processes inherit
    with concurrent.futures.ThreadPoolExecutor(workers or 1) as threads:
        try:
            try:
                for _ in range(workers):
                    ours, theirs = context.Pipe()
                    child: multiprocessing.process.BaseProcess = context.Process(
                        target=_work, args=(make, theirs), daemon=True
                    )
                    with theirs:
                        child.start()
                    children.append(child)
                    idle.put(ours)
            except OSError as error:
                reason = error.strerror or error
                raise ValueError(f"cannot start a worker process: {reason}; set fewer {setting}") from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            yield lambda item: threads.submit(call, item)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()
                child.join()


def _work(make: Callable[[], Callable[[Any], Any]], pipe: multiprocessing.connection.Connection) -> None:
    """Answers the items that come through a pipe, in a process, until the parent process ends."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)  # even in the middle of an item

    threading.Thread(target=end_with_parent, daemon=True).start()
    function = None
    with contextlib.suppress(EOFError, OSError):  # of the pipe, when the parent process has ended
        while True:
            item = pipe.recv()
            try:
                function = function or make()
                pipe.send((function(item), None))
            except Exception as error:
                if not isinstance(error, ValueError):  # whose text says all that a user needs
                    error.add_note(traceback.format_exc())
                pipe.send((None, error))
