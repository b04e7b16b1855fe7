"""Models small enough to decode in a test, with attention that matters."""

import functools

import jax
from flax import nnx

from sympow_jax import config, models

VOCABULARY = 64


@functools.cache
def model(
    preset: str, *, layers: int = 1, seed: int = 0, dtype: str = "float32", **changes
) -> models.DecoderLM:
    attention = config.preset(preset, **{"window": 4, **changes})
    settings = config.ModelConfig(
        vocab_size=VOCABULARY,
        layers=layers,
        width=32,
        heads=4,
        kv_heads=2,
        dtype=dtype,
        attention=attention,
    )
    made = models.DecoderLM(settings, rngs=nnx.Rngs(seed))
    for block in made.blocks:
        for name in ("query", "key", "value", "out"):
            getattr(block.attention, name).kernel[...] *= 10
    made.embedding[...] *= 10  # logits of a few units, so that draws differ
    return made


def tokens(batch: int, time: int, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, time), 0, VOCABULARY)
