"""States that a run continues or starts from, and models of runs for everything except training."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax import config as config_lib
from sympow_jax import models, tasks
from sympow_jax.config import serialize
from sympow_jax.process import hosts, workdir
from sympow_jax.training import checkpoint, sharding
from sympow_jax.training.program import Program
from sympow_jax.training.state import Params, TrainState


def restore_or_begin(program: Program, checkpoints: checkpoint.Checkpoints) -> tuple[TrainState, Any]:
    """Returns the newest good state of a run, or that before the first update, and its position in the data, or None.

    Raises:
        ValueError: as `Checkpoints.restore` and `begin`.
    """
    restored = checkpoints.restore(program.abstract)
    if restored is None:
        return begin(program), None
    state, position = restored
    return _completed(program, state), position


def begin(program: Program) -> TrainState:
    """Returns the state before the first update, with the parameters of `task.initial_run` if it is set.

    Parameters of the same name as in that run, except a head, and running statistics are those of its newest
    checkpoint. The original attention of `models.AttentionMatcher` is a copy of the attention there. Parameters that
    only the new model has are initialized, those that only the old one has are dropped, and a message lists both.

    Raises:
        ValueError: the run does not exist or has no good checkpoint, one run is of an encoder and the other of a
            decoder, its model has other settings, or its parameters have other shapes.
    """
    config = program.config
    if config.task.initial_run is None:
        return program.init_state()
    folder = pathlib.Path(config.task.initial_run)
    with hosts.all_or_none():
        found = read_initial_config(folder, program.task)
        # By each process on its own devices, because one that fails would leave the others waiting in a collective.
        own = config_lib.ShardingConfig(fsdp=jax.local_device_count())
        mesh = sharding.mesh_of(own, jax.local_devices())
        restored, number = restore_arrays(Program(dataclasses.replace(found, sharding=own), mesh), folder)
        arrays = jax.device_get(restored)
    hosts.check_same("the checkpoint of task.initial_run", {"step": number})
    kind = "model" if config.task.is_causal else "encoder"
    hosts.say(f"the {kind} is that of step {number} of {folder}, a run of the task {found.task.name!r}")
    # Without what depends on the parameters that are replaced.
    new = dataclasses.replace(program.init_state(), opt_state=(), average={})
    # By layer, because the period of the attention may be another.
    replaced = _replaced(models.unstack(new.params), models.unstack(arrays["params"]), folder)
    stack = functools.partial(models.stack, period=config.model.attention_period)
    # In a program, so that no device has more than its shards.
    params = jax.jit(stack, out_shardings=program.shardings.params)(replaced)
    statistics = jax.device_put(
        stack(models.unstack(arrays.get("statistics", {}))), program.shardings.statistics
    )
    return _completed(program, TrainState(new.step, params, (), statistics))


def _completed(program: Program, state: TrainState) -> TrainState:
    """Returns a state with new values of what it does not have, but the program has.

    A checkpoint of imported weights has no optimizer state and no average.
    """
    missing = [
        name
        for name in ("opt_state", "average", "skips")
        if not getattr(state, name) and jax.tree.leaves(getattr(program.abstract, name))
    ]

    def init(params: Params, statistics: Params) -> dict[str, Any]:
        new = program.new_state(params, statistics)
        return {name: getattr(new, name) for name in missing}

    shardings = {name: getattr(program.shardings, name) for name in missing}
    new = jax.jit(init, out_shardings=shardings)(state.params, state.statistics) if missing else {}
    return dataclasses.replace(state, **new)


def read_initial_config(folder: pathlib.Path, task: tasks.Task) -> config_lib.Config:
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
    model = found.model
    if task.config.task.replaces_attention:
        model = model.without_pattern
        if model.attention_pattern:
            raise ValueError(
                f"task.initial_run: {folder} has layers of different attention, {model.attention_name}; name a run "
                f"whose layers are equal"
            )
    fixed = (task.settings_of_initial_run(x) for x in (model, task.config.model))
    if different := serialize.differences(*fixed):
        raise ValueError(
            f"task.initial_run: the model of {folder} does not fit: {different}; use the same settings or another run"
        )
    return found


def _replaced(new: Params, found: Params, folder: pathlib.Path) -> Params:
    """Returns the parameters `new`, replaced by those in `found` of the same name, except the head.

    The original attention of `models.AttentionMatcher` is a copy of the attention in `found`. A message lists the names
    that are not in both.

    Raises:
        ValueError: parameters of the same name have other shapes.
    """
    fresh, structure = jax.tree_util.tree_flatten_with_path(new)
    saved = {models.parameter_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    wanted = {models.parameter_name(path): leaf for path, leaf in fresh}
    saved |= {
        name: saved[source]
        for name in wanted
        if name not in saved and (source := models.AttentionMatcher.source(name)) in saved
    }
    taken = {name for name in wanted if name in saved and not name.startswith("head.")}
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
    replaced = [
        jax.device_put(saved[name], leaf.sharding) if name in taken else leaf for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(structure, replaced)


def restore_arrays(
    program: Program, folder: str | pathlib.Path, *, weights_dtype: str = "float32"
) -> tuple[dict[str, Params], int]:
    """Restores the parameters for evaluation, and `statistics` if there are any, from a workdir of the same model.

    The parameters, `params`, are those of `evaluation_params`. Each process restores on its own, so the mesh may have
    devices of this process only.

    If `weights_dtype` is not float32, arrays are loaded one after the other, and matrices are rounded to it, so that
    never all of them are in float32. Parameters that depend on the optimizer state are not rounded.

    Returns:
        The arrays and the step of the newest good checkpoint.

    Raises:
        ValueError: the folder has no good checkpoint, or its newest cannot be read.
    """
    abstract = program.abstract
    arrays = {"params": abstract.params, "statistics": abstract.statistics, "average": abstract.average}
    rounded = None
    if program.config.optimizer.name == "schedule_free":
        arrays["opt_state"] = abstract.opt_state
    elif weights_dtype != "float32":
        params = program.rounded(weights_dtype)
        rounded = arrays | {"params": params, "average": params if abstract.average else {}}
    folder, step = pathlib.Path(folder).absolute(), None
    while step is None:  # training may delete what was there
        checkpoint.require_checkpoint(folder)
        step = checkpoint.newest_good(folder / workdir.CHECKPOINTS, arrays, shared=False, rounded=rounded)
    state = TrainState(jnp.int32(step.number), **{"opt_state": (), **step.arrays})
    statistics = {"statistics": state.statistics} if state.statistics else {}
    return {"params": program.evaluation_params(state), **statistics}, step.number


def restore_model(
    folder: str | pathlib.Path,
    *,
    sizes: config_lib.ShardingConfig | None = None,
    weights_dtype: str = "float32",
) -> tuple[config_lib.Config, models.Model, int]:
    """Returns the config, the model and the step of the newest good checkpoint in a workdir.

    Each process gets the whole model on its own devices.

    Args:
        folder: workdir of a run.
        sizes: mesh shape of this process's devices, over which parameters are sharded. None gives every device a copy.
        weights_dtype: dtype of the matrices (`models.cast_weights`).

    Raises:
        ValueError: the folder holds no run, or a run without a good checkpoint, or its newest cannot be read; or the
            sizes do not fit the devices or the model.
    """
    config = workdir.read_config(pathlib.Path(folder))
    return config, *_restore(folder, config, sizes, jax.local_devices(), weights_dtype)


def restore_exact(
    folder: str | pathlib.Path,
    *,
    sizes: config_lib.ShardingConfig | None = None,
    weights_dtype: str = "float32",
    state_dtype: str = "float32",
) -> tuple[config_lib.Config, models.Model, int]:
    """Restores a model as `restore_model` does, but with products in float32 and `implementation=None`.

    At a lower precision, rounding depends on the batch, and so would the tokens sampled from the logits. `state_dtype`
    is `model.state_dtype` of the model; without `sizes`, it is on one device.
    """
    config = workdir.read_config(pathlib.Path(folder))
    attention = dataclasses.replace(config.model.attention, implementation=None)
    exact = dataclasses.replace(config.model, dtype="float32", state_dtype=state_dtype, attention=attention)
    devices = jax.local_devices()[: None if sizes else 1]
    return config, *_restore(folder, dataclasses.replace(config, model=exact), sizes, devices, weights_dtype)


def _restore(
    folder: str | pathlib.Path,
    config: config_lib.Config,
    sizes: config_lib.ShardingConfig | None,
    devices: Sequence[jax.Device],
    weights_dtype: str,
) -> tuple[models.Model, int]:
    config = dataclasses.replace(config, sharding=sizes or config_lib.ShardingConfig())
    program = Program(config, sharding.mesh_of(config.sharding, devices))
    arrays, number = restore_arrays(program, folder, weights_dtype=weights_dtype)
    by_layer = {name: models.unstack(tree, donate=True) for name, tree in arrays.items()}
    return models.cast_weights(program.merge(**by_layer), weights_dtype), number
