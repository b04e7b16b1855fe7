"""Predicts times of the kernels on an H100 from a model with few constants, none of them measured."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from pallas_kernels import power_state
from sympow_jax.ops import feature_maps

__all__ = ["HOPPER", "kernel_seconds"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Cost model of the kernels' forward pass, in seconds; all constants are predicted, none is measured.

    pair, pair_power, pair_channel: time to issue a causal pair's instructions: per pair and head, per two
      factors of the power beyond the first two, and per each of the D + E channels.
    pair_product: time of a pair's matrix products, per channel. The longer of issue and products counts.
    feature: time to read and write states, per token, head, feature and value channel, by power and head size. Half of
      it is the update's, which runs over key heads.
    channel: time of the plain JAX around the chunked form, per token, head and channel.
    launch: time of launching a call, by form.
    both_passes: ratio of forward and backward together to forward alone, by form.
    """

    pair: float
    pair_power: float
    pair_channel: float
    pair_product: float
    feature: Mapping[tuple[int, int], float]
    channel: float
    launch: Mapping[str, float]
    both_passes: Mapping[str, float]

    def pairs(self, count: float, power: int, channels: int) -> float:
        """Returns the seconds of `count` pairs of a head."""
        issued = self.pair + self.pair_power * (power // 2 - 1) + self.pair_channel * channels
        return count * max(issued, self.pair_product * channels)

    def states(self, tokens: float, power: int, head_dim: int, value_dim: int) -> float:
        """Returns the seconds of the states for a number of tokens, at the sizes that the kernels pad to."""
        sizes = sorted(size for of_power, size in self.feature if of_power == power)
        head_dim = next(size for size in sizes if size >= head_dim)
        # Value sizes are padded to one of the two largest sizes.
        value_dim = next(size for size in sizes[-2:] if size >= value_dim)
        features = feature_maps.symmetric_power_dim(head_dim, power)
        return tokens * self.feature[power, head_dim] * features * value_dim


# Fitted to the predictions for an H100 in pallas_kernels/README.md: those of each kernel, and those of the chunked form
# as a whole, for b1 n8 T = 65,536.
HOPPER = _Kernels(
    pair=1.59e-13,
    pair_power=2.0e-14,
    pair_channel=1.40e-15,
    pair_product=2.53e-15,
    feature={(2, 32): 1.6e-14, (2, 64): 9.7e-15, (2, 128): 6.8e-15, (4, 16): 3.8e-14, (4, 32): 1.05e-14},
    channel=3.0e-12,
    launch={"attention": 10e-6, "chunked": 40e-6},
    both_passes={"attention": 5.3, "chunked": 3.1},
)


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
    chunk: int | None,
    exact_window: int,
) -> float:
    """Predicts the seconds of a kernel's forward pass on an H100, including the plain JAX around it."""
    tokens, channels = batch * time, head_dim + value_dim
    if form == "attention":
        pairs = tokens * heads * time / 2
        return HOPPER.launch[form] + HOPPER.pairs(pairs, power, channels)
    if chunk is None:
        chunk = power_state.choose(
            power=power,
            head_dim=head_dim,
            value_dim=value_dim,
            time=time,
            heads=batch * kv_heads,
            dtype=jnp.bfloat16,
            exact_window=exact_window,
        ).chunk
    pairs = tokens * heads * (chunk / 2 + exact_window)
    states = HOPPER.states(tokens * (heads + kv_heads) / 2, power, head_dim, value_dim)
    around = HOPPER.channel * tokens * heads * channels
    return HOPPER.launch[form] + HOPPER.pairs(pairs, power, channels) + states + around
