"""Orbax checkpoints of the training state, the position in the data and the settings.

A step `checkpoints/N` holds the state after N updates and is written atomically. Orbax does not detect a flipped bit,
so each step also has a fingerprint of its arrays and a digest of its metadata, which include N. A step whose files can
be read, but are not what was saved, is damaged: the run resumes from the one before. Any other failure, such as a file
that cannot be opened or too little memory, ends the run and leaves all steps as they are.

Imported weights are a step 0 without optimizer state and without a position in the data; training initializes both.
With several processes, each saves the shards of its devices, and Orbax synchronizes them. Each process loads on its
own, because one that cannot read its shards would leave the others waiting.
"""

import contextlib
import gc
import hashlib
import itertools
import json
import logging
import math
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.array_types import Array, Int
from sympow_jax.config import serialize
from sympow_jax.process import hosts, workdir
from sympow_jax.training.state import TrainState

_DAMAGED = "damaged_checkpoints"
# Arrays that a step may have been saved without.
_OPTIONAL = ("opt_state", "average", "skips")
# Weight of a leaf in the sum of a tree's bits, relative to the next leaf. It is odd, and swapping leaves changes a sum.
_FACTOR = 1_000_003
# "TYPE: MESSAGE" of errors that say nothing about content: of memory, of files, and TensorStore's statuses of either.
_PASSING = re.compile(
    r"(MemoryError|JaxRuntimeError|OSError|PermissionError): |"
    r"\w+: (RESOURCE_EXHAUSTED|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|PERMISSION_DENIED|INTERNAL)\b"
)
_READ_BYTES = 1 << 20


class Checkpoints:
    """Context manager that saves and restores the training state in a workdir.

    Saving continues in the background. Leaving the context waits for it and raises its errors.
    """

    def __init__(self, folder: pathlib.Path, config: config_lib.Config):
        """Opens the checkpoints in the workdir `folder`; the newest `training.keep_checkpoints` are kept.

        Raises:
            ValueError: as `workdir.checkpoint_steps`, or Orbax cannot read the metadata of a checkpoint.
        """
        self._folder = folder.absolute() / workdir.CHECKPOINTS
        for number in workdir.checkpoint_steps(folder):
            _require_files(self._folder / str(number))
        with self._explained("read from"):
            self._orbax = ocp.training.Checkpointer(
                self._folder,
                preservation_policy=ocp.training.preservation_policies.LatestN(
                    config.training.keep_checkpoints
                ),
                cleanup_tmp_directories=True,  # leftovers of a killed save
            )
        self._disk = self._folder.stat().st_dev
        self._saving: ocp.AsyncResponse[bool] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.check(wait=True)
        with self._explained():
            self._orbax.close()

    def restore(self, abstract: TrainState) -> tuple[TrainState, Any] | None:
        """Restores the newest good state, with the shardings of `abstract`, and the position in the data.

        The optimizer state is `()` if none was saved, and other parts that were not saved are empty. A damaged step is
        moved to `damaged_checkpoints`, with a message on stderr.

        Returns:
            The state and the position, which is None at the beginning of the data; or None without checkpoints.

        Raises:
            ValueError: the two newest checkpoints are damaged, or the only one; or one cannot be read.
        """
        found = newest_good(self._folder, _arrays(abstract), shared=True)
        if found is None:
            return None
        with hosts.all_or_none():
            if found.damaged is not None and hosts.is_first():
                aside = self._folder.with_name(_DAMAGED)
                aside.mkdir(exist_ok=True)
                # The same step may have been damaged before.
                suffixes = itertools.chain([""], (f".{count}" for count in itertools.count(1)))
                names = (aside / f"{found.damaged}{suffix}" for suffix in suffixes)
                target = next(name for name in names if not os.path.lexists(name))
                (self._folder / str(found.damaged)).rename(target)
                hosts.say(f"moved the damaged checkpoint of step {found.damaged} to {target}", error=True)
        self._orbax.reload()
        at = jax.make_array_from_callback((), abstract.step.sharding, lambda _: np.int32(found.number))
        return TrainState(step=at, **{"opt_state": (), **found.arrays}), found.position

    def save(self, number: int, state: TrainState, position: Any) -> None:
        """Starts to save the state after `number` updates.

        Waits for the previous save first. The arrays of `state` may be donated when this returns.

        Args:
            number: number of updates.
            state: state after them. An optimizer state of `()` is not saved.
            position: state of this process's data iterator; None at its start. Those of all processes are saved.

        Raises:
            ValueError: this save cannot start, or the previous one failed.
        """
        arrays = _arrays(state)
        if position is not None:
            parts = map(json.loads, hosts.gather(json.dumps(position)))
            position = {name: value for part in parts for name, value in part.items()}
        metadata = {"data": position, "step": number}
        metadata["fingerprints"] = jax.tree.map(int, _fingerprints(arrays))
        metadata["digest"] = _digest(metadata)
        self.check(wait=True)
        with self._explained():
            self._require_folder()
            self._saving = self._orbax.save_checkpointables_async(
                number, arrays, force=True, custom_metadata=metadata
            )

    def check(self, *, wait: bool = False) -> None:
        """Raises ValueError if the last save has failed; with `wait`, waits until it is done."""
        if self._saving is None:
            return
        # Not if it waits: Orbax raises TimeoutError for some failures too.
        with self._explained(), contextlib.nullcontext() if wait else contextlib.suppress(TimeoutError):
            self._saving.result(timeout=None if wait else 0)
            self._saving = None
            self._require_folder()

    def _require_folder(self) -> None:
        """Raises OSError if the folder is gone, or on another disk than at the start.

        If its disk was unmounted, Orbax would make the folder anew where the disk was, and save there.
        """
        if not self._folder.is_dir() or self._folder.stat().st_dev != self._disk:
            raise FileNotFoundError("the folder has vanished")

    @contextlib.contextmanager
    def _explained(self, done: str = "saved in") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds of errors if they cannot write
            # Some of Orbax's threads wait five minutes for others that have failed.
            hosts.abandon_threads()
            raise ValueError(
                f"a checkpoint could not be {done} {self._folder}: {_reason(error)}; earlier ones are kept; "
                f"make room or repair the folder, then the same command resumes the run"
            ) from error


