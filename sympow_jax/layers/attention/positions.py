"""Position encodings that a layer applies to queries and keys, or to their features."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import documents, lrpe, rotary, spe

PositionState = rotary.RotaryState | documents.PositionState
"""Position in the current document: accumulated rates, or a number of tokens."""
Rotation = Callable[[Float[Array, "B T N _"]], Float[Array, "B T N _"]]
"""Rotates vectors by the positions of their tokens."""
HeadArrays = Mapping[str, Float[Array, "K ..."] | Int[Array, "K ..."]]

# Base of learned rotations, unless they start as in their paper.
_ROPE_BASE = 10_000.0
# Initial frequencies of SPE are low: the logistic of a normal variable minus this (code of Liutkus et al. 2021).
_LOW_FREQUENCIES = 4.0
# Sines per dimension, of which the authors' configs have 8 or 10, and realizations of the noise, of which all of these
# have 64. The latter are the head size of encoded queries and keys.
_SINES, _REALIZATIONS = 5, 64


def rotates(attention: config_lib.AttentionConfig) -> bool:
    """Returns whether positions rotate single vectors, so that they can be applied to features too."""
    return issubclass(_CLASSES[attention.position], _Rotating)


def encoded_dim(attention: config_lib.AttentionConfig, size: int) -> int:
    """Returns the size of encoded vectors, from the `size` before."""
    return _CLASSES[attention.position]._encoded_dim(attention, size)


def num_rates(attention: config_lib.AttentionConfig, size: int) -> int:
    """Returns the number of rotation rates per key/value head that a layer computes from its input."""
    return _CLASSES[attention.position]._num_rates(size)


def make(attention: config_lib.AttentionConfig, **options: Any) -> "Positions":
    """Returns the module for `attention.position`; `options` are the other arguments of `Positions`."""
    return _CLASSES[attention.position](attention, **options)


class Positions(nnx.Module):
    """Identity on queries and keys, for no position and for positions that are added to the embedding.

    `nnx.tabulate` compiles every public method that a call uses, so those with other values than arrays are private.

    Args:
        attention: the options.
        num_kv_heads: number of key/value heads; each has parameters of its own.
        size: size of the vectors that positions are applied to.
        of_features: whether the kernel applies rotations to features, instead of this module to queries and keys.
        dtype: dtype of the layer; angles are float64 if it is.
        rngs: source of initial values.
    """

    def __init__(
        self,
        attention: config_lib.AttentionConfig,
        *,
        num_kv_heads: int,
        size: int,
        of_features: bool,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.attention, self.dtype = attention, dtype
        self.num_kv_heads, self.size, self.of_features = num_kv_heads, size, of_features
        self.init_parameters(rngs)

    @staticmethod
    def _encoded_dim(attention: config_lib.AttentionConfig, size: int) -> int:
        return size

    def init_parameters(self, rngs: nnx.Rngs) -> None:
        """Creates the parameters, if there are any."""

    @staticmethod
    def _num_rates(size: int) -> int:
        return 0

    def rate(self, projected: Float[Array, "B T _"] | None) -> Float[Array, "B T K ..."] | None:
        """Returns the distance, in [0, 2], that each token moves its position; None unless it depends on the input."""
        return None

    def head_arrays(self) -> HeadArrays:
        """Returns parameters and constants by name; their first axis is the key/value heads."""
        return {}

    @property
    def theta(self) -> np.ndarray | None:
        """Angle in radians that each pair rotates by at rate 1; None unless rates are learned."""
        return None

    def init_state(self, batch: int) -> PositionState | None:
        """Returns the position before any token; None if none is needed."""
        return None

    def _apply(
        self,
        query: Float[Array, "B T N D"],
        key: Float[Array, "B T K D"],
        *,
        rate: Float[Array, "B T K ..."] | None,
        head_arrays: HeadArrays,
        segment_ids: Int[Array, "B T"] | None,
        state: PositionState | None = None,
        axis_name: str | None = None,
    ) -> tuple[Float[Array, "B T N _"], Float[Array, "B T K _"], Rotation | None, PositionState | None]:
        """Returns queries and keys for the kernel, the rotation of their features or None, and the new state.

        Args:
            query: queries.
            key: keys.
            rate: result of `rate`.
            head_arrays: result of `head_arrays`, for the heads in `key`.
            segment_ids: document of each token, negative for padding; positions restart at each document. None
                continues the document of the state.
            state: position before the first token; None for none.
            axis_name: mesh axis that time is sharded over; None if time is whole.
        """
        return query, key, None, None


class _Rotating(Positions, abc.ABC):
    """Positions that rotate single vectors: queries and keys, or features of them."""

    @abc.abstractmethod
    def _rotation(
        self,
        rate: Float[Array, "B T K ..."] | None,
        head_arrays: HeadArrays,
        segment_ids: Int[Array, "B T"],
        state: PositionState | None,
        axis_name: str | None,
    ) -> tuple[Rotation, PositionState]:
        """Returns the rotation of each token's vectors, and the new state."""

    def _apply(self, query, key, *, rate, head_arrays, segment_ids, state=None, axis_name=None):
        segment_ids = _continued(query, state) if segment_ids is None else segment_ids
        rotation, state = self._rotation(rate, head_arrays, segment_ids, state, axis_name)
        if self.of_features:
            return query, key, rotation, state
        return rotation(query), rotation(key), None, state

    def init_state(self, batch):
        return documents.PositionState.zeros(batch)


