"""How queries and keys are turned by their places in a document, and what is learned of it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config as configs
from sympow_jax import ops
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import documents, lrpe, rotary, spe

__all__ = ["PositionState", "Positions", "compared_dim", "features_dim", "turned_dim"]

PositionState = rotary.RotaryState | documents.PositionState
Turn = Callable[[Float[Array, "B T N _"]], Float[Array, "B T N _"]]

# Frequencies of SPE begin low: the logistic of a normal variable less this (Liutkus et al. 2021, their code).
_LOW_FREQUENCIES = 4.0


def compared_dim(config: configs.ModelConfig) -> int:
    """The size of queries and keys as the kernel gets them: that of a head, unless positions change it."""
    attention = config.attention
    if attention.position == "spe":
        return attention.spe.realizations
    head_dim = config.head_dim
    assert head_dim is not None  # ModelConfig derives what is not given
    return head_dim if _behind_features(attention) else _turned(attention, head_dim)


def features_dim(config: configs.ModelConfig) -> int:
    """The number of features of the kernel `linear`, before they are turned."""
    return _mapped(config.attention, compared_dim(config))


def turned_dim(config: configs.ModelConfig) -> int | None:
    """The number of features behind their turn; None unless features are turned."""
    attention = config.attention
    return _turned(attention, features_dim(config)) if _behind_features(attention) else None


def _behind_features(attention: configs.AttentionConfig) -> bool:
    turns = attention.position not in ("none", "spe") and not attention.adds_position
    return attention.kernel == "linear" and turns


def _mapped(attention: configs.AttentionConfig, size: int) -> int:
    """What the feature map of the kernel `linear` makes of vectors of this size."""
    match attention.feature_map:
        case "symmetric":
            return ops.symmetric_power_dim(size, attention.power)
        case "tensor":
            return size**attention.power
    return size


def _turned(attention: configs.AttentionConfig, size: int) -> int:
    """What a turn makes of vectors of this size: complex numbers are twice as many real ones."""
    choice = attention.lrpe
    complex_valued = choice.core == "unitary" or choice.basis == "fourier"
    return 2 * size if attention.position == "lrpe" and complex_valued else size


class Positions(nnx.Module):
    """Position encodings that turn vectors; `none` and those added to the embedding leave them as they are.

    Queries and keys are turned before the kernel compares them, but for the kernel `linear` behind its feature map:
    rotated features are what makes its weights depend on distances ("Roformer", Su et al. 2021, section 3.3). SPE goes
    before the feature map, as its authors have it; its noise is drawn once, where they draw it for every batch.
    """

    def __init__(self, config: configs.ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        attention, kv_heads, head_dim = config.attention, config.kv_heads, config.head_dim
        assert kv_heads is not None  # ModelConfig derives what is not given
        assert head_dim is not None
        if attention.position == "spe":
            shape = (kv_heads, head_dim, attention.spe.sines)
            normal = jax.random.normal
            gains = normal(rngs.params(), shape)
            self.frequencies = nnx.Param(normal(rngs.params(), shape) - _LOW_FREQUENCIES)
            self.phases = nnx.Param(normal(rngs.params(), shape))
            self.gains = nnx.Param(gains / jnp.linalg.norm(gains, axis=-1, keepdims=True) / 2)
        if attention.position == "lrpe" and attention.lrpe.learned_rates:
            rates = jnp.asarray(self._fixed_rates(), jnp.float32)
            self.rates = nnx.Param(jnp.broadcast_to(rates, (kv_heads, len(rates))))
        if attention.position == "lrpe" and attention.lrpe.learned_basis:
            self.householder = nnx.Param(
                jax.random.normal(rngs.params(), (kv_heads, self._turned_size), jnp.float32)
            )

    def learned(self) -> dict[str, Float[Array, "K ..."]]:
        """What is learned, key/value heads first."""
        return {name: x[...] for name, x in vars(self).items() if isinstance(x, nnx.Param)}

    def theta(self) -> np.ndarray | None:
        """Radians by which a token of rate 1 turns each pair; None unless rates are learned from the data."""
        if not self.config.attention.position.startswith("learned_rope"):
            return None
        longest = self.config.attention.max_document_length
        return rotary.rope_rates(self._turned_size, max_document_length=longest)

    def zeros(self, batch: int) -> PositionState | None:
        """The place before any token; None where none is needed."""
        kv_heads = self.config.kv_heads
        assert kv_heads is not None
        if not self._turns:
            return None
        match self.config.attention.position:
            case "learned_rope":
                return rotary.RotaryState.zeros(batch, kv_heads)
            case "learned_rope_pairs":
                return rotary.RotaryState.zeros(batch, kv_heads, self._turned_size // 2)
        return documents.PositionState.zeros(batch)

    def __call__(
        self,
        query: Float[Array, "B T N D"],
        key: Float[Array, "B T K D"],
        *,
        rate: Float[Array, "B T K ..."] | None,
        learned: dict[str, Float[Array, "K ..."]],
        segment_ids: Int[Array, "B T"] | None,
        state: PositionState | None,
        axis_name: str | None,
    ) -> tuple[Float[Array, "B T N _"], Float[Array, "B T K _"], Turn | None, PositionState | None]:
        """Queries and keys for the kernel, what turns their features if anything does, and the place reached.

        `learned` is what `learned` returns, of these heads. `rate` is by how much each token moves the position on,
        where the data says so.
        """
        position = self.config.attention.position
        if not self._turns:
            return query, key, None, None
        if segment_ids is None:
            segment_ids = jnp.zeros(query.shape[:2], jnp.int32)
        if rate is not None:
            angles, state = rotary.learned_angles(
                rate,
                self._turned_size,
                max_document_length=self.config.attention.max_document_length,
                segment_ids=segment_ids,
                state=state if isinstance(state, rotary.RotaryState) else None,
                axis_name=axis_name,
            )
            turn: Turn = functools.partial(rotary.rotate, angles=angles)
        else:
            state = state if isinstance(state, documents.PositionState) else None
            before = state or documents.PositionState.zeros(len(query))
            places, state = documents.positions(segment_ids, before, axis_name=axis_name)
            if position == "spe":
                return *self._spe(query, key, places, learned), None, state
            turn = self._fixed_turn(places, learned)
        if _behind_features(self.config.attention):
            return query, key, turn, state
        return turn(query), turn(key), None, state

    def _fixed_turn(self, places, learned) -> Turn:
        attention = self.config.attention
        if attention.position == "rope":
            angles = rotary.rope_angles(
                places, self._turned_size, max_document_length=attention.max_document_length
            )
            return functools.partial(rotary.rotate, angles=angles)
        choice = attention.lrpe
        fixed: dict[str, Any] = {"core": choice.core, "basis": choice.basis}
        fixed["identity_dim"] = choice.identity_dim
        if choice.core == "permutation":
            fixed["permutation"] = lrpe.permutation(self._turned_size)
        else:
            fixed["rates"] = self._fixed_rates()
        if choice.basis == "householder":
            fixed["householder"] = lrpe.householder(self._turned_size)
        return functools.partial(lrpe.encode, positions=places, **fixed | learned)

    def _spe(self, query, key, places, learned):
        choice = self.config.attention.spe
        kv_heads, head_dim, sines = learned["phases"].shape
        noise = jax.random.normal(jax.random.key(0), (kv_heads, head_dim, 2 * sines, choice.realizations))
        return spe.encode(
            query,
            key,
            places,
            frequencies=jax.nn.sigmoid(learned["frequencies"]) / 2,
            phases=learned["phases"],
            gains=jax.nn.softplus(learned["gains"]),
            noise=noise,
        )

    def _fixed_rates(self):
        attention = self.config.attention
        choice = attention.lrpe
        return lrpe.rates(
            choice.core,
            self._turned_size,
            kind=choice.rates,
            identity_dim=choice.identity_dim,
            reference_length=choice.reference_length,
            max_document_length=attention.max_document_length,
        )

    @property
    def _turns(self) -> bool:
        """Whether anything depends on places here."""
        attention = self.config.attention
        return attention.position != "none" and not attention.adds_position

    @property
    def _turned_size(self) -> int:
        """The size of the vectors that are turned."""
        head_dim = self.config.head_dim
        assert head_dim is not None
        return features_dim(self.config) if _behind_features(self.config.attention) else head_dim
