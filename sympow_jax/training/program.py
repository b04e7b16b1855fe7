"""Program of a run: its model, optimizer, state and update, each made once for a config and a mesh."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax import models, tasks
from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.layers import partitioning
from sympow_jax.ops._shared.promotion import by_default_rules
from sympow_jax.process import hosts, workdir
from sympow_jax.training import checkpoint, initial, optimizer, sharding, stacking
from sympow_jax.training.state import Params, TrainState

__all__ = ["Program", "Update", "restore_exact", "restore_model"]

# Models of at least this many layers are scanned by default. Otherwise each layer takes about 1 s of CPU to compile.
_SCANNED_LAYERS = 16

# Parts of a state that a checkpoint may be without.
_OPTIONAL = ("opt_state", "average", "skips")

Update = Callable[[TrainState, tasks.Batch], tuple[TrainState, dict[str, Float[Array, ""]]]]
"""Maps (state, batch) to (updated state, metrics)."""


class Program:
    """Model graph, optimizer, state and update of a run on a mesh.

    Parameters and optimizer state are by layer (`blocks`) or, if an update scans the layers, stacked
    (`stacked_blocks`; see `stacking`). Models and checkpoints always have them by layer.

    Attributes:
        config: config of the run.
        task: its task.
        mesh: mesh that state and batches are sharded over.
        params: shapes, dtypes and shardings of the parameters, by layer.
        statistics: those of the running statistics of batch normalization; empty without it.
        kernels: attention kernel of each layer.
        scans: whether an update scans the layers, so that the state has them stacked.
        optimizer: optax optimizer of an update, for parameters and gradients as in the state.

    Examples:
        >>> from sympow_jax import config, training
        >>> from sympow_jax.training import sharding
        >>> model = config.ModelConfig(vocab_size=256, layers=1, width=32, heads=2)
        >>> data = config.DataConfig(context_length=16, batch_tokens=64)
        >>> program = training.Program(config.Config(model=model, data=data), sharding.whole_mesh())
        >>> int(program.init_state().step)
        0
    """

    def __init__(self, config: config_lib.Config, mesh: jax.sharding.Mesh):
        self.config, self.mesh = config, mesh
        self.task = tasks.make(config)
        model = nnx.eval_shape(lambda: self._make(0, stacked=False))
        self._graph, params, statistics = _split(model)
        scans = config.training.scan_layers
        self.scans = config.model.layers >= _SCANNED_LAYERS if scans is None else scans
        specs = models.parameter_specs(model)

        def shard(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return self._placed(leaf, specs[tuple(key.key for key in path)])

        self.params: Params = jax.tree_util.tree_map_with_path(shard, params)
        self.statistics: Params = jax.tree.map(self._placed, statistics)
        self.kernels = tuple(block.attention.kernel for block in model.blocks)
        options = optimizer.parameter_options(config.optimizer, self.params)
        trained = jax.tree_util.tree_map_with_path(self._trains, self.params)
        if self.scans:
            rates = self._stack(options.learning_rate, join=np.array)
            kinds = options.weight_decay, options.orthogonalized, trained
            decays, matrices, trained = self._stack(kinds, join=lambda leaves: leaves[0])
            options = optimizer.ParameterOptions(rates, decays, matrices)
        self.optimizer = optimizer.make_optimizer(config.optimizer, config.training.steps, options, trained)

    def _trains(self, path: tuple[Any, ...], _: Any) -> bool:
        return self.task.trains(models.parameter_name(path))

    def _placed(
        self, leaf: Any, spec: jax.sharding.PartitionSpec = partitioning.REPLICATED
    ) -> jax.ShapeDtypeStruct:
        spec = partitioning.fitted(spec, leaf.shape, self.mesh.shape)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(self.mesh, spec)
        )

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state.

        Arrays of the optimizer state that have the shape of their parameter are sharded like it, and others replicated.
        """
        params, statistics = self.params, self.statistics
        if self.scans:
            params, statistics = self._stack((params, statistics), join=self._stacked)
        by_path = dict(jax.tree_util.tree_leaves_with_path(params))

        def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            param = by_path.get(_param_path(path))
            # Adafactor's means of rows and columns are replicated: they are a thousandth of a matrix.
            return self._placed(leaf) if param is None or param.shape != leaf.shape else param

        opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(self.optimizer.init, params))
        step: Any = self._placed(jax.ShapeDtypeStruct((), jnp.int32))
        return TrainState(
            step=step,
            params=params,
            opt_state=opt_state,
            statistics=statistics,
            average=params if self.config.optimizer.ema_decay is not None else {},
            skips=jax.tree.map(self._placed, jax.eval_shape(_no_skips)),
        )

    @property
    def _stack(self) -> Callable[..., Any]:
        return functools.partial(stacking.stack, period=self.config.model.attention_period)

    def _stacked(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        shape, sharding = (len(leaves), *leaves[0].shape), leaves[0].sharding
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return jax.ShapeDtypeStruct(
            shape, leaves[0].dtype, sharding=jax.sharding.NamedSharding(self.mesh, spec)
        )

    @functools.cached_property
    def abstract_by_layer(self) -> TrainState:
        """Shapes, dtypes and shardings of the state `by_layer`, which is what a checkpoint holds."""
        if not self.scans:
            return self.abstract

        def take(leaf: jax.ShapeDtypeStruct, _: int) -> jax.ShapeDtypeStruct:
            return self._placed(
                jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
                jax.sharding.PartitionSpec(*leaf.sharding.spec[1:]),
            )

        return stacking.unstack(self.abstract, take)

    def by_layer(self, state: TrainState) -> TrainState:
        """Returns a state with the parameters and optimizer state of each layer on their own.

        They are a copy if layers are scanned. An optimizer state of `()` stays, and so does an empty average.
        """
        return _converted(stacking.unstack, state, self.abstract_by_layer) if self.scans else state

    def from_layers(self, state: TrainState) -> TrainState:
        """Returns the inverse of `by_layer`; an optimizer state of `()` and an empty average stay."""
        return _converted(self._stack, state, self.abstract) if self.scans else state

    def model(self, state: TrainState) -> models.Model:
        """Returns the model of a state with its `evaluation_params`, in evaluation mode."""
        # Without the optimizer state, which is larger than the parameters.
        state = TrainState(state.step, self.evaluation_params(state), (), state.statistics)
        state = self.by_layer(state)
        return self.merge(state.params, state.statistics)

    def evaluation_params(self, state: TrainState) -> Params:
        """Returns the parameters of a state for everything except training, in the form of the state.

        They are the moving average with `optimizer.ema_decay`, the average x of `schedule_free`, and otherwise those
        that are trained. A state without an average or optimizer state, as of imported weights, has no others.
        """
        if state.average:
            return state.average
        if self.config.optimizer.name == "schedule_free" and state.opt_state != ():
            return jax.jit(optimizer.schedule_free_average)(state.opt_state, state.params)
        return state.params

    @functools.cached_property
    def _shardings(self) -> TrainState:
        return _shardings_of(self.abstract)

    def merge(self, params: Params, statistics: Params | None = None) -> models.Model:
        """Returns the model with these parameters and running statistics by layer, in evaluation mode."""
        return nnx.merge(self._graph, params, statistics or {})

    def _merge_trained(self, params: Params, statistics: Params) -> models.Model:
        """Returns the model with parameters and running statistics as they are in the state."""
        return nnx.merge(self._trained_graph, params, statistics)

    @functools.cached_property
    def _trained_graph(self) -> nnx.GraphDef:
        if not self.scans:
            return self._graph
        # Without the mesh that an update is traced in: its axes are not the logical ones that parameters name.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return _split(nnx.eval_shape(lambda: self._make(0, stacked=True)))[0]

    def _make(self, seed: int, *, stacked: bool) -> models.Model:
        return models.make(self.config.model, self.config.task, rngs=seed, stacked=stacked)

    def init_state(self) -> TrainState:
        """Returns the state of a new model before the first update, a function of the config only."""

        def init() -> TrainState:
            # Stacked, because layers that are initialized by a loop compile in the time of one.
            _, *variables = _split(self._make(self.config.training.seed, stacked=True))
            params, statistics = variables if self.scans else stacking.unstack(variables)
            return self._new_state(params, statistics)

        with _random_kernels(), jax.threefry_partitionable(True):
            return jax.jit(init, out_shardings=self._shardings)()

    def _new_state(self, params: Params, statistics: Params) -> TrainState:
        """Returns the state before the first update of these parameters, in the form of the state."""
        # A copy, because the update donates both.
        average = jax.tree.map(jnp.copy, params) if self.config.optimizer.ema_decay is not None else {}
        opt_state = self.optimizer.init(params)
        return TrainState(jnp.int32(0), params, opt_state, statistics, average, _no_skips())

    def begin(self) -> TrainState:
        """Returns the state before the first update, with the parameters of `task.initial_run` if it is set.

        An encoder's embedding, blocks and norms, with their running statistics, are those of that run's newest
        checkpoint. The head and the optimizer state are new. The attention of a decoder may have other settings than in
        that run. Parameters that only the new model has are initialized, parameters that only the old one has are
        dropped, and a message lists both.

        Raises:
            ValueError: the run does not exist or has no good checkpoint, one run is of an encoder and the other of a
                decoder, its model has other settings, or its parameters have other shapes.
        """
        if self.config.task.initial_run is None:
            return self.init_state()
        folder = pathlib.Path(self.config.task.initial_run)
        with hosts.all_or_none():
            first = Program(initial.read_config(folder, self.task), self.mesh)
            arrays, number = first.restore_arrays(folder)
        hosts.check_same("the checkpoint of task.initial_run", {"step": number})
        kind = "model" if self.config.task.is_causal else "encoder"
        hosts.say(
            f"the {kind} is that of step {number} of {folder}, a run of the task {first.config.task.name!r}"
        )
        # Without what depends on the parameters that are replaced.
        state = dataclasses.replace(self.init_state(), opt_state=(), average={}, skips={})
        new = self.by_layer(state)
        params = initial.replace(new.params, arrays["params"], folder)
        new = dataclasses.replace(new, params=params, statistics=arrays.get("statistics", {}))
        return self._completed(self.from_layers(new))

    def restore_or_begin(self, checkpoints: checkpoint.Checkpoints) -> tuple[TrainState, Any]:
        """Returns the newest good state of a run, or the state before the first update if there is no checkpoint.

        Returns:
            The state, and its position in the data, which is None at the beginning of the data.

        Raises:
            ValueError: as `Checkpoints.restore` and `begin`.
        """
        restored = checkpoints.restore(self.abstract_by_layer)
        if restored is None:
            return self.begin(), None
        state, position = self.from_layers(restored[0]), restored[1]
        return self._completed(state), position

    def _completed(self, state: TrainState) -> TrainState:
        """Returns a state with new values of what it does not have, but the program has.

        A checkpoint of imported weights has no optimizer state and no average, and one from before updates could be
        skipped has no numbers of these.
        """
        missing = [
            name
            for name in _OPTIONAL
            if not getattr(state, name) and jax.tree.leaves(getattr(self.abstract, name))
        ]
        if not missing:
            return state

        def init(params: Params, statistics: Params) -> dict[str, Any]:
            new = self._new_state(params, statistics)
            return {name: getattr(new, name) for name in missing}

        shardings = {name: getattr(self._shardings, name) for name in missing}
        return dataclasses.replace(
            state, **jax.jit(init, out_shardings=shardings)(state.params, state.statistics)
        )

    def restore_arrays(self, folder: str | pathlib.Path) -> tuple[dict[str, Params], int]:
        """Restores the parameters for evaluation, and `statistics` if there are any, from a workdir of the same model.

        The parameters, `params`, are those of `evaluation_params`. Each process restores on its own, so the mesh may
        have devices of this process only.

        Returns:
            The arrays and the step of the newest good checkpoint.

        Raises:
            ValueError: the folder has no good checkpoint, or its newest cannot be read.
        """
        abstract = self.abstract_by_layer
        arrays: dict[str, Any] = {"params": self.params, "statistics": self.statistics}
        arrays["average"] = abstract.average
        if self.config.optimizer.name == "schedule_free":
            arrays["opt_state"] = abstract.opt_state
        found, number = checkpoint.restore_arrays(folder, arrays)
        step = jnp.int32(number)
        state = TrainState(
            step, found.pop("params"), found.pop("opt_state", ()), average=found.pop("average", {})
        )
        return {"params": self.evaluation_params(state), **found}, number

    def trace(self, row: Mapping[str, np.ndarray]) -> jax.stages.Traced:
        """Traces the update for batches of such rows, which raises the model's errors before anything is compiled.

        Raises:
            ValueError: sizes do not fit each other or the mesh.
            NotImplementedError: a named implementation does not support the config on these devices.
        """
        rows = self.config.data.batch_size
        batch = {
            name: jax.ShapeDtypeStruct(
                (rows, *values.shape),
                values.dtype,
                sharding=sharding.batch_sharding(self.mesh, values.ndim + 1),
            )
            for name, values in row.items()
        }
        return self.update.trace(self.abstract, batch)

    @functools.cached_property
    def update(self) -> Any:
        """Jitted optimizer update on one batch, an `Update`, which donates the state.

        The loss is the mean over the targets or labels of the whole batch that count (`Task.sums`), whatever the
        number of micro-batches. Only batch normalization uses the statistics of each micro-batch, one after another.
        The metrics are:

        * `loss`, without the terms below, and further metrics of the task, such as `accuracy`
        * terms that are added to the loss, such as `z_loss`
        * `grad_norm`, before clipping
        * `parameter_norm`, after the update, which is finite only if every parameter is
        * `update_norm`, the norm of the change of the parameters
        * `learning_rate`
        * `skipped_updates` and `skipped_in_a_row`, if updates may be skipped
        """
        settings = self.config
        rate = optimizer.learning_rate(settings.optimizer, settings.training.steps)
        ema_decay = settings.optimizer.ema_decay

        @by_default_rules
        def update(state: TrainState, batch: tasks.Batch) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
            # Kernels shard themselves over the mesh in scope, because the partitioner cannot.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                sums, grads, statistics = self._accumulate(state, batch)
            count = tasks.count(batch)
            grads = jax.tree.map(lambda grad: grad / count, grads)
            grad_norm = optax.tree.norm(grads)
            changes, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)
            step, average = state.step + 1, state.average
            # Neither the schedule nor the average counts what was skipped, even by a run that no longer skips.
            done = state.step - state.skips["total"]
            if ema_decay is not None:
                average = _averaged(average, params, ema_decay, done + 1)
            is_good = jnp.bool(True)
            if settings.training.skip_nonfinite:
                is_good = jnp.isfinite(sums.loss) & jnp.isfinite(grad_norm)
            skips = {
                "total": state.skips["total"] + ~is_good,
                "in_a_row": jnp.where(is_good, 0, state.skips["in_a_row"] + 1),
            }
            if settings.training.skip_nonfinite:
                old = state.params, state.opt_state, state.statistics, state.average
                new = params, opt_state, statistics, average
                params, opt_state, statistics, average = _selected(is_good, new, old)
                changes = _selected(is_good, changes, jax.tree.map(jnp.zeros_like, changes))
            metrics = {
                **sums.means(count),
                **{name: term / count for name, term in sums.terms.items()},
                "grad_norm": grad_norm,
                "parameter_norm": optax.tree.norm(params),
                "update_norm": optax.tree.norm(changes),
                "learning_rate": jnp.asarray(rate(done), jnp.float32),
            }
            if settings.training.skip_nonfinite:
                metrics |= {"skipped_updates": skips["total"], "skipped_in_a_row": skips["in_a_row"]}
            return TrainState(step, params, opt_state, statistics, average, skips), metrics

        shardings = self._shardings, sharding.replicated(self.mesh)
        return jax.jit(update, donate_argnums=0, out_shardings=shardings)

    @functools.cached_property
    def heldout_means(self) -> Any:
        """Jitted function of (params, statistics, batch), as in the state, to its means in evaluation mode.

        They are `loss` and further metrics of the task. Rows are taken in micro-batches as in an update, so that it
        needs no more memory.
        """

        @by_default_rules
        def means(params: Params, statistics: Params, batch: tasks.Batch) -> dict[str, Float[Array, ""]]:
            def sums(rows: tasks.Batch) -> tasks.Sums:
                return self.task.sums(self._merge_trained(params, statistics), rows)

            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                parts = jax.lax.map(sums, self._micro_batches(batch))
            return jax.tree.map(jnp.sum, parts).means(tasks.count(batch))

        return jax.jit(means, out_shardings=sharding.replicated(self.mesh))

    def _differentiate(
        self, params: Params, statistics: Params, rows: tasks.Batch
    ) -> tuple[tasks.Sums, Params, Params]:
        """Returns the sums over rows, their gradients and the new statistics."""

        def total(params: Params):
            model = self._merge_trained(params, statistics)
            model.train()
            sums = self.task.sums(model, rows)
            return sums.total, (sums, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))

        grads, (sums, statistics) = jax.grad(total, has_aux=True)(params)
        return sums, grads, statistics

    def _accumulate(self, state: TrainState, batch: tasks.Batch) -> tuple[tasks.Sums, Params, Params]:
        """Returns the sums over a batch, their gradients and the new statistics."""
        if self.config.optimizer.accumulate == 1:
            return self._differentiate(state.params, state.statistics, batch)

        def add(carry, rows):
            grads, statistics = carry
            sums, more, statistics = self._differentiate(state.params, statistics, rows)
            return (jax.tree.map(jnp.add, grads, more), statistics), sums

        carry = jax.tree.map(jnp.zeros_like, state.params), state.statistics
        (grads, statistics), sums = jax.lax.scan(add, carry, self._micro_batches(batch))
        return jax.tree.map(jnp.sum, sums), grads, statistics

    def _micro_batches(self, batch: tasks.Batch) -> tasks.Batch:
        """Returns a batch with micro-batches as the first axis."""
        parts = self.config.optimizer.accumulate
        # Row r goes to part r % parts, so that every device has rows of every part.
        return jax.tree.map(
            lambda rows: rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1),
            dict(batch),
        )


