"""Program of a run: its model, optimizer, state and update, each made once for a config and a mesh."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax import models
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import partitioning
from sympow_jax.training import checkpoint, hosts, initial, loss, optimizer, sharding, stacking, workdir
from sympow_jax.training.state import Params, TrainState

__all__ = ["Program", "Update", "restore_exact", "restore_model"]

# Models of at least this many layers are scanned by default. Otherwise each layer takes about 1 s of CPU to compile.
_SCANNED_LAYERS = 16

Update = Callable[[TrainState, loss.Batch], tuple[TrainState, dict[str, Float[Array, ""]]]]
"""Maps (state, batch) to (updated state, metrics)."""


class Program:
    """Model graph, optimizer, state and update of a run on a mesh.

    Parameters and optimizer state are by layer (`blocks`) or, if an update scans the layers, stacked
    (`stacked_blocks`; see `stacking`). Models and checkpoints always have them by layer.

    Attributes:
        config: config of the run.
        mesh: mesh that state and batches are sharded over.
        params: shapes, dtypes and shardings of the parameters, by layer.
        statistics: those of the running statistics of batch normalization; empty without it.
        kernels: attention kernel of each layer.
        scans: whether an update scans the layers, so that the state has them stacked.

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
        one_layer, factors = self.params, optimizer.factors(config.optimizer, self.params)
        trained = jax.tree_util.tree_map_with_path(self._trains, self.params)
        if self.scans:
            one_layer, trained = self._stack((self.params, trained), join=lambda leaves: leaves[0])
            factors = self._stack(factors, join=np.array)
        self._optimizer = optimizer.make_optimizer(
            config.optimizer, config.training.steps, one_layer, factors, trained
        )

    def _trains(self, path: tuple[Any, ...], _: Any) -> bool:
        if self.config.task.name != "match_attention":
            return True
        return models.AttentionMatcher.is_trained(self.config.model, models.parameter_name(path))

    def _placed(
        self, leaf: Any, spec: jax.sharding.PartitionSpec = partitioning.REPLICATED
    ) -> jax.ShapeDtypeStruct:
        spec = partitioning.fitted(spec, leaf.shape, self.mesh.shape)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(self.mesh, spec)
        )

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; optimizer state is sharded like its parameters."""
        params, statistics = self.params, self.statistics
        if self.scans:
            params, statistics = self._stack((params, statistics), join=self._stacked)
        opt_state = optax.tree_map_params(
            self._optimizer,
            # Parameters that are not trained have no state.
            lambda leaf, param: leaf if isinstance(leaf, optax.MaskedNode) else param,
            jax.eval_shape(self._optimizer.init, params),
            params,
            transform_non_params=self._placed,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
        step: Any = self._placed(jax.ShapeDtypeStruct((), jnp.int32))
        return TrainState(step=step, params=params, opt_state=opt_state, statistics=statistics)

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

        They are a copy if layers are scanned. An optimizer state of `()` stays.
        """
        return _converted(stacking.unstack, state, self.abstract_by_layer) if self.scans else state

    def from_layers(self, state: TrainState) -> TrainState:
        """Returns the inverse of `by_layer`; an optimizer state of `()` stays."""
        return _converted(self._stack, state, self.abstract) if self.scans else state

    def model(self, state: TrainState) -> models.Model:
        """Returns the model of a state, in evaluation mode."""
        # Without the optimizer state, which is larger than the parameters.
        state = self.by_layer(dataclasses.replace(state, opt_state=()))
        return self.merge(state.params, state.statistics)

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
        return models.make(self.config.model, self.config.task, rngs=nnx.Rngs(seed), stacked=stacked)

    def init_state(self) -> TrainState:
        """Returns the state of a new model before the first update, a function of the config only."""

        def init() -> TrainState:
            # Stacked, because layers that are initialized by a loop compile in the time of one.
            _, *variables = _split(self._make(self.config.training.seed, stacked=True))
            params, statistics = variables if self.scans else stacking.unstack(variables)
            return TrainState(jnp.int32(0), params, self._optimizer.init(params), statistics)

        with _random_kernels():
            return jax.jit(init, out_shardings=self._shardings)()

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
            first = Program(initial.read_config(folder, self.config), self.mesh)
            arrays, number = first.restore_arrays(folder)
        hosts.check_same("the checkpoint of task.initial_run", {"step": number})
        kind = "model" if self.config.task.is_causal else "encoder"
        hosts.say(
            f"the {kind} is that of step {number} of {folder}, a run of the task {first.config.task.name!r}"
        )
        state = self.init_state()
        new = self.by_layer(dataclasses.replace(state, opt_state=()))
        params = initial.replace(new.params, arrays["params"], folder)
        new = dataclasses.replace(new, params=params, statistics=arrays.get("statistics", {}))
        return dataclasses.replace(self.from_layers(new), opt_state=state.opt_state)

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
        if state.opt_state == ():  # a checkpoint of imported weights
            init = jax.jit(self._optimizer.init, out_shardings=self._shardings.opt_state)
            state = dataclasses.replace(state, opt_state=init(state.params))
        return state, position

    def restore_arrays(self, folder: str | pathlib.Path) -> tuple[dict[str, Params], int]:
        """Restores `params`, and `statistics` if there are any, from a workdir of the same model.

        Each process restores on its own, so the mesh may have devices of this process only.

        Returns:
            The arrays and the step of the newest good checkpoint.

        Raises:
            ValueError: the folder has no good checkpoint, or its newest cannot be read.
        """
        arrays = {"params": self.params, "statistics": self.statistics}
        return checkpoint.restore_arrays(folder, arrays)

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

        The loss is the mean over the targets or labels of the whole batch that count (`loss.sums`), whatever the number
        of micro-batches. Only batch normalization uses the statistics of each micro-batch, one after another. The
        metrics are:

        * `loss`, and `accuracy` if classes are predicted
        * `grad_norm`, before clipping
        * `parameter_norm`, after the update, which is finite only if every parameter is
        * `update_norm`, the norm of the change of the parameters
        * `learning_rate`
        """
        settings = self.config
        rate = optimizer.learning_rate(settings.optimizer, settings.training.steps)

        def update(state: TrainState, batch: loss.Batch) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
            # Kernels shard themselves over the mesh in scope, because the partitioner cannot.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                sums, grads, statistics = self._accumulate(state, batch)
            count = loss.count(batch)
            grads = jax.tree.map(lambda grad: grad / count, grads)
            changes, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)
            metrics = {
                **self._means(sums, count),
                "grad_norm": optax.tree.norm(grads),
                "parameter_norm": optax.tree.norm(params),
                "update_norm": optax.tree.norm(changes),
                "learning_rate": jnp.asarray(rate(state.step), jnp.float32),
            }
            return TrainState(state.step + 1, params, opt_state, statistics), metrics

        shardings = self._shardings, sharding.replicated(self.mesh)
        return jax.jit(update, donate_argnums=0, out_shardings=shardings)

    @functools.cached_property
    def heldout_means(self) -> Any:
        """Jitted function of (params, statistics, batch), as in the state, to its means in evaluation mode.

        They are `loss`, and `accuracy` if classes are predicted. Rows are taken in micro-batches as in an update, so
        that it needs no more memory.
        """

        def means(params: Params, statistics: Params, batch: loss.Batch) -> dict[str, Float[Array, ""]]:
            def add(total: loss.Sums, rows: loss.Batch) -> tuple[loss.Sums, None]:
                more = loss.sums(self._merge_trained(params, statistics), rows)
                return jax.tree.map(jnp.add, total, more), None

            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                zeros = loss.Sums(jnp.float32(0), jnp.float32(0))
                total, _ = jax.lax.scan(add, zeros, self._micro_batches(batch))
            return self._means(total, loss.count(batch))

        return jax.jit(means, out_shardings=sharding.replicated(self.mesh))

    def _means(self, sums: loss.Sums, count: Int[Array, ""]) -> dict[str, Float[Array, ""]]:
        """Returns the means over a batch's targets or labels that count."""
        means = {"loss": sums.loss / count}
        if self.config.task.name == "classification":
            means["accuracy"] = sums.correct / count
        return means

    def _differentiate(
        self, params: Params, statistics: Params, rows: loss.Batch
    ) -> tuple[loss.Sums, Params, Params]:
        """Returns the sums over rows, their gradients and the new statistics."""

        def total(params: Params):
            model = self._merge_trained(params, statistics)
            model.train()
            sums = loss.sums(model, rows)
            return sums.loss, (sums, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))

        grads, (sums, statistics) = jax.grad(total, has_aux=True)(params)
        return sums, grads, statistics

    def _accumulate(self, state: TrainState, batch: loss.Batch) -> tuple[loss.Sums, Params, Params]:
        if self.config.optimizer.accumulate == 1:
            return self._differentiate(state.params, state.statistics, batch)

        def add(carry, rows):
            sums, grads, statistics = carry
            more, more_grads, statistics = self._differentiate(state.params, statistics, rows)
            return (*jax.tree.map(jnp.add, (sums, grads), (more, more_grads)), statistics), None

        zeros = loss.Sums(jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, state.params)
        return jax.lax.scan(add, (*zeros, state.statistics), self._micro_batches(batch))[0]

    def _micro_batches(self, batch: loss.Batch) -> loss.Batch:
        """Returns a batch with micro-batches as the first axis."""
        parts = self.config.optimizer.accumulate
        # Row r goes to part r % parts, so that every device has rows of every part.
        return jax.tree.map(
            lambda rows: rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1),
            dict(batch),
        )


def _shardings_of(abstract: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _converted(convert: Callable[[Any], Any], state: TrainState, abstract: TrainState) -> TrainState:
    """Returns `convert(state)` with the shardings of `abstract`; an optimizer state of `()` stays."""
    if state.opt_state == ():
        abstract = dataclasses.replace(abstract, opt_state=())
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
