"""Attention as a kernel, a decay and a position encoding, and the papers' names for their combinations."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from sympow_jax.config import checks, fields

__all__ = [
    "DECAYS",
    "KERNELS",
    "PRESETS",
    "SHARED",
    "AttentionConfig",
    "Decay",
    "DecaySource",
    "Kernel",
    "LrpeConfig",
    "RopeConfig",
    "preset",
    "preset_name",
    "with_preset",
]

# Added to the embedding by the model, and applied to queries and keys by each layer.
ADDED_POSITIONS = ("sinusoidal", "learned_absolute")
LAYER_POSITIONS = ("none", "rope", "learned_rope", "learned_rope_pairs", "lrpe", "spe")
POSITIONS = (*ADDED_POSITIONS, *LAYER_POSITIONS)
FEATURE_MAPS = ("elu", "relu", "identity", "symmetric", "tensor")
NORMALIZERS = ("unrotated", "rotated")
# How attention is computed changes neither parameters nor the function. Some of it changes the layout of states.
_COMPUTATION = fields.may_differ(fields.Occasion.INITIAL_ENCODER)
_SPEED = fields.may_differ(fields.Occasion.INITIAL_ENCODER, fields.Occasion.SAVED_STATE)

FORMS = ("attention", "chunked", "recurrent")
IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")


class DecaySource(enum.Enum):
    """Source of the per-token decays."""

    NONE = enum.auto()
    FIXED = enum.auto()  # ALiBi's slopes
    RATIO = enum.auto()  # PermuteFormer's r = sigmoid(2 + 3 h / K) of head h = 0 ... K - 1
    PARAMETER = enum.auto()  # learned, the same for all tokens
    DATA = enum.auto()  # sigmoid(W x)


@dataclasses.dataclass(frozen=True)
class Decay:
    """Properties of a value of `attention.decay`.

    Attributes:
        source: fixed, learned, computed from the token, or none.
        per_channel: one decay per value channel, instead of one per key/value head.
    """

    source: DecaySource
    per_channel: bool = False


DECAYS: Mapping[str, Decay] = {
    "none": Decay(DecaySource.NONE),
    "alibi": Decay(DecaySource.FIXED),
    "permuteformer": Decay(DecaySource.RATIO),
    "constant": Decay(DecaySource.PARAMETER),
    "learned": Decay(DecaySource.DATA),
    "channel_fixed": Decay(DecaySource.FIXED, per_channel=True),
    "channel_constant": Decay(DecaySource.PARAMETER, per_channel=True),
    "channel_learned": Decay(DecaySource.DATA, per_channel=True),
}
"""Decays by name, the choices of `AttentionConfig.decay`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Class of a value of `attention.kernel`, and the options that it supports.

    Attributes:
        target: "module:class" of a subclass of `sympow_jax.layers.attention.kernels.Kernel`. A string, because the
            config package imports no layers.
        implementations: choices of `attention.implementation`.
        even_power: whether `attention.power` must be even.
        per_channel_decay: whether decays may be per value channel.
        bidirectional: whether `causal=False` is supported.
    """

    target: str
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    even_power: bool = False
    per_channel_decay: bool = False
    bidirectional: bool = True


_MODULES = "sympow_jax.layers.attention.kernels"
KERNELS: dict[str, Kernel] = {
    "softmax": Kernel(target=f"{_MODULES}.softmax:SoftmaxKernel", implementations=("xla", "cudnn")),
    "power": Kernel(
        target=f"{_MODULES}.power:PowerKernel", even_power=True, per_channel_decay=True, bidirectional=False
    ),
    "linear": Kernel(target=f"{_MODULES}.linear:LinearKernel"),
    "expressive": Kernel(target=f"{_MODULES}.expressive:ExpressiveKernel"),
    "sliding_window": Kernel(
        target=f"{_MODULES}.softmax:SlidingWindowKernel",
        implementations=("xla", "cudnn"),
        bidirectional=False,
    ),
}
"""Kernels by name, the choices of `AttentionConfig.kernel`. A new kernel is one more row."""

ROPE_LAYOUTS = ("pairs", "halves")
ROPE_SCALINGS = ("none", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rates and layout of the positions `rope`, `learned_rope` and `learned_rope_pairs`."""

    base: float | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Base b of the rotation rates theta_m = b^(-2m/D), m from 0, in radians per token, as in Llama. If none, "
            "the rates depend on `max_document_length`."
        ),
    )
    layout: str = dataclasses.field(
        default="pairs",
        metadata=fields.about(
            "Dimensions that rotate together, m from 0: 2m and 2m + 1 in `pairs`, m and m + D/2 in `halves`, as in "
            "Llama.",
            choices=ROPE_LAYOUTS,
        ),
    )
    scaling: str = dataclasses.field(
        default="none",
        metadata=fields.about(
            "Scaling of the rates. With `llama3`, pairs that rotate slowly have their rates divided by `factor`, and "
            "fast ones keep theirs. Between `low_frequency_factor` and `high_frequency_factor`, the scale is "
            "interpolated.",
            choices=ROPE_SCALINGS,
        ),
    )
    factor: float = dataclasses.field(
        default=8.0, metadata=fields.about("Divisor of the slow rates of `llama3`.")
    )
    low_frequency_factor: float = dataclasses.field(
        default=1.0,
        metadata=fields.about(
            "Turns in `original_length` tokens below which `llama3` divides a rate by `factor`."
        ),
    )
    high_frequency_factor: float = dataclasses.field(
        default=4.0,
        metadata=fields.about("Turns in `original_length` tokens above which `llama3` keeps a rate."),
    )
    original_length: int = dataclasses.field(
        default=8192,
        metadata=fields.about("Context length of the training before `llama3` scaled the rates."),
    )

    def __post_init__(self):
        fields.validate(self, "attention.rope")
        if self.base is not None and self.base <= 1:
            raise ValueError(f"attention.rope.base is {self.base}; it must be above 1")
        if self.scaling != "none" and self.base is None:
            raise ValueError(
                f"attention.rope.scaling is {self.scaling!r} and attention.rope.base None; set the base of the rates "
                f"that are scaled"
            )
        checks.require_at_least(
            1, **{f"attention.rope.{name}": getattr(self, name) for name in ("factor", "original_length")}
        )
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if not 0 < low < high:
            raise ValueError(
                f"attention.rope.low_frequency_factor is {low} and attention.rope.high_frequency_factor {high}; they "
                f"must be positive, and the second larger"
            )


