"""Attention as a kernel, a decay and a position encoding."""

from sympow_jax.layers.attention.layer import Attention, AttentionMaps, AttentionState, make_attention
from sympow_jax.layers.attention.plain import (
    ExpressiveAttention,
    LinearAttention,
    PowerAttention,
    PowerDeltaAttention,
    SoftmaxAttention,
)

__all__ = [
    "Attention",
    "AttentionMaps",
    "AttentionState",
    "ExpressiveAttention",
    "LinearAttention",
    "PowerAttention",
    "PowerDeltaAttention",
    "SoftmaxAttention",
    "make_attention",
]
