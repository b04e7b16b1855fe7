"""Orbax checkpoints of the training state, the position in the data and the settings.

A step `checkpoints/N` holds the state after N updates. It is written atomically, so a run that is killed at any time
loses at most the updates since the last save. Orbax does not detect a flipped bit, so each step also has a fingerprint
of its arrays and a digest of its metadata. Imported weights are a step 0 without optimizer state and without a position
in the data; training initializes both.

With several processes, each saves the shards of its devices, and Orbax synchronizes them. Each process loads on its
own, and all agree on which steps are damaged, because a process that cannot read its shards would leave the others
waiting.
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import math
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from sympow_jax import config, models
from sympow_jax.array_types import Array, Int
from sympow_jax.training import hosts, sharding, step, workdir

__all__ = ["Checkpoints", "require_checkpoint", "restore_arrays", "restore_exact", "restore_model"]

_DAMAGED = "damaged_checkpoints"
_OPTIMIZER = "opt_state"


class Checkpoints:
    """Context manager that saves and restores the training state in a workdir.

    Saving continues in the background. Leaving the context waits for it and raises its errors.
    """

    def __init__(self, folder: pathlib.Path, settings: config.Config):
        """Opens the checkpoints in the workdir `folder`; the newest `training.keep_checkpoints` are kept."""
        self._folder = folder.absolute() / workdir.CHECKPOINTS
        self._settings = settings
        self._orbax = ocp.training.Checkpointer(
            self._folder,
            preservation_policy=ocp.training.preservation_policies.LatestN(
                settings.training.keep_checkpoints
            ),
            cleanup_tmp_directories=True,  # leftovers of a killed save
        )
        self._saving: ocp.AsyncResponse[bool] | None = None
        self._failure = _Failure()

    def __enter__(self) -> "Checkpoints":
        logging.getLogger("absl").addHandler(self._failure)
        return self

    def __exit__(self, *_) -> None:
        try:
            self.check(wait=True)
        finally:
            self._let_end()
            logging.getLogger("absl").removeHandler(self._failure)
        with self._explained():
            self._orbax.close()

    def restore(self, abstract: step.TrainState) -> tuple[step.TrainState, Any] | None:
        """Restores the newest good state, with the shardings of `abstract`, and the position in the data.

        If no optimizer state was saved, it is initialized. Damaged steps are moved to `damaged_checkpoints`, with a
        message on stderr.

        Returns:
            The state and the position, which is None at the beginning of the data; or None without checkpoints.

        Raises:
            ValueError: there are checkpoints, but all of them are damaged.
        """

        def load(number: int) -> tuple[step.TrainState, Any]:
            arrays = _arrays(abstract)
            with hosts.all_or_none():
                loaded, metadata = _load(self._folder / str(number), arrays)
            _check(loaded, metadata)
            if _OPTIMIZER not in loaded:
                loaded[_OPTIMIZER] = step.init_optimizer(self._settings, abstract, loaded["params"])
            at = jax.make_array_from_callback((), abstract.step.sharding, lambda _: np.int32(number))
            return step.TrainState(step=at, **loaded), metadata["data"]

        # Process 0 lists the steps for all, because on a network file system they become visible at different times.
        numbers = json.loads(hosts.gather(json.dumps(workdir.checkpoint_steps(self._folder.parent)))[0])
        found, damaged = _newest_good(self._folder, numbers, load)
        for number in damaged:
            with hosts.all_or_none():
                if hosts.is_first():
                    _put_aside(self._folder / str(number))
        self._orbax.reload()
        return found

    def save(self, number: int, state: step.TrainState, position: Any) -> None:
        """Starts to save the state after `number` updates.

        Waits for the previous save first. The arrays of `state` may be donated when this returns.

        Args:
            number: number of updates.
            state: state after them. An optimizer state of `()` is not saved.
            position: state of the data iterator; None at its start.

        Raises:
            ValueError: this save cannot start, or the previous one failed.
        """
        arrays = _arrays(state)
        metadata = {
            "config": dataclasses.asdict(self._settings),
            "data": position,
            "fingerprints": _fingerprints(arrays),
        }
        metadata["digest"] = _digest(metadata)
        self.check(wait=True)
        with self._explained():
            self._saving = self._orbax.save_checkpointables_async(
                number, arrays, force=True, custom_metadata=metadata
            )

    def check(self, *, wait: bool = False) -> None:
        """Raises ValueError if the last save has failed.

        With `wait`, waits until it is done. Otherwise, a failure may become known only later.
        """
        with self._explained():
            while wait and self._saving is not None and self._failure.error is None:
                with contextlib.suppress(TimeoutError):
                    self._saving.result(timeout=0.1)
                    self._saving = None
            if self._failure.error is not None:
                raise self._failure.error

    def _let_end(self) -> None:
        """Waits for the threads of a failed save, so that they do not write or log anything later.

        Does nothing with several processes, whose threads may wait for those of processes without the failure.
        """
        if self._saving is not None and jax.process_count() == 1:
            with contextlib.suppress(Exception):
                self._saving.result(timeout=30)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds of errors if they cannot write
            raise ValueError(
                f"a checkpoint could not be saved in {self._folder}: {_reason(error)}; those before it are kept: "
                f"make room or mend the folder, and the same command goes on"
            ) from error


class _Failure(logging.Handler):
    """Log handler that records the first error that Orbax logs while it saves.

    Orbax also raises the error, but later. With several processes, this is much later, because its threads first wait
    for those of processes without the error.
    """

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.error is None and record.exc_info:
            self.error = record.exc_info[1]


def restore_model(folder: str | pathlib.Path) -> tuple[config.Config, models.Model, int]:
    """Returns the settings, the model and the step of the newest good checkpoint in a workdir.

    Each process gets the whole model on its own devices.

    Raises:
        ValueError: the folder holds no run, or a run without a good checkpoint.
    """
    saved, arrays, number = restore_arrays(folder, sharding.whole_mesh(jax.local_devices()))
    return saved, step.merge(saved, **arrays), number


def restore_exact(folder: str | pathlib.Path) -> tuple[config.Config, models.Model, int]:
    """Restores a model as `restore_model` does, but on one device, in float32 and with `implementation=None`.

    At a lower precision, rounding depends on the batch, and so would the tokens sampled from the logits.
    """
    saved, arrays, number = restore_arrays(folder, sharding.whole_mesh(jax.local_devices()[:1]))
    attention = dataclasses.replace(saved.model.attention, implementation=None)
    exact = dataclasses.replace(saved.model, dtype="float32", attention=attention)
    return saved, step.merge(dataclasses.replace(saved, model=exact), **arrays), number


def restore_arrays(
    folder: str | pathlib.Path, mesh: jax.sharding.Mesh
) -> tuple[config.Config, dict[str, step.Params], int]:
    """Restores `params`, and `statistics` if there are any, instead of a model, sharded over a mesh.

    Returns:
        The settings, the arrays and the step of the newest good checkpoint.

    Raises:
        ValueError: as `restore_model`.
    """
    folder = pathlib.Path(folder).absolute()
    settings = workdir.read_config(folder)
    require_checkpoint(folder)
    wanted = _arrays(step.abstract_state(settings, mesh))
    del wanted[_OPTIMIZER]
    checkpoints = folder / workdir.CHECKPOINTS

    def load(number: int) -> tuple[config.Config, dict[str, step.Params], int]:
        loaded, metadata = _load(checkpoints / str(number), wanted)
        _check(loaded, metadata)
        return workdir.from_dict(config.Config, metadata["config"]), loaded, number

    found, _ = _newest_good(checkpoints, workdir.checkpoint_steps(folder), load)
    assert found is not None  # there is a checkpoint, and _newest_good raises if all are damaged
    return found


def require_checkpoint(folder: str | pathlib.Path) -> None:
    """Raises ValueError if a workdir has no checkpoint, good or damaged; loads nothing."""
    if not workdir.checkpoint_steps(pathlib.Path(folder)):
        raise ValueError(f"{pathlib.Path(folder).absolute()} has no checkpoint yet")


def _newest_good[T](
    folder: pathlib.Path, numbers: Sequence[int], load: Callable[[int], T]
) -> tuple[T | None, list[int]]:
    damaged: list[int] = []
    for number in reversed(numbers):
        try:
            with _quiet():
                return load(number), damaged
        except Exception as error:  # Orbax raises many kinds of errors for a damaged file
            hosts.say(
                f"the checkpoint of step {number} in {folder} is damaged, trying the one before it: {_reason(error)}",
                error=True,
            )
            damaged.append(number)
    if damaged:
        raise ValueError(f"every checkpoint in {folder} is damaged; use another --workdir")
    return None, []


def _arrays(state: step.TrainState) -> dict[str, Any]:
    """Returns the arrays of a state that a checkpoint holds; `step` is the folder's name instead."""
    arrays = {"params": state.params, _OPTIMIZER: state.opt_state, "statistics": state.statistics}
    # Omit empty trees, which Orbax does not support. Older checkpoints have no statistics.
    return {name: tree for name, tree in arrays.items() if tree}


