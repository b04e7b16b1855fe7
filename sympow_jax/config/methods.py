"""Methods compared in "Linearized Relative Positional Encoding" (Qin et al. 2023, section 4), by name."""

from typing import Any

from sympow_jax.config import _checks as checks
from sympow_jax.config import attention as attention_lib

__all__ = ["LRPE_METHODS", "lrpe_method"]

# All except the first are linear attention with the features elu + 1. Learned rates and fixed Householder matrices are
# as in appendix D.1. There, the identity with fixed rates is RoPE, and the identity with a permutation PermuteFormer.
LRPE_METHODS: dict[str, dict[str, Any]] = {
    "softmax": {"kernel": "softmax", "position": "rope"},
    "base": {"position": "sinusoidal"},
    "rope": {"lrpe": {"core": "orthogonal"}},
    "spe": {"position": "spe"},
    "permuteformer": {"lrpe": {"core": "permutation"}},
    "type1": {"lrpe": {"core": "unitary", "basis": "householder", "learned_rates": True}},
    "type2": {"lrpe": {"core": "orthogonal", "basis": "householder", "learned_rates": True}},
    "type3": {"lrpe": {"core": "permutation", "basis": "householder"}},
}
"""Fields of `AttentionConfig` for each method of the paper's tables; `lrpe_method` makes one."""


def lrpe_method(name: str, **changes: Any) -> attention_lib.AttentionConfig:
    """Returns the attention that the paper's tables call `name`, with `changes` to its fields.

    Raises:
        ValueError: `name` is not in `LRPE_METHODS`, or `AttentionConfig` rejects the fields.
    """
    checks.require_choice("method", name, tuple(LRPE_METHODS))
    values = {"kernel": "linear", "decay": "none", "position": "lrpe", **LRPE_METHODS[name], **changes}
    if isinstance(values.get("lrpe"), dict):
        values["lrpe"] = attention_lib.LrpeConfig(**values["lrpe"])
    return attention_lib.AttentionConfig(**values)
