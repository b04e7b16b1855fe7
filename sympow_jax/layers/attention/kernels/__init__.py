"""Attention kernels, one class each, selected by the config."""

import pkgutil

from sympow_jax import config as configs
from sympow_jax.config import attention as attention_lib
from sympow_jax.layers.attention.kernels.kernel import CachePolicy, Kernel, Memory, RecurrentKernel

__all__ = ["CachePolicy", "Kernel", "Memory", "RecurrentKernel", "from_config", "make"]


def make(
    attention: configs.AttentionConfig,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str = "float32",
    state_dtype: str = "float32",
) -> Kernel:
    """Returns the kernel that `attention.kernel` names, with its options.

    Args:
        attention: the options; `config.attention.KERNELS` has a row for each kernel.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        head_dim: size of a head.
        dtype: name of the dtype of queries, keys and values, and of a KV cache.
        state_dtype: name of the dtype in which a recurrent state is stored.
    """
    kind = pkgutil.resolve_name(attention_lib.KERNELS[attention.kernel].target)
    return kind(
        attention=attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        state_dtype=state_dtype,
    )


def from_config(config: configs.ModelConfig, layer: int = 0) -> Kernel:
    """Returns the kernel of a layer of a model, counted from 0."""
    return make(
        config.attentions[layer],
        num_heads=config.heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_size,
        dtype=config.dtype,
        state_dtype=config.state_dtype,
    )
