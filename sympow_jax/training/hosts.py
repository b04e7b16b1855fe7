"""Several processes of one run, on one host or many: how they meet, agree and end.

Every process runs the same program on the same settings; each reads its own rows of a batch, and the first alone
reports and writes what is not a checkpoint. What one of them finds out by itself, a mistake or a signal, the others
learn through the collectives here, which all call in the same order.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

__all__ = [
    "TIMEOUT",
    "Launch",
    "Vote",
    "all_or_none",
    "check_same",
    "ending",
    "gather",
    "is_first",
    "join",
    "say",
]

# Seconds for all processes of a run to meet.
TIMEOUT = 60
# A process that has not been heard of for so many seconds is taken for dead, and the others end.
_HEARTBEAT = 60
# The dynamic ports of RFC 6335 end here; the number of a job chooses one of the last of them.
_LAST_PORT, _PORTS = 65_535, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One process of a run: where all meet (process 0 listens there), how many there are, which one this is.

    `devices` are the local ones that it uses; None for all.
    """

    coordinator: str
    count: int
    index: int
    timeout: int = TIMEOUT
    devices: tuple[int, ...] | None = None

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= _LAST_PORT:
            raise ValueError(
                f"--coordinator_address is {self.coordinator!r}; it must be HOST:PORT, where process 0 can be reached"
            )
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"--process_id is {self.index} and --process_count is {self.count}; ids count from 0 to "
                f"{self.count - 1 if self.count > 0 else 'the count'}"
            )
        if self.timeout < 1:
            raise ValueError(f"--coordinator_timeout is {self.timeout}; it must be at least 1 second")

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def from_slurm(environment: Mapping[str, str], *, timeout: int = TIMEOUT) -> Launch | None:
    """What `srun` says of a step of more than one task; None elsewhere, as in the batch script itself.

    A task alone on its node uses all its devices. Several on a node use one each, the one of their local number,
    unless SLURM shows each of them only its own.
    """
    count = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if count == 1:
        return None
    # "node7", "node7,node9" and "node[7-9,12],other3" all begin with the first host.
    head, bracket, rest = environment["SLURM_STEP_NODELIST"].partition("[")
    first = head.partition(",")[0]
    if bracket and first == head:
        first += rest.replace("-", ",").replace("]", ",").partition(",")[0]
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    alone = int(environment["SLURM_STEP_NUM_NODES"]) == count or (visible and "," not in visible)
    return Launch(
        coordinator=f"{first}:{_LAST_PORT - int(environment['SLURM_JOB_ID']) % _PORTS}",
        count=count,
        index=int(environment["SLURM_PROCID"]),
        timeout=timeout,
        devices=None if alone else (int(environment["SLURM_LOCALID"]),),
    )


def join(launch: Launch | None) -> None:
    """Meets the other processes; None runs alone. Before anything touches a device.

    Ends the process with one line on stderr where they have not met within the launch's timeout: what JAX does
    then is to abort.

    Raises:
      ValueError: another program listens on the coordinator's port.
    """
    if launch is None:
        return
    if launch.index == 0:
        _check_port(launch)
    # Signals are ours to handle: cli.StopSignals, and Vote for the other processes.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    watchdog = threading.Timer(launch.timeout, _give_up, [launch])
    watchdog.daemon = True
    watchdog.start()
    jax.distributed.initialize(
        launch.coordinator,
        launch.count,
        launch.index,
        local_device_ids=launch.devices,
        cluster_detection_method="deactivate",  # the launch says it all
        initialization_timeout=2 * launch.timeout,  # ours ends first
        heartbeat_timeout_seconds=_HEARTBEAT,
    )
    watchdog.cancel()
    if jax.local_device_count() * jax.process_count() != jax.device_count():
        raise ValueError(
            f"process {jax.process_index()} has {jax.local_device_count()} of {jax.device_count()} devices of "
            f"{jax.process_count()} processes; each must have as many"
        )
    # Kernels are used where every process has found them right, so that all compile the same program.
    from pallas_kernels.check import verdict

    verdict.agree(jax.devices()[0].device_kind)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Around all that a process does: it waits for the others, unless it fails while they go on.

    Then they end too: as soon as they miss it in a collective, or `_HEARTBEAT` seconds later.
    """
    try:
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        if not jax.distributed.is_initialized() or (isinstance(error, SystemExit) and not error.code):
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # At an ordinary exit JAX waits for the other processes to exit as well.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def is_first() -> bool:
    """Whether this is the process that reports and writes."""
    return jax.process_index() == 0


def say(text: str, *, error: bool = False) -> None:
    """Prints a line, from the first process alone; to stderr where it is about an error."""
    if is_first():
        print(text, file=sys.stderr if error else sys.stdout, flush=True)


def gather(text: str) -> list[str]:
    """The text of each process, on all of them, by index."""
    if jax.process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(encoded.size))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: encoded.size] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes)]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """What a process raises within, all raise: its own error there, a ValueError that quotes it elsewhere.

    No collective may be within, since a process that fails would not come to it.
    """
    try:
        yield
    except Exception as error:
        gather(_line(error))
        raise
    for index, line in enumerate(gather("")):
        if line:
            raise ValueError(f"process {index}: {line}")


def check_same(what: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError where the values, such as can be written as JSON, are not those of process 0."""
    texts = gather(json.dumps(values, sort_keys=True))
    expected = json.loads(texts[0])
    for index, text in enumerate(texts):
        found = json.loads(text)
        if found != expected:
            names = sorted(
                name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
            )
            changes = ", ".join(f"{name} is {found.get(name)!r} not {expected.get(name)!r}" for name in names)
            raise ValueError(
                f"process {index} has other {what} than process 0: {changes}; they must be the same"
            )


class Vote:
    """The highest number that any process casts, the same on all of them after the same step.

    With several processes it is that of the step before, which is known by then: no step waits for it.
    """

    def __init__(self) -> None:
        if jax.process_count() == 1:
            return
        mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._highest = jax.jit(jnp.max, out_shardings=replicated)
        self._before = self._dispatch(0)

    def cast(self, number: int, *, now: bool = False) -> int:
        """The highest number of the step before; of this one where it may wait, and in a run of one process."""
        if jax.process_count() == 1:
            return number
        before, self._before = self._before, self._dispatch(number)
        return int(self._before if now else before)

    def _dispatch(self, number: int) -> jax.Array:
        local = np.full(jax.local_device_count(), number, np.int32)
        return self._highest(jax.make_array_from_process_local_data(self._sharding, local))


def _check_port(launch: Launch) -> None:
    """JAX's coordinator would share the port with another run's."""
    port = launch.endpoint[1]
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise ValueError(
            f"port {port} of --coordinator_address cannot be used on {socket.gethostname()}: "
            f"{error.strerror}; end what listens there or choose another port"
        ) from error


def _give_up(launch: Launch) -> None:
    if launch.index == 0:
        reason = (
            f"not all of the {launch.count} processes have come to {launch.coordinator} within "
            f"{launch.timeout} s; start the others with the same --process_count"
        )
    else:
        reason = (
            f"the coordinator, process 0, does not answer at {launch.coordinator} within {launch.timeout} s"
        )
        try:
            socket.create_connection(launch.endpoint, timeout=1).close()
            reason += ", though a program listens there: not all processes have come, or it is another one"
        except OSError as error:
            reason += f": {error.strerror or error}"
    print(f"error: {reason}; --coordinator_timeout gives them more time", file=sys.stderr, flush=True)
    os._exit(1)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
