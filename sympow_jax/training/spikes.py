"""Updates that are skipped because their loss or gradients are not finite, or their gradients are too large."""

import jax.numpy as jnp

from sympow_jax import config
from sympow_jax.array_types import Array, Bool, Float

__all__ = ["begin", "judge"]

# Weight of the previous mean of norms, which so goes back about 50 updates.
_DECAY = 0.98
# Norms before the first comparison. The first norms of a run are often its largest.
_HISTORY = 20


def begin() -> dict[str, Array]:
    """Returns `TrainState.skips` before the first update.

    It has the number of skipped updates, `total` and `in_a_row`, and of those that were done, `done`. `norms` is the
    exponential moving sum of the gradient norms of the latter, whose mean is `norms / (1 - decay^done)`.
    """
    return {name: jnp.int32(0) for name in ("total", "in_a_row", "done")} | {"norms": jnp.float32(0)}


def judge(
    settings: config.TrainingConfig,
    skips: dict[str, Array],
    loss: Float[Array, ""],
    norm: Float[Array, ""],
) -> tuple[Bool[Array, ""], dict[str, Array]]:
    """Returns whether an update is done, and the new `TrainState.skips`.

    Args:
        settings: settings of the training.
        skips: state after the update before.
        loss: loss of the update.
        norm: global norm of its gradients, before clipping.
    """
    is_good = jnp.bool(True)
    if settings.skip_nonfinite:
        is_good &= jnp.isfinite(loss) & jnp.isfinite(norm)
    if settings.skip_spikes is not None:
        mean = skips["norms"] / (1 - _DECAY ** skips["done"])
        is_good &= (skips["done"] < _HISTORY) | ~(norm > settings.skip_spikes * mean)
    return is_good, {
        "total": skips["total"] + ~is_good,
        "in_a_row": jnp.where(is_good, 0, skips["in_a_row"] + 1),
        "done": skips["done"] + is_good,
        "norms": jnp.where(is_good, _DECAY * skips["norms"] + (1 - _DECAY) * norm, skips["norms"]),
    }
