"""The feed-forward half of a block."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.array_types import Array, Float
from sympow_jax.layers import initializers
from sympow_jax.ops import arguments
from sympow_jax.ops.promotion import by_default_rules

Activation = Callable[[Float[Array, "B T H"]], Float[Array, "B T H"]]


# Those of JAX are objects that `pickle` refuses, and with them a model.
def _relu(x: Array) -> Array:
    return nnx.relu(x)


def _silu(x: Array) -> Array:
    return nnx.silu(x)


class MLP(nnx.Module):
    """Feed-forward layer W_2 f(W_1 x + b_1) + b_2, as in GPT-2; biases only with `use_bias`.

    Args:
        width: M, the size of the input and of the output.
        hidden_width: number of hidden units.
        activation: f. The default, `nnx.gelu`, is the tanh approximation of gelu, as in GPT-2.
        dtype: dtype of the matrix products, by name or as a dtype; parameters are float32.
        use_bias: whether there are biases.
        out_scale: factor of the initial standard deviation of the output projection.
        rngs: source of initial values, or a seed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import layers
        >>> layers.MLP(32, 128, rngs=0)(jnp.ones((1, 16, 32))).shape
        (1, 16, 32)
    """

    is_gated: ClassVar[bool] = False

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        activation: Activation = nnx.gelu,
        dtype: Any = jnp.float32,
        use_bias: bool = False,
        out_scale: float = 1.0,
        rngs: nnx.Rngs | int,
    ):
        rngs = initializers.as_rngs(rngs)
        width = arguments.check_integer("width", width, 1)
        hidden_width = arguments.check_integer("hidden_width", hidden_width, 1)
        linear = functools.partial(initializers.Linear, dtype=dtype, use_bias=use_bias, rngs=rngs)
        self.activation = activation
        self.up = linear(width, hidden_width, names=("embed", "mlp"))
        self.down = linear(hidden_width, width, names=("mlp", "embed"), scale=out_scale)
        if self.is_gated:
            self.gate = linear(width, hidden_width, names=("embed", "mlp"))

    @by_default_rules
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        # The backward pass computes the derivative again from arrays that are kept anyway: it is as large as x, and to
        # write and read it takes longer than to compute it.
        activated = jax.checkpoint(lambda x, *factors: math.prod(factors, start=self.activation(x)))
        hidden = initializers.project(x, *([self.gate] if self.is_gated else []), self.up)
        (out,) = initializers.project(activated(*hidden), self.down)
        return out


class GatedMLP(MLP):
    """Feed-forward layer W_2 (f(W_g x) * W_1 x) ("GLU Variants Improve Transformer", Shazeer 2020).

    f is silu in SwiGLU, the default here, and gelu in GeGLU. Arguments are those of `MLP`; with `use_bias`, all three
    projections have biases.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import layers
        >>> layers.GatedMLP(32, 96, rngs=0)(jnp.ones((1, 16, 32))).shape
        (1, 16, 32)
    """

    is_gated = True

    def __init__(self, width: int, hidden_width: int, *, activation: Activation = _silu, **options: Any):
        super().__init__(width, hidden_width, activation=activation, **options)


_KINDS: Mapping[str, tuple[type[MLP], Activation]] = {
    "gelu": (MLP, nnx.gelu),
    "relu": (MLP, _relu),
    "swiglu": (GatedMLP, _silu),
    "geglu": (GatedMLP, nnx.gelu),
}


def make_mlp(config: config_lib.ModelConfig, *, rngs: nnx.Rngs | int) -> MLP:
    """Returns the feed-forward layer of a model's blocks, of the class that `config.activation` names.

    Examples:
        >>> from sympow_jax import config, layers
        >>> model = config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2, activation="swiglu")
        >>> type(layers.make_mlp(model, rngs=0)).__name__
        'GatedMLP'
    """
    kind, activation = _KINDS[config.activation]
    return kind(
        config.width,
        config.hidden_width,
        activation=activation,
        dtype=config.dtype,
        use_bias=config.biases,
        # GPT-2's scale: the residual stream is the sum of 2 * layers outputs.
        out_scale=1 / math.sqrt(2 * config.layers),
        rngs=rngs,
    )


def num_weights(config: config_lib.ModelConfig) -> int:
    """Returns the number of weights in the matrices of a model's feed-forward layer."""
    matrices = 3 if _KINDS[config.activation][0].is_gated else 2
    return matrices * config.width * config.hidden_width
