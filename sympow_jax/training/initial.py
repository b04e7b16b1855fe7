"""Config and parameters of another run, from which a run starts (`task.initial_run`)."""

import pathlib

import jax
import jax.numpy as jnp

from sympow_jax import config as config_lib
from sympow_jax import models, tasks
from sympow_jax.config import serialize
from sympow_jax.process import hosts, workdir
from sympow_jax.training import checkpoint
from sympow_jax.training.state import Params

__all__ = ["read_config", "replace"]

_HEAD = "head"


def read_config(folder: pathlib.Path, task: tasks.Task) -> config_lib.Config:
    """Returns the config of the run in `folder`, whose parameters a run of `task` starts from.

    Raises:
        ValueError: the run does not exist or has no checkpoint, one run is of an encoder and the other of a decoder, or
            its model has other settings.
    """
    try:
        found = workdir.read_config(folder)
        checkpoint.require_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"task.initial_run: {error}") from error
    if found.task.is_causal != task.config.task.is_causal:
        kind, other = ("causal", "an encoder") if found.task.is_causal else ("not causal", "a decoder")
        raise ValueError(
            f"task.initial_run: {folder} is a run of the task {found.task.name!r}, whose attention is {kind}; name "
            f"a run of {other}"
        )
    if task.config.task.replaces_attention and len(set(found.model.attentions)) > 1:
        raise ValueError(
            f"task.initial_run: {folder} has layers of different attention, {found.model.attention_name}; name a run "
            f"whose layers are equal"
        )
    fixed = (task.settings_of_initial_run(model) for model in (found.model, task.config.model))
    if different := serialize.differences(*fixed):
        raise ValueError(
            f"task.initial_run: the model of {folder} does not fit: {different}; use the same settings or another run"
        )
    return found


def replace(new: Params, found: Params, folder: pathlib.Path) -> Params:
    """Returns the parameters `new`, replaced by those in `found` of the same name, except the head.

    The original attention of `models.AttentionMatcher` is a copy of the attention in `found`. A message lists the names
    that are not in both.

    Raises:
        ValueError: parameters of the same name have other shapes.
    """
    fresh, structure = jax.tree_util.tree_flatten_with_path(new)
    saved = {models.parameter_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    wanted = {models.parameter_name(path): leaf for path, leaf in fresh}
    originals = {
        name: saved[source]
        for name in wanted
        if name not in saved and (source := models.AttentionMatcher.source(name)) in saved
    }
    # Copies, because the state is donated, and the new attention begins with the same arrays.
    saved |= jax.tree.map(jnp.copy, originals)
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
        ("dropped", {name for name in saved if name not in wanted}),
    ):
        if names:
            hosts.say(f"{what}: {', '.join(models.names_of_any_layer(names))}")
    return jax.tree.unflatten(structure, [(saved if name in taken else wanted)[name] for name in wanted])