def _load(path: pathlib.Path, abstract: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the arrays of a step, with the shardings of `abstract`, and its metadata, in this process only.

    The optimizer state is included only if it was saved.
    """
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    with ocp.Context(multiprocessing_options=alone):
        metadata = ocp.checkpointables_metadata(path).custom_metadata
        if missing := {"config", "data", "fingerprints"} - set(metadata):
            raise ValueError(f"its metadata lacks {', '.join(sorted(missing))}")
        if "digest" in metadata and metadata["digest"] != _digest(metadata):
            raise ValueError("its metadata is not what was saved")
        if _OPTIMIZER not in metadata["fingerprints"]:
            abstract = {name: tree for name, tree in abstract.items() if name != _OPTIMIZER}
        return ocp.load_checkpointables(path, abstract), metadata


def _check(loaded: dict[str, Any], metadata: dict[str, Any]) -> None:
    for name, value in _fingerprints(loaded).items():
        if value != metadata["fingerprints"][name]:
            raise ValueError(f"its {name} are not what was saved")


def _digest(metadata: Mapping[str, Any]) -> str:
    others = {name: value for name, value in metadata.items() if name != "digest"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _put_aside(path: pathlib.Path) -> None:
    folder = path.parent.with_name(_DAMAGED)
    folder.mkdir(exist_ok=True)
    taken = sum(1 for _ in folder.glob(f"{path.name}*"))
    target = folder / (f"{path.name}.{taken}" if taken else path.name)
    path.rename(target)
    hosts.say(f"moved the damaged checkpoint of step {path.name} to {target}", error=True)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    # Keep both ends of a long message: what failed is said first, why is said last, with long paths in between.
    return text if len(text) <= 240 else f"{text[:80]} ... {text[-140:]}"


def _fingerprints(arrays: dict[str, Any]) -> dict[str, int]:
    return {name: int(value) for name, value in _fingerprint_each(arrays).items()}


@jax.jit
def _fingerprint_each(arrays: dict[str, Any]) -> dict[str, Int[Array, ""]]:
    """Returns a 32-bit sum of each tree's bits, weighted by position, which any changed element changes."""
    sums = {}
    for name, tree in arrays.items():
        total = jnp.uint32(0)
        for leaf in jax.tree.leaves(tree):
            bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
            weights = 2 * _flat_indices(leaf.shape) + 1
            # An odd factor, so that swapping leaves changes the sum too.
            total = 1_000_003 * total + jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32)
        sums[name] = total
    return sums


def _flat_indices(shape: tuple[int, ...]) -> Int[Array, "..."]:
    # Not by reshaping the array, which would need collectives if it is sharded.
    return sum(
        (
            jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
            * jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
            for axis in range(len(shape))
        ),
        start=jnp.zeros(shape, jnp.uint32),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # For a damaged file, Orbax prints its own tracebacks, some only when its tasks are garbage-collected.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            try:
                yield
            finally:
                gc.collect()
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook
