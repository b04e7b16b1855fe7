"""Weights as safetensors files with the settings beside them: models of this package, and GPT-2's."""

from sympow_jax.weights.files import load, read_settings, save, settings_path

__all__ = ["load", "read_settings", "save", "settings_path"]