class Rope(_Rotating):
    """Rotary position embeddings, which rotate pairs by the position times a fixed rate."""

    def _rotation(self, rate, head_arrays, segment_ids, state, axis_name):
        places, state = _places(segment_ids, state, axis_name)
        rope = self.attention.rope
        theta, layout = _theta(self.attention, self.size, rope.base), rope.layout
        return functools.partial(rotary.rope, positions=places, theta=theta, layout=layout), state


class LearnedRope(_Rotating):
    """Rotary embeddings whose position moves by 1 + tanh(W x) per token and head (Kumar et al. 2025, section 3)."""

    @staticmethod
    def _num_rates(size):
        return 1

    def rate(self, projected):
        return 1 + jnp.tanh(projected)

    @property
    def theta(self):
        base = self.attention.rope.base
        if base is None and self.attention.learned_rope_start == "rope":
            base = _ROPE_BASE
        return _theta(self.attention, self.size, base)

    def init_state(self, batch):
        return rotary.RotaryState.zeros(batch, self.num_kv_heads, dtype=self.dtype)

    def _rotation(self, rate, head_arrays, segment_ids, state, axis_name):
        angles, state = rotary.learned_angles(
            rate,
            self.size,
            theta=self.theta,
            segment_ids=segment_ids,
            initial_state=state,
            axis_name=axis_name,
        )
        return functools.partial(rotary.rotate, angles=angles, layout=self.attention.rope.layout), state


