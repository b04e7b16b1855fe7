"""Settings of attention."""

import dataclasses

from sympow_jax.config import checks, fields
from sympow_jax.config.attention.kernels import DECAYS, IMPLEMENTATIONS, KERNELS, Decay
from sympow_jax.config.attention.positions import ADDED_POSITIONS, POSITIONS, LrpeConfig, RopeConfig

# How attention is computed changes neither parameters nor the function. Some of it changes the layout of states.
_COMPUTATION = (fields.Occasion.INITIAL_ENCODER,)
_SPEED = (fields.Occasion.INITIAL_ENCODER, fields.Occasion.SAVED_STATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention as a kernel, a decay and a position encoding."""

    kernel: str = fields.setting(
        "power", "Weight of a value, as a function of its key and the query.", choices=KERNELS
    )
    decay: str = fields.setting(
        "learned_alibi",
        "Decay of the weights of older tokens. Per head, `alibi` and `permuteformer` are fixed, `constant` is trained "
        "and `learned` is computed from each token, as is `learned_alibi`, which starts at the slopes of `alibi`. "
        "`channel_*` are the same per value channel.",
        choices=DECAYS,
    )
    decay_bias: float | None = fields.setting(
        None,
        "Initial bias of the decays `learned`, `learned_alibi` and `channel_learned` before their sigmoid. If none, "
        "`learned_alibi` starts at the slopes, and the others have no bias and start at about 1/2. From 4 on decays "
        "start near 1, so that replaced layers forget little at first.",
        least=-100,
        most=100,
    )
    position: str = fields.setting(
        "learned_rope",
        "Position encoding. The kernel `linear` applies it to features instead of to queries and keys.",
        choices=POSITIONS,
    )
    learned_rope_start: str = fields.setting(
        "rope",
        "Initial rates beta = 1 + tanh(W x) of the positions `learned_rope` and `learned_rope_pairs`. With `rope`, W "
        "is 0, and angles start as those of `rope`. With `paper`, W is random, and they start as random walks.",
        choices=("rope", "paper"),
    )
    qk_norm: bool = fields.setting(
        False,
        "Whether queries and keys of each head are RMS-normalized before positions, each with a scale, as in Qwen3.",
    )
    qkv_biases: bool = fields.setting(
        False,
        "Whether queries, keys and values have biases even if `model.biases` is false, as in Qwen2.",
    )
    causal: bool = fields.setting(
        True,
        "Whether a token attends only to itself and to tokens before it, instead of to its whole document.",
    )
    power: int = fields.setting(
        2,
        "Degree of the kernels `power`, which needs an even one, and `power_delta`, and of the feature maps "
        "`symmetric` and `tensor`.",
        least=1,
    )
    negative_eigenvalues: bool = fields.setting(
        False,
        "Whether write strengths of the kernel `power_delta` go to 2 instead of 1. Above 1 a write also changes the "
        "sign of what the state holds for its key, which tracking states such as a parity needs (Grazzi et al. 2024).",
    )
    feature_map: str = fields.setting(
        "elu",
        "Feature map of the kernel `linear`.",
        choices=("elu", "relu", "identity", "symmetric", "tensor"),
    )
    normalizer: str = fields.setting(
        "unrotated", "Features in the denominator of the kernel `linear`.", choices=("unrotated", "rotated")
    )
    form: str | None = fields.setting(
        None,
        "Form of the op. If none, the op chooses.",
        choices=("attention", "chunked", "recurrent"),
        may_differ=_COMPUTATION,
    )
    implementation: str | None = fields.setting(
        None,
        "Implementation of the op; `cudnn` is one of `softmax` and `sliding_window`, which use `xla` with a KV cache. "
        "If none, the op chooses.",
        choices=(*IMPLEMENTATIONS, "cudnn"),
        may_differ=_SPEED,
    )
    chunk_size: int | None = fields.setting(
        None, "Tokens per chunk. If none, the op chooses.", least=1, may_differ=_SPEED
    )
    exact_window: int = fields.setting(
        64,
        "Minimum number of last keys that every query attends to exactly instead of through the state. The attention "
        "form without a state attends to all keys exactly.",
        least=0,
        may_differ=_COMPUTATION,
    )
    window: int = fields.setting(
        1024,
        "Tokens that the kernel `sliding_window`, or a `softmax_window`, attends to, the query's own included.",
        least=1,
    )
    softmax_window: bool = fields.setting(
        False,
        "Whether the kernel `power` comes with softmax attention to the last `window` tokens. The output is the sum of "
        "both, each times a gate sigmoid(W x + b) per token and head: 0.88 for softmax and 0.12 for power at first.",
    )
    max_document_length: int = fields.setting(
        65_536,
        "M in theta_m = 2 pi / M^(2m/D), m from 0, the rotation rates of ropes without `rope.base`. Also the "
        "longest document that position `learned_absolute` supports.",
        least=2,
    )
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    lrpe: LrpeConfig = dataclasses.field(default_factory=LrpeConfig)

    def __post_init__(self):
        fields.validate(self, "attention")
        kernel, decay = KERNELS[self.kernel], self.decay_kind
        if self.implementation is not None:
            checks.require_choice("attention.implementation", self.implementation, kernel.implementations)
        channels = " and ".join(repr(name) for name, row in KERNELS.items() if row.per_channel_decay)
        checks.refuse(
            (
                kernel.even_power and self.power % 2,
                f"attention.power is {self.power}; it must be positive and even, so that weights are >= 0",
            ),
            (
                self.softmax_window and self.kernel != "power",
                f"attention.softmax_window is True, which the kernel 'power' has and {self.kernel!r} has not",
            ),
            (
                decay.per_channel and not kernel.per_channel_decay,
                f"attention.decay is {self.decay!r}, which the kernel {channels} has and {self.kernel!r} has not",
            ),
            (
                decay.per_channel and self.form not in (None, "chunked"),
                f"attention.decay is {self.decay!r}, but attention.form {self.form!r}; it is chunked: leave form out",
            ),
            (
                self.implementation == "reference" and self.form not in (None, "attention"),
                f"attention.implementation is 'reference', but attention.form {self.form!r}; the reference has "
                f"only the form 'attention'; leave form out",
            ),
            (
                self.form == "recurrent" and self.chunk_size is not None,
                f"attention.chunk_size is {self.chunk_size}, but attention.form 'recurrent'; leave one of them out",
            ),
            (
                not self.causal and not kernel.bidirectional,
                f"attention.causal is False, which the kernel {self.kernel!r} has not; use kernel 'linear' with "
                f"feature_map 'symmetric', or kernel 'softmax'",
            ),
            (
                not self.causal and self.decay != "none",
                f"attention.causal is False, attention.decay {self.decay!r}; decays run in one direction: use 'none'",
            ),
        )

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
