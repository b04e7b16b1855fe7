"""Samples the next token from logits, with a key of the seed and the position only."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int, UInt32

__all__ = ["Sampling", "sample"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of sampling.

    Attributes:
        temperature: divisor of the logits; 0 selects the likeliest token.
        top_k: samples from the `top_k` likeliest tokens only; None for all.
        top_p: samples from the fewest likeliest of these that together have at least this probability ("The Curious
            Case of Neural Text Degeneration", Holtzman et al. 2020, section 3.1).
        vocab_size: samples ids below this only; None for all ids of the model.

    Raises:
        ValueError: the temperature is below 0, `top_k` is below 1, or `top_p` is outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    vocab_size: int | None = None

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature:g}; it must be 0 or larger, and finite")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p:g}; it must be above 0 and at most 1")


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    *,
    seed: UInt32[Array, ""],
    position: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Returns a token for each row.

    `position` is the number of tokens before it in the row. The token depends on the seed, the position and the row's
    logits only, so it does not depend on the batch, and equal rows get equal tokens.
    """
    logits = jnp.where(
        jnp.arange(logits.shape[-1]) < (sampling.vocab_size or logits.shape[-1]), logits, -jnp.inf
    )
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = _truncated(logits / sampling.temperature, sampling)
    # Noise is indexed by token id, not by rank, so that rounding that swaps nearly equal logits changes no noise.
    keys = jax.vmap(lambda index: jax.random.fold_in(jax.random.key(seed), index))(position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def _truncated(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Replaces the logits that `top_k` and `top_p` exclude by minus infinity."""
    if sampling.top_k is None and sampling.top_p == 1:
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranks = jnp.argsort(order, axis=-1)
    if sampling.top_k is not None:
        logits = jnp.where(ranks < min(sampling.top_k, logits.shape[-1]), logits, -jnp.inf)
    ordered = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    likelier = jnp.cumsum(ordered, axis=-1) - ordered
    likelier = jnp.take_along_axis(likelier, ranks, axis=-1)
    return jnp.where((likelier < sampling.top_p) | (ranks == 0), logits, -jnp.inf)
