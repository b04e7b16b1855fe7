"""What a form costs, from shapes alone: the choice of form and chunk, and the size of a state."""

import os

import jax
import jax.numpy as jnp

from sympow_jax.ops import feature_maps

__all__ = [
    "default_chunk",
    "flops_per_token",
    "memory_bytes",
    "precision_of",
    "require_memory",
    "state_bytes",
]


def flops_per_token(
    form: str,
    *,
    time: int,
    head_dim: int,
    value_dim: int,
    power: int,
    chunk: int,
    exact_window: int,
    backward: bool = False,
) -> float:
    """FLOPs of the forward pass, or with `backward` of both passes, for one token and head among `time` tokens.

    attention: 2 (D + E) T / 2, since half of the pairs are causal. chunked: 4 F E + 2 (D + E) (C / 2 + W).
    Backward, five products over pairs stand against two of the forward pass, and four over features against two.
    """
    over_pairs, over_features = (3.5, 3) if backward else (1, 1)
    if form == "attention":
        return over_pairs * (head_dim + value_dim) * time
    features = feature_maps.symmetric_power_dim(head_dim, power)
    pairs = (head_dim + value_dim) * (chunk + 2 * exact_window)
    return over_features * 4 * features * value_dim + over_pairs * pairs


def precision_of(dtype) -> jax.lax.Precision:
    """Full precision for float32 and float64; the default (TF32 on Ampere and later) for shorter inputs."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT


def default_chunk(form: str) -> int:
    """Tokens of a chunk, or of a block of the attention form: what measured fastest on two cores at T = 4,096."""
    return {"attention": 256, "chunked": 128, "recurrent": 1}[form]


def state_bytes(
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    power: int,
    per_channel: bool = False,
    itemsize: int = 4,
) -> int:
    """Bytes of the folded state and its normalizer, of which there is one per value if decays are."""
    columns = 2 * value_dim if per_channel else value_dim + 1
    return batch * kv_heads * feature_maps.symmetric_power_dim(head_dim, power) * columns * itemsize


def require_memory(**sizes) -> None:
    """Raises ValueError where the state of these sizes (those of `state_bytes`) exceeds the device's memory."""
    needed, available = state_bytes(**sizes), memory_bytes()
    if needed > available:
        raise ValueError(
            f"the state takes {needed:,} bytes ({sizes}) and the device has {available:,}; use a smaller power or "
            f"head_dim, or the attention form without a state"
        )


def memory_bytes() -> int:
    """Bytes of memory of the first local device."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
