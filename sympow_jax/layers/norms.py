"""Normalization over the width, or over the batch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers
from sympow_jax.ops.promotion import by_default_rules

# Factor of the old running mean at each batch.
MOMENTUM = 0.9

Norm = nnx.LayerNorm | nnx.RMSNorm | nnx.BatchNorm
"""Type of the modules that `make_norm` returns."""


def make_norm(config: config_lib.ModelConfig, dtype: Any, *, rngs: nnx.Rngs | int) -> Norm:
    """Returns the normalization that `config.norm` names, with float32 statistics and results in `dtype`.

    Inputs of `layer` are rounded to `dtype` first. Those of `rms` and `batch` are not.

    Batch normalization ("Batch Normalization", Ioffe and Szegedy 2015) uses its running statistics until the model's
    `train()` is called. From then on, it uses the statistics of the batch, with the biased variance, and moves the
    running ones by a tenth of the difference. The running statistics are variables of the kind `nnx.BatchStat`.

    Examples:
        >>> from flax import nnx
        >>> from sympow_jax import config, layers
        >>> model = config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2)
        >>> type(layers.make_norm(model, "bfloat16", rngs=nnx.Rngs(0))).__name__
        'LayerNorm'
    """
    return _MAKERS[config.norm](
        config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=initializers.as_rngs(rngs)
    )


def rms_norm(size: int, *, epsilon: float, dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Returns the module that computes x / sqrt(mean(x^2) + epsilon) times a scale over the last axis.

    Source: "Root Mean Square Layer Normalization", Zhang and Sennrich 2019. Inputs are not rounded to `dtype`, the
    dtype of the result.
    """
    return nnx.RMSNorm(size, epsilon=epsilon, dtype=dtype, promote_dtype=_unchanged, rngs=rngs)


@by_default_rules
def normalize(
    norm: Norm, x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
) -> Float[Array, "B T M"]:
    """Returns x normalized; padding (a negative segment id) is excluded from the statistics.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from sympow_jax import config, layers
        >>> model = config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2)
        >>> norm = layers.make_norm(model, "float32", rngs=nnx.Rngs(0))
        >>> layers.normalize(norm, jnp.ones((1, 16, 32)), None).shape
        (1, 16, 32)
    """
    if isinstance(norm, nnx.BatchNorm):
        return norm(x, mask=None if segment_ids is None else segment_ids[..., None] >= 0)
    return _apply(*nnx.split(norm), x)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _apply(graph, parameters, x):
    """Applies a module without mutable variables; jit compiles it once instead of dispatching some twenty ops."""
    return nnx.merge(graph, parameters)(x)


def _unchanged(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    # Keeps the inputs and the running statistics of `rms` and `batch` in float32. Flax would round them to `dtype`
    # first, as it rounds those of `layer`.
    del dtype, inexact
    return arrays


_MAKERS: Mapping[str, Callable[..., Norm]] = {
    "layer": nnx.LayerNorm,
    "rms": rms_norm,
    "batch": functools.partial(
        nnx.BatchNorm,
        use_running_average=True,
        momentum=MOMENTUM,
        use_fast_variance=False,
        promote_dtype=_unchanged,
    ),
}
