"""The methods that "Linearized Relative Positional Encoding" (Qin et al. 2023, section 4) compares, by their names."""

from typing import Any

from sympow_jax.config import _checks as checks
from sympow_jax.config import attention as attention_lib

__all__ = ["LRPE_METHODS", "lrpe_method"]

# All but the first are attention with the features elu + 1. Learned rates and fixed Householder matrices are those of
# appendix D.1, where identity and fixed rates give RoPE and identity and a permutation PermuteFormer.
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
"""The methods of the paper's tables; `lrpe_method` makes one."""


def lrpe_method(name: str, **changes: Any) -> attention_lib.AttentionConfig:
    """The attention that the paper's tables call `name`, with `changes` to its fields.

    Raises ValueError for a name that is not in `LRPE_METHODS`, and what `AttentionConfig` raises.
    """
    checks.require_choice("method", name, tuple(LRPE_METHODS))
    values = {"kernel": "linear", "decay": "none", "position": "lrpe", **LRPE_METHODS[name], **changes}
    if isinstance(values.get("lrpe"), dict):
        values["lrpe"] = attention_lib.LrpeConfig(**values["lrpe"])
    return attention_lib.AttentionConfig(**values)
