"""Normalization over the width, or over the batch."""

from typing import Any

from flax import nnx

from sympow_jax import config as configs
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers

__all__ = ["EPSILON", "MOMENTUM", "Norm", "make_norm", "normalize"]

EPSILON = 1e-5  # GPT-2's, and everybody's for batch normalization
# What a running mean keeps at each batch.
MOMENTUM = 0.9

Norm = nnx.LayerNorm | nnx.BatchNorm
"""What `make_norm` makes."""


def make_norm(config: configs.ModelConfig, dtype: Any, *, rngs: nnx.Rngs | int) -> Norm:
    """The normalization that `config.norm` names, its statistics in float32 and its results in `dtype`.

    Batch normalization ("Batch Normalization", Ioffe and Szegedy 2015) uses its running means until the model's
    `train()` is called; then those of the batch, each with the biased variance, and moves the running ones by a tenth
    of the difference. They are variables of the kind `nnx.BatchStat`.

    Examples:
        >>> from flax import nnx
        >>> from sympow_jax import config, layers
        >>> model = config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2)
        >>> type(layers.make_norm(model, "bfloat16", rngs=nnx.Rngs(0))).__name__
        'LayerNorm'
    """
    rngs = initializers.as_rngs(rngs)
    if config.norm == "layer":
        return nnx.LayerNorm(config.width, epsilon=EPSILON, dtype=dtype, rngs=rngs)
    return nnx.BatchNorm(
        config.width,
        use_running_average=True,
        momentum=MOMENTUM,
        epsilon=EPSILON,
        dtype=dtype,
        use_fast_variance=False,
        promote_dtype=_unchanged,
        rngs=rngs,
    )


def normalize(
    norm: Norm, x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
) -> Float[Array, "B T M"]:
    """x normalized; padding (a negative segment id) counts in no mean.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from sympow_jax import config, layers
        >>> model = config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2)
        >>> norm = layers.make_norm(model, "float32", rngs=nnx.Rngs(0))
        >>> layers.normalize(norm, jnp.ones((1, 16, 32)), None).shape
        (1, 16, 32)
    """
    if isinstance(norm, nnx.LayerNorm):
        return norm(x)
    return norm(x, mask=None if segment_ids is None else segment_ids[..., None] >= 0)


def _unchanged(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    # The residual stream and the statistics are float32; Flax would round them first.
    del dtype, inexact
    return arrays
