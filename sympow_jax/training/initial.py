"""The parameters that a run begins with: those of another run, or new ones."""

import dataclasses
import pathlib
from typing import Any

import jax

from sympow_jax import config
from sympow_jax.training import checkpoint, hosts, step, workdir

__all__ = ["begin"]

_HEAD = "head"
# What may differ between the models of the two runs: it changes no parameter and nothing that they compute.
_FREE = (
    "dtype",
    "remat",
    "attention.form",
    "attention.implementation",
    "attention.chunk_size",
    "attention.window",
)


def begin(settings: config.Config, mesh: jax.sharding.Mesh) -> step.TrainState:
    """The state before the first update, its encoder that of the run `settings.task.initial_run` if there is one.

    Embedding, blocks and norms with their running means come from that run's newest checkpoint; the head and the
    optimizer's state are new.

    Raises:
      ValueError: there is no such run or it has no good checkpoint, it is a decoder's, or its model has other settings.
    """
    if settings.task.initial_run is None:
        return step.init_state(settings, mesh)
    folder = pathlib.Path(settings.task.initial_run)
    with hosts.all_or_none():
        _check(settings, folder)
        found, arrays, number = checkpoint.restore_arrays(folder, mesh)
    hosts.check_same("the checkpoint of task.initial_run", {"step": number})
    hosts.say(f"the encoder is that of step {number} of {folder}, a run of the task {found.task.name!r}")
    state = step.init_state(settings, mesh)
    params = {name: state.params[name] if name == _HEAD else arrays["params"][name] for name in state.params}
    return dataclasses.replace(state, params=params, statistics=arrays.get("statistics", {}))


def _check(settings: config.Config, folder: pathlib.Path) -> None:
    try:
        found = workdir.read_config(folder)
        checkpoint.require_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"task.initial_run: {error}") from error
    if found.task.name == "next_token":
        raise ValueError(
            f"task.initial_run: {folder} is a run of the task 'next_token', whose attention is causal; name one of "
            f"'masked_token'"
        )
    if different := workdir.differences(_fixed(found.model), _fixed(settings.model)):
        raise ValueError(
            f"task.initial_run: the model of {folder} does not fit: {different}; use the same settings or another run"
        )


def _fixed(model: config.ModelConfig) -> dict[str, Any]:
    flat = workdir.flatten(dataclasses.asdict(model))
    return {f"model.{name}": value for name, value in flat.items() if name not in _FREE}
