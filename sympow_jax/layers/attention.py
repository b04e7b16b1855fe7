"""Attention as a kernel, a decay and a position encoding."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax import ops
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers, partitioning
from sympow_jax.ops import documents, rotary

__all__ = ["Attention", "AttentionState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionState:
    """What a layer carries from one call to the next.

    memory: the recurrent state, or kept keys and values.
    position: where the document has got to; None where the layer needs no position.
    """

    memory: ops.PowerState | ops.LinearState | ops.KeyValueState
    position: rotary.RotaryState | documents.PositionState | None


class Attention(nnx.Module):
    """Causal attention over [B, T, M]; `config.attention` chooses kernel, decay and position.

    Decays gamma = sigmoid(W_gamma x) and rotation rates beta = 1 + tanh(W_beta x), one per key/value head,
    are those of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, section
    3). They, the rotation angles, the state and the normaliser are in float32 whatever `config.dtype`.
    Over a mesh in scope each device has its rows, times and heads, as `layers.partitioning` names the axes.
    `sinusoidal` positions belong to the model, which adds them to the embedding.
    """

    def __init__(self, config: configs.ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        assert kv_heads is not None  # ModelConfig derives what is not given
        assert head_dim is not None
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.query = initializers.linear(config, config.width, heads * head_dim, rngs=rngs)
        self.key = initializers.linear(config, config.width, kv_heads * head_dim, rngs=rngs)
        self.value = initializers.linear(config, config.width, kv_heads * head_dim, rngs=rngs)
        self.out = initializers.linear(config, heads * head_dim, config.width, residual=True, rngs=rngs)
        if config.attention.decay == "learned":
            self.decay = initializers.linear(config, config.width, kv_heads, exact=True, rngs=rngs)
        if config.attention.position == "learned_rope":
            self.rate = initializers.linear(config, config.width, kv_heads, exact=True, rngs=rngs)

    @overload
    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: AttentionState | None = None,
        return_state: Literal[False] = False,
    ) -> Float[Array, "B T M"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: AttentionState | None = None,
        return_state: Literal[True],
    ) -> tuple[Float[Array, "B T M"], AttentionState]: ...

    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: AttentionState | None = None,
        return_state: bool = False,
    ) -> Float[Array, "B T M"] | tuple[Float[Array, "B T M"], AttentionState]:
        """The layer's output, and with `return_state` the state behind x.

        Consecutive calls, each given the state of the one before, equal one call. Raises ValueError for
        `return_state` without a state where keys are kept, as they need a capacity: start from `init_state`.
        """
        if return_state and state is None:
            state = self._first_state(x.shape[0])
        batch, time, _ = x.shape
        arrays = self._project(x) | {"segment_ids": segment_ids}
        if state is None:
            mixed = self._over_devices(arrays)
        else:
            mixed, state = self._mix(**arrays, state=state, axis_name=None)
        (out,) = initializers.project(mixed.reshape(batch, time, -1), self.out)
        return out if state is None or not return_state else (out, state)

    def init_state(self, batch: int, *, max_length: int) -> AttentionState:
        """The state before any token, for up to `max_length` positions.

        Keys and values are kept, with that capacity, where attending to them costs less than the recurrent
        state or is what `form` asks for. Raises ValueError where the recurrent state would exceed memory.
        """
        if not self._keeps_keys(max_length):
            return self._recurrent_state(batch)
        memory = ops.KeyValueState.zeros(
            batch,
            max_length,
            self.kv_heads,
            self.head_dim,
            self.head_dim,
            dtype=jnp.dtype(self.config.dtype),
        )
        return AttentionState(memory=memory, position=self._first_position(batch))

    def _keeps_keys(self, max_length: int) -> bool:
        attention = self.config.attention
        if attention.kernel != "power" or attention.form is not None:
            return attention.kernel == "softmax" or attention.form == "attention"
        # FLOPs a token and head: 4 F E to read and update a state, 2 (D + E) S to read kept keys.
        features = ops.symmetric_power_dim(self.head_dim, attention.power)
        return 2 * (2 * self.head_dim) * max_length <= 4 * features * self.head_dim

    def _first_state(self, batch: int) -> AttentionState:
        attention = self.config.attention
        if attention.kernel == "softmax" or attention.form == "attention":
            raise ValueError(
                f"return_state is set without a state, but kernel {attention.kernel!r} in form "
                f"{attention.form or 'attention'!r} keeps keys; pass state=init_state(batch, max_length=...)"
            )
        return self._recurrent_state(batch)

    def _recurrent_state(self, batch: int) -> AttentionState:
        attention = self.config.attention
        sizes = (batch, self.kv_heads, self.head_dim, self.head_dim)
        memory: ops.PowerState | ops.LinearState
        if attention.kernel == "power":
            memory = ops.PowerState.zeros(*sizes, power=attention.power, window=attention.window)
        else:
            memory = ops.LinearState.zeros(*sizes, window=attention.window)
        return AttentionState(memory=memory, position=self._first_position(batch))

    def _first_position(self, batch: int) -> rotary.RotaryState | documents.PositionState | None:
        match self.config.attention.position:
            case "rope":
                return documents.PositionState.zeros(batch)
            case "learned_rope":
                return rotary.RotaryState.zeros(batch, self.kv_heads)
        return None

    def _project(self, x) -> dict[str, Array | None]:
        """Queries, keys and values by head, and what decays and moves positions on, by key/value head."""
        attention = self.config.attention
        learned = {"decay": attention.decay == "learned", "rate": attention.position == "learned_rope"}
        names = ["query", "key", "value", *(name for name, is_learned in learned.items() if is_learned)]
        found = dict(zip(names, initializers.project(x, *(getattr(self, name) for name in names))))
        heads = {name: found[name].reshape(*x.shape[:2], -1, self.head_dim) for name in names[:3]}
        return heads | {
            "rate": self._rate(found.get("rate")),
            "log_decay": self._log_decay(x, found.get("decay")),
        }

    def _over_devices(self, arrays):
        """The kernel's output [B, T, N, E] without a state, each device having its rows, heads and times."""
        names, shape = list(arrays), arrays["query"].shape
        divisible = self.kv_heads % partitioning.size(partitioning.TENSOR) == 0
        heads = partitioning.HEADS if divisible else partitioning.TOKENS
        divided = partitioning.CONTEXT in partitioning.dividing(heads, shape)

        def mix(*arrays):
            arguments = dict(zip(names, arrays))
            return self._mix(**arguments, state=None, axis_name=partitioning.CONTEXT if divided else None)[0]

        specs = (partitioning.TOKENS if name == "segment_ids" else heads for name in names)
        return partitioning.over_devices(
            mix, tuple(arrays.values()), tuple(specs), partitioning.fit(heads, shape)
        )

    def _mix(self, query, key, value, rate, log_decay, segment_ids, state, axis_name):
        """The kernel's output [B, T, N, E], and the state behind it if there was one to begin with.

        `axis_name` is the mesh axis over which time is divided, if it is.
        """
        position = None if state is None else state.position
        turns, position = self._angles(query, rate, segment_ids, position, axis_name)
        if turns is not None:
            query, key = rotary.rotate(query, turns), rotary.rotate(key, turns)
        if state is None:
            form = self.config.attention.form
            return self._attend(query, key, value, log_decay, segment_ids, form, axis_name), None
        mixed, memory = self._remember(query, key, value, log_decay, segment_ids, state.memory)
        return mixed, AttentionState(memory=memory, position=position)

    def _rate(self, projected) -> Float[Array, "B T K"] | None:
        """By how much each token moves the position on, in [0, 2]; None unless the data says so."""
        return None if projected is None else 1 + jnp.tanh(projected)

    def _angles(self, query, rate, segment_ids, state, axis_name):
        """The angles that turn queries and keys, and the position reached; None where nothing turns them."""
        head_dim, longest = self.head_dim, self.config.attention.max_document_length
        if rate is not None:
            return rotary.learned_angles(
                rate,
                head_dim,
                max_document_length=longest,
                segment_ids=segment_ids,
                state=state,
                axis_name=axis_name,
            )
        if self.config.attention.position != "rope":
            return None, None
        if segment_ids is None:
            segment_ids = jnp.zeros(query.shape[:2], jnp.int32)
        state = state or self._first_position(query.shape[0])
        places, state = documents.positions(segment_ids, state, axis_name=axis_name)
        return rotary.rope_angles(places, head_dim, max_document_length=longest), state

    def _log_decay(self, x, projected) -> Float[Array, "B T K"] | None:
        """The logarithm of gamma, finite where sigmoid itself rounds to 0."""
        match self.config.attention.decay:
            case "learned":
                return jax.nn.log_sigmoid(projected)
            case "alibi":
                slopes = -jnp.array(ops.alibi_slopes(self.kv_heads), jnp.float32)
                return jnp.broadcast_to(slopes, (*x.shape[:2], len(slopes)))
        return None

    def _remember(self, query, key, value, log_decay, segment_ids, memory):
        """The kernel's output [B, T, N, E] and what it remembers, from what it remembered before."""
        if not isinstance(memory, ops.KeyValueState):
            return self._recur(query, key, value, log_decay, segment_ids, memory)
        capacity = memory.key.shape[1]
        joined, missing = memory.append(key, value, log_decay, segment_ids)
        log_decay = None if log_decay is None else joined.log_decay
        out = self._attend(query, joined.key, joined.value, log_decay, joined.segment_ids, "attention")
        return jnp.where(missing[..., None, None], jnp.nan, out), joined.newest(capacity)

    def _attend(self, query, key, value, log_decay, segment_ids, form, axis_name=None):
        """The kernel without a recurrent state; in the attention form there may be more keys than queries."""
        tokens = {"log_decay": log_decay, "segment_ids": segment_ids, "axis_name": axis_name}
        if self.config.attention.kernel == "softmax":
            kept = key.shape[1] > query.shape[1]
            implementation = "xla" if kept else self.config.attention.implementation
            return ops.softmax_attention(query, key, value, **tokens, implementation=implementation)
        attend, _ = self._kernel(form)
        return attend(query, key, value, **tokens)

    def _recur(self, query, key, value, log_decay, segment_ids, memory):
        attend, step = self._kernel(self.config.attention.form)
        tokens = {"log_decay": log_decay, "segment_ids": segment_ids}
        if query.shape[1] > 1:
            return attend(query, key, value, **tokens, initial_state=memory, return_state=True)
        token = {name: None if x is None else x[:, 0] for name, x in tokens.items()}
        out, memory = step(query[:, 0], key[:, 0], value[:, 0], memory, **token)
        return out[:, None], memory

    def _kernel(self, form: str | None) -> tuple[Callable, Callable]:
        """The op of the kernel and its step for one token, with the config's settings."""
        attention = self.config.attention
        attend: Callable = ops.linear_attention
        step: Callable = ops.linear_attention_step
        if attention.kernel == "power":
            attend = functools.partial(ops.power_attention, power=attention.power)
            step = functools.partial(ops.power_attention_step, power=attention.power)
        attend = functools.partial(
            attend,
            form=form,
            implementation=attention.implementation,
            chunk_size=attention.chunk_size,
            window=attention.window,
        )
        return attend, functools.partial(step, implementation=attention.implementation)
