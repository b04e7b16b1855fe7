"""One-layer transformer for the NT tasks, small enough to train many copies in one program.

"Reorganizing attention-space geometry with expressive attention" (Gros 2024), section 4: one head as wide as the base,
one-hot symbols, no positions, LayerNorm before attention and before the feed-forward layer, skip connections, and one
matrix from all positions to the next symbol. Weights are either separate for each position, as the paper's count of 802
parameters (N = 2, 16 positions) implies, or shared by all positions.

Of the 802 parameters, 66 belong to the readout with its bias. Each position has 46: 12 in attention, 32 in the
feed-forward layer, and a vector of 2 that the paper does not name. Here that vector is the bias of both LayerNorms; the
matrices after them absorb their gains. Without the bias the model could not compute XOR: for N = 2 LayerNorm leaves
only a sign, so z^2 would be the same for all symbols and the outputs would be odd functions of them.
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
_FEED_FORWARD = 4  # ratio of the hidden layer's width to the model's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model with one kind of attention; its parameters are a dict of arrays."""

    attention: str
    base: int
    context: int
    weights: str = "shared"
    initial_weights: str = "normal"

    def initial(self, key: Array) -> dict[str, Array]:
        """Draws random parameters; the paper does not specify how.

        Biases are zero. Matrices with n inputs are `normal` with variance 1 / n, or `uniform` within 1 / sqrt(n), which
        is a third of that variance and PyTorch's default.
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
        """Returns the number of trained parameters."""
        shapes = jax.eval_shape(self.initial, jax.random.key(0))
        return sum(x.size for x in shapes.values())

    def outputs(self, parameters: dict[str, Array], symbols: Int[Array, " T"]) -> Float[Array, " base"]:
        """Computes the outputs, which are trained to be the one-hot next symbol."""
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
        """Computes the mean squared error of the outputs."""
        return jnp.square(self.outputs(parameters, symbols) - jax.nn.one_hot(following, self.base)).mean()


def attention_weights(attention: str, scores: Float[Array, "T T"]) -> Float[Array, "T T"]:
    """Computes causal attention weights by equation 2, or for softmax by equation 1 with beta = 1.

    It does not call `ops.expressive_attention`, whose blocks of time are longer than these whole sequences.
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
    # Not `jax.nn.standardize`, whose E[x^2] - E[x]^2 cancels if the entries of x are nearly equal.
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + _EPSILON)
