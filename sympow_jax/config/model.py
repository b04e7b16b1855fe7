"""The shapes of models."""

import dataclasses

from sympow_jax.config import _checks as checks
from sympow_jax.config import attention as attention_lib

__all__ = ["MODEL_SIZES", "ModelConfig"]

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "attention", "full")
ACTIVATIONS = ("gelu", "relu")
NORMS = ("layer", "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm transformer; `dtype` is that of the matrix products, parameters are float32.

    `dtype` may be given as a dtype such as `jnp.bfloat16`; the field holds its name.

    `activation` is that of the feed-forward layers, `norm` the normalization in front of each half of a block and
    behind the last: over the width, or over the batch with running means for evaluation. `embedding_norm` is one more
    behind the embedding, `biases` are those of all projections but decays and rotation rates; GPT-2 has biases and no
    norm behind the embedding. `patch_size` is the side of the square patches that an image model embeds, of `channels`
    values a pixel; None embeds `vocab_size` tokens.

    `remat` is what the backward pass finds of each block: `none`, all that the forward pass computed; `attention`, its
    input and the output of its attention, from which the rest is computed again but not attention itself; `full`, its
    input alone. It changes memory and time, not the model.
    """

    vocab_size: int = 0  # of tokens
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width // heads
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


# GPT-2's shapes and GPT-3 XL's; 50,257 tokens padded to a multiple of 128. `quickstart` reads bytes.
MODEL_SIZES = {
    "quickstart": {"vocab_size": 256, "layers": 2, "width": 128, "heads": 4, "dtype": "float32"},
    "gpt2_124m": {"vocab_size": 50_304, "layers": 12, "width": 768, "heads": 12},
    "gpt2_335m": {"vocab_size": 50_304, "layers": 24, "width": 1024, "heads": 16},
    "gpt2_774m": {"vocab_size": 50_304, "layers": 36, "width": 1280, "heads": 20},
    "gpt2_1558m": {"vocab_size": 50_304, "layers": 48, "width": 1600, "heads": 25},
    "gpt3_1311m": {"vocab_size": 50_304, "layers": 24, "width": 2048, "heads": 32},
}
"""Shapes by name, as fields of `ModelConfig`."""
