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
def model(preset: str, *, seed: int = 0, **changes) -> models.DecoderLM:
    """Returns a model of one layer; `changes` are of the model, or of its attention."""
    sizes = {"vocab_size": VOCABULARY, "layers": 1, "width": 32, "heads": 4, "kv_heads": 2}
    sizes |= {"dtype": "float32"}
    for name in {"layers", "dtype", "state_dtype", "attention_pattern"} & changes.keys():
        sizes[name] = changes.pop(name)
    attention = config.preset(preset, **{"exact_window": 4, "window": 30, **changes})
    settings = config.ModelConfig(**sizes, attention=attention)
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
