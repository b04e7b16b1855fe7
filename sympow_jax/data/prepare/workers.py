"""Tokenizes pieces in this process or in others, and writes them to the folder of an output."""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import pathlib
import signal
import threading
import traceback
from collections.abc import Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from sympow_jax.data import processes
from sympow_jax.data.prepare import folder, pieces

__all__ = ["Task", "run"]

_STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Task:
    """A piece and its place in the order of all pieces."""

    index: int
    piece: pieces.Piece


def run(
    tasks: Sequence[Task], encoding: pieces.Encoding, path: pathlib.Path, *, count: int
) -> Generator[int]:
    """Writes the tokens of every task's piece to the folder `path`, and yields its index when that is done.

    Args:
        tasks: pieces in order.
        encoding: the way from documents to tokens.
        path: folder that the pieces are written to.
        count: number of processes. One is this process itself. Others end with this one, however it ends.

    Raises:
        ValueError: a piece cannot be read, encoded or written, or a process was killed.
    """
    count = min(count, len(tasks))
    if count <= 1:
        encoder = pieces.PieceEncoder(encoding)
        for task in tasks:
            folder.write_piece(path, task.index, encoder.encode(task.piece))
            yield task.index
    else:
        with _started(count, encoding, path) as connections:
            yield from _distribute(tasks, connections)


def _distribute(tasks: Sequence[Task], connections: Sequence[Connection]) -> Iterator[int]:
    """Gives every process one task at a time, and yields the indices of those that are done."""
    # `run` starts no more processes than there are tasks.
    for connection, task in zip(connections, tasks):
        _send(connection, task)
    waiting, busy = iter(tasks[len(connections) :]), list(connections)
    while busy:
        ready = multiprocessing.connection.wait(busy)
        for connection in [connection for connection in busy if connection in ready]:
            yield _result(connection)
            following = next(waiting, None)
            if following is None:
                busy.remove(connection)
            else:
                _send(connection, following)


def _send(connection: Connection, task: Task) -> None:
    with contextlib.suppress(OSError):  # of a process that has ended, which `_result` reports
        connection.send(task)


def _result(connection: Connection) -> int:
    try:
        result = connection.recv()
    except (EOFError, OSError):
        raise ValueError(
            "a worker process was killed, perhaps because memory was short; repeat the command, which continues, if "
            "need be with fewer --workers"
        ) from None
    if isinstance(result, Exception):
        raise result
    return result


@contextlib.contextmanager
def _started(count: int, encoding: pieces.Encoding, path: pathlib.Path) -> Iterator[list[Connection]]:
    """Starts processes, yields a connection to each, and kills them at the end."""
    context = multiprocessing.get_context("spawn")
    # Before the first process is started, because this unblocks signals.
    multiprocessing.resource_tracker.ensure_running()
    started: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, encoding, path), daemon=True)
            started.append(process)
            connections.append(ours)
            with _stops_delayed():
                process.start()
            # So that the end of the process ends the connection.
            theirs.close()
        yield connections
    finally:
        for process in started:
            if process.pid is not None:
                process.kill()
                process.join()


@contextlib.contextmanager
def _stops_delayed() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM, which would leave a half-started process, to the end.

    Processes that are started within never see them: they inherit that this thread blocks them. Ctrl-C reaches all
    processes of a terminal, but the parent alone reports it and ends the others.
    """
    # Python calls handlers in the main thread only.
    numbers = _STOPS if threading.current_thread() is threading.main_thread() else ()
    received: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    # Blocking is not enough, because the signal may arrive in another thread.
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if received:
            signal.raise_signal(received[0])


def _work(connection: Connection, encoding: pieces.Encoding, path: pathlib.Path) -> None:
    """Does the tasks that a connection sends, and answers each with its index or with an error."""
    processes.end_with_parent()
    with contextlib.suppress(EOFError):  # the parent has ended
        try:
            encoder = pieces.PieceEncoder(encoding)
            while True:
                task = connection.recv()
                folder.write_piece(path, task.index, encoder.encode(task.piece))
                connection.send(task.index)
        except EOFError:
            raise
        except ValueError as error:
            connection.send(ValueError(str(error)))
        except Exception:
            connection.send(RuntimeError(traceback.format_exc()))
