"""The delta rule on power features, by which a token overwrites what the state holds for its key."""

import dataclasses
import functools

import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.layers.attention.kernels import kernel
from sympow_jax.ops import cost
from sympow_jax.ops.forms import delta as delta_form


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerDeltaKernel(kernel.RecurrentKernel):
    """`ops.delta_attention`; the layer computes a write strength for each token and head."""

    @property
    def form(self):
        # Only the chunked form has chunks of a chosen size.
        chosen = "chunked" if self.attention.chunk_size is not None else None
        return self.attention.form or chosen

    @property
    def largest_delta(self):
        return 2 if self.attention.negative_eigenvalues else 1

    def attend(self, query, key, value, *, rotate, log_decay, segment_ids, delta, axis_name=None):
        if axis_name is not None:
            raise ValueError(
                "kernel 'power_delta' cannot divide time over devices; use a mesh whose axis context is 1"
            )
        options = {"log_decay": log_decay, "segment_ids": segment_ids}
        if self.attention.form == "attention":
            options |= {"form": "attention", "chunk_size": None}
        return self.op(rotate)(query, key, value, delta, **options)

    def op(self, rotate):
        attention = self.attention
        # The attention form has no state, so only `attend` uses it.
        form = None if attention.form == "attention" else attention.form
        return functools.partial(
            ops.delta_attention, power=attention.power, form=form, chunk_size=attention.chunk_size
        )

    def step(self, rotate):
        return functools.partial(ops.delta_attention_step, power=self.attention.power)

    def init_state(self, batch):
        return ops.DeltaState.zeros(
            batch,
            self.num_kv_heads,
            self.encoded_dim,
            self.head_dim,
            power=self.attention.power,
            dtype=jnp.dtype(self.state_dtype),
        )

    def state_sizes(self):
        return ops.symmetric_power_dim(self.encoded_dim, self.attention.power), 0

    @property
    def flop_shape(self):
        return self.encoded_dim, self.head_dim, self.attention.power

    def pair_flops(self, pairs):
        # Keys are compared with keys too.
        return super().pair_flops(pairs) * (1 + self.num_kv_heads / self.num_heads)

    def flops_per_token(self, context_length):
        """Returns the FLOPs of `RecurrentKernel`, without a form those of the one that the op chooses."""
        if self.form is None:
            size, columns, power = self.flop_shape
            heads = {"heads": self.num_heads, "kv_heads": self.num_kv_heads}
            shape = {"head_dim": size, "value_dim": columns, "power": power}
            if not delta_form.prefers_pairs(context_length, **heads, **shape):
                return self.feature_flops("chunked")
        return super().flops_per_token(context_length)

    def feature_flops(self, form):
        # Keys read the state, and then update it.
        size, columns, power = self.flop_shape
        sizes = {"head_dim": size, "value_dim": columns, "power": power}
        features = cost.feature_flops(heads=self.num_heads, kv_heads=2 * self.num_kv_heads, **sizes)
        chunk = {"chunked": self.attention.chunk_size or delta_form.CHUNK, "recurrent": 1}[form]
        return features + self.pair_flops(chunk / 2)
