"""Initial parameters of a run, new or from another run."""

import dataclasses
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import jax

from sympow_jax import config, models
from sympow_jax.training import checkpoint, hosts, step, workdir

__all__ = ["begin"]

_HEAD, _DECODER = "head", "next_token"
# Settings that may differ between the models of the two runs, because they do not change parameters or the function.
_FREE = (
    "dtype",
    "remat",
    "attention.form",
    "attention.implementation",
    "attention.chunk_size",
    "attention.exact_window",
)


def begin(settings: config.Config, mesh: jax.sharding.Mesh) -> step.TrainState:
    """Returns the state before the first update, with the parameters of `task.initial_run` if it is set.

    An encoder's embedding, blocks and norms, with their running statistics, are those of that run's newest checkpoint.
    The head and the optimizer state are new. The attention of a decoder may have other settings than in that run.
    Parameters that only the new model has are initialized, parameters that only the old one has are dropped, and a
    message lists both.

    Raises:
        ValueError: the run does not exist or has no good checkpoint, one run is of an encoder and the other of a
            decoder, its model has other settings, or its parameters have other shapes.
    """
    if settings.task.initial_run is None:
        return step.init_state(settings, mesh)
    folder = pathlib.Path(settings.task.initial_run)
    with hosts.all_or_none():
        _check(settings, folder)
        found, arrays, number = checkpoint.restore_arrays(folder, mesh)
    hosts.check_same("the checkpoint of task.initial_run", {"step": number})
    kind = "model" if found.task.name == _DECODER else "encoder"
    hosts.say(f"the {kind} is that of step {number} of {folder}, a run of the task {found.task.name!r}")
    state = step.init_state(settings, mesh)
    params = _taken(state.params, arrays["params"], folder)
    return dataclasses.replace(state, params=params, statistics=arrays.get("statistics", {}))


def _taken(new: step.Params, found: step.Params, folder: pathlib.Path) -> step.Params:
    """Returns the parameters `new`, replaced by those in `found` of the same name, except the head."""
    fresh, structure = jax.tree_util.tree_flatten_with_path(new)
    saved = {models.parameter_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    wanted = {models.parameter_name(path): leaf for path, leaf in fresh}
    taken = {name for name in wanted if name in saved and name.partition(".")[0] != _HEAD}
    if different := [
        f"{name} was {list(saved[name].shape)} and is {list(wanted[name].shape)}"
        for name in wanted
        if name in taken and saved[name].shape != wanted[name].shape
    ]:
        raise ValueError(
            f"task.initial_run: the parameters of {folder} do not fit: {', '.join(different)}; use the settings they "
            f"were made with"
        )
    for what, names in (
        ("new", wanted.keys() - taken),
        ("left behind", {name for name in saved if name not in wanted}),
    ):
        if names:
            hosts.say(f"{what}: {', '.join(_of_any_layer(names))}")
    return jax.tree.unflatten(structure, [(saved if name in taken else wanted)[name] for name in wanted])


def _of_any_layer(names: Iterable[str]) -> list[str]:
    return sorted({re.sub(r"^blocks\.\d+\.", "blocks.*.", name) for name in names})


def _check(settings: config.Config, folder: pathlib.Path) -> None:
    try:
        found = workdir.read_config(folder)
        checkpoint.require_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"task.initial_run: {error}") from error
    if (found.task.name == _DECODER) != (settings.task.name == _DECODER):
        kind, other = ("causal", "masked_token") if found.task.name == _DECODER else ("not causal", _DECODER)
        raise ValueError(
            f"task.initial_run: {folder} is a run of the task {found.task.name!r}, whose attention is {kind}; name "
            f"one of {other!r}"
        )
    if different := workdir.differences(*(_fixed(x.model, x.task.name) for x in (found, settings))):
        raise ValueError(
            f"task.initial_run: the model of {folder} does not fit: {different}; use the same settings or another run"
        )


def _fixed(model: config.ModelConfig, task: str) -> dict[str, Any]:
    flat = workdir.flatten(dataclasses.asdict(model))
    free = ("attention.",) if task == _DECODER else ()
    return {
        f"model.{name}": value
        for name, value in flat.items()
        if name not in _FREE and not name.startswith(free)
    }
