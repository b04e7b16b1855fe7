"""Safetensors files of weights, with settings next to them, for models of this package and for GPT-2."""

from sympow_jax.weights.files import load, read_settings, save, settings_path

__all__ = ["load", "read_settings", "save", "settings_path"]
