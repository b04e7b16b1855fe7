"""Optax optimizers from an `OptimizerConfig`.

Layers may be stacked (`stacking`). The arrays of `stacked_blocks` then have a leading axis of layers. Every optimizer
treats the array of each layer separately, so its updates are the same with and without stacking.
"""

import fnmatch
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from sympow_jax import config, models, spelling
from sympow_jax.training import stacking

__all__ = [
    "ParameterOptions",
    "learning_rate",
    "make_optimizer",
    "parameter_options",
    "schedule_free_average",
]

# Root mean square of muon's updates, with which they need the learning rate and the weight decay of AdamW: "Muon is
# Scalable for LLM Training" (Liu et al. 2025, section 2.2).
_MUON_RMS = 0.2


class ParameterOptions(NamedTuple):
    """Options of an optimizer for each parameter, as trees like the parameters.

    Attributes:
        learning_rate: factors of the learning rate; arrays with one per layer where parameters are stacked.
        weight_decay: factors of the weight decay, in the same form. They are 0 except for matrices.
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
    assert peak is not None  # after initialization, it is a number
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
        decay = functools.partial(_inverse_sqrt, peak, warmup)
    if not warmup:
        return lambda count: decay(count + 1)
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])
    return lambda count: schedule(count + 1)


def parameter_options(settings: config.OptimizerConfig, params: optax.Params) -> ParameterOptions:
    """Returns the options of each parameter; layers must not be stacked.

    A factor is the product of the factors of all patterns that the parameter's name matches.

    Raises:
        ValueError: a pattern of `learning_rate_factors` matches no parameter, or one of `weight_decay_factors` no
            matrix; or, for `muon`, a pattern of `orthogonalized` matches no matrix, unless it is one of the defaults
            and another one matches.
    """
    names = jax.tree_util.tree_map_with_path(lambda path, _: models.parameter_name(path), params)
    matrices = jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
    rate_factors = settings.factors_by_pattern("learning_rate_factors")
    decay_factors = settings.factors_by_pattern("weight_decay_factors")
    parameter_names = jax.tree.leaves(names)
    matrix_names = [name for name, is_matrix in zip(parameter_names, jax.tree.leaves(matrices)) if is_matrix]
    _require_matches("learning_rate_factors", [x for x, _ in rate_factors], parameter_names, "parameter")
    _require_matches("weight_decay_factors", [x for x, _ in decay_factors], matrix_names, "matrix")

    def is_orthogonalized(name: str, leaf: Any) -> bool:
        # By the name of any layer, because an update may run all layers as one.
        (name,) = models.names_of_any_layer([name])
        return leaf.ndim == 2 and any(fnmatch.fnmatchcase(name, x) for x in settings.orthogonalized)

    orthogonalized = jax.tree.map(is_orthogonalized, names, params)
    if settings.name == "muon":
        matrix_names = models.names_of_any_layer(matrix_names)
        defaults = config.OptimizerConfig().orthogonalized
        own = [pattern for pattern in settings.orthogonalized if pattern not in defaults]
        _require_matches("orthogonalized", own, matrix_names, "matrix")
        if not any(jax.tree.leaves(orthogonalized)):
            raise ValueError(
                f"optimizer.orthogonalized is {settings.orthogonalized} and matches no matrix; the matrices are "
                f"{', '.join(matrix_names)}"
            )
    return ParameterOptions(
        learning_rate=jax.tree.map(lambda name: _product(rate_factors, name), names),
        weight_decay=jax.tree.map(
            lambda name, is_matrix: _product(decay_factors, name) if is_matrix else 0, names, matrices
        ),
        orthogonalized=orthogonalized,
    )


def _product(pairs: Sequence[tuple[str, float]], name: str) -> float:
    return math.prod(factor for pattern, factor in pairs if fnmatch.fnmatchcase(name, pattern))


def _require_matches(setting: str, patterns: Sequence[str], names: Sequence[str], kind: str) -> None:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            remedy = spelling.remedy(
                pattern, names, otherwise=f"the names are {', '.join(models.names_of_any_layer(names))}"
            )
            raise ValueError(
                f"optimizer.{setting} has the pattern {pattern!r}, which matches no {kind}; {remedy}"
            )


def make_optimizer(
    settings: config.OptimizerConfig, steps: int, options: ParameterOptions, is_trained: Any
) -> optax.GradientTransformation:
    """Returns the optimizer with clipping, weight decay, learning rates by parameter, and frozen parameters.

    Gradients are clipped by the global norm of those of trained parameters. Each update, including its weight decay, is
    multiplied by its factor of the learning rate. Frozen parameters have no state.

    Args:
        settings: settings of the optimizer.
        steps: number of updates, at which the schedules end.
        options: options of each parameter, stacked where the parameters are.
        is_trained: tree of whether each parameter is trained; all others are frozen.
    """
    rate = learning_rate(settings, steps)
    factors = optax.stateless(lambda changes, _: jax.tree.map(_scaled, options.learning_rate, changes))
    stages = [_direction(settings, options)]
    # AdamW always has the weight-decay stage, so that its state has one structure with and without decay.
    if settings.weight_decay or settings.name == "adamw":
        stages.append(_weight_decay(settings, options))
    update = optax.chain(*stages, optax.scale_by_learning_rate(rate))
    if settings.name == "schedule_free":
        # Factors scale the steps of z, of which x is the mean.
        update = optax.contrib.schedule_free(
            optax.chain(update, factors),
            lambda update_number: rate(update_number - 1),
            b1=settings.b1,
        )
    if settings.clip_norm is not None:
        update = optax.chain(optax.clip_by_global_norm(settings.clip_norm), update)
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
        return optax.trace(settings.b1)
    if settings.name == "lion":
        return optax.scale_by_lion(settings.b1, settings.b2)
    if settings.name == "schedule_free":
        return optax.scale_by_rms(settings.b2, settings.epsilon, eps_in_sqrt=False, bias_correction=True)
    if settings.name == "adafactor":
        return _adafactor(settings)
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.epsilon)
    if settings.name != "muon":
        return adam
    labels = jax.tree.map(lambda matrix: "muon" if matrix else "adam", options.orthogonalized)
    return optax.partition({"muon": _muon(settings), "adam": adam}, labels)


def _adafactor(settings: config.OptimizerConfig) -> optax.GradientTransformation:
    """Returns "Adafactor" (Shazeer and Stern 2018, algorithm 4 with the decay of section 7.2), as `optax.adafactor`."""
    parts = [
        optax.scale_by_factored_rms(min_dim_size_to_factor=settings.factored_size, epsilon=settings.epsilon),
        optax.clip_by_block_rms(1.0),
    ]
    if settings.parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    update = _by_layer(optax.chain(*parts))
    return optax.chain(update, optax.ema(settings.b1, debias=False)) if settings.b1 else update


def _muon(settings: config.OptimizerConfig) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024), whose updates have the root mean square of AdamW's for any shape."""

    def axes(matrices: optax.Params) -> Any:
        # Leading axes, such as that of stacked layers, are a batch of matrices.
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), matrices)

    def scale(matrices: optax.Params, _: Any) -> optax.Params:
        return jax.tree.map(lambda matrix: _MUON_RMS * max(matrix.shape[-2:]) ** 0.5 * matrix, matrices)

    orthogonalize = optax.contrib.scale_by_muon(
        beta=settings.momentum, eps=settings.epsilon, weight_dimension_numbers=axes
    )
    return optax.chain(orthogonalize, optax.stateless(scale))


