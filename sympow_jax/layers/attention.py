"""Attention as a kernel, a decay and a position encoding."""

import dataclasses
import math
from typing import Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax import ops
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers, kernels, partitioning, positions

__all__ = ["Attention", "AttentionMaps", "AttentionState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionState:
    """What a layer carries from one call to the next.

    Attributes:
        memory: the recurrent state, or kept keys and values.
        position: where the document has got to; None where the layer needs no position.
    """

    memory: kernels.Memory
    position: positions.PositionState | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """What a layer does with a sequence.

    Attributes:
        weights: what the value of each token (last axis) is multiplied by in the output of each (second last). They
            sum to 1 over values, or to 0 where nothing has a weight; weights of kernel `linear` whose features
            positions turn need not, and may be negative. Of gates by value channel, the mean over channels.
        log_decay: the logarithm of what each head, or value channel of a head, keeps of the past; None without a gate.
        rate: by how much each token moves on the learned position of a head, or of each of its pairs; None unless
            learned. `Positions.theta` is what a pair turns by at rate 1.
    """

    weights: Float[Array, "B N T T"]
    log_decay: Float[Array, "B T K ..."] | None
    rate: Float[Array, "B T K ..."] | None


class Attention(nnx.Module):
    """Attention over [B, T, M]; `config.attention` chooses kernel, decay and position.

    Decays gamma = sigmoid(W_gamma x) and rotation rates beta = 1 + tanh(W_beta x), one per key/value head,
    are those of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, section
    3). Decays `channel_...` are one per value channel: fixed, the slopes of ALiBi over all channels; constant, learned
    from there; learned, sigmoid(W x). `learned_rope_pairs` has a rate per pair of dimensions. They, rotation angles,
    the state and the normaliser are in float32 whatever `config.dtype`.
    Over a mesh in scope each device has its rows, times and heads, as `layers.partitioning` names the axes.
    Positions that are added to the embedding belong to the model.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from sympow_jax import config, layers
        >>> model = config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2, attention=config.preset("conformal"))
        >>> layer = layers.Attention(model, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 16, 32))).shape
        (1, 16, 32)
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
        self.positions = positions.Positions(config, rngs=rngs)
        decays = {"learned": kv_heads, "channel_learned": kv_heads * head_dim}.get(config.attention.decay)
        if decays is not None:
            self.decay = initializers.linear(config, config.width, decays, exact=True, rngs=rngs)
        if config.attention.decay == "channel_constant":
            fixed = jnp.exp(self._fixed_decays())
            self.decay_logits = nnx.Param(jnp.log(fixed) - jnp.log1p(-fixed))
        rates = {"learned_rope": kv_heads, "learned_rope_pairs": kv_heads * (head_dim // 2)}
        if config.attention.position in rates:
            self.rate = initializers.linear(
                config, config.width, rates[config.attention.position], exact=True, rngs=rngs
            )

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
        `return_state` without a state where keys are kept, as they need a capacity: start from `init_state`;
        and for any state of attention that is not causal.
        """
        if (return_state or state is not None) and not self.config.attention.causal:
            raise ValueError("attention that is not causal has no state; leave out state and return_state")
        if return_state and state is None:
            state = self._first_state(x.shape[0])
        batch, time, _ = x.shape
        arrays = self._project(x) | {"segment_ids": segment_ids}
        if state is None:
            mixed = self._over_devices(arrays)
        else:
            mixed, state = self._mix(**arrays, learned=self.positions.learned(), state=state, axis_name=None)
        (out,) = initializers.project(mixed.reshape(batch, time, -1), self.out)
        return out if state is None or not return_state else (out, state)

    def maps(
        self, x: Float[Array, "B T M"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> AttentionMaps:
        """The weights, in the attention form, decays and rates of a call without a state; T x T numbers a head."""
        arrays = self._project(x)
        query, key, rate, log_decay = (arrays[name] for name in ("query", "key", "rate", "log_decay"))
        assert query is not None
        assert key is not None
        query, key, turn, _ = self.positions(
            query,
            key,
            rate=rate,
            learned=self.positions.learned(),
            segment_ids=segment_ids,
            state=None,
            axis_name=None,
        )
        tokens = {"turn": turn, "log_decay": log_decay, "segment_ids": segment_ids}
        weights = self._kernel.weights(query, key, **tokens)
        return AttentionMaps(weights=jnp.swapaxes(weights, 1, 2), log_decay=log_decay, rate=rate)

    def init_state(self, batch: int, *, max_length: int, keep_keys: bool | None = None) -> AttentionState:
        """The state before any token, for up to `max_length` positions.

        Keys and values are kept, with that capacity, if `keep_keys`; None keeps them where attending to them costs
        less than the recurrent state or is what `form` asks for. Raises ValueError where the recurrent state would
        exceed memory, and for `keep_keys` that the kernel does not leave open.
        """
        if keep_keys is None:
            keep_keys = self._kernel.keeps_keys(max_length)
        elif (not keep_keys) if self.kept_length is None else (keep_keys and not self.kept_length):
            kernel = self.config.attention.kernel
            raise ValueError(f"keep_keys is {keep_keys}, which this attention of kernel {kernel!r} cannot do")
        if not keep_keys:
            return self._recurrent_state(batch)
        memory = self._kernel.kept_keys(batch, max_length)
        return AttentionState(memory=memory, position=self.positions.zeros(batch))

    @property
    def kept_length(self) -> int | None:
        """For how many positions kept keys take no more memory than the recurrent state.

        0 where keys are never kept, None where they always are.
        """
        return self._kernel.kept_length()

    def fold(self, state: AttentionState) -> AttentionState:
        """The state with kept keys and values folded into the recurrent state, which does not grow.

        A row whose document has outgrown the kept keys is NaN from there on. Raises ValueError where no recurrent
        state exists.
        """
        if not isinstance(state.memory, ops.KeyValueState):
            return state
        if self.kept_length is None:
            kernel = self.config.attention.kernel
            raise ValueError(
                f"this attention of kernel {kernel!r} has no recurrent state to fold its keys into"
            )
        return dataclasses.replace(state, memory=self._kernel.fold(state.memory))

    def _first_state(self, batch: int) -> AttentionState:
        attention = self.config.attention
        if self._kernel.must_keep_keys():
            raise ValueError(
                f"return_state is set without a state, but kernel {attention.kernel!r} in form "
                f"{attention.form or 'attention'!r} keeps keys; pass state=init_state(batch, max_length=...)"
            )
        return self._recurrent_state(batch)

    def _recurrent_state(self, batch: int) -> AttentionState:
        return AttentionState(memory=self._kernel.zeros(batch), position=self.positions.zeros(batch))

    @property
    def _kernel(self) -> kernels.Kernel:
        return kernels.Kernel(self.config)

    def _project(self, x) -> dict[str, Array | None]:
        """Queries, keys and values by head, and what decays and moves positions on, by key/value head."""
        names = ["query", "key", "value", *(name for name in ("decay", "rate") if hasattr(self, name))]
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
        axis_name = partitioning.CONTEXT if divided else None

        def mix(learned, *arrays):
            arguments = dict(zip(names, arrays))
            return self._mix(**arguments, learned=learned, state=None, axis_name=axis_name)[0]

        # Key/value heads come first in what is learned.
        of_heads = jax.sharding.PartitionSpec(partitioning.TENSOR if divisible else None)
        specs = (partitioning.TOKENS if name == "segment_ids" else heads for name in names)
        return partitioning.over_devices(
            mix,
            (self.positions.learned(), *arrays.values()),
            (of_heads, *specs),
            partitioning.fit(heads, shape),
        )

    def _mix(self, query, key, value, rate, log_decay, segment_ids, learned, state, axis_name):
        """The kernel's output [B, T, N, E], and the state behind it if there was one to begin with.

        `learned` is of the positions; `axis_name` is the mesh axis over which time is divided, if it is.
        """
        query, key, turn, position = self.positions(
            query,
            key,
            rate=rate,
            learned=learned,
            segment_ids=segment_ids,
            state=None if state is None else state.position,
            axis_name=axis_name,
        )
        tokens = {"turn": turn, "log_decay": log_decay, "segment_ids": segment_ids}
        if state is None:
            return self._kernel.attend(query, key, value, **tokens, axis_name=axis_name), None
        memory = state.memory
        if isinstance(memory, ops.KeyValueState):
            mixed, memory = self._extend(query, key, value, **tokens, memory=memory)
        else:
            mixed, memory = self._kernel.recur(query, key, value, **tokens, memory=memory)
        return mixed, AttentionState(memory=memory, position=position)

    def _extend(self, query, key, value, turn, log_decay, segment_ids, memory):
        """The kernel's output [B, T, N, E] and the kept keys, from those kept before."""
        capacity = memory.key.shape[1]
        joined, missing = memory.append(key, value, log_decay, segment_ids)
        out = self._kernel.attend(
            query,
            joined.key,
            joined.value,
            turn=turn,
            log_decay=None if log_decay is None else joined.log_decay,
            segment_ids=joined.segment_ids,
            kept=True,
        )
        if segment_ids is not None and key.shape[1] > 1:
            joined = joined.without_gaps()
        return jnp.where(missing[..., None, None], jnp.nan, out), joined.newest(capacity)

    def _rate(self, projected) -> Float[Array, "B T K ..."] | None:
        """By how much each token moves the position on, in [0, 2]; None unless the data says so."""
        if projected is None:
            return None
        by_head = (self.kv_heads, -1) if self.config.attention.position == "learned_rope_pairs" else (-1,)
        return 1 + jnp.tanh(projected.reshape(*projected.shape[:2], *by_head))

    def _log_decay(self, x, projected) -> Float[Array, "B T K ..."] | None:
        """The logarithm of gamma, finite where sigmoid itself rounds to 0."""
        match self.config.attention.decay:
            case "learned":
                return jax.nn.log_sigmoid(projected)
            case "channel_learned":
                return jax.nn.log_sigmoid(projected.reshape(*x.shape[:2], self.kv_heads, self.head_dim))
            case "channel_constant":
                fixed = jax.nn.log_sigmoid(self.decay_logits[...])
            case "alibi" | "channel_fixed":
                fixed = self._fixed_decays()
            case _:
                return None
        return jnp.broadcast_to(fixed, (*x.shape[:2], *fixed.shape))

    def _fixed_decays(self) -> Float[Array, "K ..."]:
        """The logarithms of decays that do not depend on the data, by head or by value channel."""
        by_channel = self.config.attention.decay.startswith("channel")
        shape = (self.kv_heads, self.head_dim) if by_channel else (self.kv_heads,)
        return -jnp.array(ops.alibi_slopes(math.prod(shape)), jnp.float32).reshape(shape)
