"""Startup, agreement and shutdown of a run's processes, on one host or several.

Every process runs the same program with the same settings and reads its own rows of a batch. Only the first reports and
writes files, except for checkpoints. An error or a signal in one process reaches the others through the collectives
here, which all processes call in the same order.
"""

import collections
import contextlib
import dataclasses
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from sympow_jax import spelling
from sympow_jax.process import streams

TIMEOUT = 60
"""Seconds for all processes of a run to connect."""

# Seconds without a heartbeat after which a process counts as dead, and the others end.
_HEARTBEAT = 60
# Seconds that processes with the same error have to end before the first one does, at whose end JAX aborts the others.
_SECONDS_TO_END = 3.0
# Devices of a host that show that it has TPUs.
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
# Words in JAX's errors when another process cannot be reached.
_UNREACHABLE = ("Gloo", "remote process exited", "CoordinationService")
# Set once `abandon_threads` is called.
_abandoned = threading.Event()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Place of one process among those of a run.

    Attributes:
        coordinator: HOST:PORT where process 0 listens. None leaves it, `count` and `index` to JAX's cluster detection.
        count: number of processes.
        index: index of this process.
        devices: local devices that this process uses; None leaves the choice to JAX, and () takes all.
        timeout: seconds for all processes to connect.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    devices: tuple[int, ...] | None = None
    timeout: int = TIMEOUT

    def __post_init__(self):
        host, _, port = (self.coordinator or "localhost:1").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"--coordinator_address is {self.coordinator!r}; it must be HOST:PORT, where process 0 can be reached"
            )


def detect(environment: Mapping[str, str], *, timeout: int = TIMEOUT) -> Launch | None:
    """Returns the launch of a process that a cluster started as one of several; None if it is alone.

    JAX's cluster detection then finds coordinator, number and index. In a shell of a SLURM job it would wait for tasks
    that nobody starts. It gives each process of SLURM and Open MPI the device of its index on the host. A process that
    is alone on its host, or sees only its own devices, takes all instead.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        takes_all = (
            environment["SLURM_STEP_NUM_NODES"] == environment["SLURM_STEP_NUM_TASKS"]
            or "SLURM_GPUS_PER_TASK" in environment
            or environment.get("CUDA_VISIBLE_DEVICES", "").isdigit()
        )
        return Launch(devices=() if takes_all else None, timeout=timeout)
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        takes_all = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        return Launch(devices=() if takes_all else None, timeout=timeout)
    is_tpu = importlib.util.find_spec("libtpu") and any(map(os.path.exists, _TPU_DEVICES))
    is_pod = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    if is_tpu or (is_pod and importlib.util.find_spec("kubernetes")):
        return Launch(timeout=timeout)
    return None


def join(launch: Launch | None) -> None:
    """Connects this process to the others, before any device is used; does nothing if `launch` is None.

    If not all processes connect within the launch's timeout, exits with one line on stderr, because JAX would abort.

    Raises:
        ValueError: JAX does not connect the processes, or they have different numbers of devices.
        OSError: another program listens on the coordinator's port.
    """
    if launch is None:
        return
    if launch.coordinator is not None and launch.index == 0:
        # JAX's coordinator would share the port with that of another run.
        socket.create_server(("", int(launch.coordinator.rpartition(":")[2]))).close()
    # Signals are handled by signals.StopSignals, and by Vote for the other processes.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")

    def give_up() -> None:
        where = f" at {launch.coordinator}, where process 0 must run," if launch.coordinator else ""
        streams.say(
            f"error: not all processes of the run have met{where} within {launch.timeout} s; start the others with the "
            f"same flags, or give them more time by --coordinator_timeout",
            error=True,
        )
        os._exit(1)

    watchdog = threading.Timer(launch.timeout, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.count,
            launch.index,
            local_device_ids=launch.devices,
            cluster_detection_method="deactivate" if launch.coordinator else None,
            initialization_timeout=2 * launch.timeout,  # the watchdog ends first
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    except Exception as error:  # of any type: Kubernetes and the cloud's metadata have their own
        raise ValueError(
            f"JAX does not connect the processes: {spelling.one_line(error)}; without a cluster, "
            f"--coordinator_address, --process_count and --process_id connect them"
        ) from error
    finally:
        watchdog.cancel()
    numbers = collections.Counter(x.process_index for x in jax.devices())
    least, most = min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)
    if numbers[least] != numbers[most]:
        if is_first():
            time.sleep(_SECONDS_TO_END)
        raise ValueError(
            f"the processes must have the same number of devices; process {least} has {numbers[least]} and process "
            f"{most} has {numbers[most]}"
        )


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Wraps the whole program: waits for the other processes at the end, unless this one fails.

    If it fails, the others end as soon as they miss it in a collective, or `_HEARTBEAT` seconds later. A process that
    fails and has others, or whose threads no longer end (`abandon_threads`), does not wait for anything.
    """
    _abandoned.clear()
    try:
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if not code or not (jax.distributed.is_initialized() or _abandoned.is_set()):
            raise
        if isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in _UNREACHABLE):
            streams.say(
                f"error: another process of the run has ended or cannot be reached: "
                f"{spelling.cut(spelling.one_line(error), 300)}; see what the others said, then start all again",
                error=True,
            )
        elif not isinstance(error, SystemExit):
            traceback.print_exc()
        elif not isinstance(code, int):
            print(code, file=sys.stderr)  # as `SystemExit` does
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would make JAX wait for the other processes, and Python for threads.
        os._exit(code if isinstance(code, int) else 1)


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
        self._sharding, replicated = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("devices",), ()))
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
