"""Settings of a model."""

import dataclasses
from typing import Any

from sympow_jax.config import _checks as checks
from sympow_jax.config import attention as attention_lib

__all__ = ["MODEL_SIZES", "ModelConfig"]

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "attention", "full")
ACTIVATIONS = ("gelu", "relu")
NORMS = ("layer", "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm transformer.

    Attributes:
        vocab_size: number of token ids.
        layers: number of blocks.
        width: size of the residual stream.
        heads: number of query heads.
        kv_heads: number of key/value heads; None means `heads`.
        head_dim: size of a head; None means `width // heads`.
        mlp_ratio: hidden width of the feed-forward layers, divided by `width`.
        activation: activation of the feed-forward layers.
        norm: normalization before each half of a block and after the last block. `layer` normalizes over the width,
            `batch` over the batch, with running means for evaluation.
        embedding_norm: whether one more norm follows the embedding. GPT-2 has none.
        biases: whether projections have biases, except those of decays and rotation rates. GPT-2 has biases.
        patch_size: side of the square patches that an image model embeds. None embeds `vocab_size` tokens.
        channels: values per pixel of an image.
        dtype: dtype of the matrix products; parameters are float32. A dtype such as `jnp.bfloat16` is accepted, and
            the field holds its name.
        remat: values that are saved for the backward pass; all others are recomputed. `none` saves all values.
            `attention` saves the input of each block and the output of its attention, so that attention itself is not
            recomputed. `full` saves only the input of each block. This changes memory and time, not the model.
        attention: the attention of every block.
    """

    vocab_size: int = 0
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_ratio: int = 4
    activation: str = "gelu"
    norm: str = "layer"
    embedding_norm: bool = True
    biases: bool = False
    patch_size: int | None = None
    channels: int = 3
    dtype: str = "bfloat16"
    remat: str = "none"
    attention: attention_lib.AttentionConfig = dataclasses.field(
        default_factory=attention_lib.AttentionConfig
    )

    def __post_init__(self):
        positive = ["layers", "width", "heads", "mlp_ratio", "channels"]
        positive += ["vocab_size"] if self.patch_size is None else []
        checks.require_at_least(1, **{f"model.{name}": getattr(self, name) for name in positive})
        if self.patch_size is not None:
            checks.require_at_least(1, **{"model.patch_size": self.patch_size})
        checks.require_choice("model.activation", self.activation, ACTIVATIONS)
        checks.require_choice("model.norm", self.norm, NORMS)
        object.__setattr__(self, "dtype", checks.dtype_name(self.dtype))
        checks.require_choice("model.dtype", self.dtype, DTYPES)
        checks.require_choice("model.remat", self.remat, REMATS)
        sizes = checks.head_sizes(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            prefix="model.",
        )
        object.__setattr__(self, "kv_heads", sizes[0])
        object.__setattr__(self, "head_dim", sizes[1])
        self.attention.check_head(sizes[1])
        position = self.attention.position
        if position == "sinusoidal" and self.width % 2:
            raise ValueError(f"model.width is {self.width}; sinusoidal positions need an even one")


# The shapes of GPT-2 and GPT-3 XL, with the 50,257 tokens padded to a multiple of 128. `quickstart` reads bytes.
MODEL_SIZES: dict[str, dict[str, Any]] = {
    "quickstart": {"vocab_size": 256, "layers": 2, "width": 128, "heads": 4, "dtype": "float32"},
    "gpt2_124m": {"vocab_size": 50_304, "layers": 12, "width": 768, "heads": 12},
    "gpt2_335m": {"vocab_size": 50_304, "layers": 24, "width": 1024, "heads": 16},
    "gpt2_774m": {"vocab_size": 50_304, "layers": 36, "width": 1280, "heads": 20},
    "gpt2_1558m": {"vocab_size": 50_304, "layers": 48, "width": 1600, "heads": 25},
    "gpt3_1311m": {"vocab_size": 50_304, "layers": 24, "width": 2048, "heads": 32},
}
"""Model sizes by name, as fields of `ModelConfig`."""
