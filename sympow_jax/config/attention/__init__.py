"""Attention as a kernel, a decay and a position encoding, and the papers' names for their combinations."""

from sympow_jax.config.attention.kernels import DECAYS, KERNELS, Decay, DecaySource, Kernel
from sympow_jax.config.attention.positions import LAYER_POSITIONS, LrpeConfig, RopeConfig
from sympow_jax.config.attention.presets import (
    LRPE_METHODS,
    PRESETS,
    SHARED,
    lrpe_method,
    preset,
    preset_name,
    with_preset,
)
from sympow_jax.config.attention.settings import AttentionConfig

__all__ = [
    "DECAYS",
    "KERNELS",
    "LAYER_POSITIONS",
    "LRPE_METHODS",
    "PRESETS",
    "SHARED",
    "AttentionConfig",
    "Decay",
    "DecaySource",
    "Kernel",
    "LrpeConfig",
    "RopeConfig",
    "lrpe_method",
    "preset",
    "preset_name",
    "with_preset",
]
