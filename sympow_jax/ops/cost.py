"""Predicted cost of each form, from shapes, and the size of a state against the device's memory."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sympow_jax.ops import feature_maps, target


def flops_per_token(
    form: str,
    *,
    time: int,
    key_time: int | None = None,
    heads: int = 1,
    kv_heads: int = 1,
    head_dim: int,
    value_dim: int,
    power: int,
    chunk: int,
    exact_window: int,
    backward: bool = False,
) -> float:
    """Returns the FLOPs per query token of the forward pass or, with `backward`, of both passes.

    The attention form has S - T / 2 causal pairs per query, the mean over T queries at the end of S = `key_time` keys
    (by default T = `time`). The other forms have C / 2 + W pairs, and products with the state. The backward pass has
    five products over pairs against two in the forward pass, and four over features against two.
    """
    over_pairs, over_features = (3.5, 3) if backward else (1, 1)
    sizes = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim}
    if form == "attention":
        return over_pairs * pair_flops((key_time or time) - time / 2, **sizes)
    by_features = feature_flops(kv_heads=kv_heads, power=power, **sizes)
    return over_features * by_features + over_pairs * pair_flops(chunk / 2 + exact_window, **sizes)


def pair_flops(pairs: float, *, heads: int, head_dim: int, value_dim: int) -> float:
    """Returns the FLOPs of a number of pairs per query head: 2 (D + E) for each."""
    return 2 * heads * (head_dim + value_dim) * pairs


def feature_flops(*, heads: int, kv_heads: int, head_dim: int, value_dim: int, power: int) -> int:
    """Returns the FLOPs per token of products with a state.

    Every key head updates one, and every query head reads one, for 2 F E each.
    """
    return 2 * feature_maps.symmetric_power_dim(head_dim, power) * value_dim * (heads + kv_heads)


def faster_kernel(flops: Mapping[str, float], time: int, heads: float) -> str:
    """Returns the form whose Hopper kernels are faster, from the FLOPs of each form.

    A FLOP over features takes longer than one over pairs, and the chunked form has more small launches, whose share of
    the time is smaller with more heads. Fitted to forward and both passes at batch 1 with 8 heads on an H200 and an
    H100, and on the H100 to both passes of 192 heads at 4,096 tokens and of 48 at 16,384 (benchmarks/results). Both
    forms then take equally long at about 8,900 tokens for p = 2, D = 64, a window of 64 and 8 heads, and at 5,000 for
    192. FLOPs count a chunk of 128 unless one is asked for.

    Args:
        flops: FLOPs of each form, of which only the ratio counts.
        time: tokens per row.
        heads: heads of all rows of one device.
    """
    overhead = 1 + 6.6 / heads
    pays = time >= 3400 * overhead and 1.1 * overhead * flops["chunked"] < flops["attention"]
    return "chunked" if pays else "attention"


def precision_of(dtype) -> jax.lax.Precision:
    """Returns full precision for float32 and float64; the default (TF32 on Ampere and later) for shorter inputs."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT


def default_chunk(form: str) -> int:
    """Returns the tokens per chunk, or per block of the attention form.

    These values measured fastest on two CPU cores at T = 4,096.
    """
    return {"attention": 256, "chunked": 128, "recurrent": 1}[form]


def state_bytes(
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    power: int,
    normalizers: int = 1,
    exact_window: int = 0,
    itemsize: int = 4,
) -> int:
    """Returns the bytes of the state of features, its normalizers and the 2W tokens of a window.

    There is one normalizer per value if decays are per value, and as many decays of a token in the window.
    """
    columns = value_dim + normalizers
    features = feature_maps.symmetric_power_dim(head_dim, power)
    return batch * kv_heads * (features * columns + 2 * exact_window * (head_dim + columns)) * itemsize


def exceeds_memory(size) -> bool:
    """Returns True if a device's share of these bytes exceeds its memory, as that of a symbolic batch never does."""
    return not jax.export.is_symbolic_dim(size) and size > target.device_count() * target.memory_bytes()


def require_memory(**sizes) -> None:
    """Raises ValueError if a device's share of the state exceeds its memory; arguments are those of `state_bytes`."""
    smaller = "a smaller power, head_dim or window, or the attention form without a state"
    require_bytes(state_bytes(**sizes), sizes, smaller)


def require_bytes(needed, sizes: Mapping[str, int], smaller: str) -> None:
    """Raises ValueError, which says to use what is smaller, if a device's share of a state exceeds its memory."""
    if exceeds_memory(needed):
        count = target.device_count()
        devices = "the device has" if count == 1 else f"each of the {count} devices has"
        raise ValueError(
            f"the state takes {needed:,} bytes ({sizes}) and {devices} {target.memory_bytes():,}; use {smaller}"
        )
