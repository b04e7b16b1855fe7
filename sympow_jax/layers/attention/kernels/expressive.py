"""Expressive attention."""

import dataclasses

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel

__all__ = ["ExpressiveKernel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpressiveKernel(kernel.Kernel):
    """`ops.expressive_attention`; a KV cache is its only memory."""

    def attend(self, query, key, value, *, rotate, log_decay, segment_ids, axis_name=None):
        return ops.expressive_attention(
            query,
            key,
            value,
            log_decay=log_decay,
            segment_ids=segment_ids,
            axis_name=axis_name,
            causal=self.attention.causal,
            implementation=self.attention.implementation,
        )
