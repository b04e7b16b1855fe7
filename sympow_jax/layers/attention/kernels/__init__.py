"""Attention kernels, one class each, selected by the config."""

import pkgutil
from typing import Any

from sympow_jax import config as config_lib
from sympow_jax.config import attention as attention_lib
from sympow_jax.layers.attention.kernels.kernel import CachePolicy, Kernel, Memory, RecurrentKernel

__all__ = ["CachePolicy", "Kernel", "Memory", "RecurrentKernel", "from_config", "make"]


def make(attention: config_lib.AttentionConfig, **sizes: Any) -> Kernel:
    """Returns the kernel that `attention.kernel` names, a row of `config.attention.KERNELS`.

    `sizes` are the other attributes of `Kernel`: the numbers and size of heads, and the dtypes if not float32. The
    state of a float64 kernel is float64 too.
    """
    if sizes.get("dtype") == "float64":
        sizes = {"state_dtype": "float64"} | sizes
    kernel: Kernel = pkgutil.resolve_name(attention_lib.KERNELS[attention.kernel].target)(
        attention=attention, **sizes
    )
    return kernel


def from_config(config: config_lib.ModelConfig, layer: int = 0) -> Kernel:
    """Returns the kernel of a layer of a model, counted from 0."""
    return make(
        config.attentions[layer],
        num_heads=config.heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_size,
        dtype=config.dtype,
        state_dtype=config.state_dtype,
    )
