"""Safetensors files of weights, with settings next to them, for models of this package and for published ones."""

from sympow_jax.weights.files import load, read_settings, save, settings_path
from sympow_jax.weights.pretrained import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "load", "read_settings", "save", "save_pretrained", "settings_path"]
