"""Checkpoints through Orbax: a step holds the state, the position in the data and the settings.

A step `checkpoints/N` holds the state after N updates. It appears whole or not at all, so that a run killed
at any instant loses the updates since the last save at most. Orbax does not notice a flipped bit, so each
step also carries a fingerprint of its arrays.
"""

import contextlib
import dataclasses
import gc
import logging
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from sympow_jax import config, models
from sympow_jax.array_types import Array, Int
from sympow_jax.training import sharding, step, workdir

__all__ = ["Checkpoints", "require_checkpoint", "restore_model"]

_DAMAGED = "damaged_checkpoints"


class Checkpoints:
    """Saves and restores the state of the run in a workdir; a context manager.

    Saving goes on in the background; leaving the context waits for it and raises what went wrong in it.
    """

    def __init__(self, folder: pathlib.Path, settings: config.Config):
        """Keeps the newest `settings.training.keep_checkpoints` steps in `folder`, a run's workdir."""
        self._workdir = folder.absolute()
        self._settings = dataclasses.asdict(settings)
        self._orbax = _open(self._workdir, keep=settings.training.keep_checkpoints)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._orbax.close()

    def restore(self, abstract: step.TrainState) -> tuple[step.TrainState, Any] | None:
        """The newest good state, placed as `abstract` asks, and the position in the data; None at the start.

        Damaged steps are moved to `damaged_checkpoints`, with a line on stderr.

        Raises:
          ValueError: there are checkpoints and all of them are damaged.
        """

        def load(number: int) -> tuple[step.TrainState, Any]:
            arrays = {"params": abstract.params, "opt_state": abstract.opt_state}
            loaded, metadata = _load_checked(self._orbax, number, arrays)
            at = jax.device_put(jnp.int32(number), abstract.step.sharding)
            return step.TrainState(step=at, **loaded), metadata["data"]

        found, damaged = _newest_good(self._orbax, load)
        for number in damaged:
            self._put_aside(number)
        return found

    def save(self, number: int, state: step.TrainState, position: Any) -> None:
        """Begins to save the state after `number` updates; `position` is that of the data's iterator.

        The arrays of `state` may be donated as soon as this returns.
        """
        arrays = {"params": state.params, "opt_state": state.opt_state}
        metadata = {"config": self._settings, "data": position, "fingerprints": _fingerprints(arrays)}
        self._orbax.save_checkpointables_async(number, arrays, force=True, custom_metadata=metadata)

    def _put_aside(self, number: int) -> None:
        folder = self._workdir / _DAMAGED
        folder.mkdir(exist_ok=True)
        taken = sum(1 for _ in folder.glob(f"{number}*"))
        target = folder / (f"{number}.{taken}" if taken else str(number))
        (self._workdir / workdir.CHECKPOINTS / str(number)).rename(target)
        print(f"moved the damaged checkpoint of step {number} to {target}", file=sys.stderr, flush=True)
        self._orbax.reload()


def restore_model(folder: str | pathlib.Path) -> tuple[config.Config, models.DecoderLM, int]:
    """The settings, the model and the step of the newest good checkpoint of the run in a workdir.

    Raises:
      ValueError: the folder holds no run, or a run without a good checkpoint.
    """
    folder = pathlib.Path(folder).absolute()
    settings = workdir.read_config(folder)
    require_checkpoint(folder)
    abstract = step.abstract_state(settings, sharding.whole_mesh())
    with contextlib.closing(_open(folder, keep=None)) as orbax:

        def load(number: int) -> tuple[config.Config, models.DecoderLM, int]:
            loaded, metadata = _load_checked(orbax, number, {"params": abstract.params})
            saved = workdir.from_dict(config.Config, metadata["config"])
            return saved, step.merge(saved.model, loaded["params"]), number

        found, _ = _newest_good(orbax, load)
    assert found is not None  # there is a checkpoint, and a damaged one raises
    return found


def require_checkpoint(folder: str | pathlib.Path) -> None:
    """Raises ValueError where the run in a workdir has no checkpoint, good or damaged; loads nothing."""
    folder = pathlib.Path(folder).absolute()
    if (folder / workdir.CHECKPOINTS).is_dir():
        with contextlib.closing(_open(folder, keep=None)) as orbax:
            if orbax.checkpoints:
                return
    raise ValueError(f"{folder} has no checkpoint yet")


def _open(folder: pathlib.Path, *, keep: int | None) -> ocp.training.Checkpointer:
    policies = ocp.training.preservation_policies
    return ocp.training.Checkpointer(
        folder / workdir.CHECKPOINTS,
        preservation_policy=policies.PreserveAll() if keep is None else policies.LatestN(keep),
        cleanup_tmp_directories=keep is not None,  # what a killed save left; never from under a running one
    )


def _newest_good[T](orbax: ocp.training.Checkpointer, load: Callable[[int], T]) -> tuple[T | None, list[int]]:
    damaged: list[int] = []
    for checkpoint in reversed(orbax.checkpoints):
        try:
            with _quiet():
                return load(checkpoint.step), damaged
        except Exception as error:  # Orbax raises errors of many kinds for a damaged file
            reason = " ".join(str(error).split())[:100]
            print(
                f"the checkpoint of step {checkpoint.step} in {orbax.directory} is damaged, trying the one "
                f"before it: {reason}",
                file=sys.stderr,
                flush=True,
            )
            damaged.append(checkpoint.step)
    if damaged:
        raise ValueError(f"every checkpoint in {orbax.directory} is damaged; use another --workdir")
    return None, []


def _load_checked(
    orbax: ocp.training.Checkpointer, number: int, abstract: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    metadata = orbax.checkpointables_metadata(number).custom_metadata
    if missing := {"config", "data", "fingerprints"} - set(metadata):
        raise ValueError(f"its metadata lacks {', '.join(sorted(missing))}")
    loaded = orbax.load_checkpointables(number, abstract)
    for name, value in _fingerprints(loaded).items():
        if value != metadata["fingerprints"][name]:
            raise ValueError(f"its {name} are not what was saved")
    return loaded, metadata


def _fingerprints(arrays: dict[str, Any]) -> dict[str, int]:
    return {name: int(value) for name, value in _fingerprint_each(arrays).items()}


@jax.jit
def _fingerprint_each(arrays: dict[str, Any]) -> dict[str, Int[Array, ""]]:
    """A 32-bit sum of each tree's bits, weighted by position: a changed element changes it."""
    sums = {}
    for name, tree in arrays.items():
        total = jnp.uint32(0)
        for leaf in jax.tree.leaves(tree):
            bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).ravel()
            weights = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
            # An odd factor, so that trees whose leaves changed places differ too.
            total = 1_000_003 * total + jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32)
        sums[name] = total
    return sums


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # For a damaged file Orbax prints tracebacks of its own, some only when its tasks are collected.
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