class LearnedRopePairs(LearnedRope):
    """`LearnedRope` with a separate rate for each pair of dimensions."""

    @staticmethod
    def _num_rates(size):
        return size // 2

    def rate(self, projected):
        return super().rate(projected.reshape(*projected.shape[:2], -1, self.size // 2))

    def init_state(self, batch):
        return rotary.RotaryState.zeros(batch, self.num_kv_heads, self.size // 2, dtype=self.dtype)


class Lrpe(_Rotating):
    """Linearized relative positional encoding; `config.LrpeConfig` has its options."""

    @staticmethod
    def _encoded_dim(attention, size):
        # A complex number takes two real ones.
        complex_valued = attention.lrpe.core == "unitary" or attention.lrpe.basis == "fourier"
        return 2 * size if complex_valued else size

    def init_parameters(self, rngs):
        if self.attention.lrpe.learned_rates:
            rates = jnp.asarray(self._fixed_rates(), jnp.float32)
            self.rates = nnx.Param(jnp.broadcast_to(rates, (self.num_kv_heads, len(rates))))

    def head_arrays(self):
        arrays = {}
        if self.attention.lrpe.learned_rates:
            arrays["rates"] = self.rates[...]
        if self.attention.lrpe.permutation_per_head:
            permutations = lrpe.permutation(self.size, heads=self.num_kv_heads)
            arrays["permutation"] = jnp.asarray(permutations, jnp.int32)
        return arrays

    def _rotation(self, rate, head_arrays, segment_ids, state, axis_name):
        places, state = _places(segment_ids, state, axis_name)
        options = self.attention.lrpe
        fixed: dict[str, Any] = {"core": options.core, "basis": options.basis}
        if options.core == "permutation":
            fixed["permutation"] = lrpe.permutation(self.size)
        else:
            fixed["rates"] = self._fixed_rates()
        if options.basis == "householder":
            fixed["householder"] = lrpe.householder(self.size)
        return functools.partial(lrpe.encode, positions=places, **fixed | head_arrays), state

    def _fixed_rates(self):
        options = self.attention.lrpe
        return lrpe.rates(
            options.core,
            self.size,
            kind=options.rates,
            reference_length=options.reference_length,
            max_document_length=self.attention.max_document_length,
        )


class Spe(Positions):
    """Stochastic positional encoding, applied before the feature map of the kernel `linear`, as in the paper.

    Source: "Relative Positional Encoding for Transformers with Linear Complexity", Liutkus et al. 2021, without its
    gate. The noise is drawn once. The paper draws it for every batch.
    """

    @staticmethod
    def _encoded_dim(attention, size):
        return _REALIZATIONS

    def init_parameters(self, rngs):
        shape = (self.num_kv_heads, self.size, _SINES)
        gains = jax.random.normal(rngs.params(), shape)
        self.frequencies = nnx.Param(jax.random.normal(rngs.params(), shape) - _LOW_FREQUENCIES)
        self.phases = nnx.Param(jax.random.normal(rngs.params(), shape))
        self.gains = nnx.Param(gains / jnp.linalg.norm(gains, axis=-1, keepdims=True) / 2)

    def head_arrays(self):
        return {
            "frequencies": self.frequencies[...],
            "phases": self.phases[...],
            "gains": self.gains[...],
        }

    def init_state(self, batch):
        return documents.PositionState.zeros(batch)

    def _apply(self, query, key, *, rate, head_arrays, segment_ids, state=None, axis_name=None):
        segment_ids = _continued(query, state) if segment_ids is None else segment_ids
        places, state = _places(segment_ids, state, axis_name)
        kv_heads, head_dim, sines = head_arrays["phases"].shape
        shape = (kv_heads, head_dim, 2 * sines, _REALIZATIONS)
        with jax.threefry_partitionable(True):  # the noise is part of the model, whatever JAX's flags are
            noise = jax.random.normal(jax.random.key(0, impl="threefry2x32"), shape)
        query, key = spe.encode(
            query,
            key,
            places,
            frequencies=jax.nn.sigmoid(head_arrays["frequencies"]) / 2,
            phases=head_arrays["phases"],
            gains=jax.nn.softplus(head_arrays["gains"]),
            noise=noise,
        )
        return query, key, None, state


_CLASSES: Mapping[str, type[Positions]] = {
    "none": Positions,
    "sinusoidal": Positions,
    "learned_absolute": Positions,
    "rope": Rope,
    "learned_rope": LearnedRope,
    "learned_rope_pairs": LearnedRopePairs,
    "lrpe": Lrpe,
    "spe": Spe,
}


def _theta(attention: config_lib.AttentionConfig, size: int, base: float | None) -> np.ndarray:
    """Returns the rotation rates of all ropes, in radians per position; without a base, the papers'."""
    rope = attention.rope
    theta = rotary.rope_rates(size, max_document_length=attention.max_document_length, base=base)
    if rope.scaling == "none":
        return theta
    return rotary.llama3_rates(
        theta,
        factor=rope.factor,
        low_frequency_factor=rope.low_frequency_factor,
        high_frequency_factor=rope.high_frequency_factor,
        original_length=rope.original_length,
    )


def _continued(query: Float[Array, "B T N D"], state: PositionState | None) -> Int[Array, "B T"]:
    """Returns segment ids of tokens that continue the document of the state."""
    if state is None:
        return jnp.zeros(query.shape[:2], jnp.int32)
    return jnp.broadcast_to(documents.continued(state.segment)[:, None], query.shape[:2])


def _places(
    segment_ids: Int[Array, "B T"], state: PositionState | None, axis_name: str | None
) -> tuple[Int[Array, "B T"], documents.PositionState]:
    """Returns the position of each token in its document, and the new state."""
    before = state or documents.PositionState.zeros(len(segment_ids))
    assert isinstance(before, documents.PositionState)
    return documents.positions(segment_ids, before, axis_name=axis_name)