LRPE_CORES = ("orthogonal", "unitary", "permutation", "mixed")
LRPE_BASES = ("identity", "householder", "odd_even", "fourier")
LRPE_RATES = ("a", "b", "c", "rope", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrpeConfig:
    """Position `lrpe`: linearized relative positional encoding, W_s = P^H Lambda^(s) P.

    Source: "Linearized Relative Positional Encoding", Qin et al. 2023, section 3. `ops.lrpe` has the formulas.

    The core `unitary` and the basis `fourier` are complex. Each doubles the size of queries and keys, and so of the
    state.
    """

    core: str = dataclasses.field(
        default="orthogonal",
        metadata=fields.about(
            "Lambda. `orthogonal` rotates pairs of dimensions (solution 2, without an identity part). `unitary` "
            "rotates each dimension in the complex plane (solution 1). `permutation` permutes dimensions (solution "
            "3). `mixed` rotates half of them.",
            choices=LRPE_CORES,
        ),
    )
    basis: str = dataclasses.field(default="identity", metadata=fields.about("Basis P.", choices=LRPE_BASES))
    rates: str = dataclasses.field(
        default="a",
        metadata=fields.about(
            "Rotation rates. `a` is 10000^(-2 t / d). `b` and `c` are linear and harmonic in t, divided by "
            "`reference_length` in place of the current length. `rope` is 2 pi M^(-2 t / d), with M the "
            "`max_document_length`. `cosine` is pi / 2 over `reference_length` for every t: with core "
            "`unitary`, weights are those of cosFormer, which reaches 0 at that distance.",
            choices=LRPE_RATES,
        ),
    )
    learned_rates: bool = dataclasses.field(
        default=False, metadata=fields.about("Whether the rates are trained, starting from `rates`.")
    )
    permutation_per_head: bool = dataclasses.field(
        default=False,
        metadata=fields.about("Whether each key/value head has its own `permutation`, as in PermuteFormer."),
    )
    reference_length: int = dataclasses.field(
        default=1024, metadata=fields.about("Divisor of the rates `b`, `c` and `cosine`, in tokens.")
    )

    def __post_init__(self):
        fields.validate(self, "attention.lrpe")
        checks.require_at_least(1, **{"attention.lrpe.reference_length": self.reference_length})
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
                f"{name} is {head_dim}; attention.lrpe.core 'orthogonal' rotates pairs of dimensions and needs an "
                f"even one"
            )
        if self.core == "mixed" and head_dim < 3:
            raise ValueError(f"{name} is {head_dim}; attention.lrpe.core 'mixed' needs at least 3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention as a kernel, a decay and a position encoding."""

    kernel: str = dataclasses.field(
        default="power",
        metadata=fields.about("Weight of a value, as a function of its key and the query.", choices=KERNELS),
    )
    decay: str = dataclasses.field(
        default="learned",
        metadata=fields.about(
            "Decay of the weights of older tokens. Per head, `alibi` and `permuteformer` are fixed, `constant` is "
            "trained and `learned` is computed from each token; `channel_fixed`, `channel_constant` and "
            "`channel_learned` are per value channel: fixed, trained, and computed from each token.",
            choices=DECAYS,
        ),
    )
    decay_bias: float | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Initial value of a bias of the decays `learned` and `channel_learned`, before their sigmoid. If none, "
            "there is no bias, and decays start at about 1/2. From 4 on they start near 1, so that layers that "
            "replace softmax forget little at first."
        ),
    )
    position: str = dataclasses.field(
        default="learned_rope",
        metadata=fields.about(
            "Position encoding. The kernel `linear` applies it to features instead of to queries and keys.",
            choices=POSITIONS,
        ),
    )
    qk_norm: bool = dataclasses.field(
        default=False,
        metadata=fields.about(
            "Whether the queries and keys of each head are RMS-normalized before positions are applied, with a "
            "scale for queries and one for keys. Qwen3 has these norms."
        ),
    )
    qkv_biases: bool = dataclasses.field(
        default=False,
        metadata=fields.about(
            "Whether the projections to queries, keys and values have biases even if `model.biases` is false. Qwen2 "
            "has these biases."
        ),
    )
    causal: bool = dataclasses.field(
        default=True,
        metadata=fields.about(
            "Whether a token attends only to itself and to tokens before it. If false, every token attends to "
            "its whole document."
        ),
    )
    power: int = dataclasses.field(
        default=2,
        metadata=fields.about(
            "Degree of the kernel `power`, and of the feature maps `symmetric` and `tensor` of the kernel "
            "`linear`."
        ),
    )
    feature_map: str = dataclasses.field(
        default="elu", metadata=fields.about("Feature map of the kernel `linear`.", choices=FEATURE_MAPS)
    )
    normalizer: str = dataclasses.field(
        default="unrotated",
        metadata=fields.about("Features in the denominator of the kernel `linear`.", choices=NORMALIZERS),
    )
    form: str | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Form of the op, as in `ops.power_attention`. If none, the op chooses.", choices=FORMS
        )
        | _COMPUTATION,
    )
    implementation: str | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Implementation of the op, as in `ops.power_attention`; for the kernels `softmax` and "
            "`sliding_window`, as in `ops.softmax_attention`. If none, the op chooses. With a KV cache, these two "
            "always use `xla`.",
            choices=(*IMPLEMENTATIONS, "cudnn"),
        )
        | _SPEED,
    )
    chunk_size: int | None = dataclasses.field(
        default=None,
        metadata=fields.about("Tokens per chunk, as in `ops.power_attention`. If none, the op chooses.")
        | _SPEED,
    )
    exact_window: int = dataclasses.field(
        default=64,
        metadata=fields.about(
            "Minimum number of last keys that every query attends to exactly, as in `ops.power_attention`."
        )
        | _COMPUTATION,
    )
    window: int = dataclasses.field(
        default=1024,
        metadata=fields.about(
            "Number of tokens of a document that the kernel `sliding_window` attends to: the token itself and those "
            "directly before it."
        ),
    )
    max_document_length: int = dataclasses.field(
        default=65_536,
        metadata=fields.about(
            "M in theta_m = 2 pi / M^(2m/D), m from 0, the rotation rates of all ropes without `rope.base`. Also the "
            "number of rows in the table of position `learned_absolute`, and so the longest document that it supports."
        ),
    )
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    lrpe: LrpeConfig = dataclasses.field(default_factory=LrpeConfig)

    def __post_init__(self):
        fields.validate(self, "attention")
        if self.implementation is not None:
            choices = KERNELS[self.kernel].implementations
            checks.require_choice("attention.implementation", self.implementation, choices)
        if KERNELS[self.kernel].even_power and (self.power <= 0 or self.power % 2):
            raise ValueError(
                f"attention.power is {self.power}; it must be positive and even, so that weights are >= 0"
            )
        checks.require_at_least(1, **{"attention.power": self.power})
        if self.chunk_size is not None:
            checks.require_at_least(1, **{"attention.chunk_size": self.chunk_size})
        checks.require_at_least(0, **{"attention.exact_window": self.exact_window})
        if self.decay_bias is not None and abs(self.decay_bias) > 100:
            raise ValueError(f"attention.decay_bias is {self.decay_bias}; it must be from -100 to 100")
        checks.require_at_least(1, **{"attention.window": self.window})
        checks.require_at_least(2, **{"attention.max_document_length": self.max_document_length})
        self._check_composition()

    @property
    def adds_position(self) -> bool:
        """True if the model adds positions to the embedding, instead of each layer to queries and keys."""
        return self.position in ADDED_POSITIONS

    @property
    def decay_kind(self) -> Decay:
        """Row of `DECAYS` that `decay` names."""
        return DECAYS[self.decay]

    @property
    def longest_document(self) -> int | None:
        """Tokens of the longest document that the positions support; None if unlimited."""
        return self.max_document_length if self.position == "learned_absolute" else None

    def check_head(self, head_dim: int, *, name: str = "model.head_dim") -> None:
        """Raises ValueError if the positions do not support a head size, which the error calls `name`."""
        if "rope" in self.position and head_dim % 2:
            raise ValueError(
                f"{name} is {head_dim}; position {self.position!r} rotates pairs of dimensions and needs an even one"
            )
        if self.position == "lrpe":
            self.lrpe.check_head(head_dim, name=name)

    def _check_composition(self):
        kernel = KERNELS[self.kernel]
        if self.decay_kind.per_channel and not kernel.per_channel_decay:
            have = " and ".join(repr(name) for name, row in KERNELS.items() if row.per_channel_decay)
            raise ValueError(
                f"attention.decay is {self.decay!r}, which the kernel {have} has and {self.kernel!r} has not; "
                f"use 'learned'"
            )
        if self.decay_kind.per_channel and self.form not in (None, "chunked"):
            raise ValueError(
                f"attention.decay is {self.decay!r}, which has the chunked form alone, and attention.form "
                f"{self.form!r}; leave form out"
            )
        if self.form == "recurrent" and self.chunk_size is not None:
            raise ValueError(
                f"attention.chunk_size is {self.chunk_size} and attention.form 'recurrent', which updates the state "
                f"one token at a time; leave chunk_size out, or use form 'chunked'"
            )
        if not self.causal and not kernel.bidirectional:
            raise ValueError(
                f"attention.causal is False, which the kernel {self.kernel!r} has not; use kernel 'linear' with "
                f"feature_map 'symmetric', or kernel 'softmax'"
            )
        if not self.causal and self.decay != "none":
            raise ValueError(
                f"attention.causal is False and attention.decay {self.decay!r}; decays run in one direction: use 'none'"
            )


