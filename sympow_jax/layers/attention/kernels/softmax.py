"""Softmax attention, the baseline, with and without a sliding window."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxKernel(kernel.Kernel):
    """Softmax attention with scores q . k / sqrt(head_dim); a KV cache is its only memory."""

    weighs_cache = True

    @property
    def window(self) -> int | None:
        """Number of tokens of its document that a query attends to; None for all up to its own."""
        return None

    def attend(self, query, key, value, *, rotate, log_decay, segment_ids, axis_name=None):
        return ops.softmax_attention(
            query,
            key,
            value,
            # The size of the head, even if position encodings change the size of queries and keys.
            scale=1 / math.sqrt(self.head_dim),
            log_decay=log_decay,
            segment_ids=segment_ids,
            axis_name=axis_name,
            causal=self.attention.causal,
            window=self.window,
            # Only `xla` supports the keys of a cache, which are more than the queries.
            implementation="xla" if key.shape[1] > query.shape[1] else self.attention.implementation,
        )

    def weigh(self, scores, log_decay):
        logits = scores / math.sqrt(self.head_dim) + log_decay
        return jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowKernel(SoftmaxKernel):
    """Softmax attention to the last `attention.window` tokens of a document.

    Its memory is a KV cache of at most window - 1 positions, or one, so it has a bounded size.
    """

    @property
    def window(self):
        return self.attention.window

    @property
    def weighs_cache(self):
        # A window of one token does not see the one slot of its cache.
        return self.attention.window > 1

    @property
    def cache_limit(self):
        # A query brings its own key. A cache has at least one slot.
        return max(1, self.attention.window - 1)

    def state_bytes(self, *, bytes_per_element=4):
        """Returns the bytes of the keys and values of a full cache of one row, without decays and segment ids."""
        assert self.cache_limit is not None
        elements = self.num_kv_heads * (self.encoded_dim + self.head_dim)
        return self.cache_limit * elements * bytes_per_element

    def _pairs(self, context_length):
        window = self.attention.window
        if context_length <= window:
            return super()._pairs(context_length)
        return window - window**2 / (2 * context_length)  # the first tokens have fewer keys
