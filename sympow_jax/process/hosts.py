"""Startup, agreement and shutdown of a run's processes, on one host or several.

Every process runs the same program with the same settings and reads its own rows of a batch. Only the first reports and
writes files, except for checkpoints, which all write. An error or a signal in one process reaches the others through
the collectives here, which all processes call in the same order.
"""

import collections
import contextlib
import dataclasses
import glob
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from sympow_jax import spelling
from sympow_jax.process import streams

__all__ = [
    "TIMEOUT",
    "Cluster",
    "Launch",
    "Vote",
    "abandon_threads",
    "all_or_none",
    "check_same",
    "detect",
    "ending",
    "gather",
    "is_first",
    "join",
    "say",
]

# Seconds for all processes of a run to connect.
TIMEOUT = 60

# Seconds without a heartbeat after which a process counts as dead, and the others end.
_HEARTBEAT = 60
# Seconds that processes with the same error have to end before the first one does.
_SECONDS_TO_END = 3.0
# Last of the dynamic ports of RFC 6335. The ids of a job and its step select one of the last `_PORTS` ports.
_LAST_PORT, _PORTS = 65_535, 4096
# Variable from which JAX's cluster detection takes the port of the coordinator.
_PORT_VARIABLE = "JAX_COORDINATOR_PORT"
# Devices of a host that show that it has TPUs, or each of its GPUs.
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_GPU_DEVICES = "/dev/nvidia[0-9]*"
# Words in JAX's errors when another process cannot be reached, and the number of characters that are shown of one.
_UNREACHABLE = ("Gloo", "remote process exited", "CoordinationService")
_LONGEST_REASON = 300
# Set once `abandon_threads` is called.
_abandoned = threading.Event()
# Part of JAX's error if devices were used before `jax.distributed.initialize`.
_TOO_LATE = "before any JAX calls"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Place of one process among those of a run, as given by flags.

    Attributes:
        coordinator: HOST:PORT where process 0 listens.
        count: number of processes.
        index: index of this process.
        timeout: seconds for all processes to connect.
    """

    coordinator: str
    count: int
    index: int
    timeout: int = TIMEOUT

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
        _check_timeout(self.timeout)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    port_source = "--coordinator_address"

    @property
    def port(self) -> int | None:
        """Port that this process listens on; None except in process 0."""
        return self.endpoint[1] if self.index == 0 else None

    def initialize(self, **options: Any) -> None:
        """Calls `jax.distributed.initialize`."""
        jax.distributed.initialize(
            self.coordinator, self.count, self.index, cluster_detection_method="deactivate", **options
        )

    @property
    def connect_error(self) -> str:
        """Start of the error if `initialize` fails."""
        return f"the processes could not be connected through {self.coordinator}"

    def timeout_error(self) -> str:
        """Returns why the processes have not met within the timeout."""
        if self.index == 0:
            return (
                f"not all of the {self.count} processes have come to {self.coordinator} within {self.timeout} s; start "
                f"the others with the same --process_count"
            )
        reason = f"the coordinator, process 0, does not answer at {self.coordinator} within {self.timeout} s"
        try:
            socket.create_connection(self.endpoint, timeout=1).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: the host is no valid name
            return f"{reason}: {getattr(error, 'strerror', None) or error}"
        return f"{reason}, though a program listens there: not all processes have come, or it is another one"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Place of one process among those that a cluster started, which JAX's cluster detection finds.

    Attributes:
        name: name of the cluster in errors.
        timeout: seconds for all processes to connect.
        devices: local devices that this process uses; None leaves the choice to JAX, and () takes all.
        coordinator_port: port of the coordinator; None leaves the choice to JAX.
        port: as in `Launch`, or None if it is not known.
    """

    name: str
    timeout: int = TIMEOUT
    devices: tuple[int, ...] | None = None
    coordinator_port: int | None = None
    port: int | None = None

    port_source = f"the job's id (${_PORT_VARIABLE} replaces it)"

    def __post_init__(self):
        _check_timeout(self.timeout)

    def initialize(self, **options: Any) -> None:
        """Calls `jax.distributed.initialize`."""
        if self.coordinator_port is not None:
            os.environ[_PORT_VARIABLE] = str(self.coordinator_port)
        jax.distributed.initialize(local_device_ids=self.devices, **options)

    @property
    def connect_error(self) -> str:
        """Start of the error if `initialize` fails."""
        return (
            f"{self.name} started this process, but JAX does not connect it to the others (--coordinator_address, "
            f"--process_count and --process_id would do so without {self.name})"
        )

    def timeout_error(self) -> str:
        """Returns why the processes have not met within the timeout."""
        return f"not all processes that {self.name} started have met within {self.timeout} s"