def _weight_decay(
    settings: config.OptimizerConfig, options: ParameterOptions
) -> optax.GradientTransformation:
    """Returns decoupled weight decay, before the learning rate; its state has no arrays."""

    def add(changes: optax.Updates, params: optax.Params) -> optax.Updates:
        return jax.tree.map(add_one, options.weight_decay, changes, params)

    def add_one(factor: Any, change: Any, param: Any) -> Any:
        if not settings.weight_decay or isinstance(change, optax.MaskedNode):
            return change
        return change + _scaled(factor, settings.weight_decay * param)

    return optax.masked(
        optax.stateless(add), jax.tree.map(lambda factor: bool(np.any(factor)), options.weight_decay)
    )


def _by_layer(update: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer of single arrays as one that treats each layer of stacked arrays as an array."""

    def axes(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: 0 if stacking.is_stacked(path) else None, tree
        )

    def has_layers(params: optax.Params) -> bool:
        return any(axis is not None for axis in jax.tree.leaves(axes(params), is_leaf=lambda x: x is None))

    def init(params: optax.Params) -> optax.OptState:
        if not has_layers(params):
            return update.init(params)
        state = jax.eval_shape(update.init, params)
        return jax.vmap(update.init, in_axes=(axes(params),), out_axes=axes(state))(params)

    def update_layers(changes: optax.Updates, state: Any, params: Any) -> tuple[optax.Updates, Any]:
        if not has_layers(params):
            return update.update(changes, state, params)
        each = (axes(changes), axes(state), axes(params))
        return jax.vmap(update.update, in_axes=each, out_axes=each[:2])(changes, state, params)

    return optax.GradientTransformation(init, update_layers)


def _inverse_sqrt(peak: float, warmup: int, since_warmup: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    return peak * (max(warmup, 1) / (warmup + since_warmup)) ** 0.5


def _scaled(factor: Any, change: Any) -> Any:
    """Returns the change times its factor, or its factors by layer; a masked one as it is."""
    if isinstance(change, optax.MaskedNode) or np.all(factor == 1):
        return change
    factor = np.asarray(factor, change.dtype)
    return change * factor.reshape(*factor.shape, *[1] * (change.ndim - factor.ndim))
