"""Optax optimizers from an `OptimizerConfig`."""

import functools

import jax
import optax

from sympow_jax import config

__all__ = ["learning_rate", "make_optimizer"]


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


def make_optimizer(
    settings: config.OptimizerConfig, steps: int, params: optax.Params
) -> optax.GradientTransformation:
    """Returns Adam, AdamW (decay on matrices only) or SGD with momentum `b1`, after clipping by global norm.

    Args:
        settings: settings of the optimizer.
        steps: number of updates, at which the schedules end.
        params: tree of the parameters' shapes, of one layer where they are stacked.
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
    if settings.clip_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), update)


def _inverse_sqrt(peak: float, warmup: int, since_warmup: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    return peak * (max(warmup, 1) / (warmup + since_warmup)) ** 0.5
