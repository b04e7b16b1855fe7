"""flax.nnx modules, which hold parameters and call `sympow_jax.ops`."""

from sympow_jax.layers.attention import (
    Attention,
    AttentionMaps,
    AttentionState,
    ExpressiveAttention,
    LinearAttention,
    PowerAttention,
    PowerDeltaAttention,
    SoftmaxAttention,
    make_attention,
)
from sympow_jax.layers.mlp import MLP, GatedMLP, make_mlp
from sympow_jax.layers.norms import Norm, make_norm, normalize

__all__ = [
    "MLP",
    "Attention",
    "AttentionMaps",
    "AttentionState",
    "ExpressiveAttention",
    "GatedMLP",
    "LinearAttention",
    "Norm",
    "PowerAttention",
    "PowerDeltaAttention",
    "SoftmaxAttention",
    "make_attention",
    "make_mlp",
    "make_norm",
    "normalize",
]
