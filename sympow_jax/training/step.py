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
from sympow_jax.training import optimizer, sharding

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

# At most so many bytes of float32 logits exist at once, in each of forward and backward.
_LOGITS_BYTES = 1 << 28


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
    return jax.jit(lambda: _init(settings), out_shardings=sharding.replicated(mesh))()


def abstract_state(settings: config.Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    replicated = sharding.replicated(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated),
        jax.eval_shape(lambda: _init(settings)),
    )


def check_model(settings: config.Config) -> None:
    """Raises, before anything is compiled, what the model raises: NotImplementedError for an implementation that the
    settings name and that cannot do it on these devices.
    """

    def loss() -> Float[Array, ""]:
        tokens = jnp.zeros((1, settings.data.context_length), jnp.int32)
        model = merge(settings.model, _init(settings).params)
        return loss_sum(model, {"inputs": tokens, "targets": tokens})

    jax.eval_shape(loss)


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

    return jax.jit(update, donate_argnums=0, out_shardings=sharding.replicated(mesh))


def loss_sum(model: models.DecoderLM, batch: Batch) -> Float[Array, ""]:
    """The cross-entropies in nats of the targets >= 0, summed in float32.

    Logits exist for one slice of time at once, in the backward pass too, which computes them again.
    """
    hidden = model.hidden(batch["inputs"], segment_ids=batch.get("segment_ids"))
    targets = batch["targets"]
    rows, time, _ = hidden.shape
    width = max(1, _LOGITS_BYTES // (4 * rows * model.config.vocab_size))
    if width >= time:
        return _slice_loss(model, hidden, targets)
    slices = -(-time // width)
    width = -(-time // slices)
    padding = slices * width - time
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)

    @jax.checkpoint
    def add(total: Float[Array, ""], start: Int[Array, ""]) -> tuple[Float[Array, ""], None]:
        part = (jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=1) for leaf in (hidden, targets))
        return total + _slice_loss(model, *part), None

    return jax.lax.scan(add, jnp.float32(0), jnp.arange(slices) * width)[0]


def _slice_loss(
    model: models.DecoderLM, hidden: Float[Array, "B T M"], targets: Int[Array, "B T"]
) -> Float[Array, ""]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model.unembed(hidden), jnp.maximum(targets, 0))
    return jnp.sum(jnp.where(targets >= 0, losses, 0))


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
