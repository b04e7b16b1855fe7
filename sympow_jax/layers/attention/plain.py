"""Attention layers with plain arguments, for use in other models."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax.config import attention as attention_lib
from sympow_jax.config import checks
from sympow_jax.config import model as model_lib
from sympow_jax.layers.attention import kernels, layer
from sympow_jax.ops._shared import arguments

__all__ = ["ExpressiveAttention", "LinearAttention", "PowerAttention", "SoftmaxAttention"]


class PowerAttention(layer.Attention):
    """Power attention, whose weights are even powers of q . k, times the decay between key and query.

    Args:
        width: M, the size of the input and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; it must divide `num_heads`. If None, `num_heads`.
        head_dim: size of a head. If None, `width // num_heads`.
        power: degree of the weights, positive and even. The recurrent state has binomial(head_dim + power - 1, power)
            x head_dim elements per key/value head.
        decay: "none"; per head "alibi" or "permuteformer", fixed, "constant", trained, or "learned", sigmoid(W x); or
            per value channel "channel_fixed", "channel_constant" or "channel_learned".
        decay_bias: initial value of a bias b of learned decays, which are then sigmoid(W x + b). At 4 a head at first
            forgets 2 % per token, and at None, without a bias, half.
        position: "none", "rope", "learned_rope", "learned_rope_pairs", "lrpe" or "spe".
        form: "attention", quadratic in time; "chunked"; or "recurrent". If None, the cheapest for the shapes.
        implementation: implementation of the op. If None, the op chooses.
        chunk_size: tokens per chunk of the chunked form. If None, the op chooses.
        exact_window: minimum number of last keys that every query attends to exactly instead of through the state.
        max_document_length: longest document in tokens, which sets the rotation rates.
        qk_norm: whether queries and keys of each head are RMS-normalized before positions are applied.
        qkv_biases: whether the projections to queries, keys and values have a bias even without `use_bias`.
        rope: rates and layout of positions "rope", "learned_rope" and "learned_rope_pairs".
        lrpe: options of position "lrpe".
        use_bias: whether the four projections have a bias.
        dtype: dtype of the matrix products, "float32" or "bfloat16", by name or as a dtype; parameters are float32.
        rngs: source of initial values, or a seed.

    Raises:
        ValueError: an argument is out of range, or two of them contradict each other.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.PowerAttention(64, 4, num_kv_heads=2, power=2, rngs=0)
        >>> x = jax.random.normal(jax.random.key(0), (2, 128, 64))
        >>> attention(x).shape
        (2, 128, 64)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        power: int = 2,
        decay: str = "learned",
        decay_bias: float | None = None,
        position: str = "learned_rope",
        form: str | None = None,
        implementation: str | None = None,
        chunk_size: int | None = None,
        exact_window: int = 64,
        max_document_length: int = 65_536,
        qk_norm: bool = False,
        qkv_biases: bool = False,
        rope: configs.RopeConfig | None = None,
        lrpe: configs.LrpeConfig | None = None,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | int,
    ):
        kernel = _kernel(
            width,
            num_heads,
            num_kv_heads,
            head_dim,
            dtype,
            kernel="power",
            power=power,
            decay=decay,
            decay_bias=decay_bias,
            position=position,
            form=form,
            implementation=implementation,
            chunk_size=chunk_size,
            exact_window=exact_window,
            max_document_length=max_document_length,
            qk_norm=qk_norm,
            qkv_biases=qkv_biases,
            rope=rope,
            lrpe=lrpe,
        )
        super().__init__(width, kernel, dtype=dtype, use_bias=use_bias, rngs=rngs)