def detect(environment: Mapping[str, str], *, timeout: int = TIMEOUT) -> Cluster | None:
    """Returns the cluster that started this process as one of several; None if it is alone.

    Without the package `kubernetes`, a pod of an indexed job counts as alone, with a warning on stderr.

    JAX's cluster detection then finds coordinator, number and index. Three of its choices are corrected here:

    * It waits for the tasks of a SLURM job in a shell of the job too, and fails where there is no cluster. So it is
      called only where variables tell of several processes.
    * It gives each process of SLURM and Open MPI the device of its index on the host. That is wrong if the process is
      alone on its host, and should use all devices, or if it sees only its own: one, or the number that --gpus-per-task
      says. (All tasks see all GPUs if --gpu-bind=none is given too.)
    * Two steps of a SLURM job would have the same port.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        alone = environment["SLURM_STEP_NUM_NODES"] == environment["SLURM_STEP_NUM_TASKS"]
        # A number, or numbers after types, such as a100:2,h100:1.
        own = sum(map(int, re.findall(r"\b(\d+)(?:,|$)", environment.get("SLURM_GPUS_PER_TASK", ""))))
        sees_own = len(_listed(environment.get("CUDA_VISIBLE_DEVICES", ""))) in {1, own} - {0}
        step = 16 * int(environment["SLURM_JOB_ID"]) + int(environment.get("SLURM_STEP_ID", 0))
        port = int(environment.get(_PORT_VARIABLE, _LAST_PORT - step % _PORTS))
        return Cluster(
            name="SLURM",
            timeout=timeout,
            devices=() if alone or sees_own else None,
            coordinator_port=port,
            port=port if environment["SLURM_PROCID"] == "0" else None,
        )
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        return Cluster(name="Open MPI", timeout=timeout, devices=() if alone else None)
    if importlib.util.find_spec("libtpu") and any(map(os.path.exists, _TPU_DEVICES)):
        # Before Kubernetes, as in JAX: on GKE the hosts of a slice are an indexed job.
        return Cluster(name="the TPU's host", timeout=timeout)
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        if importlib.util.find_spec("kubernetes"):
            return Cluster(name="Kubernetes", timeout=timeout)
        # JAX asks Kubernetes by way of the package.
        print(
            "warning: Kubernetes started this process as one of an indexed job, but it runs alone, because the package "
            "kubernetes is not installed; install it, or give --coordinator_address, --process_count and --process_id",
            file=sys.stderr,
            flush=True,
        )
    return None


def join(launch: Launch | Cluster | None) -> None:
    """Connects this process to the others; does nothing if `launch` is None.

    This must be called before any device is used. If not all processes connect within the launch's timeout, exits with
    one line on stderr, because JAX would abort.

    Raises:
        ValueError: another program listens on the coordinator's port, JAX does not connect the processes, or they have
            different numbers of devices.
    """
    if launch is None:
        return
    if launch.port is not None:
        _check_port(launch.port, launch.port_source)
    # Signals are handled by cli.StopSignals, and by Vote for the other processes.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    watchdog = threading.Timer(launch.timeout, _give_up, [launch])
    watchdog.daemon = True
    watchdog.start()
    try:
        launch.initialize(
            initialization_timeout=2 * launch.timeout,  # the watchdog ends first
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    except Exception as error:  # of any type: Kubernetes and the cloud's metadata have their own
        if _TOO_LATE in str(error):
            raise ValueError(
                "devices were used before the processes were connected; a config file must not use devices, not "
                "even count them"
            ) from error
        raise ValueError(f"{launch.connect_error}: {spelling.one_line(error)}") from error
    finally:
        watchdog.cancel()
    _check_devices()
    # Use only kernels that every process has verified, so that all compile the same program.
    from pallas_kernels.check import verdict

    verdict.agree(jax.devices()[0].device_kind)
    if jax.devices()[0].platform == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = glob.glob(_GPU_DEVICES) if visible is None else _listed(visible)
        mine = (socket.gethostname(), names, jax.local_device_count())
        if advice := _unused([json.loads(text) for text in gather(json.dumps(mine))]):
            say(advice, error=True)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Wraps the whole program: waits for the other processes at the end, unless this one fails.

    If it fails, the others end too, as soon as they miss it in a collective, or `_HEARTBEAT` seconds later. A process
    that fails and has others, or whose threads no longer end (`abandon_threads`), ends without waiting for anything.
    """
    _abandoned.clear()
    try:
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        ends_normally = not (jax.distributed.is_initialized() or _abandoned.is_set())
        if ends_normally or (isinstance(error, SystemExit) and not error.code):
            raise
        if isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in _UNREACHABLE):
            reason = spelling.cut(spelling.one_line(error), _LONGEST_REASON)
            print(
                f"error: another process of the run has ended or cannot be reached: {reason}; see what the others "
                f"said, then start all again",
                file=sys.stderr,
            )
        elif not isinstance(error, SystemExit):
            traceback.print_exc()
        elif not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # as `SystemExit` does
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would make JAX wait for the other processes, and Python for threads.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def abandon_threads() -> None:
    """Makes a process that fails within `ending` end at once, as threads of a failed save would delay it by minutes."""
    _abandoned.set()


