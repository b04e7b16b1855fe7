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

    `activation` is that of the feed-forward layers, `norm` the normalisation in front of each half of a block and
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
        sizes = ["layers", "width", "heads", "mlp_ratio", "channels"]
        sizes += ["vocab_size"] if self.patch_size is None else []
        checks.require_at_least(1, **{f"model.{name}": getattr(self, name) for name in sizes})
        if self.patch_size is not None:
            checks.require_at_least(1, **{"model.patch_size": self.patch_size})
        checks.require_choice("model.activation", self.activation, ACTIVATIONS)
        checks.require_choice("model.norm", self.norm, NORMS)
        checks.require_choice("model.dtype", self.dtype, DTYPES)
        checks.require_choice("model.remat", self.remat, REMATS)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads is {self.heads} and model.kv_heads is {self.kv_heads}; "
                f"kv_heads must divide heads"
            )
        if self.head_dim is None:
            if self.width % self.heads:
                raise ValueError(
                    f"model.heads is {self.heads} and does not divide model.width {self.width}; "
                    f"change one of them or set model.head_dim"
                )
            object.__setattr__(self, "head_dim", self.width // self.heads)
        checks.require_at_least(1, **{"model.head_dim": self.head_dim})
        position = self.attention.position
        if "rope" in position and self.head_dim % 2:
            raise ValueError(
                f"model.head_dim is {self.head_dim}; position {position!r} rotates pairs of dimensions and needs an "
                f"even one"
            )
        if position == "lrpe":
            self.attention.lrpe.check_head(self.head_dim)
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
