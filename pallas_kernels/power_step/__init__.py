"""Kernels for one token of power attention on Hopper GPUs: reading the state, and updating it."""

import jax
import jax.numpy as jnp

from pallas_kernels.power_step import configs, folding, reading

__all__ = ["choose", "fold", "read"]

choose = configs.choose


def read(
    features: jax.Array,
    kv: jax.Array,
    norm: jax.Array,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    decay: jax.Array,
    *,
    power: int,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Returns sums of values weighted by (q . k)^p, and of the weights, over the tokens of state and window.

    The state and the window are read once for all query heads of a key head. All arrays and sums are float32. Not
    differentiable.

    Args:
        features: [B, K, G, F], phi(q) times the decay from the state to the query, in the order of kv's rows.
        kv: [B, K, F, E], sums of phi(k) v^T.
        norm: [B, K, F], sums of phi(k).
        query: [B, K, G, D].
        keys: [B, 2W, K, D], zero where there is no token.
        values: [B, 2W, K, E].
        decay: [B, K, 2W], from each token of the window to the query.
        power: p, even.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        numerator [B, K, G, E] and denominator [B, K, G].

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.
    """
    batch, kv_heads, group, count = features.shape
    config = configs.choose(
        heads=batch * kv_heads,
        group=group,
        features=count,
        head_dim=query.shape[-1],
        value_dim=kv.shape[-1],
        exact_window=keys.shape[1] // 2,
        power=power,
        dtype=kv.dtype,
    )
    operands = reading.Operands(features, kv, norm, query, keys, values, decay)
    numerator, denominator = reading.read(operands, power=power, config=config, interpret=interpret)
    return numerator.sum(2), denominator.sum((2, 4))


def fold(
    kv: jax.Array,
    norm: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    features: jax.Array,
    values: jax.Array,
    across: jax.Array,
    *,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Updates kv and norm with W tokens for some rows of the batch: S <- across S + sum_w phi_w v_w^T.

    The results reuse the memory of kv and norm if these are not needed any more; other rows are not touched. `choose`
    documents the supported sizes. Not differentiable.

    Args:
        kv: [B, K, F, E], float32.
        norm: [B, K, F], float32.
        rows: int32 [n], rows of the batch.
        count: int32 [], the number of leading entries of `rows` to update. Each of those occurs once.
        features: [n, K, W, F], phi(k) of each token times the decay after it.
        values: [n, W, K, E].
        across: [n, K], the decay over all W tokens.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    # A kernel updates references in place.
    held = jax.new_ref(kv), jax.new_ref(norm)
    tokens = folding.Window(rows, jnp.reshape(count, 1), features, values, across)
    folding.fold(*held, tokens, interpret=interpret)
    kv, norm = map(jax.freeze, held)
    return kv, norm
