"""Tiny models of the published families. `tests/weights` compares them with the original software."""

from typing import NamedTuple

from sympow_jax import config

VOCABULARY = 32
SMALL = {"vocab_size": VOCABULARY, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_width": 24}


class Family(NamedTuple):
    """Facts of a family: its size, whether its head is the embedding, and the window of the tiny model."""

    size: str
    tied: bool = True
    window: int | None = None


FAMILIES = {
    "llama3": Family("llama3_8b", tied=False),
    "llama32": Family("llama32_1b"),
    "qwen2": Family("qwen2_500m"),
    "qwen3": Family("qwen3_14b", tied=False),
    "starcoder2": Family("starcoder2_3b", window=11),
    "brumby": Family("qwen3_14b", tied=False),
    # Not published: its second layer has the attention of Brumby.
    "hybrid": Family("qwen3_14b", tied=False),
}


def settings(name: str, **changes) -> config.ModelConfig:
    family = FAMILIES[name]
    small = (
        config.MODEL_SIZES[family.size] | SMALL | {"layers": 2 if name == "hybrid" else 1, "dtype": "float32"}
    )
    small |= changes
    if name == "hybrid":
        small["attention_pattern"] = ("qwen3", "brumby")
    window = {} if family.window is None else {"window": family.window}
    attention = config.preset("qwen3" if name == "hybrid" else name, **window)
    return config.ModelConfig(**small, attention=attention)
