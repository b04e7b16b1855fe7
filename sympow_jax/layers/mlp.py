"""The feed-forward half of a block."""

from flax import nnx

from sympow_jax import config as configs
from sympow_jax.array_types import Array, Float
from sympow_jax.layers import initializers

__all__ = ["MLP"]

_ACTIVATIONS = {"gelu": nnx.gelu, "relu": nnx.relu}


class MLP(nnx.Module):
    """W_2 f(W_1 x + b_1) + b_2, as in GPT-2, with biases if `config.biases`; f is `config.activation`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from sympow_jax import config, layers
        >>> layer = layers.MLP(config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 16, 32))).shape
        (1, 16, 32)
    """

    def __init__(self, config: configs.ModelConfig, *, rngs: nnx.Rngs):
        hidden = config.mlp_ratio * config.width
        self.activation = _ACTIVATIONS[config.activation]
        self.up = initializers.linear(config, config.width, hidden, rngs=rngs)
        self.down = initializers.linear(config, hidden, config.width, residual=True, rngs=rngs)

    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        (hidden,) = initializers.project(x, self.up)
        (out,) = initializers.project(self.activation(hidden), self.down)
        return out
