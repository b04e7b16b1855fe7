"""Linear attention, whose weights are products of features."""

import dataclasses
import functools

import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.layers.attention import positions
from sympow_jax.layers.attention.kernels import kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearKernel(kernel.RecurrentKernel):
    """`ops.linear_attention` with a feature map; positions, except SPE, are applied to the features.

    Rotating the features makes weights depend on distances ("Roformer", Su et al. 2021, section 3.3).
    """

    rotates_features = True

    def op(self, rotate):
        attention = self.attention
        return functools.partial(
            ops.linear_attention,
            **self._features(rotate),
            form=self.form,
            chunk_size=attention.chunk_size,
            exact_window=attention.exact_window,
            causal=attention.causal,
        )

    def step(self, rotate):
        return functools.partial(ops.linear_attention_step, **self._features(rotate))

    def init_state(self, batch):
        attention = self.attention
        return ops.LinearState.zeros(
            batch,
            self.num_kv_heads,
            self.encoded_dim,
            self.head_dim,
            feature_map=attention.feature_map,
            power=attention.power,
            rotated_dim=self.rotated_dim,
            normalizer=attention.normalizer,
            exact_window=attention.exact_window,
            dtype=jnp.dtype(self.state_dtype),
        )

    @property
    def encoded_dim(self):
        return self.head_dim if positions.rotates(self.attention) else super().encoded_dim

    @property
    def position_dim(self):
        return self.mapped_dim if positions.rotates(self.attention) else self.head_dim

    @property
    def mapped_dim(self) -> int:
        """Number of features before they are rotated."""
        match self.attention.feature_map:
            case "symmetric":
                return ops.symmetric_power_dim(self.encoded_dim, self.attention.power)
            case "tensor":
                return self.encoded_dim**self.attention.power
        return self.encoded_dim

    @property
    def rotated_dim(self) -> int | None:
        """Number of features after their rotation; None if they are not rotated."""
        if not positions.rotates(self.attention):
            return None
        return positions.encoded_dim(self.attention, self.mapped_dim)

    def state_sizes(self):
        features = self.rotated_dim or self.mapped_dim
        return features, features if self.attention.normalizer == "rotated" else self.mapped_dim

    @property
    def flop_shape(self):
        # Symmetric and tensor features that are not rotated are never materialized: their products are powers of q . k.
        powers = self.attention.feature_map in ("symmetric", "tensor") and self.rotated_dim is None
        return self.rotated_dim or self.encoded_dim, self.head_dim, self.attention.power if powers else 1

    def _features(self, rotate):
        attention = self.attention
        return {
            "power": attention.power,
            "feature_map": attention.feature_map,
            "rotate": rotate,
            "normalizer": attention.normalizer,
            "implementation": attention.implementation,
        }
