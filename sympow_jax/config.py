"""Every setting of a run as frozen dataclasses, validated on construction.

A file in `configs/` returns a `Config`; `train.py` overrides fields of it with `--config.a.b=value`. The presets
are the names the papers use; each is a choice of kernel, decay and position.
"""

import dataclasses

__all__ = [
    "MODEL_SIZES",
    "PRESETS",
    "AttentionConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ShardingConfig",
    "TrainingConfig",
    "preset",
]

KERNELS = ("softmax", "power", "linear")
DECAYS = ("none", "alibi", "learned")
POSITIONS = ("none", "sinusoidal", "rope", "learned_rope")
FORMS = ("attention", "chunked", "recurrent")
IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")
SOFTMAX_IMPLEMENTATIONS = ("xla", "cudnn")
DTYPES = ("float32", "bfloat16")
SOURCES = ("text", "tokens", "longcrawl64")
PACKINGS = ("windows", "documents")
SCHEDULES = ("constant", "cosine", "inverse_sqrt")
OPTIMIZERS = ("adam", "adamw", "sgd")
REMATS = ("none", "attention", "full")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _require_at_least(least: float, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def _require_fraction(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; it must lie in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention as a kernel, a decay and a position encoding.

    `form`, `implementation`, `chunk_size` and `window` are those of `ops.power_attention`; None lets the op
    choose. The kernel `softmax` has the implementations of `ops.softmax_attention`; kept keys take its `xla`.
    `max_document_length` is M in theta_m = 2 pi / M^(2(m-1)/D), the rotation rates of both ropes.
    """

    kernel: str = "power"
    decay: str = "learned"
    position: str = "learned_rope"
    power: int = 2
    form: str | None = None
    implementation: str | None = None
    chunk_size: int | None = None
    window: int = 64
    max_document_length: int = 65_536

    def __post_init__(self):
        _require_choice("attention.kernel", self.kernel, KERNELS)
        _require_choice("attention.decay", self.decay, DECAYS)
        _require_choice("attention.position", self.position, POSITIONS)
        if self.form is not None:
            _require_choice("attention.form", self.form, FORMS)
        if self.implementation is not None:
            choices = SOFTMAX_IMPLEMENTATIONS if self.kernel == "softmax" else IMPLEMENTATIONS
            _require_choice("attention.implementation", self.implementation, choices)
        if self.power <= 0 or self.power % 2:
            raise ValueError(
                f"attention.power is {self.power}; it must be positive and even, so that weights are >= 0"
            )
        if self.chunk_size is not None:
            _require_at_least(1, **{"attention.chunk_size": self.chunk_size})
        _require_at_least(0, **{"attention.window": self.window})
        _require_at_least(2, **{"attention.max_document_length": self.max_document_length})


PRESETS = {
    "softmax": {"kernel": "softmax", "decay": "none", "position": "rope"},
    "softmax_alibi": {"kernel": "softmax", "decay": "alibi", "position": "none"},
    "linear": {"kernel": "linear", "decay": "none", "position": "sinusoidal"},
    "even_power": {"kernel": "power", "decay": "none", "position": "rope", "form": "attention"},
    "sympow": {"kernel": "power", "decay": "none", "position": "rope"},
    "sympow_gated": {"kernel": "power", "decay": "learned", "position": "rope"},
    "sympow_learned_rope": {"kernel": "power", "decay": "none", "position": "learned_rope"},
    "conformal": {"kernel": "power", "decay": "learned", "position": "learned_rope"},
}


def preset(name: str, **changes) -> AttentionConfig:
    """The attention the papers call `name`, with `changes` to its fields."""
    _require_choice("preset", name, tuple(PRESETS))
    return AttentionConfig(**{**PRESETS[name], **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with tied output; `dtype` is that of the matrix products, parameters are float32.

    `remat` is what the backward pass finds of each block: `none`, all that the forward pass computed; `attention`, its
    input and the output of its attention, from which the rest is computed again but not attention itself; `full`, its
    input alone. It changes memory and time, not the model.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width // heads
    mlp_ratio: int = 4
    dtype: str = "bfloat16"
    remat: str = "none"
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)

    def __post_init__(self):
        sizes = ("vocab_size", "layers", "width", "heads", "mlp_ratio")
        _require_at_least(1, **{f"model.{name}": getattr(self, name) for name in sizes})
        _require_choice("model.dtype", self.dtype, DTYPES)
        _require_choice("model.remat", self.remat, REMATS)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads is {self.heads} and model.kv_heads is {self.kv_heads}; "
                f"kv_heads must divide heads"
            )
        if self.head_dim is None:
            if self.width % self.heads:
                raise ValueError(
                    f"model.heads is {self.heads} and does not divide model.width {self.width}; "
                    f"change one of them or set model.head_dim"
                )
            object.__setattr__(self, "head_dim", self.width // self.heads)
        _require_at_least(1, **{"model.head_dim": self.head_dim})
        if self.attention.position in ("rope", "learned_rope") and self.head_dim % 2:
            raise ValueError(
                f"model.head_dim is {self.head_dim}; position {self.attention.position!r} rotates pairs "
                f"of dimensions and needs an even one"
            )
        if self.attention.position == "sinusoidal" and self.width % 2:
            raise ValueError(f"model.width is {self.width}; sinusoidal positions need an even one")


# GPT-2's shapes and GPT-3 XL's; 50,257 tokens padded to a multiple of 128. `quickstart` reads bytes.
MODEL_SIZES = {
    "quickstart": {"vocab_size": 256, "layers": 2, "width": 128, "heads": 4, "dtype": "float32"},
    "gpt2_124m": {"vocab_size": 50_304, "layers": 12, "width": 768, "heads": 12},
    "gpt2_335m": {"vocab_size": 50_304, "layers": 24, "width": 1024, "heads": 16},
    "gpt2_774m": {"vocab_size": 50_304, "layers": 36, "width": 1280, "heads": 20},
    "gpt2_1558m": {"vocab_size": 50_304, "layers": 48, "width": 1600, "heads": 25},
    "gpt3_1311m": {"vocab_size": 50_304, "layers": 24, "width": 2048, "heads": 32},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how documents become rows of `context_length` tokens.

    `source`: `text` reads files as bytes, `tokens` flat little-endian `.bin` files, `longcrawl64` a Zarr v2
    array of one document a row. Without `paths`, `text` reads the interpreter's own standard library.
    `packing`: `windows` cuts the concatenated documents into windows that cross documents (state and attention
    run across the boundary); `documents` gives every document its own segment id, so that nothing does.
    """

    source: str = "text"
    paths: tuple[str, ...] = ()
    heldout_paths: tuple[str, ...] = ()  # if empty, heldout_fraction of the documents are held out, by hash
    heldout_fraction: float = 0.1
    token_dtype: str = "uint16"
    # tokens: the id that ends a document; longcrawl64: the id in front of every row, 50,256 if None
    document_separator: int | None = None
    context_length: int = 1024
    batch_tokens: int = 524_288
    packing: str = "windows"
    seed: int = 0

    def __post_init__(self):
        _require_choice("data.source", self.source, SOURCES)
        _require_choice("data.packing", self.packing, PACKINGS)
        _require_choice("data.token_dtype", self.token_dtype, ("uint16", "uint32"))
        _require_fraction(**{"data.heldout_fraction": self.heldout_fraction})
        _require_at_least(1, **{"data.context_length": self.context_length})
        _require_at_least(0, **{"data.seed": self.seed})
        if self.batch_tokens < self.context_length or self.batch_tokens % self.context_length:
            raise ValueError(
                f"data.batch_tokens is {self.batch_tokens}; it must be a multiple of "
                f"data.context_length {self.context_length}"
            )
        object.__setattr__(self, "paths", tuple(self.paths))
        object.__setattr__(self, "heldout_paths", tuple(self.heldout_paths))
        if self.source != "text" and not self.paths:
            raise ValueError(f"data.paths is empty; source {self.source!r} needs the path of its data")

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.batch_tokens // self.context_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optax optimizer; the default is the papers': Adam at 6e-4 with no schedule."""

    name: str = "adam"
    learning_rate: float = 6e-4
    b1: float = 0.9
    b2: float = 0.999
    schedule: str = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.1  # of learning_rate, where `cosine` ends
    weight_decay: float = 0.0  # adamw, on matrices only
    clip_norm: float | None = None
    accumulate: int = 1  # micro-batches per update; data.batch_tokens is what an update sees

    def __post_init__(self):
        _require_choice("optimizer.name", self.name, OPTIMIZERS)
        _require_choice("optimizer.schedule", self.schedule, SCHEDULES)
        _require_at_least(
            0,
            **{
                f"optimizer.{name}": getattr(self, name)
                for name in ("learning_rate", "warmup_steps", "weight_decay")
            },
        )
        _require_at_least(1, **{"optimizer.accumulate": self.accumulate})
        _require_fraction(**{"optimizer.b1": self.b1, "optimizer.b2": self.b2})
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"optimizer.final_fraction is {self.final_fraction}; it must lie in [0, 1]")
        if self.weight_decay and self.name != "adamw":
            raise ValueError(
                f"optimizer.weight_decay is {self.weight_decay} but optimizer.name is {self.name!r}; use adamw"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"optimizer.clip_norm is {self.clip_norm}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long to train and what to write down.

    `profile_steps`: first and last step, counted from 1, that JAX's profiler traces into the workdir's `profile`.
    `wandb_project`: the project on Weights & Biases that metrics are also sent to; needs the extra `wandb`.
    """

    steps: int = 100_000
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    profile_steps: tuple[int, ...] = ()
    wandb_project: str | None = None

    def __post_init__(self):
        names = ("steps", "log_every", "checkpoint_every", "keep_checkpoints")
        _require_at_least(1, **{f"training.{name}": getattr(self, name) for name in names})
        object.__setattr__(self, "profile_steps", tuple(self.profile_steps))
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(
                f"training.profile_steps is {steps}; it must be the first and the last step to trace, counted from 1, "
                f"such as 11,13, or empty"
            )
        if self.wandb_project == "":
            raise ValueError("training.wandb_project is empty; name a project, or none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How devices share the work: the sizes of the axes of the mesh, whose product is the number of devices.

    `data` divides the rows of a batch; None is what the other axes leave of the devices. `fsdp` divides rows too, and
    parameters and optimizer state, which are gathered layer by layer. `tensor` divides heads, the hidden units of
    feed-forward layers and the vocabulary; `context` divides the sequence.
    """

    data: int | None = None
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self):
        sizes = {name: size for name, size in dataclasses.asdict(self).items() if size is not None}
        _require_at_least(1, **{f"sharding.{name}": size for name, size in sizes.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The context-length evaluation that ends a training run; no lengths, no evaluation."""

    context_lengths: tuple[int, ...] = ()
    documents: int = 64  # at most so many held-out documents, the same at every length

    def __post_init__(self):
        object.__setattr__(self, "context_lengths", tuple(self.context_lengths))
        lengths = self.context_lengths
        if any(length < 1 for length in lengths) or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"evaluation.context_lengths is {lengths}; it must be positive and increasing")
        _require_at_least(1, **{"evaluation.documents": self.documents})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    model: ModelConfig
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)

    def __post_init__(self):
        if self.data.batch_size % self.optimizer.accumulate:
            raise ValueError(
                f"optimizer.accumulate is {self.optimizer.accumulate} and does not divide the "
                f"{self.data.batch_size} rows of a batch"
            )
        self._check_tensor()
        self._check_context()

    def _check_tensor(self):
        tensor, model = self.sharding.tensor, self.model
        divided = {
            "model.kv_heads": model.kv_heads,
            "model.heads": model.heads,
            "the feed-forward width model.mlp_ratio * model.width": model.mlp_ratio * model.width,
            "model.vocab_size": model.vocab_size,
        }
        for name, size in divided.items():
            if size % tensor:
                raise ValueError(
                    f"sharding.tensor is {tensor} and does not divide {name}, {size}; use a divisor of it"
                )

    def _check_context(self):
        context, length = self.sharding.context, self.data.context_length
        attention = self.model.attention
        if length % context:
            raise ValueError(
                f"sharding.context is {context} and does not divide data.context_length {length}; "
                f"use a divisor of it"
            )
        if context > 1 and attention.implementation == "reference":
            raise ValueError(
                "attention.implementation 'reference' cannot divide the sequence over devices; "
                "leave it unset or set sharding.context=1"
            )