def is_first() -> bool:
    """Returns whether this is the process that reports and writes."""
    return jax.process_index() == 0


def say(*lines: str, error: bool = False) -> None:
    """Calls `streams.say` in the first process only."""
    if is_first():
        streams.say(*lines, error=error)


def gather(text: str) -> list[str]:
    """Returns the texts of all processes, by index, on every process; what is not UTF-8 is escaped."""
    if jax.process_count() == 1:
        return [text]
    # Paths in errors may have surrogates. An error here would leave the other processes waiting.
    encoded = np.frombuffer(text.encode("utf-8", "backslashreplace"), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(encoded.size))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: encoded.size] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes)]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Makes all processes raise if one raises an Exception within: its own there, a ValueError quoting it elsewhere.

    The body must not contain a collective, because a process that fails would not reach it.
    """
    try:
        yield
    except Exception as error:
        gather(spelling.one_line(error))
        raise
    for index, line in enumerate(gather("")):
        if line:
            raise ValueError(f"process {index}: {line}")


def check_same(what: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError if the values, which must be serializable as JSON, differ from those of process 0."""
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
                f"process {index} has different {what} from process 0: {changes}; they must be the same"
            )


class Vote:
    """Maximum over processes of a number that each casts per step.

    With several processes, a step gets the maximum of the previous step, which is known by then, so that no step waits.
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
        """Returns the maximum of the previous step; with `now` or a single process, of this one. `now` waits for it."""
        if jax.process_count() == 1:
            return number
        before, self._before = self._before, self._dispatch(number)
        return int(self._before if now else before)

    def _dispatch(self, number: int) -> jax.Array:
        local = np.full(jax.local_device_count(), number, np.int32)
        return self._highest(jax.make_array_from_process_local_data(self._sharding, local))


def _check_timeout(timeout: int) -> None:
    if timeout < 1:
        raise ValueError(f"--coordinator_timeout is {timeout}; it must be at least 1 second")


def _check_port(port: int, source: str) -> None:
    """Raises ValueError if the port is in use, because JAX's coordinator would share it with another run's."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise ValueError(
            f"port {port} of {source} cannot be used on {socket.gethostname()}: "
            f"{error.strerror}; end what listens there or choose another port"
        ) from error


def _check_devices() -> None:
    """Raises ValueError, the same in all processes, if they have different numbers of devices."""
    numbers = collections.Counter(device.process_index for device in jax.devices())
    order = sorted(numbers, key=lambda index: (numbers[index], index))
    if numbers[least := order[0]] != numbers[most := order[-1]]:
        if is_first():
            # JAX aborts processes whose first process has ended: let the others end with this error before.
            time.sleep(_SECONDS_TO_END)
        raise ValueError(
            f"the processes must have the same number of devices; process {least} has {numbers[least]} and process "
            f"{most} has {numbers[most]}"
        )


def _unused(processes: Sequence[tuple[str, Sequence[str], int]]) -> str | None:
    """Returns a line if a host has visible GPUs that no process uses, or None.

    Args:
        processes: host, names of the visible GPUs and number of those in use, for each process.
    """
    visible: dict[str, set[str]] = collections.defaultdict(set)
    used: collections.Counter[str] = collections.Counter()
    for host, names, number in processes:
        visible[host].update(names)
        used[host] += number
    # Tasks that each see only their own GPUs may use the same names for them.
    unused = {host: len(names) - used[host] for host, names in visible.items() if len(names) > used[host]}
    if not unused:
        return None
    host = next(iter(unused))
    return (
        f"unused GPUs: {sum(unused.values())}; on {host}, the processes use {used[host]} of "
        f"{len(visible[host])}; start one process per GPU, or one per host for all of its GPUs"
    )


def _listed(visible: str) -> list[str]:
    return [name for name in visible.split(",") if name]


def _give_up(launch: Launch | Cluster) -> None:
    try:
        reason = launch.timeout_error()
        streams.say(f"error: {reason}; --coordinator_timeout gives them more time", error=True)
    finally:
        os._exit(1)
