"""Program of a run: what is a function of config and mesh, made once: graph, shardings, optimizer, jitted update."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax import models, tasks
from sympow_jax.array_types import Array, Float
from sympow_jax.layers import partitioning
from sympow_jax.layers.attention import kernels
from sympow_jax.ops.promotion import by_default_rules
from sympow_jax.training import optimizer, sharding
from sympow_jax.training.state import Params, TrainState

# Models of at least this many layers are scanned by default. Otherwise each layer takes about 1 s of CPU to compile.
_SCANNED_LAYERS = 16

Update = Callable[[TrainState, tasks.Batch], tuple[TrainState, dict[str, Float[Array, ""]]]]
"""Maps (state, batch) to (updated state, metrics)."""


class Program:
    """Model graph, optimizer, shapes of the state and update of a run on a mesh.

    Parameters, and so the optimizer state, are those of a stacked model (`models.stack`), whether an update loops over
    its layers or not (`training.scan_layers`).

    Attributes:
        config: config of the run.
        task: its task.
        mesh: mesh that state and batches are sharded over.
        kernels: attention kernel of each layer.
        optimizer: optax optimizer of an update.

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
        self.kernels = tuple(kernels.from_config(config.model, layer) for layer in range(config.model.layers))
        model = nnx.eval_shape(lambda: self._make(0))
        self._graph, params, self._statistics = _split(model)
        specs = models.parameter_specs(model)
        self._params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._placed(leaf, specs[tuple(key.key for key in path)]), params
        )
        options = optimizer.parameter_options(config.optimizer, params)
        self._options = options
        trained = jax.tree.map(
            lambda names: self.task.trains(str(names.flat[0])), models.parameter_names(params)
        )
        self.optimizer = optimizer.make_optimizer(config.optimizer, config.training.steps, options, trained)

    def _make(self, seed: int) -> models.Model:
        scans = self.config.training.scan_layers
        if scans is None:
            scans = self.config.model.layers >= _SCANNED_LAYERS
        return models.make(self.config.model, self.config.task, rngs=seed, stacked=True, scans=scans)

    def _placed(
        self, leaf: Any, spec: jax.sharding.PartitionSpec = partitioning.REPLICATED
    ) -> jax.ShapeDtypeStruct:
        spec = partitioning.fit(spec, leaf.shape, self.mesh.shape)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(self.mesh, spec)
        )

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state.

        Arrays of the optimizer state that have the shape of their parameter are sharded like it, and others replicated.
        """
        by_path = dict(jax.tree_util.tree_leaves_with_path(self._params))

        def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            # Only the dicts at the end of a path are those of the parameters, because an optax state is a named tuple.
            keys = itertools.takewhile(lambda key: isinstance(key, jax.tree_util.DictKey), reversed(path))
            param = by_path.get(tuple(reversed(list(keys))))
            # Adafactor's means of rows and columns are replicated: they are a thousandth of a matrix.
            return self._placed(leaf) if param is None or param.shape != leaf.shape else param

        opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(self.optimizer.init, self._params))
        step: Any = self._placed(jax.ShapeDtypeStruct((), jnp.int32))
        return TrainState(
            step=step,
            params=self._params,
            opt_state=opt_state,
            statistics=jax.tree.map(self._placed, self._statistics),
            average=self._params if self.config.optimizer.ema_decay is not None else {},
            skips=jax.tree.map(self._placed, jax.eval_shape(_no_skips)),
        )

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def init_state(self) -> TrainState:
        """Returns the state of a new model before the first update, a function of the config only."""

        def init() -> TrainState:
            return self.new_state(*_split(self._make(self.config.training.seed))[1:])

        # In a kernel of JAX's on GPUs, with the same results. Otherwise XLA evaluates the random numbers of a constant
        # seed while it compiles, which for 124M parameters on an H200 took 187 seconds.
        before = jax.config.jax_threefry_gpu_kernel_lowering
        jax.config.update("jax_threefry_gpu_kernel_lowering", True)
        try:
            with jax.threefry_partitionable(True):
                return jax.jit(init, out_shardings=self.shardings)()
        finally:
            jax.config.update("jax_threefry_gpu_kernel_lowering", before)

    def new_state(self, params: Params, statistics: Params) -> TrainState:
        """Returns the state before the first update of these parameters."""
        # A copy, because the update donates both.
        average = jax.tree.map(jnp.copy, params) if self.config.optimizer.ema_decay is not None else {}
        opt_state = self.optimizer.init(params)
        return TrainState(jnp.int32(0), params, opt_state, statistics, average, _no_skips())

    def evaluation_params(self, state: TrainState) -> Params:
        """Returns the parameters of a state for everything except training.

        They are the moving average with `optimizer.ema_decay`, the average x of `schedule_free`, and otherwise those
        that are trained. A state without an average or optimizer state, as of imported weights, has no others.
        """
        if state.average:
            return state.average
        if self.config.optimizer.name == "schedule_free" and state.opt_state != ():
            return jax.jit(optimizer.schedule_free_average)(state.opt_state, state.params)
        return state.params

    def model(self, state: TrainState) -> models.Model:
        """Returns the model of a state with its `evaluation_params`, its blocks in a list, in evaluation mode."""
        return self.merge(self.evaluation_params(state), state.statistics)

    def merge(self, params: Params, statistics: Params | None = None) -> models.Model:
        """Returns the model with these parameters and running statistics, its blocks in a list, in evaluation mode."""
        return nnx.merge(self._graph_by_layer, *map(models.unstack, (params, statistics or {})))

    def rounded(self, dtype: str) -> Params:
        """Returns the shapes of the parameters, with the dtypes that `models.cast_weights` gives to them."""
        make = functools.partial(models.make, self.config.model, self.config.task, rngs=0)
        params = _split(nnx.eval_shape(lambda: models.cast_weights(make(), dtype)))[1]
        return jax.eval_shape(
            functools.partial(models.stack, period=self.config.model.attention_period), params
        )

    @functools.cached_property
    def _graph_by_layer(self) -> nnx.GraphDef:
        return _split(nnx.eval_shape(lambda: models.make(self.config.model, self.config.task, rngs=0)))[0]

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
        number of micro-batches. Only batch normalization and the sizes of `MatchAttention` are of each micro-batch.
        The metrics are:

        * `loss`, without the terms below, and further metrics of the task, such as `accuracy`
        * terms that are added to the loss, such as `z_loss`
        * `grad_norm`, before clipping, without parameters whose factor of the learning rate is 0
        * `parameter_norm`, after the update, which is finite only if every parameter is
        * `update_norm`, the norm of the change of the parameters
        * `learning_rate`
        * `skipped_updates` and `skipped_in_a_row`, if updates may be skipped
        """
        config = self.config
        rate = optimizer.learning_rate(config.optimizer, config.training.steps)
        ema_decay, skips_nonfinite = config.optimizer.ema_decay, config.training.skip_nonfinite

        @by_default_rules
        def update(state: TrainState, batch: tasks.Batch) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
            def differentiate(
                statistics: Params, rows: tasks.Batch
            ) -> tuple[Params, tuple[tasks.Sums, Params]]:
                """Returns the gradients of the sums over rows, the sums, and the new statistics."""

                def total(params: Params):
                    model = nnx.merge(self._graph, params, statistics)
                    model.train()
                    sums = self.task.sums(model, rows)
                    return sums.total, (sums, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))

                return jax.grad(total, has_aux=True)(state.params)

            def accumulate(carry, rows):
                grads, statistics = carry
                more, (sums, statistics) = differentiate(statistics, rows)
                return (jax.tree.map(jnp.add, grads, more), statistics), sums

            # Kernels shard themselves over the mesh in scope, because the partitioner cannot.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                if config.optimizer.accumulate == 1:
                    grads, (sums, statistics) = differentiate(state.statistics, batch)
                else:
                    carry = jax.tree.map(jnp.zeros_like, state.params), state.statistics
                    (grads, statistics), parts = jax.lax.scan(accumulate, carry, self._micro_batches(batch))
                    sums = jax.tree.map(jnp.sum, parts)
            count = tasks.count(batch)
            grads = jax.tree.map(lambda grad: grad / count, grads)
            grad_norm = optax.tree.norm(optimizer.counted(self._options, grads))
            changes, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)

            # Neither the schedule nor the average counts what was skipped, even by a run that no longer skips.
            done, average = state.step - state.skips["total"], state.average
            if ema_decay is not None:
                # The decay rises with the number of the update, from 1, so that the first parameters are soon
                # forgotten, as in TensorFlow's `ExponentialMovingAverage` with `num_updates`.
                weight = jnp.minimum(ema_decay, (2 + done) / (11 + done))
                average = jax.tree.map(lambda old, new: weight * old + (1 - weight) * new, average, params)

            is_good = jnp.bool(True)
            if skips_nonfinite:
                is_good = jnp.isfinite(sums.loss) & jnp.isfinite(grad_norm)
                select = functools.partial(jax.tree.map, functools.partial(jnp.where, is_good))
                params, opt_state = select((params, opt_state), (state.params, state.opt_state))
                statistics, average = select((statistics, average), (state.statistics, state.average))
                changes = select(changes, jax.tree.map(jnp.zeros_like, changes))
            skips = {
                "total": state.skips["total"] + ~is_good,
                "in_a_row": jnp.where(is_good, 0, state.skips["in_a_row"] + 1),
            }
            metrics = {
                **sums.means(count),
                **{name: term / count for name, term in sums.terms.items()},
                "grad_norm": grad_norm,
                "parameter_norm": optax.tree.norm(params),
                "update_norm": optax.tree.norm(changes),
                "learning_rate": jnp.asarray(rate(done), jnp.float32),
            }
            if skips_nonfinite:
                metrics |= {"skipped_updates": skips["total"], "skipped_in_a_row": skips["in_a_row"]}
            return TrainState(state.step + 1, params, opt_state, statistics, average, skips), metrics

        shardings = self.shardings, sharding.replicated(self.mesh)
        return jax.jit(update, donate_argnums=0, out_shardings=shardings)

    @functools.cached_property
    def heldout_means(self) -> Any:
        """Jitted function of (params, statistics, batch) to its means in evaluation mode.

        They are `loss` and further metrics of the task. Rows are taken in micro-batches as in an update, so that it
        needs no more memory.
        """

        @by_default_rules
        def means(params: Params, statistics: Params, batch: tasks.Batch) -> dict[str, Float[Array, ""]]:
            def sums(rows: tasks.Batch) -> tasks.Sums:
                return self.task.sums(nnx.merge(self._graph, params, statistics), rows)

            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                parts = jax.lax.map(sums, self._micro_batches(batch))
            return jax.tree.map(jnp.sum, parts).means(tasks.count(batch))

        return jax.jit(means, out_shardings=sharding.replicated(self.mesh))

    def _micro_batches(self, batch: tasks.Batch) -> tasks.Batch:
        """Returns a batch with micro-batches as the first axis."""
        parts = self.config.optimizer.accumulate
        # Row r goes to part r % parts, so that every device has rows of every part.
        return jax.tree.map(
            lambda rows: rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1),
            dict(batch),
        )


def _no_skips() -> dict[str, Array]:
    """Returns `TrainState.skips` before the first update."""
    return {"total": jnp.int32(0), "in_a_row": jnp.int32(0)}


def _split(model: models.Model) -> tuple[nnx.GraphDef, Params, Params]:
    """Returns the graph, parameters and running statistics of a model; fails if it has other variables."""
    graph, *variables = nnx.split(model, nnx.Param, nnx.BatchStat)
    params, statistics = (nnx.to_pure_dict(tree) for tree in variables)
    return graph, params, statistics
