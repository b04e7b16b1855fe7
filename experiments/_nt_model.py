"""The one-layer transformer of the NT tasks, small enough to train many times over in one program.

"Reorganizing attention-space geometry with expressive attention" (Gros 2024), section 4: one head as wide as the base,
one-hot symbols, no positions, LayerNorm before attention and before the feed-forward layer, skip connections, and one
matrix from all positions to the next symbol. Weights are every position's own, which its 802 parameters (N = 2, 16
positions) count, or shared by all.

Of the 802, 66 are the readout's, with a bias, and 46 a position's: 12 in attention, 32 in the feed-forward layer, and a
vector of 2. Here this is the bias of both LayerNorms, whose gains are those of the matrices behind them. Without one
the model could not tell apart what XOR is of: for N = 2, LayerNorm leaves a sign, z^2 would be the same for all symbols
and the outputs odd functions of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int

__all__ = ["ATTENTIONS", "INITIALS", "WEIGHTS", "Model", "attention_weights"]

ATTENTIONS = ("expressive", "softmax")
WEIGHTS = ("shared", "position")
INITIALS = ("normal", "uniform")
_EPSILON = 1e-5
_FEED_FORWARD = 4  # widths of the hidden layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The model of one attention: its parameters are a dict of arrays."""

    attention: str
    base: int
    context: int
    weights: str = "shared"
    initial_weights: str = "normal"

    def initial(self, key: Array) -> dict[str, Array]:
        """Random parameters, which the paper does not give: biases of zero, and matrices, for n that they multiply,
        `normal` of variance 1 / n or `uniform` within 1 / sqrt(n), of a third of that variance, as PyTorch has it.
        """
        width, hidden = self.base, _FEED_FORWARD * self.base
        own = (self.context,) if self.weights == "position" else ()
        shapes = {
            "attention": (*own, width, 3 * width),
            "hidden": (*own, width, hidden),
            "output": (*own, hidden, width),
            "readout": (self.context * width, width),
        }
        keys = jax.random.split(key, len(shapes))
        draw = jax.random.normal if self.initial_weights == "normal" else _uniform
        drawn = {
            name: draw(key, shape) / np.sqrt(shape[-2])
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return drawn | {"norm_bias": jnp.zeros((*own, width)), "readout_bias": jnp.zeros(width)}

    def parameters(self) -> int:
        """How many numbers are trained."""
        shapes = jax.eval_shape(self.initial, jax.random.key(0))
        return sum(x.size for x in shapes.values())

    def outputs(self, parameters: dict[str, Array], symbols: Int[Array, " T"]) -> Float[Array, " base"]:
        """What is to be the one-hot next symbol."""
        multiply = "ti,tij->tj" if self.weights == "position" else "ti,ij->tj"

        def times(x, name):
            return jnp.einsum(multiply, x, parameters[name])

        bias = parameters["norm_bias"]
        x = jax.nn.one_hot(symbols, self.base)
        query, key, value = jnp.split(times(_normalized(x) + bias, "attention"), 3, axis=-1)
        x = x + attention_weights(self.attention, query @ key.T) @ value
        x = x + times(jnp.tanh(times(_normalized(x) + bias, "hidden")), "output")
        return x.reshape(-1) @ parameters["readout"] + parameters["readout_bias"]

    def loss(
        self, parameters: dict[str, Array], symbols: Int[Array, " T"], following: Int[Array, ""]
    ) -> Array:
        """The squared error of the outputs, averaged over them."""
        return jnp.square(self.outputs(parameters, symbols) - jax.nn.one_hot(following, self.base)).mean()


def attention_weights(attention: str, scores: Float[Array, "T T"]) -> Float[Array, "T T"]:
    """Each position's weights of itself and those before it: equation 2, or equation 1 with beta = 1.

    `ops.expressive_attention` divides time into blocks, which are longer than all of this time.
    """
    seen = np.tri(len(scores), dtype=bool)
    if attention == "softmax":
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    weights = jnp.where(seen, 1 - 1 / (1 + jnp.square(scores)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def _uniform(key, shape):
    return jax.random.uniform(key, shape, minval=-1, maxval=1)


def _normalized(x):
    # Not `jax.nn.standardize`, whose E[x^2] - E[x]^2 cancels where the entries of x are all but equal.
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + _EPSILON)
