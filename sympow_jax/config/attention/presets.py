"""Kernel, decay and position together, by name; those of a paper that has others end in `_paper`."""

import dataclasses
from typing import Any

from sympow_jax.config import checks
from sympow_jax.config.attention.positions import LrpeConfig, RopeConfig
from sympow_jax.config.attention.settings import AttentionConfig

_LLAMA3_ROPE = RopeConfig(base=500_000.0, layout="halves")
_QWEN_ROPE = RopeConfig(base=1_000_000.0, layout="halves")
_STARCODER2_ROPE = RopeConfig(base=999_999.4420358813, layout="halves")


def _fields(kernel: str, decay: str, position: str, **others: Any) -> dict[str, Any]:
    return {"kernel": kernel, "decay": decay, "position": position, "softmax_window": False, **others}


PRESETS: dict[str, dict[str, Any]] = {
    "softmax": _fields("softmax", "none", "rope"),
    "softmax_alibi": _fields("softmax", "alibi", "none"),
    "gpt2": _fields("softmax", "none", "learned_absolute", max_document_length=1024),
    "sliding_window": _fields("sliding_window", "none", "rope"),
    "linear": _fields("linear", "none", "sinusoidal"),
    "linear_lrpe": _fields(
        "linear", "none", "lrpe", lrpe=LrpeConfig(basis="householder", learned_rates=True)
    ),
    "expressive": _fields("expressive", "none", "rope"),
    "even_power": _fields("power", "none", "rope", form="attention"),
    "sympow": _fields("power", "none", "rope"),
    "sympow_gated": _fields("power", "learned_alibi", "rope"),
    "sympow_gated_window": _fields("power", "learned_alibi", "rope", softmax_window=True),
    "sympow_gated_paper": _fields("power", "learned", "rope"),
    "sympow_learned_rope": _fields("power", "none", "learned_rope"),
    "conformal": _fields("power", "learned_alibi", "learned_rope"),
    "conformal_paper": _fields("power", "learned", "learned_rope", learned_rope_start="paper"),
    "power_delta": _fields("power_delta", "learned_alibi", "rope"),
    "llama3": _fields("softmax", "none", "rope", rope=_LLAMA3_ROPE),
    "llama31": _fields("softmax", "none", "rope", rope=dataclasses.replace(_LLAMA3_ROPE, scaling="llama3")),
    "llama32": _fields(
        "softmax", "none", "rope", rope=dataclasses.replace(_LLAMA3_ROPE, scaling="llama3", factor=32.0)
    ),
    "qwen2": _fields("softmax", "none", "rope", rope=_QWEN_ROPE, qkv_biases=True),
    "qwen3": _fields("softmax", "none", "rope", rope=_QWEN_ROPE, qk_norm=True),
    "starcoder2": _fields("sliding_window", "none", "rope", rope=_STARCODER2_ROPE, window=4096),
    "brumby": _fields("power", "learned", "rope", rope=_QWEN_ROPE, qk_norm=True),
}
"""Fields of `AttentionConfig` by name of the preset; `preset` makes one."""

SHARED = "shared"
"""Word of a pattern for layers that have `model.attention` itself."""


def preset(name: str, **changes) -> AttentionConfig:
    """Returns the attention of the preset `name`, with `changes` to its fields."""
    checks.require_choice("preset", name, tuple(PRESETS))
    return AttentionConfig(**{**PRESETS[name], **changes})


def with_preset(attention: AttentionConfig, name: str) -> AttentionConfig:
    """Returns `attention` with all that the preset `name` sets, or `attention` itself for `SHARED`."""
    checks.require_choice("model.attention_pattern", name, (SHARED, *PRESETS))
    if name == SHARED:
        return attention
    try:
        return dataclasses.replace(attention, **PRESETS[name])
    except ValueError as error:
        raise ValueError(f"in layers of preset {name!r}: {error}") from error


def preset_name(attention: AttentionConfig) -> str:
    """Returns the name in `PRESETS` with the most fields, all of which `attention` has, or else names its parts."""
    names = [
        name
        for name, values in PRESETS.items()
        if all(getattr(attention, field) == value for field, value in values.items())
    ]
    if names:
        return max(names, key=lambda name: len(PRESETS[name]))
    window = ", softmax window" if attention.softmax_window else ""
    return f"{attention.kernel}, {attention.decay}, {attention.position}{window}"


# Methods compared in "Linearized Relative Positional Encoding" (Qin et al. 2023, section 4).
# All except the first are linear attention, with the features elu + 1, or relu in cosFormer. Learned rates and fixed
# Householder matrices are as in appendix D.1, where the identity with fixed rates is RoPE. PermuteFormer has its own
# paper's permutation per head and decay r (Chen 2021, section 3.2). cosFormer's M is `lrpe.reference_length`, the
# sequence length of the paper's language models (Table 8) by default. It must be at least the length of a document:
# weights of tokens that are further apart are negative.
#
# The paper's denominator (equation 38, normalizer="rotated") has rotated features. It is kept where training with it is
# stable. After a Householder matrix features have both signs, and sums of weights become negative or nearly zero, so
# that types 1 and 2 end at a much higher perplexity (experiments/README.md). They therefore have the unrotated
# denominator, and so does type 3, for which both are level.
LRPE_METHODS: dict[str, dict[str, Any]] = {
    "softmax": {"kernel": "softmax", "position": "rope"},
    "base": {"position": "sinusoidal"},
    "rope": {"normalizer": "rotated", "lrpe": {"core": "orthogonal"}},
    "spe": {"position": "spe"},
    "permuteformer": {"decay": "permuteformer", "normalizer": "rotated"}
    | {"lrpe": {"core": "permutation", "permutation_per_head": True}},
    "cosformer": {"feature_map": "relu", "normalizer": "rotated"}
    | {"lrpe": {"core": "unitary", "rates": "cosine"}},
    "type1": {"lrpe": {"core": "unitary", "basis": "householder", "learned_rates": True}},
    "type2": {"lrpe": {"core": "orthogonal", "basis": "householder", "learned_rates": True}},
    "type3": {"lrpe": {"core": "permutation", "basis": "householder"}},
}
"""Fields of `AttentionConfig` for each method of the paper; `lrpe_method` makes one."""


def lrpe_method(name: str, *, length: int = 512, **changes: Any) -> AttentionConfig:
    """Returns the attention that the paper calls `name`, with `changes` to its fields.

    With `causal=False` there is no decay, as decays run in one direction.

    Args:
        name: one of `LRPE_METHODS`.
        length: tokens of the longest document. Only cosFormer uses it, and not if `lrpe` is given.
        **changes: fields of `AttentionConfig`.
    """
    checks.require_choice("method", name, tuple(LRPE_METHODS))
    values = {"kernel": "linear", "decay": "none", "position": "lrpe", **LRPE_METHODS[name]}
    if not changes.get("causal", True):
        values["decay"] = "none"
    if name == "cosformer":
        values["lrpe"] = {**values["lrpe"], "reference_length": length}
    if "lrpe" in values:
        values["lrpe"] = LrpeConfig(**values["lrpe"])
    values |= changes
    return AttentionConfig(**values)