def _param_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path of a parameter, from that of an array for it in an optimizer state.

    Only the dicts at its end are those of the parameters, because an optax state is a named tuple.
    """
    names = itertools.takewhile(lambda key: isinstance(key, jax.tree_util.DictKey), reversed(path))
    return tuple(reversed(list(names)))


def _no_skips() -> dict[str, Array]:
    """Returns `TrainState.skips` before the first update."""
    return {"total": jnp.int32(0), "in_a_row": jnp.int32(0)}


def _averaged(average: Params, params: Params, decay: float, update: Int[Array, ""]) -> Params:
    """Returns the moving average after an update, which is counted from 1.

    The decay rises with its number, so that the first parameters are soon forgotten, as in TensorFlow's
    `ExponentialMovingAverage` with `num_updates`.
    """
    weight = jnp.minimum(decay, (1 + update) / (10 + update))
    return jax.tree.map(lambda old, new: weight * old + (1 - weight) * new, average, params)


def _selected(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), new, old)


def _shardings_of(abstract: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _converted(convert: Callable[[Any], Any], state: TrainState, abstract: TrainState) -> TrainState:
    """Returns `convert(state)` with the shardings of `abstract`; what the state does not have is left out."""
    missing = {name: getattr(state, name) for name in _OPTIONAL if not getattr(state, name)}
    abstract = dataclasses.replace(abstract, **missing)
    return jax.jit(convert, out_shardings=_shardings_of(abstract))(state)


def _split(model: models.Model) -> tuple[nnx.GraphDef, Params, Params]:
    """Returns the graph, parameters and running statistics of a model; fails if it has other variables."""
    graph, *variables = nnx.split(model, nnx.Param, nnx.BatchStat)
    params, statistics = (nnx.to_pure_dict(tree) for tree in variables)
    return graph, params, statistics


@contextlib.contextmanager
def _random_kernels() -> Iterator[None]:
    """Makes GPUs draw random numbers in a kernel of JAX's, with the same results.

    Otherwise XLA evaluates the numbers of a constant seed while it compiles. For 124M parameters on an H200 that took
    187 seconds.
    """
    before = jax.config.jax_threefry_gpu_kernel_lowering
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        yield
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", before)


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
    model, number = _restore(folder, config, sizes, jax.local_devices())
    return config, models.cast_weights(model, weights_dtype), number


def restore_exact(
    folder: str | pathlib.Path,
    *,
    sizes: config_lib.ShardingConfig | None = None,
    weights_dtype: str = "float32",
    state_dtype: str = "float32",
) -> tuple[config_lib.Config, models.Model, int]:
    """Restores a model as `restore_model` does, but with products in float32 and `implementation=None`.

    At a lower precision, rounding depends on the batch, and so would the tokens sampled from the logits.

    Args:
        folder: workdir of a run.
        sizes: mesh shape of this process's devices. None restores the model on one device.
        weights_dtype: dtype of the matrices (`models.cast_weights`).
        state_dtype: `model.state_dtype` of the model.
    """
    config = workdir.read_config(pathlib.Path(folder))
    attention = dataclasses.replace(config.model.attention, implementation=None)
    exact = dataclasses.replace(config.model, dtype="float32", state_dtype=state_dtype, attention=attention)
    devices = jax.local_devices()[: None if sizes else 1]
    model, number = _restore(folder, dataclasses.replace(config, model=exact), sizes, devices)
    return config, models.cast_weights(model, weights_dtype), number


def _restore(
    folder: str | pathlib.Path,
    config: config_lib.Config,
    sizes: config_lib.ShardingConfig | None,
    devices: Sequence[jax.Device],
) -> tuple[models.Model, int]:
    config = dataclasses.replace(config, sharding=sizes or config_lib.ShardingConfig())
    program = Program(config, sharding.mesh_of(config.sharding, devices))
    arrays, number = program.restore_arrays(folder)
    return program.merge(**arrays), number
