"""The op of each kernel, with and without a state, behind one interface."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax import config as configs
from sympow_jax import ops
from sympow_jax.array_types import Array, Float
from sympow_jax.layers import positions

__all__ = ["Kernel", "Memory"]

Memory = ops.PowerState | ops.LinearState | ops.KeyValueState


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What `config.attention` computes from queries and keys that `layers.positions` has turned."""

    config: configs.ModelConfig

    def keeps_keys(self, max_length: int) -> bool:
        """Whether a state for so many positions is kept keys: where nothing else exists, or where they cost less."""
        attention = self.config.attention
        if attention.kernel == "linear" or self._gates_channels:
            return False
        if attention.kernel != "power" or attention.form is not None:
            return attention.kernel != "power" or attention.form == "attention"
        # FLOPs a token and head: 4 F E to read and update a state, 2 (D + E) S to read kept keys.
        features = ops.symmetric_power_dim(self._compared_dim, attention.power)
        return 2 * (self._compared_dim + self._value_dim) * max_length <= 4 * features * self._value_dim

    def kept_length(self) -> int | None:
        """For how many positions kept keys take no more memory than the recurrent state; None where there is none."""
        if self.must_keep_keys():
            return None
        attention = self.config.attention
        if not self.keeps_keys(1):  # the kernel or `form` leave no choice
            return 0
        # The state holds kv, norm and a window of 2 W keys and values besides.
        features = ops.symmetric_power_dim(self._compared_dim, attention.power)
        return (
            features * (self._value_dim + 1) // (self._compared_dim + self._value_dim) + 2 * attention.window
        )

    def must_keep_keys(self) -> bool:
        """Whether no other state exists, however long the document."""
        attention = self.config.attention
        if attention.kernel in ("softmax", "expressive"):
            return True
        return attention.kernel == "power" and attention.form == "attention"

    def kept_keys(self, batch: int, max_length: int) -> ops.KeyValueState:
        """The state before any token, with room for so many positions."""
        return ops.KeyValueState.zeros(
            batch,
            max_length,
            self._kv_heads,
            self._compared_dim,
            self._value_dim,
            dtype=jnp.dtype(self.config.dtype),
        )

    def zeros(self, batch: int) -> Memory:
        """The recurrent state before any token. Raises ValueError where it would exceed memory."""
        attention = self.config.attention
        sizes = (batch, self._kv_heads, self._compared_dim, self._value_dim)
        if attention.kernel == "linear":
            return ops.LinearState.zeros(
                *sizes,
                feature_map=attention.feature_map,
                power=attention.power,
                turned_dim=positions.turned_dim(self.config),
                normaliser=attention.normaliser,
                window=attention.window,
            )
        return ops.PowerState.zeros(
            *sizes, power=attention.power, window=attention.window, per_channel=self._gates_channels
        )

    def fold(self, kept: ops.KeyValueState) -> Memory:
        """The recurrent state of kept keys and values; NaN in rows whose document has outgrown them."""
        batch, capacity = kept.segment_ids.shape
        # What the queries read is dropped, and XLA computes none of it.
        heads = (batch, capacity, self.config.heads, self._compared_dim)
        _, memory = self.recur(
            jnp.zeros(heads, kept.key.dtype),
            kept.key,
            kept.value,
            turn=None,
            log_decay=kept.log_decay,
            segment_ids=kept.segment_ids,
            memory=self.zeros(batch),
        )
        assert isinstance(memory, ops.PowerState)  # `kept_length`
        kv = jnp.where(kept.complete[:, None, None, None], memory.kv, jnp.nan)
        return dataclasses.replace(memory, kv=kv, segment=kept.segment)

    def attend(
        self, query, key, value, *, turn, log_decay, segment_ids, axis_name=None, kept=False
    ) -> Float[Array, "B T N E"]:
        """Without a recurrent state; `kept` keys may be more than queries."""
        attention = self.config.attention
        tokens = {"log_decay": log_decay, "segment_ids": segment_ids, "axis_name": axis_name}
        if attention.kernel == "softmax":
            implementation = "xla" if kept else attention.implementation
            scale = 1 / math.sqrt(self._value_dim)  # of the head, whatever size positions make of it
            return ops.softmax_attention(
                query,
                key,
                value,
                **tokens,
                causal=attention.causal,
                scale=scale,
                implementation=implementation,
            )
        if attention.kernel == "expressive":
            return ops.expressive_attention(
                query, key, value, **tokens, causal=attention.causal, implementation=attention.implementation
            )
        op, _ = self._recurrent_ops(turn)
        if attention.kernel == "linear":
            op = functools.partial(op, causal=attention.causal)
        if kept:
            op = functools.partial(op, form="attention")
        return op(query, key, value, **tokens)

    def weights(self, query, key, *, turn, log_decay, segment_ids) -> Float[Array, "B T N T"]:
        """What `attend` multiplies each value by, in the attention form; for gates by channel the mean over channels.

        The output for values that are one-hot, so exact for every kernel.
        """
        batch, time, kv_heads, _ = key.shape
        one_hot = jnp.broadcast_to(jnp.eye(time, dtype=key.dtype)[:, None], (batch, time, kv_heads, time))
        attention = self.config.attention
        form = "attention" if attention.kernel in ("power", "linear") and attention.causal else None
        plain = dataclasses.replace(attention, form=form, implementation="xla", decay="none")
        kernel = Kernel(dataclasses.replace(self.config, attention=plain))

        def weigh(log_decay):
            return kernel.attend(query, key, one_hot, turn=turn, log_decay=log_decay, segment_ids=segment_ids)

        if not self._gates_channels:
            return weigh(log_decay)
        # Of one channel it is power attention; of all at once it would be a T x T array a channel.
        by_channel = jnp.moveaxis(log_decay, -1, 0)
        zeros = jnp.zeros((batch, time, self.config.heads, time), one_hot.dtype)
        total, _ = jax.lax.scan(lambda total, channel: (total + weigh(channel), None), zeros, by_channel)
        return total / len(by_channel)

    def recur(
        self, query, key, value, *, turn, log_decay, segment_ids, memory
    ) -> tuple[Float[Array, "B T N E"], Memory]:
        """From a recurrent state; one token takes the step."""
        op, step = self._recurrent_ops(turn)
        tokens = {"log_decay": log_decay, "segment_ids": segment_ids}
        if query.shape[1] > 1:
            return op(query, key, value, **tokens, initial_state=memory, return_state=True)
        token = {name: None if x is None else x[:, 0] for name, x in tokens.items()}
        out, memory = step(query[:, 0], key[:, 0], value[:, 0], state=memory, **token)
        return out[:, None], memory

    def _recurrent_ops(self, turn) -> tuple[Callable, Callable]:
        """The op of the kernel and its step for one token, with the config's settings."""
        attention = self.config.attention
        shared: dict[str, Any] = {"power": attention.power}
        settings: dict[str, Any] = {"chunk_size": attention.chunk_size, "window": attention.window}
        op: Callable = ops.power_attention
        step: Callable = ops.power_attention_step
        shared["implementation"] = attention.implementation
        settings["form"] = attention.form
        if attention.kernel == "linear":
            op, step = ops.linear_attention, ops.linear_attention_step
            shared |= {
                "feature_map": attention.feature_map,
                "turn": turn,
                "normaliser": attention.normaliser,
            }
        return functools.partial(op, **shared, **settings), functools.partial(step, **shared)

    @property
    def _gates_channels(self) -> bool:
        return self.config.attention.decay.startswith("channel")

    @property
    def _compared_dim(self) -> int:
        return positions.compared_dim(self.config)

    @property
    def _kv_heads(self) -> int:
        assert self.config.kv_heads is not None  # ModelConfig derives what is not given
        return self.config.kv_heads

    @property
    def _value_dim(self) -> int:
        assert self.config.head_dim is not None
        return self.config.head_dim
