"""Samples the next token from logits, with a key of the seed and the position only.

Options are applied in the order of Hugging Face transformers: repetition penalty, temperature, `top_k`, `top_p`,
`min_p`. vLLM applies `min_p` before `top_k` and `top_p`, so that its `top_p` counts probabilities among fewer tokens.
"""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import spelling
from sympow_jax.array_types import Array, Bool, Float, Int, UInt32
from sympow_jax.config import checks
from sympow_jax.ops import arguments

# Numbers that float32 neither rounds to 0 nor to infinity. At the smallest temperature, as below, the likeliest token
# differs from all others by more than any noise.
_SMALLEST, _LARGEST = 1e-30, 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of sampling.

    Attributes:
        temperature: divisor of the logits; 0 selects the likeliest token.
        top_k: samples from the `top_k` likeliest tokens only; None for all.
        top_p: samples from the fewest likeliest of these that together have at least this probability ("The Curious
            Case of Neural Text Degeneration", Holtzman et al. 2020, section 3.1).
        min_p: excludes tokens whose probability is below `min_p` times the largest one ("Turning Up the Heat: Min-p
            Sampling for Creative and Coherent LLM Outputs", Nguyen et al. 2025, section 3); 0 excludes none.
        repetition_penalty: divisor of the positive logits, and factor of the negative ones, of tokens that have
            occurred in the prompt or its continuation ("CTRL", Keskar et al. 2019, section 4.1); 1 for none.
        vocab_size: samples ids below this only; None for all ids of the model.

    Raises:
        ValueError: an option is no number, the temperature is outside [0, 1e30], `top_k` or `vocab_size` is no integer
            of at least 1, `top_p` is outside (0, 1], `min_p` outside [0, 1], or the penalty outside [1e-30, 1e30].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    vocab_size: int | None = None

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
                raise ValueError(f"{name} is {spelling.shown(value)}; it must be a number")
            # A Python float, so that equal options are one compiled program.
            object.__setattr__(self, name, math.inf if abs(value) > _LARGEST else float(value))
        for name in ("top_k", "vocab_size"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, arguments.check_integer(name, value, 1))
        temperature, penalty = self.temperature, self.repetition_penalty
        checks.refuse(
            (
                not 0 <= temperature <= _LARGEST,
                f"temperature is {temperature:g}; it must be from 0 to {_LARGEST:g}",
            ),
            (not 0 < self.top_p <= 1, f"top_p is {self.top_p:g}; it must be above 0 and at most 1"),
            (not 0 <= self.min_p <= 1, f"min_p is {self.min_p:g}; it must be at least 0 and at most 1"),
            (
                not _SMALLEST <= penalty <= _LARGEST,
                f"repetition_penalty is {penalty:g}; it must be from {_SMALLEST:g} to {_LARGEST:g}",
            ),
        )

    @property
    def uses_seen(self) -> bool:
        """True if the draws depend on the tokens that have occurred."""
        return self.repetition_penalty != 1


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    *,
    seed: UInt32[Array, ""] | UInt32[Array, " B"],
    position: Int[Array, " B"],
    seen: Bool[Array, "B V"] | None = None,
) -> Int[Array, " B"]:
    """Returns a token for each row.

    The token depends on the row's seed, position, logits and seen tokens only, so it does not depend on the batch, and
    equal rows get equal tokens.

    Args:
        logits: logits of the next token of each row.
        sampling: options.
        seed: seed of the draws, one for all rows or one per row.
        position: number of tokens before the sampled one in the row.
        seen: tokens that have occurred in the row; only used by `repetition_penalty`.

    Raises:
        ValueError: there is a repetition penalty and `seen` is None.
    """
    logits = jnp.where(
        jnp.arange(logits.shape[-1]) < (sampling.vocab_size or logits.shape[-1]), logits, -jnp.inf
    )
    if sampling.uses_seen:
        penalty = sampling.repetition_penalty
        if seen is None:
            raise ValueError(f"repetition_penalty is {penalty:g}, which needs the seen tokens; pass seen")
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The difference to the largest logit may be divided by any temperature: the largest stays 0, and others may become
    # minus infinity.
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits = logits / max(sampling.temperature, _SMALLEST)
    if sampling.top_k is not None or sampling.top_p < 1:
        order = jnp.argsort(-logits, axis=-1, stable=True)
        ranks = jnp.argsort(order, axis=-1)
        if sampling.top_k is not None:
            logits = jnp.where(ranks < min(sampling.top_k, logits.shape[-1]), logits, -jnp.inf)
        ordered = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
        likelier = jnp.cumsum(ordered, axis=-1) - ordered
        likelier = jnp.take_along_axis(likelier, ranks, axis=-1)
        logits = jnp.where((likelier < sampling.top_p) | (ranks == 0), logits, -jnp.inf)
    if sampling.min_p > 0:
        lowest = logits.max(axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    # Noise is indexed by token id, not by rank, so that rounding that swaps nearly equal logits changes no noise.
    seeds = jnp.broadcast_to(seed, position.shape)

    def draw(seed: UInt32[Array, ""], index: Int[Array, ""]) -> Float[Array, " V"]:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    with jax.threefry_partitionable(True):  # the same tokens, whatever JAX's flags are
        noise = jax.vmap(draw)(seeds, position)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
