"""Settings of training, sharding and evaluation, and of a whole run."""

import dataclasses

from sympow_jax.config import checks, fields
from sympow_jax.config import data as data_lib
from sympow_jax.config import model as model_lib
from sympow_jax.config import optimizer as optimizer_lib
from sympow_jax.config import task as task_lib

__all__ = ["Config", "EvaluationConfig", "ShardingConfig", "TrainingConfig"]

_ON_RESUME = (fields.Occasion.RESUME,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of training, and the frequency of logs and checkpoints."""

    steps: int = fields.setting(100_000, "Number of updates.", least=1, may_differ=_ON_RESUME)
    seed: int = fields.setting(0, "Seed of the initial parameters.", least=0, below=fields.SEEDS)
    log_every: int = fields.setting(10, "Steps between logged metrics.", least=1, may_differ=_ON_RESUME)
    checkpoint_every: int = fields.setting(1000, "Steps between checkpoints.", least=1, may_differ=_ON_RESUME)
    keep_checkpoints: int = fields.setting(
        3, "Number of newest checkpoints that are not deleted.", least=1, may_differ=_ON_RESUME
    )
    scan_layers: bool | None = fields.setting(
        None,
        "Whether an update runs the layers as a loop, which is compiled once, instead of one after another. None: from "
        "16 layers on.",
        may_differ=_ON_RESUME,
    )
    profile_steps: tuple[int, ...] = fields.setting(
        (),
        "First and last step, counted from 1, that JAX's profiler traces into the workdir's `profile`.",
        may_differ=_ON_RESUME,
    )
    skip_nonfinite: bool = fields.setting(
        False,
        "Whether an update whose loss or gradients are not finite is skipped: it leaves parameters and optimizer state "
        "as they were. Otherwise, the run ends.",
        may_differ=_ON_RESUME,
    )
    max_skips: int = fields.setting(
        10,
        "Number of updates that are skipped in a row at which the run ends.",
        least=1,
        may_differ=_ON_RESUME,
    )
    wandb_project: str | None = fields.setting(
        None,
        "Weights & Biases project that metrics are also sent to; needs the extra `wandb`.",
        may_differ=_ON_RESUME,
    )

    def __post_init__(self):
        fields.validate(self, "training")
        steps = self.profile_steps
        checks.refuse(
            (
                steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]),
                f"training.profile_steps is {steps}; it must be the first and the last step to trace, counted from 1, "
                f"such as 11,13, or empty",
            ),
            (self.wandb_project == "", "training.wandb_project is empty; name a project, or none"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """Sizes of the mesh axes, whose product must be the number of devices."""

    data: int | None = fields.setting(
        None,
        "Number of shards of the rows of a batch. If none, the devices that the other axes leave.",
        least=1,
    )
    fsdp: int = fields.setting(
        1,
        "Number of shards of the rows, and also of parameters and optimizer state, which are gathered layer by layer.",
        least=1,
    )
    tensor: int = fields.setting(
        1,
        "Number of shards of heads, of the hidden units of feed-forward layers and of the vocabulary.",
        least=1,
    )
    context: int = fields.setting(1, "Number of shards of the sequence.", least=1)

    def __post_init__(self):
        fields.validate(self, "sharding")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of evaluation on held-out data, during training and at its end.

    At the end, a decoder is evaluated by context length, and a model of another task on its held-out rows.
    """

    every: int | None = fields.setting(
        None,
        "Steps between losses, and accuracies of `classification`, on a fixed batch of held-out rows, during training. "
        "If none, a tenth of `training.steps`. 0 turns them off.",
        least=0,
    )
    context_lengths: tuple[int, ...] | None = fields.setting(
        None,
        "Increasing context lengths of the evaluation of a decoder at the end of training, in tokens. If none, powers "
        "of two up to four times `data.context_length`, as far as held-out documents reach. () turns it off.",
    )
    prompts: tuple[str, ...] = fields.setting(
        (),
        "Prompts that the model continues at each of these steps, for TensorBoard's texts. For decoders of bytes, on "
        "one device.",
    )
    documents: int = fields.setting(
        64, "Maximum number of held-out documents, the same documents at every length.", least=1
    )

    def __post_init__(self):
        fields.validate(self, "evaluation")
        lengths, prompts = self.context_lengths or (), self.prompts
        checks.refuse(
            (
                list(lengths) != sorted({length for length in lengths if length > 0}),
                f"evaluation.context_lengths is {lengths}; it must be positive and increasing",
            ),
            ("" in prompts, f"evaluation.prompts is {prompts}; each must have at least one character"),
            (len(set(prompts)) < len(prompts), f"evaluation.prompts is {prompts}; each must occur once"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: model_lib.ModelConfig
    task: task_lib.TaskConfig = dataclasses.field(default_factory=task_lib.TaskConfig)
    data: data_lib.DataConfig = dataclasses.field(default_factory=data_lib.DataConfig)
    optimizer: optimizer_lib.OptimizerConfig = dataclasses.field(
        default_factory=optimizer_lib.OptimizerConfig
    )
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    sharding: ShardingConfig = dataclasses.field(
        default_factory=ShardingConfig, metadata={"may_differ": _ON_RESUME}
    )
    evaluation: EvaluationConfig = dataclasses.field(
        default_factory=EvaluationConfig, metadata={"may_differ": _ON_RESUME}
    )

    def __post_init__(self):
        fields.validate(self)
        if self.data.batch_size % self.optimizer.accumulate:
            raise ValueError(
                f"optimizer.accumulate is {self.optimizer.accumulate} and does not divide the "
                f"{self.data.batch_size} rows of a batch"
            )
        self._check_optimizer()
        self._check_task()
        self._check_pairs()
        self._check_images()
        self._check_tensor()
        self._check_context()
        self._check_documents()

    @property
    def heldout_every(self) -> int:
        """Steps between evaluations on a held-out batch; 0 if they are off."""
        every = self.evaluation.every
        return max(1, self.training.steps // 10) if every is None else every

    def _check_optimizer(self):
        optimizer, steps = self.optimizer, self.training.steps
        if optimizer.z_loss and self.task.predicted is not task_lib.Predicted.TOKEN:
            raise ValueError(
                f"optimizer.z_loss is {optimizer.z_loss} and task.name {self.task.name!r}; it is for tasks that "
                f"predict tokens: leave it out"
            )
        falling = round(optimizer.decay_fraction * steps)
        if optimizer.schedule == "wsd" and optimizer.warmup_steps + falling > steps:
            raise ValueError(
                f"optimizer.warmup_steps is {optimizer.warmup_steps} and optimizer.decay_fraction "
                f"{optimizer.decay_fraction}, {falling} updates, but training.steps is {steps}; lower one of the two"
            )

    def _check_task(self):
        task, model = self.task.name, self.model
        if model.attention.causal != self.task.is_causal:
            raise ValueError(
                f"model.attention.causal is {model.attention.causal} and task.name {task!r}; to predict the next token "
                f"or to match such attention, attention must be causal, for any other task it must not"
            )
        if self.task.is_causal and model.norm == "batch":
            raise ValueError(
                f"model.norm is 'batch' and task.name {task!r}; means over a batch show a position those that follow "
                f"it: use 'layer'"
            )
        if self.task.replaces_attention:
            if not model.replaced_layers:
                raise ValueError(
                    f"task.name is {task!r}, but every layer has model.attention; name the new attention in "
                    f"model.attention_pattern, such as conformal"
                )
            if self.task.initial_run is None:
                raise ValueError(
                    f"task.name is {task!r} and task.initial_run none; name the run whose attention is replaced"
                )
            added, own = model.added_position, model.original.added_position
            if added != own:
                raise ValueError(
                    f"task.name is {task!r}, and the new attention adds positions "
                    f"{added and added[0]!r} to the embedding where the original adds {own and own[0]!r}; "
                    f"use a preset with the same, or train without this stage"
                )
        if self.data.heldout_names and self.task.outputs is None:
            raise ValueError(
                f"data.heldout_names is {self.data.heldout_names} and task.name {task!r}; parts of held-out data are "
                f"for tasks with labels: leave the names out"
            )
        if not self.task.is_language_model and self.evaluation.context_lengths:
            raise ValueError(
                f"evaluation.context_lengths is {self.evaluation.context_lengths} and task.name {task!r}; losses by "
                f"position are of decoders: leave them out"
            )

    def _check_pairs(self):
        data = self.data
        if not self.task.dual_encoder:
            return
        if data.source != "tsv" or len(data.text_columns) != 2:
            raise ValueError(
                f"task.dual_encoder is True, data.source {data.source!r} and data.text_columns {data.text_columns}; "
                f"a dual encoder needs source 'tsv' and the names of two columns of text"
            )
        if data.context_length % 2:
            raise ValueError(
                f"task.dual_encoder is True and data.context_length {data.context_length}; each of two texts has half "
                f"of a row: use an even number"
            )

    def _check_images(self):
        data, model = self.data, self.model
        side = model.patch_size
        are_arrays = data.source == "images" and not data.image_tokens
        if are_arrays != (side is not None):
            raise ValueError(
                f"data.source is {data.source!r}, data.image_tokens {data.image_tokens} and model.patch_size {side}; "
                f"arrays of images have patches, and tokens have none"
            )
        if side is None:
            return
        if self.task.outputs is None:
            raise ValueError(
                f"model.patch_size is {side} and task.name {self.task.name!r}; images have classes or numbers, not "
                f"tokens"
            )
        patches = (data.image_size // side) ** 2
        if data.image_size % side or data.context_length != patches:
            raise ValueError(
                f"data.image_size is {data.image_size}, model.patch_size {side} and data.context_length "
                f"{data.context_length}; the patches must divide the image, and their number be the context length"
            )

    def _check_tensor(self):
        tensor, model = self.sharding.tensor, self.model
        divided = {
            "model.kv_heads": model.num_kv_heads,
            "model.heads": model.heads,
            "the hidden width of feed-forward layers": model.hidden_width,
            "model.vocab_size": model.vocab_size,
        }
        for name, size in divided.items():
            if size % tensor:
                raise ValueError(
                    f"sharding.tensor is {tensor} and does not divide {name}, {size}; use a divisor of it"
                )

    def _check_context(self):
        context, length = self.sharding.context, self.data.context_length
        channels = next((x for x in self.model.attentions if x.decay_kind.per_channel), None)
        if context > 1 and not self.task.is_causal:
            raise ValueError(
                f"sharding.context is {context} and task.name {self.task.name!r}; the sequence is divided for causal "
                f"attention alone: use sharding.data, sharding.fsdp or sharding.tensor"
            )
        if length % context:
            raise ValueError(
                f"sharding.context is {context} and does not divide data.context_length {length}; "
                f"use a divisor of it"
            )
        if context > 1 and channels is not None:
            raise ValueError(
                f"sharding.context is {context} and attention.decay {channels.decay!r}; gates by channel cannot "
                f"divide the sequence over devices: set sharding.context=1, or use decay 'learned'"
            )
        if context > 1 and self.model.attention.implementation == "reference":
            raise ValueError(
                "attention.implementation 'reference' cannot divide the sequence over devices; "
                "leave it unset or set sharding.context=1"
            )

    def _check_documents(self):
        length, longest = self.data.context_length, self.model.longest_document
        # A document may fill its row, and a traced model cannot check documents: beyond the table its outputs are NaN.
        if longest is not None and length > longest:
            raise ValueError(
                f"data.context_length is {length} and model.attention.max_document_length {longest}; a document of a "
                f"row may not be longer than the learned positions: set max_document_length={length}, or use another "
                f"position"
            )
