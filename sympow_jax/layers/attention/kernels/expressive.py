"""Expressive attention."""

import dataclasses

import jax
import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpressiveKernel(kernel.Kernel):
    """`ops.expressive_attention`; a KV cache is its only memory."""

    weighs_cache = True

    def attend(self, query, key, value, *, rotate, log_decay, segment_ids, axis_name=None):
        return ops.expressive_attention(
            query,
            key,
            value,
            log_decay=log_decay,
            segment_ids=segment_ids,
            axis_name=axis_name,
            causal=self.attention.causal,
        )

    def weigh(self, scores, log_decay):
        # z^2 / (1 + z^2) as u^2 / (1 + z^2) with u = s z / m, whose largest is about 1: z^2 alone would vanish below
        # 1e-19. s^2 is the decay and m the largest s min(|z|, 1). At the bound z^2 does not overflow.
        bound = 2.0 ** (jnp.finfo(scores.dtype).maxexp // 2 - 1)
        size, decay = jnp.minimum(jnp.abs(scores), bound), jnp.exp(log_decay / 2)
        largest = jax.lax.stop_gradient((decay * jnp.minimum(size, 1)).max(-1, keepdims=True))
        scaled = size * (decay / jnp.where(largest == 0, 1, largest))
        return scaled * scaled / (1 + size * size)