class Step(NamedTuple):
    """A good step that was loaded.

    Attributes:
        number: number of updates.
        arrays: its arrays by name, without those that were not saved and may be missing.
        position: position in the data; None at its beginning.
        damaged: a later step that is damaged; None if there is none.
    """

    number: int
    arrays: dict[str, Any]
    position: Any
    damaged: int | None


def require_checkpoint(folder: str | pathlib.Path) -> None:
    """Raises ValueError if a workdir has no checkpoint, good or damaged; loads nothing."""
    folder = pathlib.Path(folder).absolute()
    if not workdir.checkpoint_steps(folder):
        raise ValueError(f"{folder} has no checkpoint yet")


class _DamagedError(ValueError):
    """Error of a checkpoint whose files can be read, but are not what was saved."""


def newest_good(
    folder: pathlib.Path,
    abstract: Mapping[str, Any],
    *,
    shared: bool,
    rounded: Mapping[str, Any] | None = None,
) -> Step | None:
    """Loads the arrays of `abstract`, with its shardings, from the newest step, or the one before if it is damaged.

    Args:
        folder: folder of the steps.
        abstract: trees of arrays by name; empty ones are left out.
        shared: whether all processes of the run load together and agree on which step is damaged. Otherwise another
            process may train in this folder meanwhile. A step that it deletes while it is loaded is not damaged: the
            steps are listed again, and the newest is loaded.
        rounded: the same trees with other dtypes, of dicts only, to load arrays one after the other and round each.

    Returns:
        The step, or None if there are none.

    Raises:
        ValueError: the two newest checkpoints are damaged, or the only one; or one cannot be read.
    """
    arrays = {name: tree for name, tree in abstract.items() if tree}
    together = hosts.all_or_none if shared else contextlib.nullcontext

    def gather(text: str) -> list[str]:
        return hosts.gather(text) if shared else [text]

    # Process 0 lists the steps for all, because on a network file system they become visible at different times.
    with together():
        listed = workdir.checkpoint_steps(folder.parent)
    listed = json.loads(gather(json.dumps(listed))[0])
    damaged: int | None = None
    while left := [number for number in listed if number != damaged]:
        number, damage = left[-1], ""
        try:
            with _quiet():
                with together():
                    try:
                        if rounded is None:
                            loaded, metadata = _load(folder, number, arrays)
                            fingerprints = jax.tree.map(int, _fingerprints(loaded))
                        else:
                            loaded, metadata, fingerprints = _load_rounded(folder, number, arrays, rounded)
                    except _DamagedError as error:
                        damage = str(error)
                # Every process must go to the step before if one cannot read its shards.
                if reasons := [reason for reason in gather(damage) if reason]:
                    raise _DamagedError(reasons[0])
                for name, value in fingerprints.items():
                    if value != metadata["fingerprints"][name]:
                        raise _DamagedError(f"its {name} are not what was saved")
                return Step(number, loaded, metadata["data"], damaged)
        except Exception as error:  # Orbax raises many kinds of errors
            before, listed = listed, listed if shared else workdir.checkpoint_steps(folder.parent)
            if number not in listed or listed[-1] > before[-1]:
                continue
            if not isinstance(error, _DamagedError):
                raise ValueError(
                    f"the checkpoint of step {number} in {folder} cannot be read, and stays where it is: "
                    f"{_reason(error)}; remove the cause, then the same command resumes the run"
                ) from error
            if damaged is not None:
                raise ValueError(
                    f"the checkpoints of steps {damaged} and {number} in {folder} are damaged: {_reason(error)}; move "
                    f"both elsewhere, then the same command resumes from one before, or use another --workdir"
                ) from error
            hosts.say(
                f"the checkpoint of step {number} in {folder} is damaged, trying the one before it: {_reason(error)}",
                error=True,
            )
            damaged = number
    if damaged is not None:
        raise ValueError(f"the only checkpoint in {folder} is damaged; use another --workdir")
    return None


