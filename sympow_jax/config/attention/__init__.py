"""Attention as a kernel, a decay and a position encoding, and the papers' names for their combinations."""

from sympow_jax.config.attention.kernels import KERNELS, DecaySource, Kernel
from sympow_jax.config.attention.positions import LAYER_POSITIONS, LrpeConfig, RopeConfig
from sympow_jax.config.attention.presets import lrpe_method, preset, preset_name, with_preset
from sympow_jax.config.attention.settings import AttentionConfig

__all__ = [
    "KERNELS",
    "LAYER_POSITIONS",
    "AttentionConfig",
    "DecaySource",
    "Kernel",
    "LrpeConfig",
    "RopeConfig",
    "lrpe_method",
    "preset",
    "preset_name",
    "with_preset",
]
