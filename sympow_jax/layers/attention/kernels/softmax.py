"""Softmax attention, the baseline, with and without a sliding window."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel

__all__ = ["SlidingWindowKernel", "SoftmaxKernel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxKernel(kernel.Kernel):
    """Softmax attention with scores q . k / sqrt(head_dim); a KV cache is its only memory."""

    weighs_cache = True

    @property
    def window(self) -> int | None:
        """Number of tokens of its document that a query attends to; None for all up to its own."""
        return None

    def attend(self, query, key, value, *, rotate, log_decay, segment_ids, axis_name=None):
        return self._attend(
            query,
            key,
            value,
            log_decay=log_decay,
            segment_ids=segment_ids,
            axis_name=axis_name,
            implementation=self.attention.implementation,
        )

    def attend_cache(self, query, key, value, *, rotate, log_decay, segment_ids):
        # A cache has more keys than queries, which only `xla` supports.
        options = {"log_decay": log_decay, "segment_ids": segment_ids, "implementation": "xla"}
        return self._attend(query, key, value, **options)

    def weigh(self, scores, log_decay):
        logits = scores / math.sqrt(self.head_dim) + log_decay
        return jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))

    def _attend(self, query, key, value, **options):
        # Scale by the size of the head, even if position encodings change the size of queries and keys.
        options["scale"] = 1 / math.sqrt(self.head_dim)
        return ops.softmax_attention(
            query, key, value, causal=self.attention.causal, window=self.window, **options
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowKernel(SoftmaxKernel):
    """Softmax attention to the last `attention.window` tokens of a document.

    Its memory is a KV cache of at most window - 1 positions, or one, so it has a bounded size.
    """

    @property
    def window(self):
        return self.attention.window

    @property
    def cache_limit(self):
        # A query brings its own key. A cache has at least one slot.
        return max(1, self.attention.window - 1)

    def compress(self, cache):
        """Returns a cache with room for all keys of a window; NaN in rows that exceeded a smaller capacity."""
        assert self.cache_limit is not None
        if cache.capacity == self.cache_limit:
            return cache
        larger = self.init_cache(len(cache.segment), self.cache_limit)
        value = jnp.where(cache.complete[:, None, None, None], cache.value, jnp.nan)
        filled = dataclasses.replace(cache, value=value)
        joined, _ = dataclasses.replace(larger, segment=cache.segment).append(**filled.tokens())
        return dataclasses.replace(joined.newest(self.cache_limit), segment=cache.segment)

    def state_bytes(self, *, bytes_per_element=4, feature_map="symmetric", normalizer=True):
        """Returns the bytes of the keys and values of a full cache of one row, without decays and segment ids."""
        assert self.cache_limit is not None
        elements = self.num_kv_heads * (self.encoded_dim + self.head_dim)
        return self.cache_limit * elements * bytes_per_element

    def _pairs(self, context_length):
        window = self.attention.window
        if context_length <= window:
            return super()._pairs(context_length)
        return window - window**2 / (2 * context_length)  # the first tokens have fewer keys
