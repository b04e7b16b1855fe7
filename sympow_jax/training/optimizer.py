"""Optax optimizers from an `OptimizerConfig`.

Parameters are those of a stacked model: the arrays of `stacked_blocks` have a leading axis of layers. Every optimizer
treats the array of each layer separately.
"""

import fnmatch
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from sympow_jax import config, models, spelling

# Root mean square of muon's updates, with which they need the learning rate and the weight decay of AdamW: "Muon is
# Scalable for LLM Training" (Liu et al. 2025, section 2.2).
_MUON_RMS = 0.2
# Matrices that muon orthogonalizes. All other parameters, such as embeddings, gates and norms, have updates of AdamW.
_MUON_MATRICES = tuple(
    f"blocks.*.{name}.kernel"
    for name in ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.*")
)
# Arrays of several axes that are no matrices: decays, and rates, phases and gains of positions, of each head.
_VECTORS = ("*.attention.decay_logits", "*.attention.positions.*")
# Smallest size of both axes of a matrix whose squared gradients Adafactor keeps as means of rows and columns, as in
# optax.
FACTORED_SIZE = 128


class ParameterOptions(NamedTuple):
    """Options of an optimizer for each parameter, as trees like the parameters.

    Attributes:
        learning_rate: factors of the learning rate, as arrays with one per layer or without an axis.
        weight_decay: whether the weight decay applies, which it does to matrices.
        orthogonalized: whether muon orthogonalizes the parameter.
    """

    learning_rate: Any
    weight_decay: Any
    orthogonalized: Any


def learning_rate(settings: config.OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a schedule from `count`, the number of previous updates, to the learning rate.

    For update u = count + 1 and w warm-up steps, the rate is `learning_rate * u / w` up to u = w, and depends on the
    schedule afterwards. `constant` stays at `learning_rate`. `cosine` is half a cosine and `linear` a straight line;
    both reach `final_fraction * learning_rate` at update `steps`. `wsd` is constant, then a straight line to the same
    rate over the last `decay_fraction * steps` updates, rounded. `inverse_sqrt` is `learning_rate * sqrt(w / u)`, with
    w at least 1. A run that ends within its warm-up does not reach `learning_rate`.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    length = max(steps - warmup, 1)
    linear = functools.partial(optax.polynomial_schedule, peak, settings.final_fraction * peak, power=1)
    if settings.schedule == "constant":
        decay = optax.constant_schedule(peak)
    elif settings.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, length, alpha=settings.final_fraction)
    elif settings.schedule == "linear":
        decay = linear(transition_steps=length)
    elif settings.schedule == "wsd":
        decay_steps = round(settings.decay_fraction * steps)
        schedules = [optax.constant_schedule(peak), linear(transition_steps=decay_steps)]
        decay = optax.join_schedules(schedules, [length - decay_steps])
    else:

        def decay(count):
            return peak * (max(warmup, 1) / (warmup + count)) ** 0.5

    if not warmup:
        return lambda count: decay(count + 1)
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])
    return lambda count: schedule(count + 1)


def parameter_options(settings: config.OptimizerConfig, params: optax.Params) -> ParameterOptions:
    """Returns the options of each parameter.

    A factor is the product of the factors of all patterns that the parameter's name matches.

    Raises:
        ValueError: a pattern of `learning_rate_factors` matches no parameter.
    """
    names = models.parameter_names(params)
    factors = settings.rate_factors_by_pattern
    every = [str(name) for array in jax.tree.leaves(names) for name in array.ravel()]
    for pattern, _ in factors:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in every):
            listed = f"the names are {', '.join(models.names_of_any_layer(every))}"
            raise ValueError(
                f"optimizer.learning_rate_factors has the pattern {pattern!r}, which matches no parameter; "
                f"{spelling.remedy(pattern, every, otherwise=listed)}"
            )

    def rate_factors(names: np.ndarray) -> np.ndarray:
        products = [
            math.prod(factor for pattern, factor in factors if fnmatch.fnmatchcase(str(name), pattern))
            for name in names.ravel()
        ]
        return np.array(products, float).reshape(names.shape)

    def is_matrix(names: np.ndarray, leaf: Any) -> bool:
        is_vector = any(fnmatch.fnmatchcase(str(names.flat[0]), x) for x in _VECTORS)
        return leaf.ndim - names.ndim >= 2 and not is_vector

    def is_orthogonalized(names: np.ndarray, leaf: Any) -> bool:
        (name,) = models.names_of_any_layer(map(str, names.ravel()))  # all layers at once
        return leaf.ndim - names.ndim == 2 and any(fnmatch.fnmatchcase(name, x) for x in _MUON_MATRICES)

    return ParameterOptions(
        learning_rate=jax.tree.map(rate_factors, names),
        weight_decay=jax.tree.map(is_matrix, names, params),
        orthogonalized=jax.tree.map(is_orthogonalized, names, params),
    )


def _scaled(factor: Any, change: Any) -> Any:
    """Returns the change times its factor, or its factors by layer; a masked one as it is."""
    if isinstance(change, optax.MaskedNode) or np.all(factor == 1):
        return change
    factor = np.asarray(factor, change.dtype)
    return change * factor.reshape(*factor.shape, *[1] * (change.ndim - factor.ndim))


def counted(options: ParameterOptions, gradients: Any) -> Any:
    """Returns the gradients that clipping counts: zero where the factor of the learning rate is 0."""
    return jax.tree.map(_scaled, jax.tree.map(np.sign, options.learning_rate), gradients)