class LinearAttention(layer.Attention):
    """Linear attention, whose weights are f(q) . f(k) for a feature map f, times the decay between key and query.

    Positions that rotate vectors are applied to the features.

    Args:
        width: M, the size of the input and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; it must divide `num_heads`. If None, `num_heads`.
        head_dim: size of a head. If None, `width // num_heads`.
        feature_map: "elu" (elu(x) + 1), "relu", "identity", "symmetric" or "tensor".
        power: degree of the feature maps "symmetric" and "tensor".
        normalizer: "unrotated" or "rotated", the features that the denominator uses.
        decay: "none"; "alibi" or "permuteformer", fixed per head; or "learned", sigmoid(W x) per head.
        decay_bias: initial value of a bias b of learned decays, which are then sigmoid(W x + b). None for no bias.
        position: "none", "rope", "learned_rope", "learned_rope_pairs", "lrpe" or "spe".
        causal: whether a token attends only to itself and earlier tokens; if False, to its whole document.
        form: "attention", quadratic in time; "chunked"; or "recurrent". If None, the cheapest for the shapes.
        implementation: implementation of the op. If None, the op chooses.
        chunk_size: tokens per chunk of the chunked form. If None, the op chooses.
        exact_window: minimum number of last keys that every query attends to exactly instead of through the state.
        max_document_length: longest document in tokens, which sets the rotation rates.
        qk_norm: whether queries and keys of each head are RMS-normalized before positions are applied.
        qkv_biases: whether the projections to queries, keys and values have a bias even without `use_bias`.
        rope: rates and layout of positions "rope", "learned_rope" and "learned_rope_pairs".
        lrpe: options of position "lrpe".
        use_bias: whether the four projections have a bias.
        dtype: dtype of the matrix products, "float32" or "bfloat16", by name or as a dtype; parameters are float32.
        rngs: source of initial values, or a seed.

    Raises:
        ValueError: an argument is out of range, or two of them contradict each other.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.LinearAttention(64, 4, feature_map="relu", rngs=0)
        >>> attention(jax.random.normal(jax.random.key(0), (2, 128, 64))).shape
        (2, 128, 64)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        feature_map: str = "elu",
        power: int = 2,
        normalizer: str = "unrotated",
        decay: str = "none",
        decay_bias: float | None = None,
        position: str = "rope",
        causal: bool = True,
        form: str | None = None,
        implementation: str | None = None,
        chunk_size: int | None = None,
        exact_window: int = 64,
        max_document_length: int = 65_536,
        qk_norm: bool = False,
        qkv_biases: bool = False,
        rope: configs.RopeConfig | None = None,
        lrpe: configs.LrpeConfig | None = None,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | int,
    ):
        kernel = _kernel(
            width,
            num_heads,
            num_kv_heads,
            head_dim,
            dtype,
            kernel="linear",
            feature_map=feature_map,
            power=power,
            normalizer=normalizer,
            decay=decay,
            decay_bias=decay_bias,
            position=position,
            causal=causal,
            form=form,
            implementation=implementation,
            chunk_size=chunk_size,
            exact_window=exact_window,
            max_document_length=max_document_length,
            qk_norm=qk_norm,
            qkv_biases=qkv_biases,
            rope=rope,
            lrpe=lrpe,
        )
        super().__init__(width, kernel, dtype=dtype, use_bias=use_bias, rngs=rngs)


class SoftmaxAttention(layer.Attention):
    """Softmax attention with scores q . k / sqrt(head_dim); a KV cache is its only memory.

    Args:
        width: M, the size of the input and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; it must divide `num_heads`. If None, `num_heads`.
        head_dim: size of a head. If None, `width // num_heads`.
        decay: "none"; "alibi" or "permuteformer", fixed per head; or "learned", sigmoid(W x) per head.
        decay_bias: initial value of a bias b of learned decays, which are then sigmoid(W x + b). None for no bias.
        position: "none", "rope", "learned_rope", "learned_rope_pairs", "lrpe" or "spe".
        causal: whether a token attends only to itself and earlier tokens; if False, to its whole document.
        window: number of tokens of its document that a token attends to, itself and those directly before it. If None,
            all. A window bounds the size of the KV cache.
        implementation: "xla" or "cudnn". If None, the op chooses.
        max_document_length: longest document in tokens, which sets the rotation rates.
        qk_norm: whether queries and keys of each head are RMS-normalized before positions are applied.
        qkv_biases: whether the projections to queries, keys and values have a bias even without `use_bias`.
        rope: rates and layout of positions "rope", "learned_rope" and "learned_rope_pairs".
        lrpe: options of position "lrpe".
        use_bias: whether the four projections have a bias.
        dtype: dtype of the matrix products, "float32" or "bfloat16", by name or as a dtype; parameters are float32.
        rngs: source of initial values, or a seed.

    Raises:
        ValueError: an argument is out of range, or two of them contradict each other.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.SoftmaxAttention(64, 4, causal=False, rngs=0)
        >>> attention(jax.random.normal(jax.random.key(0), (2, 128, 64))).shape
        (2, 128, 64)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        decay: str = "none",
        decay_bias: float | None = None,
        position: str = "rope",
        causal: bool = True,
        window: int | None = None,
        implementation: str | None = None,
        max_document_length: int = 65_536,
        qk_norm: bool = False,
        qkv_biases: bool = False,
        rope: configs.RopeConfig | None = None,
        lrpe: configs.LrpeConfig | None = None,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | int,
    ):
        kernel = _kernel(
            width,
            num_heads,
            num_kv_heads,
            head_dim,
            dtype,
            **({"kernel": "softmax"} if window is None else {"kernel": "sliding_window", "window": window}),
            decay=decay,
            decay_bias=decay_bias,
            position=position,
            causal=causal,
            implementation=implementation,
            max_document_length=max_document_length,
            qk_norm=qk_norm,
            qkv_biases=qkv_biases,
            rope=rope,
            lrpe=lrpe,
        )
        super().__init__(width, kernel, dtype=dtype, use_bias=use_bias, rngs=rngs)


