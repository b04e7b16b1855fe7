"""Attention layers with plain arguments, for use in other models."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.config import attention as attention_lib
from sympow_jax.config import checks
from sympow_jax.config import model as model_lib
from sympow_jax.layers.attention import kernels, layer
from sympow_jax.ops import arguments

# Options of power and linear attention.
_RECURRENT = ("power", "form", "chunk_size", "exact_window")


class _PlainAttention(layer.Attention):
    """`Attention` of one kernel, from sizes and from fields of `config.AttentionConfig`.

    A subclass lists its options. `SoftmaxAttention` documents the arguments.
    """

    defaults: ClassVar[dict[str, Any]]
    """The kernel, and fields of `config.AttentionConfig` with another default."""
    windowed: ClassVar[dict[str, Any]] = {}
    """Fields to set if there is a window."""
    options: ClassVar[tuple[str, ...]] = (
        "decay",
        "decay_bias",
        "position",
        "learned_rope_start",
        "rope",
        "lrpe",
        "max_document_length",
        "qk_norm",
        "qkv_biases",
        "implementation",
    )
    """Names of the options of every kernel; a subclass adds those of its own."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | int,
        **options: Any,
    ):
        for name in options:
            if name not in self.options:
                raise TypeError(
                    f"{type(self).__name__} has no argument {name!r}; its options are {', '.join(self.options)}"
                )
        width = arguments.check_integer("width", width, 1)
        num_heads = arguments.check_integer("num_heads", num_heads, 1)
        num_kv_heads, head_dim = (
            None if size is None else arguments.check_integer(name, size, 1)
            for name, size in {"num_kv_heads": num_kv_heads, "head_dim": head_dim}.items()
        )
        num_kv_heads, head_dim = checks.head_sizes(
            width=width, heads=num_heads, kv_heads=num_kv_heads, head_dim=head_dim, heads_name="num_"
        )
        checks.require_choice("dtype", dtype := checks.dtype_name(dtype), model_lib.DTYPES)
        options = self.defaults | options
        if (window := options.pop("window", None)) is not None:
            options |= {"window": window, **self.windowed}
        attention = config_lib.AttentionConfig(**options)
        if attention.decay_bias is not None and not attention.decay_kind.is_projected:
            raise ValueError(
                f"decay_bias is {attention.decay_bias!r}, but decay {attention.decay!r} has no bias"
            )
        checks.require_choice("position", attention.position, attention_lib.LAYER_POSITIONS)
        attention.check_head(head_dim, name="head_dim")
        kernel = kernels.make(
            attention, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
        )
        super().__init__(width, kernel, use_bias=use_bias, rngs=rngs)


class PowerAttention(_PlainAttention):
    """Power attention, whose weights are even powers of q . k, times the decay between key and query.

    The recurrent state has binomial(head_dim + power - 1, power) x head_dim elements per key/value head.

    Args:
        width, num_heads, num_kv_heads, head_dim, use_bias, dtype, rngs: as in `SoftmaxAttention`.
        power: degree of the weights, positive and even; 2.
        decay: "none"; per head "alibi" or "permuteformer", fixed, "constant", trained, "learned", sigmoid(W x), the
            default, or "learned_alibi", sigmoid(W x + b), where b starts at ALiBi's slopes; or per value channel
            "channel_fixed", "channel_constant" or "channel_learned".
        decay_bias: initial value of a bias b of learned decays, which are then sigmoid(W x + b). At 4 a head at first
            forgets 2 % per token, and at None, without a bias, half.
        position: as in `SoftmaxAttention`; "learned_rope".
        form: "attention", quadratic in time; "chunked"; or "recurrent". If None, the cheapest for the shapes.
        chunk_size: tokens per chunk of the chunked form. If None, the op chooses.
        exact_window: minimum number of last keys that every query attends to exactly instead of through the state; 64.
        window: number of last tokens of softmax attention alongside power attention. Both outputs are added, each times
            a gate sigmoid(W x + b) per token and head (`softmax_window` of the config). If None, there is none.
        **options: the others of `SoftmaxAttention`, except `causal`.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.PowerAttention(64, 4, num_kv_heads=2, power=2, rngs=0)
        >>> x = jax.random.normal(jax.random.key(0), (2, 128, 64))
        >>> attention(x).shape
        (2, 128, 64)
    """

    defaults: ClassVar = {"kernel": "power"}
    windowed: ClassVar = {"softmax_window": True}
    options = (*_PlainAttention.options, *_RECURRENT, "window")


