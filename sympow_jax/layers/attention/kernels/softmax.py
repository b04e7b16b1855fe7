"""Softmax attention, the baseline."""

import dataclasses
import math

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel

__all__ = ["SoftmaxKernel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxKernel(kernel.Kernel):
    """Softmax attention with scores q . k / sqrt(head_dim); a KV cache is its only memory."""

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
        scale = 1 / math.sqrt(self.head_dim)
        return ops.softmax_attention(query, key, value, causal=self.attention.causal, scale=scale, **options)