class ExpressiveAttention(layer.Attention):
    """Expressive attention, `ops.expressive_attention`; a KV cache is its only memory.

    Args:
        width: M, the size of the input and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; it must divide `num_heads`. If None, `num_heads`.
        head_dim: size of a head. If None, `width // num_heads`.
        decay: "none"; "alibi" or "permuteformer", fixed per head; or "learned", sigmoid(W x) per head.
        decay_bias: initial value of a bias b of learned decays, which are then sigmoid(W x + b). None for no bias.
        position: "none", "rope", "learned_rope", "learned_rope_pairs", "lrpe" or "spe".
        causal: whether a token attends only to itself and earlier tokens; if False, to its whole document.
        implementation: implementation of the op. If None, the op chooses.
        max_document_length: longest document in tokens, which sets the rotation rates.
        qk_norm: whether queries and keys of each head are RMS-normalized before positions are applied.
        qkv_biases: whether the projections to queries, keys and values have a bias even without `use_bias`.
        rope: rates and layout of positions "rope", "learned_rope" and "learned_rope_pairs".
        lrpe: options of position "lrpe".
        use_bias: whether the four projections have a bias.
        dtype: dtype of the matrix products, "float32" or "bfloat16", by name or as a dtype; parameters are float32.
        rngs: source of initial values, or a seed.

    Raises:
        ValueError: an argument is out of range, or two of them contradict each other.

    Examples:
        >>> import jax
        >>> from sympow_jax import layers
        >>> attention = layers.ExpressiveAttention(64, 4, rngs=0)
        >>> attention(jax.random.normal(jax.random.key(0), (2, 128, 64))).shape
        (2, 128, 64)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        decay: str = "none",
        decay_bias: float | None = None,
        position: str = "rope",
        causal: bool = True,
        implementation: str | None = None,
        max_document_length: int = 65_536,
        qk_norm: bool = False,
        qkv_biases: bool = False,
        rope: configs.RopeConfig | None = None,
        lrpe: configs.LrpeConfig | None = None,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | int,
    ):
        kernel = _kernel(
            width,
            num_heads,
            num_kv_heads,
            head_dim,
            dtype,
            kernel="expressive",
            decay=decay,
            decay_bias=decay_bias,
            position=position,
            causal=causal,
            implementation=implementation,
            max_document_length=max_document_length,
            qk_norm=qk_norm,
            qkv_biases=qkv_biases,
            rope=rope,
            lrpe=lrpe,
        )
        super().__init__(width, kernel, dtype=dtype, use_bias=use_bias, rngs=rngs)


def _kernel(
    width: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    dtype: Any,
    *,
    position: str,
    rope: configs.RopeConfig | None,
    lrpe: configs.LrpeConfig | None,
    **options: Any,
) -> kernels.Kernel:
    """Validates the arguments and returns the kernel."""
    width = arguments.check_integer("width", width, 1)
    num_heads = arguments.check_integer("num_heads", num_heads, 1)
    num_kv_heads, head_dim = (
        None if size is None else arguments.check_integer(name, size, 1)
        for name, size in {"num_kv_heads": num_kv_heads, "head_dim": head_dim}.items()
    )
    num_kv_heads, head_dim = checks.head_sizes(
        width=width, heads=num_heads, kv_heads=num_kv_heads, head_dim=head_dim, heads_name="num_"
    )
    if options.get("decay_bias") is not None and "learned" not in options["decay"]:
        raise ValueError(
            f"decay_bias is {options['decay_bias']!r}, but decay {options['decay']!r} has no bias"
        )
    checks.require_choice("position", position, attention_lib.LAYER_POSITIONS)
    checks.require_choice("dtype", dtype := checks.dtype_name(dtype), model_lib.DTYPES)
    attention = configs.AttentionConfig(
        position=position,
        rope=configs.RopeConfig() if rope is None else rope,
        lrpe=configs.LrpeConfig() if lrpe is None else lrpe,
        **options,
    )
    attention.check_head(head_dim, name="head_dim")
    return kernels.make(
        attention, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )
