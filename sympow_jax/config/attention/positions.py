"""Position encodings: their names, and the settings of rotations and of LRPE."""

import dataclasses

from sympow_jax.config import fields

# Added to the embedding by the model, and applied to queries and keys by each layer.
ADDED_POSITIONS = ("sinusoidal", "learned_absolute")
LAYER_POSITIONS = ("none", "rope", "learned_rope", "learned_rope_pairs", "lrpe", "spe")
POSITIONS = (*ADDED_POSITIONS, *LAYER_POSITIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rates and layout of the positions `rope`, `learned_rope` and `learned_rope_pairs`."""

    base: float | None = fields.setting(
        None,
        "Base b of the rates theta_m = b^(-2m/D), m from 0, in radians per token. If none, it is 10,000 where "
        "`learned_rope_start` is `rope`; otherwise `max_document_length` sets the rates.",
        above=1,
    )
    layout: str = fields.setting(
        "pairs",
        "Dimensions that rotate together: 2m and 2m + 1 in `pairs`, m and m + D/2 in `halves`, as in Llama.",
        choices=("pairs", "halves"),
    )
    scaling: str = fields.setting(
        "none",
        "Scaling of the rates. `llama3` divides slow ones by `factor`, keeps fast ones, and interpolates in between.",
        choices=("none", "llama3"),
    )
    factor: float = fields.setting(8.0, "Divisor of the slow rates of `llama3`.", least=1)
    low_frequency_factor: float = fields.setting(
        1.0, "Turns in `original_length` tokens below which a rate is slow.", above=0
    )
    high_frequency_factor: float = fields.setting(
        4.0, "Turns in `original_length` tokens above which a rate is fast."
    )
    original_length: int = fields.setting(8192, "Context length before the rates were scaled.", least=1)

    def __post_init__(self):
        fields.validate(self, "attention.rope")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if self.scaling != "none" and self.base is None:
            raise ValueError(
                f"attention.rope.scaling is {self.scaling!r} and attention.rope.base None; set the base"
            )
        if low >= high:
            raise ValueError(
                f"attention.rope.low_frequency_factor is {low} and attention.rope.high_frequency_factor {high}; the "
                f"second must be larger"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrpeConfig:
    """Position `lrpe`: linearized relative positional encoding, W_s = P^H Lambda^(s) P.

    Source: "Linearized Relative Positional Encoding", Qin et al. 2023, section 3. `ops.lrpe` has the formulas.

    The core `unitary` and the basis `fourier` are complex. Each doubles the size of queries and keys, and so of the
    state.
    """

    core: str = fields.setting(
        "orthogonal",
        "Lambda. `orthogonal` rotates pairs of dimensions (solution 2), `unitary` each in the complex plane (solution "
        "1), `mixed` half of them; `permutation` permutes them (solution 3).",
        choices=("orthogonal", "unitary", "permutation", "mixed"),
    )
    basis: str = fields.setting(
        "identity", "Basis P.", choices=("identity", "householder", "odd_even", "fourier")
    )
    rates: str = fields.setting(
        "a",
        "Rotation rates. `a` is 10000^(-2 t / d). `b` and `c` are linear and harmonic in t, divided by "
        "`reference_length`. `rope` is 2 pi M^(-2 t / d), with M the `max_document_length`. `cosine` is pi / 2 over "
        "`reference_length`: with core `unitary`, the weights of cosFormer.",
        choices=("a", "b", "c", "rope", "cosine"),
    )
    learned_rates: bool = fields.setting(False, "Whether the rates are trained, starting from `rates`.")
    permutation_per_head: bool = fields.setting(
        False, "Whether each key/value head has its own `permutation`, as in PermuteFormer."
    )
    reference_length: int = fields.setting(
        1024, "Divisor of the rates `b`, `c` and `cosine`, in tokens.", least=1
    )

    def __post_init__(self):
        fields.validate(self, "attention.lrpe")
        if self.learned_rates and self.core == "permutation":
            raise ValueError("attention.lrpe.learned_rates is set, but core 'permutation' has no rates")
        if self.permutation_per_head and self.core != "permutation":
            raise ValueError(
                f"attention.lrpe.permutation_per_head is set but core is {self.core!r}; only 'permutation' permutes"
            )

    def check_head(self, head_dim: int, *, name: str = "model.head_dim") -> None:
        """Raises ValueError if the encoding does not support a head size, which the error calls `name`."""
        if self.core == "orthogonal" and head_dim % 2:
            raise ValueError(
                f"{name} is {head_dim}; attention.lrpe.core 'orthogonal' rotates pairs: make it even"
            )
        if self.core == "mixed" and head_dim < 3:
            raise ValueError(f"{name} is {head_dim}; attention.lrpe.core 'mixed' needs at least 3")
