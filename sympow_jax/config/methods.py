"""Methods compared in "Linearized Relative Positional Encoding" (Qin et al. 2023, section 4), by name."""

from typing import Any

from sympow_jax.config import attention as attention_lib
from sympow_jax.config import checks

__all__ = ["LRPE_METHODS", "lrpe_method"]

# All except the first are linear attention, with the features elu + 1, or relu in cosFormer. Learned rates and fixed
# Householder matrices are as in appendix D.1, where the identity with fixed rates is RoPE. PermuteFormer has its own
# paper's permutation per head and decay r (Chen 2021, section 3.2). The LRPE paper's identity with a permutation has
# neither: `LrpeConfig(core="permutation")`. cosFormer's M is `lrpe.reference_length`; `lrpe_method` sets
# it to the sequence length of the paper's language models (Table 8), or to the given one. It must be at least the
# length of a document: weights of tokens that are further apart are negative.
#
# The paper's denominator (equation 38) has rotated features. It is kept where training with it is stable: weights of
# PermuteFormer and cosFormer are not negative, and RoPE trains better with it. After a Householder matrix features have
# both signs, and in training the sums of weights become negative or nearly zero, so that types 1 and 2 end at a much
# higher perplexity (experiments/README.md). They therefore have the unrotated denominator, and so does type 3, for
# which both are level. normalizer="rotated" is equation 38.
LRPE_METHODS: dict[str, dict[str, Any]] = {
    "softmax": {"kernel": "softmax", "position": "rope"},
    "base": {"position": "sinusoidal"},
    "rope": {"normalizer": "rotated", "lrpe": {"core": "orthogonal"}},
    "spe": {"position": "spe"},
    "permuteformer": {
        "decay": "permuteformer",
        "normalizer": "rotated",
        "lrpe": {"core": "permutation", "permutation_per_head": True},
    },
    "cosformer": {
        "feature_map": "relu",
        "normalizer": "rotated",
        "lrpe": {"core": "unitary", "rates": "cosine"},
    },
    "type1": {"lrpe": {"core": "unitary", "basis": "householder", "learned_rates": True}},
    "type2": {"lrpe": {"core": "orthogonal", "basis": "householder", "learned_rates": True}},
    "type3": {"lrpe": {"core": "permutation", "basis": "householder"}},
}
"""Fields of `AttentionConfig` for each method of the paper; `lrpe_method` makes one."""


def lrpe_method(name: str, *, length: int = 512, **changes: Any) -> attention_lib.AttentionConfig:
    """Returns the attention that the paper calls `name`, with `changes` to its fields.

    With `causal=False` there is no decay, as decays run in one direction.

    Args:
        name: one of `LRPE_METHODS`.
        length: tokens of the longest document. Only cosFormer uses it, and not if `lrpe` is given.
        **changes: fields of `AttentionConfig`.

    Raises:
        ValueError: `name` is not in `LRPE_METHODS`, or `AttentionConfig` rejects the fields.
    """
    checks.require_choice("method", name, tuple(LRPE_METHODS))
    values = {"kernel": "linear", "decay": "none", "position": "lrpe", **LRPE_METHODS[name]}
    if not changes.get("causal", True):
        values["decay"] = "none"
    if name == "cosformer":
        values["lrpe"] = {**values["lrpe"], "reference_length": length}
    if "lrpe" in values:
        values["lrpe"] = attention_lib.LrpeConfig(**values["lrpe"])
    values |= changes
    return attention_lib.AttentionConfig(**values)