def _arrays(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state that a checkpoint holds; `step` is the folder's name instead."""
    names = ("params", "opt_state", "statistics", "average", "skips")
    return {name: tree for name in names if (tree := getattr(state, name))}  # Orbax has no empty trees


def _load(
    folder: pathlib.Path, number: int, abstract: dict[str, Any], *, partial: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the arrays of a step, with the shardings of `abstract`, and its metadata, in this process only.

    Those in `_OPTIONAL` are included only if they were saved. With `partial`, there may be others in the step.

    Raises:
        _DamagedError: the files can be read, but are not what was saved as this step.
        ValueError: the step cannot be read for another reason.
        OSError: a file cannot be read.
    """
    path = folder / str(number)
    _require_files(path)
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    try:
        subset = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=partial))
        with ocp.Context(multiprocessing_options=alone, pytree_options=subset):
            metadata = ocp.checkpointables_metadata(path).custom_metadata
            if missing := {"data", "digest", "fingerprints", "step"} - set(metadata):
                raise _DamagedError(f"its metadata lacks {', '.join(sorted(missing))}")
            if metadata["digest"] != _digest(metadata):
                raise _DamagedError("its metadata is not what was saved")
            if metadata["step"] != number:
                raise _DamagedError(f"it was saved as step {metadata['step']}, and renamed or linked")
            saved = metadata["fingerprints"]
            abstract = {name: x for name, x in abstract.items() if name in saved or name not in _OPTIONAL}
            return ocp.load_checkpointables(path, abstract), metadata
    except Exception as error:
        # First whether all files can be read, because Orbax takes metadata that it cannot open for absent.
        for file in (found for found in path.rglob("*") if not found.is_dir()):
            try:
                with file.open("rb") as stream:
                    while stream.read(_READ_BYTES):
                        pass
            except OSError as unreadable:
                # Python names the file only if it cannot be opened.
                raise OSError(f"{file}: {unreadable.strerror}") from unreadable
        # Orbax raises an error of its own, around one of TensorStore's.
        cause: BaseException = error
        while (inner := cause.__cause__ or cause.__context__) and not isinstance(inner, StopIteration):
            cause = inner
        if _PASSING.match(f"{type(cause).__name__}: {cause}"):
            raise ValueError(_reason(cause)) from error
        raise _DamagedError(_reason(cause)) from error


def _load_rounded(
    folder: pathlib.Path, number: int, abstract: dict[str, Any], rounded: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Reads arrays as `_load` does, one after the other, and rounds each; returns their fingerprints before that, too.

    The largest are first, while there is room for them in both dtypes.
    """
    loaded: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    fingerprints: dict[str, int] = {}
    for name, tree in abstract.items():
        if metadata and name in _OPTIONAL and name not in metadata["fingerprints"]:
            continue
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(rounded[name])]
        found, total = {}, 0
        for index, (path, one) in sorted(enumerate(leaves), key=lambda item: -item[1][1].size):
            for key in reversed(path):
                one = {key.key: one}
            read, metadata = _load(folder, number, {name: one}, partial=True)
            (leaf,) = jax.tree.leaves(read)
            total += int(_fingerprints(read)[name]) * _FACTOR ** (len(leaves) - 1 - index)
            found[index] = leaf.astype(dtypes[index]).block_until_ready()
        loaded[name] = jax.tree.unflatten(structure, [found[index] for index in range(len(leaves))])
        fingerprints[name] = total % 2**32
    return loaded, metadata, fingerprints


def _require_files(path: pathlib.Path) -> None:
    """Raises ValueError if a step has a pipe or a device, for which TensorStore would wait."""
    for file in path.rglob("*"):
        if not file.is_dir():
            serialize.require_file(file)


def _digest(metadata: Mapping[str, Any]) -> str:
    others = {name: value for name, value in metadata.items() if name != "digest"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    return spelling.cut(str(error), 240) or type(error).__name__


@jax.jit
def _fingerprints(arrays: dict[str, Any]) -> dict[str, Int[Array, ""]]:
    """Returns a 32-bit sum of each tree's bits, weighted by position, which any changed element changes."""
    sums = {}
    for name, tree in arrays.items():
        total = jnp.uint32(0)
        for leaf in jax.tree.leaves(tree):
            bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
            # Indices not by reshaping the array, which would need collectives if it is sharded.
            index = jnp.zeros(leaf.shape, jnp.uint32)
            for axis in range(leaf.ndim):
                stride = jnp.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
                index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * stride
            total = _FACTOR * total + jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)
        sums[name] = total
    return sums


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # For a damaged file, Orbax prints its own tracebacks, some only when its tasks are garbage-collected.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            try:
                yield
            except BaseException:
                gc.collect()
                raise
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook
