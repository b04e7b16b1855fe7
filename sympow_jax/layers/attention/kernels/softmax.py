"""Softmax attention, the baseline, with and without a sliding window."""

import dataclasses
import math

import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel

__all__ = ["SlidingWindowKernel", "SoftmaxKernel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxKernel(kernel.Kernel):
    """Softmax attention with scores q . k / sqrt(head_dim); a KV cache is its only memory."""

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

    def attend_cache(self, query, cache, *, rotate, log_decay):
        # A cache has more keys than queries, which only `xla` supports.
        return self._attend(
            query,
            cache.key,
            cache.value,
            log_decay=log_decay,
            segment_ids=cache.segment_ids,
            implementation="xla",
        )

    def _attend(self, query, key, value, **options):
        # Scale by the size of the head, even if position encodings change the size of queries and keys.
        options["scale"] = 1 / math.sqrt(self.head_dim)
        return ops.softmax_attention(
            query, key, value, causal=self.attention.causal, window=self.window, **options
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowKernel(SoftmaxKernel):
    """Softmax attention to the last `attention.window` tokens of a document.

    Its memory is a KV cache of at most window - 1 positions, so it has a bounded size.
    """

    @property
    def window(self):
        return self.attention.window

    @property
    def cache_limit(self):
        # A query's own key is new. A cache has a slot at least.
        return max(1, self.attention.window - 1)

    def compress(self, cache):
        """Returns a cache with room for all keys of a window; NaN in rows that exceeded a smaller capacity."""
        assert self.cache_limit is not None
        batch, capacity = cache.segment_ids.shape
        if capacity == self.cache_limit:
            return cache
        larger = self.init_cache(batch, self.cache_limit)
        value = jnp.where(cache.complete[:, None, None, None], cache.value, jnp.nan)
        joined, _ = dataclasses.replace(larger, segment=cache.segment).append(
            cache.key, value, cache.log_decay, cache.segment_ids
        )
        return dataclasses.replace(joined.newest(self.cache_limit), segment=cache.segment)

    def state_bytes(self, *, bytes_per_element=4, feature_map="symmetric", normalizer=True):
        """Returns the bytes of the keys and values of a whole window, of one row."""
        assert self.cache_limit is not None
        elements = self.num_kv_heads * (self.encoded_dim + self.head_dim)
        return self.cache_limit * elements * bytes_per_element

    def _pairs(self, context_length):
        window = self.attention.window
        if context_length <= window:
            return super()._pairs(context_length)
        return window - window**2 / (2 * context_length)  # the first tokens have fewer keys
