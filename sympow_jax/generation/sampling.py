"""The next token from its logits, drawn from a key of seed and place alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int, UInt32

__all__ = ["Sampling", "sample"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the so many likeliest; None for all.
        top_p: of these only the fewest likeliest that together have at least this probability ("The Curious Case of
            Neural Text Degeneration", Holtzman et al. 2020, section 3.1).
        vocab_size: ids from here on are never drawn; None for all that the model has.

    Raises:
        ValueError: for a temperature below 0, a `top_k` below 1, or a `top_p` outside (0, 1].
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
    """A token for each row.

    `position` is how many tokens of the row come before it. What is drawn depends on seed, position and the row's
    logits alone, so that a row alone and in any batch is drawn alike, and equal rows are drawn equal.
    """
    logits = jnp.where(
        jnp.arange(logits.shape[-1]) < (sampling.vocab_size or logits.shape[-1]), logits, -jnp.inf
    )
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = _kept(logits / sampling.temperature, sampling)
    # Noise belongs to the token, not to its rank: logits that all but tie do not change places.
    keys = jax.vmap(lambda place: jax.random.fold_in(jax.random.key(seed), place))(position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def _kept(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Minus infinity in place of the logits that `top_k` and `top_p` leave out."""
    if sampling.top_k is None and sampling.top_p == 1:
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranks = jnp.argsort(order, axis=-1)
    if sampling.top_k is not None:
        logits = jnp.where(ranks < sampling.top_k, logits, -jnp.inf)
    ordered = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    likelier = jnp.cumsum(ordered, axis=-1) - ordered
    likelier = jnp.take_along_axis(likelier, ranks, axis=-1)
    return jnp.where((likelier < sampling.top_p) | (ranks == 0), logits, -jnp.inf)
