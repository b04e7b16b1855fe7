"""Optax optimizers from an `OptimizerConfig`."""

import fnmatch
import functools
import math
from typing import Any

import jax
import numpy as np
import optax

from sympow_jax import config, models, spelling

__all__ = ["factors", "learning_rate", "make_optimizer"]


def learning_rate(settings: config.OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a schedule from `count`, the number of previous updates, to the learning rate.

    For update u = count + 1 and w warm-up steps, the rate is `learning_rate * u / w` up to u = w. Then it depends on
    the schedule. `constant` stays. `cosine` is a half cosine and `polynomial` a straight line (degree 1); both reach
    `final_fraction * learning_rate` at update `steps`. `inverse_sqrt` is `learning_rate * sqrt(w / u)`, with w at
    least 1.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if settings.schedule == "constant":
        decay = optax.constant_schedule(peak)
    elif settings.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=settings.final_fraction)
    elif settings.schedule == "polynomial":
        decay = optax.polynomial_schedule(
            peak, settings.final_fraction * peak, power=1, transition_steps=max(steps - warmup, 1)
        )
    else:
        decay = functools.partial(_inverse_sqrt, peak, warmup)
    if not warmup:
        return lambda count: decay(count + 1)
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])
    return lambda count: schedule(count + 1)


def factors(settings: config.OptimizerConfig, params: optax.Params) -> Any:
    """Returns the factor of each parameter's learning rate, for parameters by layer.

    It is the product of the factors of all patterns in `learning_rate_factors` that the parameter's name matches.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    names = jax.tree_util.tree_map_with_path(lambda path, _: models.parameter_name(path), params)
    known = jax.tree.leaves(names)
    pairs = settings.factors_by_pattern
    for pattern, _ in pairs:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            near = spelling.remedy(
                pattern, known, otherwise=f"the names are {', '.join(models.names_of_any_layer(known))}"
            )
            raise ValueError(
                f"optimizer.learning_rate_factors has the pattern {pattern!r}, which matches no parameter; {near}"
            )
    return jax.tree.map(
        lambda name: math.prod(factor for pattern, factor in pairs if fnmatch.fnmatchcase(name, pattern)),
        names,
    )


def make_optimizer(
    settings: config.OptimizerConfig, steps: int, params: optax.Params, factors: Any, trained: Any
) -> optax.GradientTransformation:
    """Returns Adam, AdamW (decay on matrices only) or SGD with momentum `b1`, after clipping by global norm.

    Updates, with their weight decay, are then multiplied by the factors, which have no state. Parameters that are not
    trained stay as they are and have no state.

    Args:
        settings: settings of the optimizer.
        steps: number of updates, at which the schedules end.
        params: shapes of the parameters; of stacked ones, those of a single layer, which weight decay looks at.
        factors: tree of the factors of the learning rate, arrays of one per layer where parameters are stacked.
        trained: tree of whether each parameter is trained.
    """
    rate = learning_rate(settings, steps)
    if settings.name == "adam":
        update = optax.adam(rate, settings.b1, settings.b2, settings.epsilon)
    elif settings.name == "adamw":
        update = optax.adamw(
            rate,
            settings.b1,
            settings.b2,
            settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        )
    else:
        update = optax.sgd(rate, momentum=settings.b1)
    if settings.clip_norm is not None:
        update = optax.chain(optax.clip_by_global_norm(settings.clip_norm), update)
    if settings.learning_rate_factors:
        update = optax.chain(
            update, optax.stateless(lambda changes, _: jax.tree.map(_scaled, changes, factors))
        )
    if all(jax.tree.leaves(trained)):
        return update
    labels = jax.tree.map(lambda trains: "trained" if trains else "kept", trained)
    return optax.partition({"trained": update, "kept": optax.set_to_zero()}, labels)


def _inverse_sqrt(peak: float, warmup: int, since_warmup: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    return peak * (max(warmup, 1) / (warmup + since_warmup)) ** 0.5


def _scaled(change: Any, factor: Any) -> Any:
    """Returns the change times its factor, or its factors by layer."""
    if np.all(factor == 1):
        return change
    factor = np.asarray(factor, change.dtype)
    return change * factor.reshape(*factor.shape, *[1] * (change.ndim - factor.ndim))
