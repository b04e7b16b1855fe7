"""Pure functions of arrays: attention, feature maps and position encodings. No Flax."""

from sympow_jax.ops import feature_maps as feature_maps
from sympow_jax.ops import lrpe as lrpe
from sympow_jax.ops import rotary as rotary
from sympow_jax.ops import spe as spe
from sympow_jax.ops.delta_attention import DeltaState, delta_attention, delta_attention_step
from sympow_jax.ops.expressive_attention import expressive_attention
from sympow_jax.ops.feature_maps import (
    elu_plus_one,
    symmetric_power,
    symmetric_power_dim,
    tensor_power,
)
from sympow_jax.ops.kv_cache import KVCache
from sympow_jax.ops.linear_attention import LinearState, linear_attention, linear_attention_step
from sympow_jax.ops.power_attention import PowerState, explain, power_attention, power_attention_step
from sympow_jax.ops.softmax_attention import alibi_slopes, softmax_attention

__all__ = [
    "DeltaState",
    "KVCache",
    "LinearState",
    "PowerState",
    "alibi_slopes",
    "delta_attention",
    "delta_attention_step",
    "elu_plus_one",
    "explain",
    "expressive_attention",
    "feature_maps",
    "linear_attention",
    "linear_attention_step",
    "lrpe",
    "power_attention",
    "power_attention_step",
    "rotary",
    "softmax_attention",
    "spe",
    "symmetric_power",
    "symmetric_power_dim",
    "tensor_power",
]
