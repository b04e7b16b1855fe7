"""The feed-forward half of a block."""

import math
from typing import Any

from flax import nnx

from sympow_jax import config as configs
from sympow_jax.array_types import Array, Float
from sympow_jax.layers import initializers

__all__ = ["MLP"]

_ACTIVATIONS = {"gelu": nnx.gelu, "relu": nnx.relu}


class MLP(nnx.Module):
    """Feed-forward layer W_2 f(W_1 x + b_1) + b_2 as in GPT-2, where f is `config.activation`.

    The biases exist only if `config.biases`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from sympow_jax import config, layers
        >>> layer = layers.MLP(config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 16, 32))).shape
        (1, 16, 32)
    """

    def __init__(self, config: configs.ModelConfig, *, rngs: nnx.Rngs | int):
        rngs = initializers.as_rngs(rngs)
        hidden = config.mlp_ratio * config.width
        options: dict[str, Any] = {"dtype": config.dtype, "use_bias": config.biases, "rngs": rngs}
        self.activation = _ACTIVATIONS[config.activation]
        self.up = initializers.linear(config.width, hidden, names=("embed", "mlp"), **options)
        # GPT-2's scale: the residual stream is the sum of 2 * layers outputs.
        scale = 1 / math.sqrt(2 * config.layers)
        self.down = initializers.linear(hidden, config.width, names=("mlp", "embed"), scale=scale, **options)

    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        (hidden,) = initializers.project(x, self.up)
        (out,) = initializers.project(self.activation(hidden), self.down)
        return out
