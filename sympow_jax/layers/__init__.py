"""flax.nnx modules: they own parameters and call `sympow_jax.ops`."""

from sympow_jax.layers.attention import Attention, AttentionState
from sympow_jax.layers.mlp import MLP

__all__ = ["MLP", "Attention", "AttentionState"]
