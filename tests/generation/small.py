"""Models small enough to decode in a test, with attention that matters, and their states after prompts."""

import functools

import jax
import numpy as np
from flax import nnx

from sympow_jax import config, generation, models

VOCABULARY = 64
ROWS, TIME = 3, 100
LENGTHS = np.array([TIME, 37, 60], np.int32)


@functools.cache
def model(
    preset: str,
    *,
    layers: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    state_dtype: str = "float32",
    attention_pattern: tuple[str, ...] = (),
    **changes,
) -> models.DecoderLM:
    model = {
        "layers": layers,
        "dtype": dtype,
        "state_dtype": state_dtype,
        "attention_pattern": attention_pattern,
    }
    attention = config.preset(preset, **{"exact_window": 4, "window": 30, **changes})
    sizes = {"vocab_size": VOCABULARY, "width": 32, "heads": 4, "kv_heads": 2, "attention": attention}
    settings = config.ModelConfig(**sizes, **model)
    result = models.DecoderLM(settings, rngs=nnx.Rngs(seed))
    for block in result.blocks:
        for name in ("query", "key", "value", "out"):
            getattr(block.attention, name).kernel[...] *= 10
        for name in ("up", "down"):
            getattr(block.mlp, name).kernel[...] *= 10
    result.embedding[...] *= 10  # logits of a few units, so that draws differ
    # Else every token predicts itself, since the output is the embedding.
    result.embedding_norm.scale[...] *= 0.1
    return result


def tokens(batch: int, time: int, seed: int = 1) -> np.ndarray:
    return np.asarray(jax.random.randint(jax.random.key(seed), (batch, time), 0, VOCABULARY))


@functools.cache
def prefilled(preset: str, max_length: int | None = None):
    """Returns logits and state after ragged prompts, the first `LENGTHS` of `tokens(ROWS, TIME)`; compiled once."""
    return generation.Program(model(preset)).prefill(tokens(ROWS, TIME), LENGTHS, max_length=max_length)


@nnx.jit
def whole(model: models.DecoderLM, tokens: np.ndarray) -> jax.Array:
    return model(tokens)