_ROPE_SOFTMAX: dict[str, Any] = {"kernel": "softmax", "decay": "none", "position": "rope"}
_LLAMA3_ROPE = RopeConfig(base=500_000.0, layout="halves")
_QWEN_ROPE = RopeConfig(base=1_000_000.0, layout="halves")

PRESETS: dict[str, dict[str, Any]] = {
    "softmax": _ROPE_SOFTMAX,
    "softmax_alibi": {"kernel": "softmax", "decay": "alibi", "position": "none"},
    "gpt2": {
        "kernel": "softmax",
        "decay": "none",
        "position": "learned_absolute",
        "max_document_length": 1024,
    },
    "sliding_window": {"kernel": "sliding_window", "decay": "none", "position": "rope"},
    "linear": {"kernel": "linear", "decay": "none", "position": "sinusoidal"},
    "linear_lrpe": {
        "kernel": "linear",
        "decay": "none",
        "position": "lrpe",
        "lrpe": LrpeConfig(basis="householder", learned_rates=True),
    },
    "expressive": {"kernel": "expressive", "decay": "none", "position": "rope"},
    "even_power": {"kernel": "power", "decay": "none", "position": "rope", "form": "attention"},
    "sympow": {"kernel": "power", "decay": "none", "position": "rope"},
    "sympow_gated": {"kernel": "power", "decay": "learned", "position": "rope"},
    "sympow_learned_rope": {"kernel": "power", "decay": "none", "position": "learned_rope"},
    "conformal": {"kernel": "power", "decay": "learned", "position": "learned_rope"},
    "llama3": _ROPE_SOFTMAX | {"rope": _LLAMA3_ROPE},
    "llama31": _ROPE_SOFTMAX | {"rope": dataclasses.replace(_LLAMA3_ROPE, scaling="llama3")},
    "llama32": _ROPE_SOFTMAX | {"rope": dataclasses.replace(_LLAMA3_ROPE, scaling="llama3", factor=32.0)},
    "qwen2": _ROPE_SOFTMAX | {"rope": _QWEN_ROPE, "qkv_biases": True},
    "qwen3": _ROPE_SOFTMAX | {"rope": _QWEN_ROPE, "qk_norm": True},
    "starcoder2": _ROPE_SOFTMAX
    | {
        "kernel": "sliding_window",
        "window": 4096,
        "rope": RopeConfig(base=999_999.4420358813, layout="halves"),
    },
    "brumby": {
        "kernel": "power",
        "decay": "learned",
        "position": "rope",
        "rope": _QWEN_ROPE,
        "qk_norm": True,
    },
}
"""Fields of `AttentionConfig` by the names that papers and published models use; `preset` makes one."""


SHARED = "shared"
"""Word of a pattern for layers that have `model.attention` itself."""


def preset(name: str, **changes) -> AttentionConfig:
    """Returns the attention that papers or published models call `name`, with `changes` to its fields.

    Raises:
        ValueError: `name` is not in `PRESETS`, or `AttentionConfig` rejects the fields.
    """
    checks.require_choice("preset", name, tuple(PRESETS))
    return AttentionConfig(**{**PRESETS[name], **changes})


def with_preset(attention: AttentionConfig, name: str) -> AttentionConfig:
    """Returns `attention` with all that the preset sets, which is at least a kernel, a decay and a position.

    Args:
        attention: fields that the preset does not set.
        name: name in `PRESETS`, or `SHARED` for `attention` itself.

    Raises:
        ValueError: there is no such preset, or `AttentionConfig` rejects the fields. The error names the preset.
    """
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
    return f"{attention.kernel}, {attention.decay}, {attention.position}"
