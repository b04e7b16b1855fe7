"""The training step: plain arrays in, plain arrays out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
    "init_state",
    "loss_sum",
    "make_update",
    "merge",
]

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update reads and replaces; `step` counts the updates done."""

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState


Batch = Mapping[str, Int[Array, "B T"]]
Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Float[Array, ""]]]]


def init_state(settings: config.Config, mesh: jax.sharding.Mesh) -> TrainState:
    """The state before the first update, a function of the settings alone."""
    return jax.jit(lambda: _init(settings), out_shardings=_shardings(settings, mesh))()


def abstract_state(settings: config.Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state: what belongs to a parameter is divided as the parameter is."""
    state = jax.eval_shape(lambda: _init(settings))
    specs = models.parameter_specs(settings.model)

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = specs.get(tuple(key.key for key in path), partitioning.REPLICATED)
        return _placed(leaf, spec, mesh)

    params = jax.tree_util.tree_map_with_path(place, state.params)
    tx = optimizer.make_optimizer(settings.optimizer, settings.training.steps)
    opt_state = optax.tree_map_params(
        tx,
        lambda _, param: param,
        state.opt_state,
        params,
        transform_non_params=lambda leaf: _placed(leaf, partitioning.REPLICATED, mesh),
    )
    at: Any = _placed(state.step, partitioning.REPLICATED, mesh)
    return TrainState(step=at, params=params, opt_state=opt_state)


def check_model(settings: config.Config, mesh: jax.sharding.Mesh) -> None:
    """Raises, before anything is compiled, what the model raises: ValueError for sizes that do not fit each other or
    the mesh, NotImplementedError for an implementation that the settings name and that cannot do it on these devices.
    """

    def total() -> Float[Array, ""]:
        rows = settings.data.batch_size // settings.optimizer.accumulate
        tokens = jnp.zeros((rows, settings.data.context_length), jnp.int32)
        model = merge(settings.model, _init(settings).params)
        return loss_sum(model, {"inputs": tokens, "targets": tokens})

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.eval_shape(total)


def merge(settings: config.ModelConfig, params: Params) -> models.DecoderLM:
    """The model that has these parameters."""
    return nnx.merge(_graphdef(settings), params)


def make_update(settings: config.Config, mesh: jax.sharding.Mesh) -> Update:
    """One optimizer update on one batch, compiled, its state donated.

    The loss is the mean cross-entropy in nats over the targets >= 0 of the whole batch, whatever the number
    of micro-batches. The metrics are `loss`, `grad_norm` (before clipping), `parameter_norm` (after the
    update: finite only where every parameter is), `update_norm` (of what the optimizer added to the
    parameters) and `learning_rate`.
    """
    graphdef = _graphdef(settings.model)
    tx = optimizer.make_optimizer(settings.optimizer, settings.training.steps)
    rate = optimizer.learning_rate(settings.optimizer, settings.training.steps)
    differentiate = jax.value_and_grad(lambda params, rows: loss_sum(nnx.merge(graphdef, params), rows))

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        # Kernels divide themselves over the mesh in scope; the partitioner cannot.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            total, grads = _accumulate(differentiate, state.params, batch, settings.optimizer.accumulate)
        # A batch without a single target has no gradient; its loss is zero, not NaN.
        count = jnp.maximum(jnp.sum(batch["targets"] >= 0), 1)
        grads = jax.tree.map(lambda grad: grad / count, grads)
        changes, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        metrics = {
            "loss": total / count,
            "grad_norm": optax.tree.norm(grads),
            "parameter_norm": optax.tree.norm(params),
            "update_norm": optax.tree.norm(changes),
            "learning_rate": jnp.asarray(rate(state.step), jnp.float32),
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    shardings = _shardings(settings, mesh), sharding.replicated(mesh)
    return jax.jit(update, donate_argnums=0, out_shardings=shardings)


def loss_sum(model: models.DecoderLM, batch: Batch) -> Float[Array, ""]:
    """The cross-entropies in nats of the targets >= 0, summed in float32."""
    hidden = model.hidden(batch["inputs"], segment_ids=batch.get("segment_ids"))
    dtype = jnp.dtype(model.config.dtype)
    return loss.cross_entropy_sum(hidden, model.embedding[...], batch["targets"], dtype)


def _accumulate(
    differentiate: Callable[[Params, Batch], tuple[Float[Array, ""], Params]],
    params: Params,
    batch: Batch,
    parts: int,
) -> tuple[Float[Array, ""], Params]:
    if parts == 1:
        return differentiate(params, batch)
    # Row r goes to part r % parts, so that every device keeps rows of every part.
    micro_batches = jax.tree.map(
        lambda rows: rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1), dict(batch)
    )

    def add(sums, rows):
        return jax.tree.map(jnp.add, sums, differentiate(params, rows)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zeros, micro_batches)[0]


def _init(settings: config.Config) -> TrainState:
    model = models.DecoderLM(settings.model, rngs=nnx.Rngs(settings.training.seed))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = optimizer.make_optimizer(settings.optimizer, settings.training.steps)
    return TrainState(step=jnp.int32(0), params=params, opt_state=tx.init(params))


def _graphdef(settings: config.ModelConfig) -> nnx.GraphDef:
    # Every variable must be a parameter: nnx.split fails on one of another kind.
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: models.DecoderLM(settings, rngs=nnx.Rngs(0))), nnx.Param)
    return graphdef


def _shardings(settings: config.Config, mesh: jax.sharding.Mesh) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(settings, mesh))


def _placed(leaf: Any, spec: jax.sharding.PartitionSpec, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    spec = partitioning.fitted(spec, leaf.shape, mesh.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
