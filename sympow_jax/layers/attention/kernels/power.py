"""Power attention, whose weights are even powers of q . k."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel, softmax
from sympow_jax.ops import power_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerKernel(kernel.RecurrentKernel):
    """`ops.power_attention`, with decays per head or per value channel."""

    weighs_cache = True

    @functools.cached_property
    def window_kernel(self):
        if not self.attention.softmax_window:
            return None
        options = {
            "kernel": "sliding_window",
            "decay": "none",
            "softmax_window": False,
            "implementation": None,
        }
        return softmax.SlidingWindowKernel(
            attention=dataclasses.replace(self.attention, **options),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    @property
    def form(self):
        # Decays per channel have no attention form.
        return "chunked" if self._per_channel else self.attention.form

    @property
    def cache_policy(self):
        policies = {"attention": kernel.CachePolicy.ALWAYS, None: kernel.CachePolicy.WHILE_SMALLER}
        return policies.get(self.form, kernel.CachePolicy.NEVER)

    def weigh(self, scores, log_decay):
        # Decay before taking the power: the largest weight is then 1, whatever the scale of the keys.
        power = self.attention.power
        scores *= jnp.exp(log_decay / power)
        largest = jax.lax.stop_gradient(jnp.abs(scores).max(-1, keepdims=True))
        return jax.lax.integer_pow(scores / jnp.where(largest == 0, 1, largest), power)

    def op(self, rotate):
        attention = self.attention
        options = {
            "power": attention.power,
            "chunk_size": attention.chunk_size,
            "exact_window": attention.exact_window,
            "implementation": attention.implementation,
        }
        return functools.partial(ops.power_attention, **options, form=attention.form)

    def explain(self, batch, time):
        query, key = (
            jax.ShapeDtypeStruct((batch, time, heads, self.encoded_dim), jnp.dtype(self.dtype))
            for heads in (self.num_heads, self.num_kv_heads)
        )
        value = jax.ShapeDtypeStruct((*key.shape[:3], self.head_dim), key.dtype)
        log_decay = jax.ShapeDtypeStruct(value.shape if self._per_channel else key.shape[:3], jnp.float32)
        return ops.explain(query, key, value, log_decay=log_decay, **self.op(None).keywords).candidates

    def step(self, rotate):
        attention = self.attention
        return functools.partial(
            ops.power_attention_step, power=attention.power, implementation=attention.implementation
        )

    def init_state(self, batch):
        return self._zeros(ops.PowerState.zeros, batch)

    @property
    def max_cache_length(self):
        if self.cache_policy is not kernel.CachePolicy.WHILE_SMALLER:
            return super().max_cache_length
        # Only shapes are made: neither memory needs to fit.
        state = jax.eval_shape(lambda: self._zeros(power_state.zeros, 1))
        empty, one = (jax.eval_shape(functools.partial(self.init_cache, 1, n)).nbytes for n in (0, 1))
        growing = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim > 1)
        return growing // (one - empty)

    def state_sizes(self):
        features = ops.symmetric_power_dim(self.encoded_dim, self.attention.power)
        return features, features * self.head_dim if self._per_channel else features

    @property
    def flop_shape(self):
        # With decays per channel, the normalizer is as large as kv. Otherwise it is not counted.
        columns = 2 * self.head_dim if self._per_channel else self.head_dim
        return self.encoded_dim, columns, self.attention.power

    def state_bytes(self, *, bytes_per_element=4):
        state, window = super().state_bytes(bytes_per_element=bytes_per_element), self.window_kernel
        return state if window is None else state + window.state_bytes(bytes_per_element=bytes_per_element)

    def flops_per_token(self, context_length):
        flops, window = super().flops_per_token(context_length), self.window_kernel
        return flops if window is None else flops + window.flops_per_token(context_length)

    def weights(self, query, key, *, rotate, log_decay, segment_ids):
        if not self._per_channel:
            return super().weights(query, key, rotate=rotate, log_decay=log_decay, segment_ids=segment_ids)
        # One channel is power attention with a decay per head. All channels at once would take T x T elements each.
        per_head = dataclasses.replace(self, attention=dataclasses.replace(self.attention, decay="learned"))

        def add(total, channel):
            weights = per_head.weights(query, key, rotate=rotate, log_decay=channel, segment_ids=segment_ids)
            return total + weights, None

        batch, time, num_heads, _ = query.shape
        zeros = jnp.zeros((batch, time, num_heads, time), key.dtype)
        channels = jnp.moveaxis(log_decay, -1, 0)
        return jax.lax.scan(add, zeros, channels)[0] / len(channels)

    def _zeros(self, zeros: Callable[..., ops.PowerState], batch: int) -> ops.PowerState:
        """Calls a constructor of states with the sizes of this kernel."""
        return zeros(
            batch,
            self.num_kv_heads,
            self.encoded_dim,
            self.head_dim,
            power=self.attention.power,
            exact_window=self.attention.exact_window,
            per_channel=self._per_channel,
            dtype=jnp.dtype(self.state_dtype),
        )

    @property
    def _per_channel(self) -> bool:
        return self.attention.decay_kind.per_channel
