"""Predicts times of the kernels on an H100 from a model with few constants, none of them measured.

The constants are fitted to the predictions in pallas_kernels/README.md: those of each kernel, and those of the chunked
form as a whole, for b1 n8 T = 65,536. They are seconds per head.
"""

import jax.numpy as jnp

from pallas_kernels import power_state
from sympow_jax.ops import feature_maps

# Ratio of forward and backward together to forward alone.
BOTH_PASSES = {"attention": 5.3, "chunked": 3.1}
# To launch a call.
LAUNCH = {"attention": 10e-6, "chunked": 40e-6}
# To issue the instructions of a causal pair: in all, per two factors of the power beyond the first two, and per each of
# the D + E channels. The longer of these and of the pair's matrix products, per channel, counts.
PAIR, PAIR_POWER, PAIR_CHANNEL, PAIR_PRODUCT = 1.59e-13, 2.0e-14, 1.40e-15, 2.53e-15
# To read and write states, per token, feature and value channel, by power and head size. Half of it is the update's,
# which runs over key heads.
FEATURE = {(2, 32): 1.6e-14, (2, 64): 9.7e-15, (2, 128): 6.8e-15, (4, 16): 3.8e-14, (4, 32): 1.05e-14}
# Plain JAX around the chunked form, per token and channel.
CHANNEL = 3.0e-12


def kernel_seconds(
    form: str,
    *,
    time: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    power: int,
    exact_window: int,
) -> float:
    """Predicts the seconds of a kernel's forward pass on an H100, including the plain JAX around it."""
    rows, channels = batch * time * heads, head_dim + value_dim
    pair = max(PAIR + PAIR_POWER * (power // 2 - 1) + PAIR_CHANNEL * channels, PAIR_PRODUCT * channels)
    if form == "attention":
        return LAUNCH[form] + rows * time / 2 * pair
    chunk = power_state.choose(
        power=power,
        head_dim=head_dim,
        value_dim=value_dim,
        time=time,
        heads=batch * kv_heads,
        dtype=jnp.bfloat16,
        exact_window=exact_window,
    ).chunk
    states = state_seconds(batch * time * (heads + kv_heads) / 2, power, head_dim, value_dim)
    return LAUNCH[form] + rows * ((chunk / 2 + exact_window) * pair + CHANNEL * channels) + states


def state_seconds(tokens: float, power: int, head_dim: int, value_dim: int) -> float:
    """Predicts the seconds of the states for a number of tokens, at the sizes that the kernels pad to."""
    sizes = sorted(size for degree, size in FEATURE if degree == power)
    head_dim = next(size for size in sizes if size >= head_dim)
    # Value sizes are padded to one of the two largest sizes.
    value_dim = next(size for size in sizes[-2:] if size >= value_dim)
    return tokens * FEATURE[power, head_dim] * feature_maps.symmetric_power_dim(head_dim, power) * value_dim
