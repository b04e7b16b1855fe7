"""Protects the rounding of 16-bit arrays, since XLA may otherwise compute with the values before it."""

import jax
import jax.numpy as jnp


def rounded(arrays):
    """Returns a tree of arrays in which XLA cannot remove the rounding of 16-bit ones.

    XLA skips a conversion to 16 bits and back where it fuses both, which may be in one pass and not in the other. The
    backward pass divides the weights of its own scores by the forward pass's sum of weights. With other keys and
    queries, a weight that is close to zero and alone in its sum would not come out as 1 but as anything: at 4,096
    tokens of the 124M model, a ratio beyond float16's range made the gradients NaN.
    """

    def keep(x):
        return jax.lax.optimization_barrier(x) if jnp.dtype(x.dtype).itemsize == 2 else x

    return jax.tree.map(keep, arrays)
