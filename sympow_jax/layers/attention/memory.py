"""Memory of a layer between calls: whether it is a KV cache or a recurrent state, and what tokens do to it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers.attention import kernels, positions
from sympow_jax.ops import arguments


def init(
    kernel: kernels.Kernel, batch: int, *, max_length: int | None, kv_cache: bool | None
) -> kernels.Memory:
    """Returns the memory before any token; `Attention.init_state` documents the arguments and errors."""
    name = kernel.attention.kernel
    if kv_cache is None:
        limit = kernel.max_cache_length
        kv_cache = limit is None or (max_length is not None and max_length <= limit)
    elif not kernel.supports_memory(kv_cache=arguments.check_flag("kv_cache", kv_cache)):
        raise ValueError(
            f"kv_cache is {kv_cache}, which this attention of kernel {name!r} does not support; pass "
            f"kv_cache={not kv_cache}"
        )
    if not kv_cache:
        return kernel.init_state(batch)
    sizes = [size for size in (max_length, kernel.cache_limit) if size is not None]
    if not sizes:
        raise ValueError(
            f"attention of kernel {name!r} uses a KV cache, whose state needs a length; pass max_length, the longest "
            f"prompt plus the tokens after it, to init_state"
        )
    return kernel.init_cache(batch, min(sizes))


# Through `jax.jit`, which traces once for equal arguments.
shapes = jax.jit(init, static_argnames=("kernel", "batch", "max_length", "kv_cache")).eval_shape


def extend(
    kernel: kernels.Kernel,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K E"],
    *,
    rotate: positions.Rotation | None,
    log_decay: Float[Array, "B T K ..."] | None,
    segment_ids: Int[Array, "B T"] | None,
    memory: kernels.Memory,
    axis_name: str | None = None,
    **gates: Float[Array, "B T K"] | None,
) -> tuple[Float[Array, "B T N E"], kernels.Memory]:
    """Returns the output after the tokens of a memory, and the memory after these; arguments as for `Kernel.attend`.

    Time is sharded only if `may_shard_time`.
    """
    # The reference has no step.
    one_token = query.shape[1] == 1 and kernel.attention.implementation != "reference" and axis_name is None
    one_token &= kernel.weighs_cache or not isinstance(memory, ops.KVCache)
    if one_token:
        arrays = (query, key, value, log_decay, segment_ids, gates)
        query, key, value, log_decay, segment_ids, gates = jax.tree.map(lambda x: x[:, 0], arrays)
    options: Any = {"log_decay": log_decay, "segment_ids": segment_ids, **gates}
    if not isinstance(memory, ops.KVCache):
        assert isinstance(kernel, kernels.RecurrentKernel)
        if not one_token:
            # The delta rule has no `axis_name`.
            options |= {} if axis_name is None else {"axis_name": axis_name}
            return kernel.op(rotate)(query, key, value, **options, initial_state=memory, return_state=True)
        out, memory = kernel.step(rotate)(query, key, value, **options, state=memory)
        return out[:, None], memory
    assert axis_name is None
    if one_token:
        out, extended, missing = memory.step(query, key, value, **options, weigh=kernel.weigh)
        out, missing = out[:, None], missing[:, None]
    else:
        joined, missing = memory.append(key, value, **options)
        # Without decays the cache holds zeros, with which the op would compute.
        cached: Any = joined.tokens() | ({"log_decay": None} if log_decay is None else {})
        out = kernel.attend(query, **cached, rotate=rotate)
        extended = (joined if segment_ids is None else joined.without_gaps()).newest(memory.capacity)
    # A sliding window needs no more than its own slots.
    if memory.capacity != kernel.cache_limit:
        out = jnp.where(missing[..., None, None], jnp.nan, out)
    return out, extended


def may_shard_time(kernel: kernels.Kernel, memory: kernels.Memory, shard: int) -> bool:
    """Returns whether a memory is extended by tokens whose time is sharded, `shard` of them, a window or more, each."""
    options = kernel.attention
    return (
        isinstance(memory, ops.PowerState | ops.LinearState)
        and kernel.window_kernel is None  # whose memory is a KV cache
        and not options.decay_kind.per_channel
        and options.form != "attention"
        and options.implementation != "reference"
        and shard >= max(1, options.exact_window)
    )


def is_bounded(kernel: kernels.Kernel) -> bool:
    """Returns whether there is a memory that does not grow, to which `fold` converts a KV cache."""
    return kernel.supports_memory(kv_cache=False) or kernel.cache_limit is not None


def fold(kernel: kernels.Kernel, memory: kernels.Memory) -> kernels.Memory:
    """Returns a memory that does not grow, with NaN in rows that exceeded the capacity of a cache.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(memory, ops.KVCache) or memory.capacity == kernel.cache_limit:
        return memory
    if not is_bounded(kernel):
        raise ValueError(
            f"this attention of kernel {kernel.attention.kernel!r} has no recurrent state for its KV cache; keep the "
            f"cache, with a larger max_length"
        )
    batch, complete = len(memory.segment), memory.complete[:, None, None, None]
    if kernel.cache_limit is not None:
        filled = dataclasses.replace(memory, value=jnp.where(complete, memory.value, jnp.nan))
        larger = dataclasses.replace(kernel.init_cache(batch, kernel.cache_limit), segment=memory.segment)
        joined, _ = larger.append(**filled.tokens())
        return dataclasses.replace(joined.newest(kernel.cache_limit), segment=memory.segment)
    # The output for these queries is discarded. Under `jax.jit`, XLA does not compute it.
    query = jnp.zeros((batch, memory.capacity, kernel.num_heads, kernel.encoded_dim), memory.key.dtype)
    cached: Any = memory.tokens()
    _, state = extend(kernel, query, **cached, rotate=None, memory=kernel.init_state(batch))
    assert isinstance(state, ops.PowerState)
    return dataclasses.replace(state, kv=jnp.where(complete, state.kv, jnp.nan), segment=memory.segment)
