"""Settings of a model."""

import dataclasses
import functools
from typing import Any

from sympow_jax.config import attention as attention_lib
from sympow_jax.config import checks, fields

CHANNELS = 3
"""Values per pixel of an image."""

# Hidden width of feed-forward layers divided by the width: "Attention Is All You Need" (Vaswani et al. 2017, Table 3).
_MLP_RATIO = 4

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "elementwise", "attention", "full")
# Building a model takes about 20 ms per layer, so that a mistyped number would seem to hang. The deepest published
# transformers have 1,000 layers (Wang et al. 2022).
_MAX_LAYERS = 1024
# An initialization that cannot be allocated may never end. The widest published feed-forward layers have 10^5 units.
_MAX_WIDTH = 2**20
_MAX_HEAD_DIM = 2**16
# What is normalized has a mean square of about 1. A larger number would outweigh it.
_MAX_EPSILON = 1.0
# A model may start from one that differs in these.
_STARTS = (fields.Occasion.INITIAL_DECODER, fields.Occasion.INITIAL_ENCODER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm transformer."""

    vocab_size: int = fields.setting(0, "Number of token ids. Not used by a model of images.", least=0)
    layers: int = fields.setting(dataclasses.MISSING, "Number of blocks.", least=1, most=_MAX_LAYERS)
    width: int = fields.setting(dataclasses.MISSING, "Size of the residual stream.", least=1, most=_MAX_WIDTH)
    heads: int = fields.setting(dataclasses.MISSING, "Number of query heads.", least=1)
    kv_heads: int | None = fields.setting(
        None, "Number of key/value heads. If none, `heads`.", derived="num_kv_heads", least=1
    )
    head_dim: int | None = fields.setting(
        None, "Size of a head. If none, `width // heads`.", derived="head_size", least=1, most=_MAX_HEAD_DIM
    )
    mlp_width: int | None = fields.setting(
        None,
        "Hidden width of feed-forward layers. If none, four times `width`.",
        derived="hidden_width",
        least=1,
        most=_MAX_WIDTH,
    )
    activation: str = fields.setting(
        "gelu",
        "Activation of the feed-forward layers. `swiglu` and `geglu` multiply hidden units by the silu or gelu of "
        "another projection. gelu is the approximation by tanh.",
        choices=("gelu", "relu", "swiglu", "geglu"),
    )
    norm: str = fields.setting(
        "layer",
        "Normalization before each half of a block and after the last block: over the width, `rms` without mean and "
        "bias, or over the batch, with running means for evaluation.",
        choices=("layer", "rms", "batch"),
    )
    norm_epsilon: float = fields.setting(
        1e-5, "Number added to the variance or mean square in norms.", least=fields.TINY, most=_MAX_EPSILON
    )
    embedding_norm: bool = fields.setting(
        True, "Whether one more norm follows the embedding. GPT-2 has none."
    )
    biases: bool = fields.setting(
        False, "Whether projections have biases, except those of decays and rotation rates, as in GPT-2."
    )
    tied_head: bool = fields.setting(
        True, "Whether logits are products with the embedding instead of with a second table."
    )
    patch_size: int | None = fields.setting(
        None,
        "Side of the square patches that an image model embeds. If none, the model embeds `vocab_size` tokens.",
        least=1,
    )
    dtype: str = fields.setting(
        "bfloat16",
        "Dtype of the matrix products; parameters are float32. In Python, also a dtype such as `jnp.bfloat16`.",
        choices=DTYPES,
        may_differ=_STARTS,
    )
    state_dtype: str = fields.setting(
        "float32",
        "Dtype in which recurrent states are stored between calls; they are computed in float32. bfloat16 halves their "
        "memory, and rounds them at each update.",
        choices=DTYPES,
        may_differ=(fields.Occasion.RESUME, *_STARTS),
    )
    remat: str = fields.setting(
        "none",
        "Values that are saved for the backward pass; others are recomputed. `none` saves all, or those of "
        "`elementwise` if layers are scanned. `elementwise` saves all but the results of elementwise functions, "
        "`attention` the input of each block and the output of power, softmax and expressive attention, `full` only "
        "the input of each block. This changes memory and time, not the model.",
        choices=REMATS,
        may_differ=(fields.Occasion.RESUME, fields.Occasion.SAVED_STATE, *_STARTS),
    )
    attention_pattern: tuple[str, ...] = fields.setting(
        (),
        "Preset of each layer in order, such as `3*conformal,softmax`; the list repeats up to the last layer. A preset "
        "replaces the fields of `attention` that it sets; `shared`, the default, is `attention` unchanged.",
        may_differ=(fields.Occasion.INITIAL_DECODER,),
    )
    attention: attention_lib.AttentionConfig = dataclasses.field(
        default_factory=attention_lib.AttentionConfig,
        metadata={"may_differ": (fields.Occasion.INITIAL_DECODER,)},
    )

    def __post_init__(self):
        for name in ("dtype", "state_dtype"):
            object.__setattr__(self, name, checks.dtype_name(getattr(self, name)))
        fields.validate(self, "model")
        if self.patch_size is None:
            checks.require_at_least(1, **{"model.vocab_size": self.vocab_size})
        for attention in set(self.attentions):
            attention.check_head(self.head_size)
        added = {(x.position, x.longest_document) for x in self.attentions if x.adds_position}
        if len(added) > 1:
            names = " and ".join(
                f"{x!r} up to {length}" if length else repr(x) for x, length in sorted(added, key=str)
            )
            raise ValueError(
                f"model.attention_pattern has layers of the positions {names}, which are added to the embedding; only "
                f"one of them can be"
            )
        if added == {("sinusoidal", None)} and self.width % 2:
            raise ValueError(f"model.width is {self.width}; sinusoidal positions need an even one")

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self._head_sizes[0]

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self._head_sizes[1]

    @functools.cached_property
    def _head_sizes(self) -> tuple[int, int]:
        sizes = {name: getattr(self, name) for name in ("width", "heads", "kv_heads", "head_dim")}
        return checks.head_sizes(**sizes, prefix="model.")

    @property
    def hidden_width(self) -> int:
        """Hidden width of the feed-forward layers."""
        return _MLP_RATIO * self.width if self.mlp_width is None else self.mlp_width

    @functools.cached_property
    def attentions(self) -> tuple[attention_lib.AttentionConfig, ...]:
        """Attention of each layer."""
        if not self.attention_pattern:
            return (self.attention,) * self.layers
        names: list[str] = []
        for item in self.attention_pattern:  # such as `softmax` or `3*conformal`
            count, star, name = item.rpartition("*")
            # No more than ten digits are read: Python refuses the longest numbers.
            number = int(count) if count.strip().isdecimal() and len(count.strip()) <= 10 else 0
            if star and not 1 <= number <= self.layers:
                raise ValueError(
                    f"model.attention_pattern has {item[:60]!r}; before `*` is the number of layers, from 1 to "
                    f"{self.layers}"
                )
            names += [name.strip()] * (number if star else 1)
        if len(names) > self.layers:
            raise ValueError(
                f"model.attention_pattern has {len(names)} layers and the model {self.layers}; shorten the pattern or "
                f"raise model.layers"
            )
        by_name = {name: attention_lib.with_preset(self.attention, name) for name in names}
        return tuple(by_name[names[layer % len(names)]] for layer in range(self.layers))

    @property
    def attention_period(self) -> int:
        """Least divisor of `layers` after which the attention of layers repeats."""
        return next(
            period
            for period in range(1, self.layers + 1)
            if self.layers % period == 0 and self.attentions[period:] == self.attentions[:-period]
        )

    @property
    def attention_name(self) -> str:
        """The pattern as it is written, or the name of the attention of all layers (`preset_name`)."""
        return ",".join(self.attention_pattern) or attention_lib.preset_name(self.attention)

    @property
    def original(self) -> "ModelConfig":
        """The model whose layers all have `attention`."""
        return dataclasses.replace(self, attention_pattern=())

    @property
    def without_pattern(self) -> "ModelConfig":
        """The same model whose pattern is left out, if its layers are equal; another model is returned as it is."""
        if len(set(self.attentions)) > 1:
            return self
        return dataclasses.replace(self, attention=self.attentions[0], attention_pattern=())

    @functools.cached_property
    def replaced_layers(self) -> frozenset[int]:
        """Layers whose attention is not that of the original."""
        return frozenset(layer for layer, kind in enumerate(self.attentions) if kind != self.attention)

    @property
    def added_position(self) -> tuple[str, int | None] | None:
        """Position that is added to the embedding, and its longest document; None if there is none."""
        return next(((x.position, x.longest_document) for x in self.attentions if x.adds_position), None)

    @property
    def longest_document(self) -> int | None:
        """Tokens of the longest document that the positions support; None if unlimited."""
        return None if self.added_position is None else self.added_position[1]


_LLAMA: dict[str, Any] = {"norm": "rms", "activation": "swiglu", "embedding_norm": False}
_QWEN: dict[str, Any] = _LLAMA | {"norm_epsilon": 1e-6}


def _size(vocab_size: int, layers: int, width: int, heads: int, **others: Any) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "layers": layers, "width": width, "heads": heads, **others}


# The shapes of GPT-2 and GPT-3 XL, with the 50,257 tokens padded to a multiple of 128. `quickstart` reads bytes. The
# others are published models, whose attention is the preset named before the `_`. Brumby has the body of `qwen3_14b`.
MODEL_SIZES: dict[str, dict[str, Any]] = {
    "quickstart": _size(256, 2, 128, 4, dtype="float32"),
    "gpt2_124m": _size(50_304, 12, 768, 12),
    "gpt2_335m": _size(50_304, 24, 1024, 16),
    "gpt2_774m": _size(50_304, 36, 1280, 20),
    "gpt2_1558m": _size(50_304, 48, 1600, 25),
    "gpt3_1311m": _size(50_304, 24, 2048, 32),
    "llama3_8b": _size(128_256, 32, 4096, 32, kv_heads=8, mlp_width=14_336, tied_head=False, **_LLAMA),
    "llama32_1b": _size(128_256, 16, 2048, 32, kv_heads=8, mlp_width=8192, **_LLAMA),
    # Qwen2 and Qwen2.5.
    "qwen2_500m": _size(151_936, 24, 896, 14, kv_heads=2, mlp_width=4864, **_QWEN),
    "qwen2_7b": _size(152_064, 28, 3584, 28, kv_heads=4, mlp_width=18_944, tied_head=False, **_QWEN),
    "qwen3_600m": _size(151_936, 28, 1024, 16, kv_heads=8, mlp_width=3072, head_dim=128, **_QWEN),
    "qwen3_14b": _size(151_936, 40, 5120, 40, kv_heads=8, mlp_width=17_408, tied_head=False, **_QWEN),
    "starcoder2_3b": _size(49_152, 30, 3072, 24, kv_heads=2, biases=True, embedding_norm=False),
}
"""Model sizes by name, as fields of `ModelConfig`."""
