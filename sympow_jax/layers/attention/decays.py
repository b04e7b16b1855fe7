"""Decays of a layer: a class for each source of `config.attention.kernels.DECAYS`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import ops
from sympow_jax.array_types import Array, Float
from sympow_jax.config.attention import DecaySource
from sympow_jax.layers.attention import kernels


@dataclasses.dataclass(frozen=True)
class Decay:
    """No decay, and the base class of all decays, which are static in a layer's graph.

    Parameters are attributes of the layer, because their names in checkpoints are `decay`, `decay_bias` and
    `decay_logits`.

    Attributes:
        shape: (K,), or (K, E) with a decay per value channel.
        initial_bias: of the projection, for all outputs or for each; None for no bias.
    """

    shape: tuple[int, ...]
    initial_bias: float | tuple[float, ...] | None

    @property
    def num_projected(self) -> int:
        """Outputs of the layer's projection `decay`; 0 if there is none."""
        return 0

    def init_parameters(self, layer: Any) -> None:
        """Creates parameters other than the projection."""

    def log_decay(
        self, layer: Any, x: Float[Array, "B T M"], projected: Float[Array, "B T _"] | None
    ) -> Float[Array, "B T K ..."] | None:
        """Returns the logarithm of each token's decay, from its input and the layer's projection of it."""
        return None


class Fixed(Decay):
    """The same decays for all tokens: ALiBi's slopes over all heads, or over all value channels of all heads."""

    def per_head(self, layer: Any) -> Float[Array, "K ..."]:
        """Returns the logarithms of the decays."""
        return -jnp.array(ops.alibi_slopes(math.prod(self.shape)), jnp.float32).reshape(self.shape)

    def log_decay(self, layer, x, projected):
        return jnp.broadcast_to(self.per_head(layer), (*x.shape[:2], *self.shape))


class Ratio(Fixed):
    """PermuteFormer's decays, r = sigmoid(2 + 3 h / K) of head h."""

    def per_head(self, layer):
        return jax.nn.log_sigmoid(2 + 3 * jnp.arange(self.shape[0]) / self.shape[0])


class Trained(Fixed):
    """Trained decays, the same for all tokens, which start at ALiBi's slopes."""

    def init_parameters(self, layer):
        layer.decay_logits = nnx.Param(jnp.array(_alibi_logits(self.shape), jnp.float32))

    def per_head(self, layer):
        return jax.nn.log_sigmoid(layer.decay_logits[...])


class Learned(Decay):
    """Decays sigmoid(W x), or sigmoid(W x + b), of each token."""

    @property
    def num_projected(self):
        return math.prod(self.shape)

    def init_parameters(self, layer):
        if self.initial_bias is not None:
            initial = jnp.array(self.initial_bias, jnp.float32)
            layer.decay_bias = nnx.Param(jnp.broadcast_to(initial, self.num_projected))

    def log_decay(self, layer, x, projected):
        if self.initial_bias is not None:
            projected += layer.decay_bias[...]
        # Finite where sigmoid itself rounds to 0.
        return jax.nn.log_sigmoid(projected.reshape(*x.shape[:2], *self.shape))


_CLASSES: Mapping[DecaySource, type[Decay]] = {
    DecaySource.NONE: Decay,
    DecaySource.FIXED: Fixed,
    DecaySource.RATIO: Ratio,
    DecaySource.PARAMETER: Trained,
    DecaySource.DATA: Learned,
    DecaySource.DATA_FROM_ALIBI: Learned,
}


def make(kernel: kernels.Kernel) -> Decay:
    """Returns the decay that the options of a kernel name."""
    kind = kernel.attention.decay_kind
    shape = (kernel.num_kv_heads, kernel.head_dim) if kind.per_channel else (kernel.num_kv_heads,)
    bias: Any = kernel.attention.decay_bias
    if bias is None and kind.source is DecaySource.DATA_FROM_ALIBI:
        bias = tuple(_alibi_logits(shape))
    return _CLASSES[kind.source](shape, bias)


def _alibi_logits(shape: tuple[int, ...]) -> np.ndarray:
    """Returns the logits of decays by ALiBi's slopes, of which sigmoid makes these decays."""
    slopes = np.array(ops.alibi_slopes(math.prod(shape)), np.float64)
    return -np.log(np.expm1(slopes)).reshape(shape)