def make_optimizer(
    settings: config.OptimizerConfig, steps: int, options: ParameterOptions, is_trained: Any
) -> optax.GradientTransformation:
    """Returns the optimizer with clipping, weight decay, learning rates by parameter, and frozen parameters.

    Gradients are clipped by the global norm of those of trained parameters whose factor is not 0. Each update,
    including its weight decay, is multiplied by its factor of the learning rate. Frozen parameters have no state.

    Args:
        settings: settings of the optimizer.
        steps: number of updates, at which the schedules end.
        options: options of each parameter.
        is_trained: tree of whether each parameter is trained; all others are frozen.
    """
    rate = learning_rate(settings, steps)
    factors = optax.stateless(lambda changes, _: jax.tree.map(_scaled, options.learning_rate, changes))
    stages = [_direction(settings, options)]
    # AdamW always has the weight-decay stage, so that its state has one structure with and without decay.
    if settings.weight_decay or settings.name == "adamw":
        stages.append(optax.add_decayed_weights(settings.weight_decay, options.weight_decay))
    update = optax.chain(*stages, optax.scale_by_learning_rate(rate))
    if settings.name == "schedule_free":
        # Factors scale the steps of z, of which x is the mean.
        update = optax.contrib.schedule_free(
            optax.chain(update, factors),
            lambda update_number: rate(update_number - 1),
            b1=settings.mean_decay,
        )
    if settings.clip_norm is not None:
        clip = optax.clip_by_global_norm(settings.clip_norm)

        def clipped(gradients: Any, _: Any) -> Any:
            return clip.update(counted(options, gradients), optax.EmptyState())[0]

        update = optax.chain(optax.stateless(clipped), update)
    if settings.learning_rate_factors and settings.name != "schedule_free":
        update = optax.chain(update, factors)
    if all(jax.tree.leaves(is_trained)):
        return update
    # These names are in checkpoints.
    labels = jax.tree.map(lambda trained: "trained" if trained else "kept", is_trained)
    return optax.partition({"trained": update, "kept": optax.set_to_zero()}, labels)


def schedule_free_average(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Returns the parameters x that `schedule_free` recommends for evaluation.

    Gradients are taken at `params`, y = (1 - b1) z + b1 x, and `opt_state` has z: "The Road Less Scheduled" (Defazio et
    al. 2024, equations 3 to 5). Parameters that are not trained stay as they are.
    """
    kind = optax.contrib.ScheduleFreeState
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    (state,) = (leaf for leaf in leaves if isinstance(leaf, kind))

    def average(z: Any, y: Any) -> Any:
        return y if isinstance(z, optax.MaskedNode) else (y - (1 - state.b1) * z) / state.b1

    return jax.tree.map(average, state.z, params, is_leaf=lambda z: isinstance(z, optax.MaskedNode))


def _direction(settings: config.OptimizerConfig, options: ParameterOptions) -> optax.GradientTransformation:
    """Returns the transformation of gradients into the direction that, times the learning rate, is subtracted."""
    if settings.name == "sgd":
        return optax.trace(settings.mean_decay)
    if settings.name == "lion":
        return optax.scale_by_lion(settings.mean_decay, settings.square_decay)
    if settings.name == "schedule_free":
        return optax.scale_by_rms(
            settings.square_decay, settings.added_epsilon, eps_in_sqrt=False, bias_correction=True
        )
    if settings.name == "adafactor":
        return _adafactor(settings)
    adam = optax.scale_by_adam(settings.mean_decay, settings.square_decay, settings.added_epsilon)
    if settings.name in ("adam", "adamw"):
        return adam
    assert settings.name == "muon"
    labels = jax.tree.map(lambda matrix: "muon" if matrix else "adam", options.orthogonalized)
    return optax.partition({"muon": _muon(settings), "adam": adam}, labels)


def _adafactor(settings: config.OptimizerConfig) -> optax.GradientTransformation:
    """Returns "Adafactor" (Shazeer and Stern 2018, algorithm 4 with the decay of section 7.2), as `optax.adafactor`."""
    update = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_SIZE, epsilon=settings.added_epsilon),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    update = _by_layer(update)
    return (
        optax.chain(update, optax.ema(settings.mean_decay, debias=False)) if settings.mean_decay else update
    )


def _muon(settings: config.OptimizerConfig) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024), whose updates have the root mean square of AdamW's for any shape."""

    def axes(matrices: optax.Params) -> Any:
        # Leading axes, such as that of stacked layers, are a batch of matrices.
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), matrices)

    def scale(matrices: optax.Params, _: Any) -> optax.Params:
        return jax.tree.map(lambda matrix: _MUON_RMS * max(matrix.shape[-2:]) ** 0.5 * matrix, matrices)

    orthogonalize = optax.contrib.scale_by_muon(
        beta=settings.momentum, eps=settings.added_epsilon, weight_dimension_numbers=axes
    )
    return optax.chain(orthogonalize, optax.stateless(scale))


def _by_layer(update: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer of single arrays as one that treats each layer of stacked arrays as an array."""
    layers = jax.tree_util.DictKey("stacked_blocks")

    def axes(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: 0 if layers in path else None, tree)

    def count(params: optax.Params) -> int:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return next((len(leaf) for path, leaf in leaves if layers in path), 1)

    def init(params: optax.Params) -> optax.OptState:
        out = axes(jax.eval_shape(update.init, params))
        return jax.vmap(update.init, (axes(params),), out, axis_size=count(params))(params)

    def update_layers(changes: optax.Updates, state: Any, params: Any) -> tuple[optax.Updates, Any]:
        each = (axes(changes), axes(state), axes(params))
        return jax.vmap(update.update, each, each[:2], axis_size=count(params))(changes, state, params)

    return optax.GradientTransformation(init, update_layers)