class PowerDeltaAttention(_PlainAttention):
    """The delta rule on power features, by which a token overwrites what the state holds for its key.

    The write strength of a token is sigmoid(W x) for each key/value head. Outputs are no means of values; those of each
    head are RMS-normalized, with a scale, as in "Gated Delta Networks" (Yang et al. 2025), the case p = 1. The state is
    that of `PowerAttention` without a normalizer.

    Args:
        width, num_heads, num_kv_heads, head_dim, use_bias, dtype, rngs: as in `SoftmaxAttention`.
        power: degree of the features, at least 1, which is that of DeltaNet; 2.
        negative_eigenvalues: whether write strengths are 2 sigmoid(W x), as tracking states needs.
        decay, decay_bias: as in `PowerAttention`, but none per value channel.
        position: as in `SoftmaxAttention`; "rope". Rotations make a key at another position another key, which is not
            overwritten; for tasks that only overwrite, use "none".
        form, chunk_size: as in `PowerAttention`. The attention form is used for calls without a state only.
        **options: the others of `SoftmaxAttention`, except `causal` and `window`.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.PowerDeltaAttention(64, 4, power=2, rngs=0)
        >>> attention(jax.random.normal(jax.random.key(0), (2, 128, 64))).shape
        (2, 128, 64)
    """

    defaults: ClassVar = {"kernel": "power_delta", "position": "rope"}
    options = (*_PlainAttention.options, "power", "negative_eigenvalues", "form", "chunk_size")


class LinearAttention(_PlainAttention):
    """Linear attention, whose weights are f(q) . f(k) for a feature map f, times the decay between key and query.

    Positions that rotate vectors are applied to the features.

    Args:
        width, num_heads, num_kv_heads, head_dim, use_bias, dtype, rngs: as in `SoftmaxAttention`.
        feature_map: "elu" (elu(x) + 1, the default), "relu", "identity", "symmetric" or "tensor".
        power: degree of the feature maps "symmetric" and "tensor"; 2.
        normalizer: "unrotated" or "rotated", the features that the denominator uses.
        form, chunk_size, exact_window: as in `PowerAttention`.
        **options: the others of `SoftmaxAttention`, except `window`.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.LinearAttention(64, 4, feature_map="relu", rngs=0)
        >>> attention(jax.random.normal(jax.random.key(0), (2, 128, 64))).shape
        (2, 128, 64)
    """

    defaults: ClassVar = {"kernel": "linear", "decay": "none", "position": "rope"}
    options = (*_PlainAttention.options, *_RECURRENT, "causal", "feature_map", "normalizer")


class SoftmaxAttention(_PlainAttention):
    """Softmax attention with scores q . k / sqrt(head_dim); a KV cache is its only memory.

    Args:
        width: M, the size of the input and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; it must divide `num_heads`. If None, `num_heads`.
        head_dim: size of a head. If None, `width // num_heads`.
        use_bias: whether the four projections have a bias.
        dtype: dtype of the matrix products, "float32" or "bfloat16", by name or as a dtype; parameters are float32.
        rngs: source of initial values, or a seed.
        decay: "none"; "alibi" or "permuteformer", fixed per head; "learned", sigmoid(W x) per head, or "learned_alibi".
        decay_bias: initial value of a bias b of learned decays, which are then sigmoid(W x + b). None for no bias.
        position: "none", "rope", "learned_rope", "learned_rope_pairs", "lrpe" or "spe".
        learned_rope_start: "rope", whose angles learned rotations begin with, or "paper", random ones.
        rope: rates and layout of positions "rope", "learned_rope" and "learned_rope_pairs", a `config.RopeConfig`.
        lrpe: options of position "lrpe", a `config.LrpeConfig`.
        max_document_length: longest document in tokens, which sets the rotation rates; 65,536.
        qk_norm: whether queries and keys of each head are RMS-normalized before positions are applied.
        qkv_biases: whether the projections to queries, keys and values have a bias even without `use_bias`.
        implementation: "xla" or "cudnn", of other kernels "reference", "xla" or "mosaic_gpu". If None, the op chooses.
        causal: whether a token attends only to itself and earlier tokens; if False, to its whole document.
        window: number of tokens of its document that a token attends to, itself and those directly before it. If None,
            all. A window bounds the size of the KV cache.

    Raises:
        ValueError: an argument is out of range, or two of them contradict each other.
        TypeError: the class has no such option.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.SoftmaxAttention(64, 4, causal=False, rngs=0)
        >>> attention(jax.random.normal(jax.random.key(0), (2, 128, 64))).shape
        (2, 128, 64)
    """

    defaults: ClassVar = {"kernel": "softmax", "decay": "none", "position": "rope"}
    windowed: ClassVar = {"kernel": "sliding_window"}
    options = (*_PlainAttention.options, "causal", "window")


class ExpressiveAttention(_PlainAttention):
    """Expressive attention, `ops.expressive_attention`; a KV cache is its only memory.

    Args:
        width, num_heads, num_kv_heads, head_dim, use_bias, dtype, rngs: as in `SoftmaxAttention`.
        **options: those of `SoftmaxAttention`, except `window`.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.ExpressiveAttention(64, 4, rngs=0)
        >>> attention(jax.random.normal(jax.random.key(0), (2, 128, 64))).shape
        (2, 128, 64)
    """

    defaults: ClassVar = {"kernel": "expressive", "decay": "none", "position": "rope"}
    options = (*_PlainAttention.options, "causal")
