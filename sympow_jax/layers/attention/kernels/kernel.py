"""Interface and base classes of attention kernels."""

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp

from sympow_jax import config as config_lib
from sympow_jax import ops
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers.attention import positions
from sympow_jax.ops import cost, plans

Memory = ops.PowerState | ops.LinearState | ops.DeltaState | ops.KVCache
"""Memory of a kernel between calls: a recurrent state or a KV cache."""


class CachePolicy(enum.Enum):
    """Rule for choosing a KV cache or a recurrent state as a kernel's memory."""

    ALWAYS = enum.auto()
    """There is no recurrent state, or the config selects the attention form."""
    NEVER = enum.auto()
    """The recurrent state is the only memory."""
    WHILE_SMALLER = enum.auto()
    """Both are supported. The cache is used while it takes no more memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel(abc.ABC):
    """An attention op with its options: a pure function of queries, keys, values and a memory.

    A subclass implements `attend`. One with a recurrent state derives from `RecurrentKernel`. Instances are hashable,
    so that they are static in a module's graph.

    Attributes:
        attention: the options, already validated.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K.
        head_dim: size of a head, and of its values, E.
        dtype: name of the dtype of queries, keys and values, and of a KV cache.
        state_dtype: name of the dtype in which a recurrent state is stored.
    """

    attention: config_lib.AttentionConfig
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    state_dtype: str = "float32"

    rotates_features: ClassVar[bool] = False
    """Positions are applied to features of queries and keys instead of to queries and keys."""

    weighs_cache: ClassVar[bool] = False
    """`weigh` is implemented: a single token leaves a KV cache in place, instead of going through `attend`."""

    @abc.abstractmethod
    def attend(
        self,
        query: Float[Array, "B T N D"],
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K E"],
        *,
        rotate: positions.Rotation | None,
        log_decay: Float[Array, "B S K ..."] | None,
        segment_ids: Int[Array, "B S"] | None,
        delta: Float[Array, "B S K"] | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "B T N E"]:
        """Returns the output of the last T of S tokens; S = T except with a KV cache.

        Args:
            query: queries, with positions applied unless `rotates_features`.
            key: keys, also with positions applied unless `rotates_features`.
            value: values.
            rotate: rotation of features; None unless `rotates_features` and there are positions.
            log_decay: logarithm of each token's decay, per head or per value channel; None without decay.
            segment_ids: document of each of the S tokens, negative for padding; None for one document.
            delta: write strength of each token and head; given if and only if `largest_delta` is not 0.
            axis_name: mesh axis that time is sharded over; None if time is whole.
        """

    @property
    def largest_delta(self) -> float:
        """Upper bound of the write strengths that the layer computes for `delta`; 0 if the ops take none."""
        return 0

    @functools.cached_property
    def window_kernel(self) -> "Kernel | None":
        """Softmax attention to the last tokens alongside this kernel; None without."""
        return None

    @property
    def cache_policy(self) -> CachePolicy:
        """Rule for choosing the memory."""
        return CachePolicy.ALWAYS

    def supports_memory(self, *, kv_cache: bool) -> bool:
        """Returns whether the policy allows a KV cache or, without `kv_cache`, a recurrent state."""
        return self.cache_policy is not (CachePolicy.NEVER if kv_cache else CachePolicy.ALWAYS)

    @property
    def encoded_dim(self) -> int:
        """D, the size of the queries and keys that `attend` receives."""
        return positions.encoded_dim(self.attention, self.head_dim)

    @property
    def position_dim(self) -> int:
        """Size of the vectors that positions are applied to."""
        return self.head_dim

    def weigh(
        self, scores: Float[Array, "B K G S"], log_decay: Float[Array, "B _ 1 S"]
    ) -> Float[Array, "B K G S"]:
        """Returns the weights of cached keys, times any factor for all keys of a query.

        Args:
            scores: products of a query and the keys.
            log_decay: logarithms of the decays between the two; minus infinity for masked keys, whose scores are 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights of a cache's keys; it uses attend")

    def init_cache(self, batch: int, capacity: int) -> ops.KVCache:
        """Returns an empty KV cache with room for `capacity` positions of each row."""
        return ops.KVCache.zeros(
            batch,
            capacity,
            self.num_kv_heads,
            self.encoded_dim,
            self.head_dim,
            dtype=jnp.dtype(self.dtype),
        )

    def init_state(self, batch: int) -> Memory:
        """Returns the recurrent state before any token.

        Raises:
            ValueError: there is no recurrent state.
        """
        raise ValueError(f"kernel {self.attention.kernel!r} has no recurrent state; use a KV cache")

    def explain(self, batch: int, time: int) -> tuple[plans.Candidate, ...]:
        """Returns the forms and implementations that the op chooses from for a batch without a state."""
        return ()

    @property
    def max_cache_length(self) -> int | None:
        """Longest cache that takes no more memory than the recurrent state; 0 if never used, None if always."""
        return None if self.cache_policy is CachePolicy.ALWAYS else 0

    @property
    def cache_limit(self) -> int | None:
        """Capacity that a KV cache never needs to exceed, in positions; None if it grows with the document."""
        return None

    def state_bytes(self, *, bytes_per_element: int = 4) -> int:
        """Returns the bytes of the recurrent state of one row.

        Raises:
            ValueError: there is no recurrent state.
        """
        raise ValueError(
            f"kernel {self.attention.kernel!r} has no recurrent state; its keys and values grow with the context"
        )

    @property
    def flop_shape(self) -> tuple[int, int, int]:
        """(D, E, p) of the op whose pairs and features are counted as FLOPs."""
        return self.encoded_dim, self.head_dim, 1

    def pair_flops(self, pairs: float) -> float:
        """Returns the FLOPs of a number of pairs per query head."""
        compared, columns, _ = self.flop_shape
        return cost.pair_flops(pairs, heads=self.num_heads, head_dim=compared, value_dim=columns)

    def flops_per_token(self, context_length: int) -> float:
        """Returns the FLOPs of a forward pass per token, by the conventions of `tasks.flops.model_flops_per_token`."""
        return self.pair_flops(self._pairs(context_length))

    def _pairs(self, context_length: int) -> float:
        """Returns the mean number of keys that a query attends to in a context."""
        return context_length / 2 if self.attention.causal else context_length

    def weights(
        self,
        query: Float[Array, "B T N D"],
        key: Float[Array, "B T K D"],
        *,
        rotate: positions.Rotation | None,
        log_decay: Float[Array, "B T K ..."] | None,
        segment_ids: Int[Array, "B T"] | None,
        **delta: Any,
    ) -> Float[Array, "B T N T"]:
        """Returns the weight of each value in the output of `attend`; the mean over channels for per-channel decays.

        Computed as the output for one-hot values, in the attention form if causal, so it is exact for every kernel.
        """
        batch, time, kv_heads, _ = key.shape
        one_hot = jnp.broadcast_to(jnp.eye(time, dtype=key.dtype)[:, None], (batch, time, kv_heads, time))
        options = dataclasses.replace(self.attention, implementation="xla", form="attention")
        kernel = dataclasses.replace(self, attention=options)
        return kernel.attend(
            query, key, one_hot, rotate=rotate, log_decay=log_decay, segment_ids=segment_ids, **delta
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentKernel(Kernel):
    """A kernel with a recurrent state of a fixed size.

    A subclass implements `op`, `step`, `init_state` and `state_sizes`.
    """

    @abc.abstractmethod
    def op(self, rotate: positions.Rotation | None) -> Callable:
        """Returns the op over a sequence, its options bound."""

    @abc.abstractmethod
    def step(self, rotate: positions.Rotation | None) -> Callable:
        """Returns the op for one token, its options bound."""

    @abc.abstractmethod
    def init_state(self, batch: int) -> Memory:
        """Returns the recurrent state before any token.

        Raises:
            ValueError: it would exceed the memory of the device.
        """

    @abc.abstractmethod
    def state_sizes(self) -> tuple[int, int]:
        """Returns F, the exact number of features of a key, and the number of elements of the normalizer per head."""

    @property
    def cache_policy(self):
        """Rule for choosing the memory: the recurrent state, unless a subclass says otherwise."""
        return CachePolicy.NEVER

    @property
    def form(self) -> str | None:
        """Form of the op; None for the cheapest, and for bidirectional attention, which has one form."""
        return self.attention.form if self.attention.causal else None

    def attend(self, query, key, value, *, rotate, log_decay, segment_ids, axis_name=None):
        """Returns the output of `op`."""
        options = {"log_decay": log_decay, "segment_ids": segment_ids, "axis_name": axis_name}
        return self.op(rotate)(query, key, value, **options)

    def state_bytes(self, *, bytes_per_element=4):
        """Returns the bytes of the recurrent state of one row."""
        features, normalizers = self.state_sizes()
        return self.num_kv_heads * (features * self.head_dim + normalizers) * bytes_per_element

    def flops_per_token(self, context_length):
        """Returns the FLOPs of a forward pass per token, by the conventions of `tasks.flops.model_flops_per_token`."""
        by_pairs = super().flops_per_token(context_length)
        if self.form == "attention":
            return by_pairs
        return self.feature_flops(self.form) if self.form else min(self.feature_flops("chunked"), by_pairs)

    def feature_flops(self, form: str) -> float:
        """Returns the FLOPs per token of a form with a state, "chunked" or "recurrent"."""
        compared, columns, power = self.flop_shape
        sizes = {"heads": self.num_heads, "kv_heads": self.num_kv_heads}
        flops: float = cost.feature_flops(**sizes, head_dim=compared, value_dim=columns, power=power)
        if self.attention.causal:
            # The recurrent form has no chunk size of its own.
            chosen = self.attention.chunk_size if form == "chunked" else None
            chunk = cost.default_chunk(form) if chosen is None else chosen
            flops += self.pair_flops(chunk / 2 + self.attention.exact_window)
        return flops
