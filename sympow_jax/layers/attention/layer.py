"""Attention as a kernel, a decay and a position encoding."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax import ops
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers, norms, partitioning
from sympow_jax.layers.attention import decays, kernels, positions
from sympow_jax.layers.attention import memory as memories
from sympow_jax.ops import arguments, documents, pytree, rotary, time_axis
from sympow_jax.ops.promotion import by_default_rules


class AttentionState(pytree.State):
    """State of an attention layer after a prefix of tokens.

    Attributes:
        memory: recurrent state or KV cache.
        position: position in the current document; None if the layer needs no position.
        window: KV cache of the softmax window alongside the kernel; None without one.
    """

    memory: kernels.Memory
    position: positions.PositionState | None
    window: ops.KVCache | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """Attention weights, decays and rotation rates of a layer for a sequence.

    Attributes:
        weights: weight of the value of each token (last axis) in the output of each token (second last). They sum to 1
            over values, or to 0 if all weights are 0. Weights of the kernel `linear` with rotated features need not
            sum to 1, and may be negative. Those of `power_delta` may be negative too, and precede the norm of outputs.
            With a softmax window alongside the kernel, they are the sum of both, each times its gate. For decays per
            value channel, this is the mean over channels.
        log_decay: logarithm of the decay of each head, or of each value channel of a head; None without decay.
        rate: distance that each token moves the learned position of a head, or of each of its pairs; None unless
            learned. `Positions.theta` is the angle of a pair at rate 1.
    """

    weights: Float[Array, "B N T T"]
    log_decay: Float[Array, "B T K ..."] | None
    rate: Float[Array, "B T K ..."] | None


# Types whose arrays have axes by name.
_WITH_LAYOUT = (ops.PowerState, ops.DeltaState, ops.KVCache, rotary.RotaryState, documents.PositionState)
_AXES = {"B": partitioning.BATCH, "K": partitioning.TENSOR}


def _state_specs(state: AttentionState | None) -> Any:
    """Returns the partition spec of each array of a state: rows and key/value heads are sharded."""
    layouts = jax.tree.map(lambda x: x.layout(), state, is_leaf=lambda x: isinstance(x, _WITH_LAYOUT))
    specs = jax.tree.map(lambda x: jax.sharding.PartitionSpec(*map(_AXES.get, x.split())), layouts)
    return jax.tree.map(lambda x, spec: partitioning.fit(spec, x.shape), state, specs)


def make_attention(config: config_lib.ModelConfig, layer: int = 0, *, rngs: nnx.Rngs | int) -> "Attention":
    """Returns the attention of a layer of a model, counted from 0.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import config, layers
        >>> model = config.ModelConfig(vocab_size=8, layers=1, width=32, heads=2, attention=config.preset("conformal"))
        >>> layer = layers.make_attention(model, rngs=0)
        >>> layer(jnp.ones((1, 16, 32))).shape
        (1, 16, 32)
    """
    return Attention(
        config.width,
        kernels.from_config(config, layer),
        use_bias=config.biases,
        norm_epsilon=config.norm_epsilon,
        # GPT-2's scale: the residual stream is the sum of 2 * layers outputs.
        out_scale=1 / math.sqrt(2 * config.layers),
        rngs=rngs,
    )


class _Heads(NamedTuple):
    """Projections of tokens, by head."""

    query: Float[Array, "B T N D"]
    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K E"]
    log_decay: Float[Array, "B T K ..."] | None
    rate: Float[Array, "B T K ..."] | None
    delta: Float[Array, "B T K"] | None
    mix: Float[Array, "B T N 2"] | None

    @property
    def gates(self) -> dict[str, Any]:
        """Decays and, of a kernel that has them, write strengths."""
        return {"log_decay": self.log_decay} | ({} if self.delta is None else {"delta": self.delta})

    def gated_sum(
        self, far: Float[Array, "B T N E"], near: Float[Array, "B T N E"]
    ) -> Float[Array, "B T N E"]:
        """Returns the sum of the outputs of the kernel and of the window alongside it, each times its gate."""
        assert self.mix is not None
        return (self.mix[..., :1] * far + self.mix[..., 1:] * near).astype(near.dtype)


class Attention(nnx.Module):
    """Attention over [B, T, M] with any kernel, decay and position encoding.

    Decays gamma = sigmoid(W_gamma x) and rotation rates beta = 1 + tanh(W_beta x), one per key/value head, are from
    "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, section 3). `learned_rope_pairs`
    has a rate per pair of dimensions. The decays `channel_...` are per value channel instead of per head. The kernel
    `power_delta` also has a write strength sigmoid(W_delta x), or twice that, per key/value head, and RMS-normalizes
    the output of each head, as "Gated Delta Networks" (Yang et al. 2025). With a softmax window alongside the
    kernel, the output of a query head is the sum of both, each times a gate sigmoid(W_mix x + b). Recurrent states
    are stored in the kernel's `state_dtype`. They are computed in float32, or in float64 if its `dtype` is, as are
    decays, gates, rotation rates and angles and the normalizer.

    Under a mesh with Auto axes named as in `layers.partitioning`, rows, times and heads are sharded over them. On a
    mesh with Explicit axes, rows keep the sharding of `x`, heads have that of the parameters that produce them, and
    time is gathered.

    Args:
        width: M, the size of the input and of the output.
        kernel: an instance of `kernels.Kernel`, whose options name the decay and the position encoding. Positions that
            are added to the embedding are applied by the model, not here. Its `dtype` is that of the matrix products;
            parameters are float32.
        use_bias: whether projections have a bias, except those of decays, strengths, rates and gates. Those of queries,
            keys and values also have one if the kernel's options say `qkv_biases`.
        norm_epsilon: number that norms of queries, keys and outputs add to the mean square.
        out_scale: factor of the initial standard deviation of the output projection.
        rngs: source of initial values, or a seed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import config, layers
        >>> from sympow_jax.layers.attention import kernels
        >>> kernel = kernels.make(config.preset("conformal"), num_heads=2, num_kv_heads=2, head_dim=16)
        >>> layers.Attention(32, kernel, rngs=0)(jnp.ones((1, 16, 32))).shape
        (1, 16, 32)
    """

    def __init__(
        self,
        width: int,
        kernel: kernels.Kernel,
        *,
        use_bias: bool = False,
        norm_epsilon: float = 1e-6,
        out_scale: float = 1.0,
        rngs: nnx.Rngs | int,
    ):
        rngs, dtype = initializers.as_rngs(rngs), jnp.dtype(kernel.dtype)
        self.width, self.kernel = width, kernel
        self.num_heads, self.kv_heads, self.head_dim = kernel.num_heads, kernel.num_kv_heads, kernel.head_dim
        linear = functools.partial(initializers.Linear, dtype=dtype, rngs=rngs)
        query_width, kv_width = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        biases = use_bias or kernel.attention.qkv_biases
        norm = functools.partial(norms.rms_norm, self.head_dim, epsilon=norm_epsilon, dtype=dtype, rngs=rngs)
        self.query = linear(width, query_width, names=("embed", "heads"), use_bias=biases)
        self.key = linear(width, kv_width, names=("embed", "kv_heads"), use_bias=biases)
        self.value = linear(width, kv_width, names=("embed", "kv_heads"), use_bias=biases)
        self.out = linear(query_width, width, names=("heads", "embed"), use_bias=use_bias, scale=out_scale)
        if kernel.attention.qk_norm:
            self.query_norm, self.key_norm = norm(), norm()
        self.positions = positions.make(
            kernel.attention,
            num_kv_heads=self.kv_heads,
            size=kernel.position_dim,
            of_features=kernel.rotates_features,
            dtype=dtype,
            rngs=rngs,
        )
        # Decays, rates and strengths are exact: their products are in float32 if the dtype is shorter.
        self.decays = decays.make(kernel)
        if self.decays.num_projected:
            self.decay = linear(width, self.decays.num_projected, names=("embed", "gates"), exact=True)
        self.decays.init_parameters(self)
        if rates := positions.num_rates(kernel.attention, kernel.position_dim):
            scale = float(kernel.attention.learned_rope_start == "paper")
            self.rate = linear(
                width, self.kv_heads * rates, names=("embed", "gates"), scale=scale, exact=True
            )
        if kernel.largest_delta:
            # Outputs of the delta rule are no means, and are normalized as in Gated DeltaNet.
            self.out_norm = norm()
            self.delta = linear(width, self.kv_heads, names=("embed", "gates"), exact=True)
        if kernel.window_kernel is not None:
            # 0.12 of the output of the state at first, and 0.88 of that of the window.
            self.mix = linear(width, 2 * self.num_heads, names=("embed", "gates"), use_bias=True, exact=True)
            assert self.mix.bias is not None
            self.mix.bias[...] += jnp.tile(jnp.array([-2, 2], jnp.float32), self.num_heads)

    @by_default_rules
    def __call__(
        self, x: Float[Array, "B T M"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T M"]:
        """Returns the output."""
        x, segment_ids = self._checked(x, segment_ids)
        return self._attend(x, segment_ids, None)[0]

    @by_default_rules
    def extend(
        self, x: Float[Array, "B T M"], state: AttentionState, *, segment_ids: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T M"], AttentionState]:
        """Returns the output after the tokens of a state, and the state after x.

        Consecutive calls, the first from `init_state` and each from the state before it, equal one call of the layer.

        Raises:
            ValueError: attention is not causal, or the state is not one of this layer.
        """
        x, segment_ids = self._checked(x, segment_ids)
        if not self.kernel.attention.causal:
            raise ValueError("attention that is not causal has no state; call the layer, without extend")
        self.check_state(state, x.shape[0])
        return self._attend(x, segment_ids, state)

    @by_default_rules
    def maps(
        self, x: Float[Array, "B T M"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> AttentionMaps:
        """Returns the attention weights, decays and rates for x; takes T x T elements per head."""
        x, segment_ids = self._checked(x, segment_ids)
        heads = self._project(x)
        arrays = self.positions.head_arrays()
        query, key, rotate, _ = self.positions._apply(
            heads.query, heads.key, rate=heads.rate, head_arrays=arrays, segment_ids=segment_ids
        )
        options: dict[str, Any] = {"rotate": rotate, "segment_ids": segment_ids}
        weights = self.kernel.weights(query, key, **options, **heads.gates)
        if (window := self.kernel.window_kernel) is not None:
            weights = heads.gated_sum(weights, window.weights(query, key, **options, log_decay=None))
        return AttentionMaps(weights=jnp.swapaxes(weights, 1, 2), log_decay=heads.log_decay, rate=heads.rate)

    def init_state(
        self, batch: int, *, max_length: int | None = None, kv_cache: bool | None = None
    ) -> AttentionState:
        """Returns the state before any token.

        Args:
            batch: number of rows.
            max_length: capacity of a KV cache, in positions; at least 1. A kernel with a window has a smaller cache if
                fewer positions suffice. None for a memory that does not grow: the recurrent state, or the cache of a
                whole window.
            kv_cache: whether to use a KV cache. None uses one if `max_length` positions take no more memory than the
                recurrent state, or if the kernel or its form requires it.

        Raises:
            ValueError: the recurrent state would exceed memory, the kernel does not support `kv_cache`, or the memory
                is a KV cache that grows and `max_length` is None.
        """
        if max_length is not None:
            max_length = arguments.check_integer("max_length", max_length, 1)
        memory = memories.init(self.kernel, batch, max_length=max_length, kv_cache=kv_cache)
        window = self._window_cache(memories.init, batch)
        state = AttentionState(memory=memory, position=self.positions.init_state(batch), window=window)
        return jax.tree.map(partitioning.constrain, state, _state_specs(state))

    @by_default_rules
    def fold(self, state: AttentionState) -> AttentionState:
        """Returns the state with a KV cache replaced by the recurrent state of its positions, which does not grow.

        The cache of a sliding window is replaced by one with room for the whole window. A row whose document has
        exceeded the capacity of the cache becomes NaN.

        Raises:
            ValueError: the state is not one of this layer, or there is no memory that does not grow.
        """
        self.check_state(state)
        return dataclasses.replace(state, memory=memories.fold(self.kernel, state.memory))

    def _checked(self, x, segment_ids):
        """Returns the arguments of a call as arrays.

        Raises:
            ValueError: they do not fit each other or the layer.
        """
        x = arguments.to_array("x", x)
        if x.ndim != 3:
            raise ValueError(
                f"x has shape {x.shape}; it must be [B, T, M]; add the batch axis to one row with x[None]"
            )
        if x.shape[-1] != self.width:
            raise ValueError(
                f"x has shape {x.shape}; its last axis must be the layer's width {self.width}; make the layer with "
                f"width={x.shape[-1]}"
            )
        if 0 in x.shape:
            raise ValueError(f"x has shape {x.shape}; every size must be at least 1")
        arguments.check_floating("x", x)
        return x, arguments.to_segment_ids(segment_ids, x.shape[:2])

    def check_state(self, state: Any, batch: int | None = None) -> None:
        """Raises ValueError unless `state` is one of this layer, for `batch` rows or, if None, for any number."""
        if not isinstance(state, AttentionState):
            raise ValueError(f"the state is a {type(state).__name__}; make it with init_state")
        memory = state.memory
        length = memory.capacity if isinstance(memory, ops.KVCache) else None
        cached = length is not None
        if not isinstance(memory, kernels.Memory) or not self.kernel.supports_memory(kv_cache=cached):
            raise ValueError(
                f"the state has a {type(memory).__name__}, which kernel {self.kernel.attention.kernel!r} does not "
                f"support; make it with init_state"
            )
        rows = len(jax.tree.leaves(memory)[0])
        if batch not in (None, rows):
            raise ValueError(
                f"the state has {rows} rows and there are tokens for {batch}; they must be equal"
            )
        abstract = memories.shapes(self.kernel, rows, max_length=length, kv_cache=cached)
        window = self._window_cache(memories.shapes, rows)
        own = AttentionState(memory=abstract, position=self.positions.init_state(rows), window=window)
        if different := pytree.difference(state, own):
            raise ValueError(f"the state is not one of this layer: {different}; make it with init_state")

    def _window_cache(self, init: Callable[..., Any], rows: int) -> Any:
        """Returns the cache of the whole softmax window by `memories.init` or `shapes`; None without a window."""
        window = self.kernel.window_kernel
        return None if window is None else init(window, rows, max_length=None, kv_cache=True)

    def _project(self, x) -> "_Heads":
        """Returns queries, keys, values, decays, rates, write strengths and the gates of a softmax window, per head."""
        names = ["query", "key", "value"]
        names += [name for name in ("decay", "rate", "delta", "mix") if hasattr(self, name)]
        arrays = initializers.project(x, *(getattr(self, name) for name in names))
        if partitioning.is_explicit(arrays[0]):
            # Shard by whole heads: by the axes of the query's heads if they divide the key/value heads. Gather time.
            rows, _, axes = partitioning.explicit_spec(arrays[0])
            spec = (rows, (), partitioning.explicit_axes(axes, self.kv_heads, arrays[0]))
            arrays = tuple(partitioning.reshard(array, spec) for array in arrays)
        projected = dict(zip(names, arrays, strict=True))
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (projected[name].reshape(shape) for name in names[:3])
        if self.kernel.attention.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        rate, delta, mix = (projected.get(name) for name in ("rate", "delta", "mix"))
        return _Heads(
            query=query,
            key=key,
            value=value,
            log_decay=self.decays.log_decay(self, x, projected.get("decay")),
            rate=None if rate is None else self.positions.rate(rate),
            delta=None if delta is None else self.kernel.largest_delta * jax.nn.sigmoid(delta),
            mix=None if mix is None else jax.nn.sigmoid(mix).reshape(*x.shape[:2], -1, 2),
        )

    def _attend(self, x, segment_ids, state):
        """Returns the output and the new state, None without a state."""
        if segment_ids is not None:
            segment_ids = partitioning.gather_time(segment_ids)
        heads, arrays = self._project(x), self.positions.head_arrays()
        if not partitioning.is_divided():
            mixed, state = self._mix(heads, arrays, segment_ids, state, axis_name=None)
        else:
            # Each device has a shard of rows and heads and, unless the memory needs all of them, of times.
            divisible = self.kv_heads % partitioning.size(partitioning.TENSOR) == 0
            rows, times, tensor = partitioning.HEADS
            partition = jax.sharding.PartitionSpec
            shard = x.shape[1] // partitioning.size(partitioning.CONTEXT)
            whole = state is not None and not memories.may_shard_time(self.kernel, state.memory, shard)
            spec = partition(rows, None if whole else times, tensor if divisible else None)
            divided = partitioning.CONTEXT in partitioning.dividing(spec, heads.query.shape)
            state_specs = _state_specs(state)
            # Key/value heads are the first axis of the positions' arrays.
            in_specs = (spec, partition(spec[2]), partition(*spec[:2]), state_specs)
            mixed, state = partitioning.over_devices(
                functools.partial(self._mix, axis_name=partitioning.CONTEXT if divided else None),
                (heads, arrays, segment_ids, state),
                in_specs,
                (partitioning.fit(spec, heads.query.shape), state_specs),
            )
        if self.kernel.largest_delta:
            mixed = self.out_norm(mixed)
        (out,) = initializers.project(mixed.reshape(*x.shape[:2], -1), self.out)
        return out, state

    def _mix(self, heads, arrays, segment_ids, state, *, axis_name):
        """Returns the kernel's output [B, T, N, E], and the new state if a state is given.

        `arrays` are the `head_arrays` of the positions. `axis_name` is the mesh axis that shards time, if any.
        """
        query, key, rotate, position = self.positions._apply(
            heads.query,
            heads.key,
            rate=heads.rate,
            head_arrays=arrays,
            segment_ids=segment_ids,
            state=None if state is None else state.position,
            axis_name=axis_name,
        )
        options: dict[str, Any] = {"rotate": rotate, "segment_ids": segment_ids, "axis_name": axis_name}

        def run(kernel, memory, **gates):
            if memory is None:
                return kernel.attend(query, key, heads.value, **options, **gates), None
            return memories.extend(kernel, query, key, heads.value, **options, **gates, memory=memory)

        memory, window = (None, None) if state is None else (state.memory, state.window)
        mixed, memory = run(self.kernel, memory, **heads.gates)
        if self.kernel.window_kernel is not None:
            near, window = run(self.kernel.window_kernel, window, log_decay=None)
            mixed = heads.gated_sum(mixed, near)
        if state is None:
            return mixed, None
        if axis_name is not None:
            position = time_axis.of_last(position, axis_name)
        return mixed, AttentionState(memory=memory, position=position, window=window)
