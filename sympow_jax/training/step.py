"""Training step on plain arrays."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sympow_jax import config, models
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import partitioning
from sympow_jax.training import loss, optimizer, sharding

__all__ = [
    "Params",
    "TrainState",
    "Update",
    "abstract_state",
    "check_model",
    "init_optimizer",
    "init_state",
    "make_update",
    "merge",
]

Params = dict[str, Any]
"""Nested dict of arrays by the names of a model's modules."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Training state that an update reads and replaces.

    Attributes:
        step: number of updates done.
        params: parameters of the model.
        opt_state: optimizer state.
        statistics: running statistics of batch normalization; empty without it.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    statistics: Params = dataclasses.field(default_factory=dict)


Update = Callable[[TrainState, loss.Batch], tuple[TrainState, dict[str, Float[Array, ""]]]]
"""Maps (state, batch) to (updated state, metrics)."""


def init_state(settings: config.Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Returns the state before the first update, a function of the settings only."""
    with _random_kernels():
        return jax.jit(lambda: _init(settings), out_shardings=_shardings(settings, mesh))()


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


def init_optimizer(settings: config.Config, abstract: TrainState, params: Params) -> optax.OptState:
    """Returns the initial optimizer state for these parameters, with the shardings of `abstract`."""
    tx = optimizer.make_optimizer(settings.optimizer, settings.training.steps)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.opt_state)
    return jax.jit(tx.init, out_shardings=shardings)(params)


def abstract_state(settings: config.Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Returns the state's shapes, dtypes and shardings; optimizer state is sharded like its parameters."""
    state = jax.eval_shape(lambda: _init(settings))
    specs = models.parameter_specs(_abstract_model(settings))

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = specs.get(tuple(key.key for key in path), partitioning.REPLICATED)
        return _placed(leaf, spec, mesh)

    def whole(leaf: Any) -> Any:
        return _placed(leaf, partitioning.REPLICATED, mesh)

    params = jax.tree_util.tree_map_with_path(place, state.params)
    tx = optimizer.make_optimizer(settings.optimizer, settings.training.steps)
    opt_state = optax.tree_map_params(
        tx, lambda _, param: param, state.opt_state, params, transform_non_params=whole
    )
    return TrainState(
        step=whole(state.step),
        params=params,
        opt_state=opt_state,
        statistics=jax.tree.map(whole, state.statistics),
    )


def check_model(settings: config.Config, mesh: jax.sharding.Mesh, row: Mapping[str, np.ndarray]) -> None:
    """Traces the model on batches of such rows, to raise its errors before anything is compiled.

    Raises:
        ValueError: sizes do not fit each other or the mesh.
        NotImplementedError: a named implementation does not support the settings on these devices.
    """
    # Outside of the mesh, because under a mesh Flax would look for the parameters' logical axis names in it.
    graphdef = _graphdef(settings)

    def total() -> Float[Array, ""]:
        state = _init(settings)
        rows = settings.data.batch_size // settings.optimizer.accumulate
        batch = {name: jnp.zeros((rows, *values.shape), values.dtype) for name, values in row.items()}
        return loss.sums(nnx.merge(graphdef, state.params, state.statistics), batch).loss

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.eval_shape(total)


def merge(settings: config.Config, params: Params, statistics: Params | None = None) -> models.Model:
    """Returns the model with these parameters and running statistics, in evaluation mode."""
    return nnx.merge(_graphdef(settings), params, statistics or {})


def make_update(settings: config.Config, mesh: jax.sharding.Mesh) -> Update:
    """Returns the jitted optimizer update on one batch, which donates the state.

    The loss is the mean over the targets or labels of the whole batch that count (`loss.sums`), whatever the number of
    micro-batches. Only batch normalization uses the statistics of each micro-batch, one after another. The metrics are:

    * `loss`, and `accuracy` if classes are predicted
    * `grad_norm`, before clipping
    * `parameter_norm`, after the update, which is finite only if every parameter is
    * `update_norm`, the norm of the change of the parameters
    * `learning_rate`
    """
    tx = optimizer.make_optimizer(settings.optimizer, settings.training.steps)
    rate = optimizer.learning_rate(settings.optimizer, settings.training.steps)
    differentiate = _differentiate(_graphdef(settings))

    def update(state: TrainState, batch: loss.Batch) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        # Kernels shard themselves over the mesh in scope, because the partitioner cannot.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            sums, grads, statistics = _accumulate(differentiate, state, batch, settings.optimizer.accumulate)
        count = loss.count(batch)
        grads = jax.tree.map(lambda grad: grad / count, grads)
        changes, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        metrics = {
            "loss": sums.loss / count,
            "grad_norm": optax.tree.norm(grads),
            "parameter_norm": optax.tree.norm(params),
            "update_norm": optax.tree.norm(changes),
            "learning_rate": jnp.asarray(rate(state.step), jnp.float32),
        }
        if settings.task.name == "classification":
            metrics["accuracy"] = sums.correct / count
        return TrainState(state.step + 1, params, opt_state, statistics), metrics

    shardings = _shardings(settings, mesh), sharding.replicated(mesh)
    return jax.jit(update, donate_argnums=0, out_shardings=shardings)


_Differentiate = Callable[[Params, Params, loss.Batch], tuple[loss.Sums, Params, Params]]


def _differentiate(graphdef: nnx.GraphDef) -> _Differentiate:
    """Returns a function of (params, statistics, rows) to (sums, gradients, new statistics)."""

    def total(params: Params, statistics: Params, rows: loss.Batch):
        model = nnx.merge(graphdef, params, statistics)
        model.train()
        sums = loss.sums(model, rows)
        return sums.loss, (sums, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))

    def differentiate(params: Params, statistics: Params, rows: loss.Batch):
        grads, (sums, statistics) = jax.grad(total, has_aux=True)(params, statistics, rows)
        return sums, grads, statistics

    return differentiate


def _accumulate(
    differentiate: _Differentiate, state: TrainState, batch: loss.Batch, parts: int
) -> tuple[loss.Sums, Params, Params]:
    if parts == 1:
        return differentiate(state.params, state.statistics, batch)
    # Row r goes to part r % parts, so that every device has rows of every part.
    micro_batches = jax.tree.map(
        lambda rows: rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1), dict(batch)
    )

    def add(carry, rows):
        sums, grads, statistics = carry
        more, more_grads, statistics = differentiate(state.params, statistics, rows)
        return (*jax.tree.map(jnp.add, (sums, grads), (more, more_grads)), statistics), None

    zeros = loss.Sums(jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, state.params)
    return jax.lax.scan(add, (*zeros, state.statistics), micro_batches)[0]


def _init(settings: config.Config) -> TrainState:
    model = models.make(settings.model, settings.task, rngs=nnx.Rngs(settings.training.seed))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = optimizer.make_optimizer(settings.optimizer, settings.training.steps)
    statistics = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    return TrainState(jnp.int32(0), params, tx.init(params), statistics)


def _abstract_model(settings: config.Config) -> models.Model:
    return nnx.eval_shape(lambda: models.make(settings.model, settings.task, rngs=nnx.Rngs(0)))


def _graphdef(settings: config.Config) -> nnx.GraphDef:
    # Every variable must be a parameter or a running statistic; nnx.split fails on other kinds.
    return nnx.split(_abstract_model(settings), nnx.Param, nnx.BatchStat)[0]


def _shardings(settings: config.Config, mesh: jax.sharding.Mesh) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(settings, mesh))


def _placed(leaf: Any, spec: jax.sharding.PartitionSpec, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    spec = partitioning.fitted(spec, leaf.shape, mesh.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
