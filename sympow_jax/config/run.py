"""Settings of training, sharding and evaluation, and of a whole run."""

import dataclasses

from sympow_jax.config import checks, fields
from sympow_jax.config import data as data_lib
from sympow_jax.config import model as model_lib
from sympow_jax.config import optimizer as optimizer_lib
from sympow_jax.config import task as task_lib
from sympow_jax.config.attention import kernels as kernels_lib

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
        "Whether an update runs the layers as a loop, which is compiled once. If none, from 16 layers on.",
        may_differ=_ON_RESUME,
    )
    profile_steps: tuple[int, ...] = fields.setting(
        (), "First and last step, from 1, that JAX's profiler traces into `profile`.", may_differ=_ON_RESUME
    )
    skip_nonfinite: bool = fields.setting(
        False,
        "Whether an update whose loss or gradients are not finite is skipped, and leaves everything as it was, instead "
        "of ending the run.",
        may_differ=_ON_RESUME,
    )
    max_skips: int = fields.setting(
        10, "Updates skipped in a row at which the run ends.", least=1, may_differ=_ON_RESUME
    )
    wandb_project: str | None = fields.setting(
        None,
        "Weights & Biases project that metrics are also sent to; needs the extra `wandb`.",
        may_differ=_ON_RESUME,
    )

    def __post_init__(self):
        fields.validate(self, "training")
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
    """Sizes of the mesh axes, whose product must be the number of devices."""

    data: int | None = fields.setting(
        None, "Shards of the rows of a batch. If none, the devices that the other axes leave.", least=1
    )
    fsdp: int = fields.setting(
        1, "Shards of the rows, and of parameters and optimizer state, gathered layer by layer.", least=1
    )
    tensor: int = fields.setting(1, "Shards of heads, hidden units and the vocabulary.", least=1)
    context: int = fields.setting(1, "Shards of the sequence.", least=1)

    def __post_init__(self):
        fields.validate(self, "sharding")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of evaluation on held-out data, during training and at its end.

    At the end, a decoder is evaluated by context length, and a model of another task on its held-out rows.
    """

    every: int | None = fields.setting(
        None,
        "Steps between evaluations on a fixed batch of held-out rows. If none, a tenth of `training.steps`. 0 turns "
        "them off.",
        least=0,
    )
    context_lengths: tuple[int, ...] | None = fields.setting(
        None,
        "Increasing context lengths of the evaluation at the end of training of a decoder, in tokens; () turns it off. "
        "If none, powers of two up to four times `data.context_length`, as far as held-out documents reach.",
    )
    prompts: tuple[str, ...] = fields.setting(
        (),
        "Prompts that a decoder of bytes on one device continues at each of these steps, for TensorBoard.",
    )
    documents: int = fields.setting(
        64, "Maximum number of held-out documents, the same at every length.", least=1
    )

    def __post_init__(self):
        fields.validate(self, "evaluation")
        lengths, prompts = self.context_lengths or (), self.prompts
        if list(lengths) != sorted({length for length in lengths if length > 0}):
            raise ValueError(f"evaluation.context_lengths is {lengths}; it must be positive and increasing")
        if "" in prompts:
            raise ValueError(f"evaluation.prompts is {prompts}; each must have at least one character")


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
        data, model, optimizer, task = self.data, self.model, self.optimizer, self.task
        steps, named = self.training.steps, f"task.name is {task.name!r}"
        context, tensor = self.sharding.context, self.sharding.tensor
        falling = round(optimizer.decay_fraction * steps)
        side = model.patch_size
        patches = (data.image_size // (side or 1)) ** 2
        added = model.added_position
        own = model.original.added_position if task.replaces_attention else added
        sizes = {
            "model.kv_heads": model.num_kv_heads,
            "model.heads": model.heads,
            "the hidden width of feed-forward layers": model.hidden_width,
            "model.vocab_size": model.vocab_size,
        }
        channels = next((x.decay for x in model.attentions if x.decay_kind.per_channel), None)
        longest = model.longest_document
        checks.refuse(
            (
                data.batch_size % optimizer.accumulate,
                f"optimizer.accumulate is {optimizer.accumulate} and does not divide the {data.batch_size} rows",
            ),
            (
                optimizer.z_loss and task.predicted is not task_lib.Predicted.TOKEN,
                f"{named} and optimizer.z_loss {optimizer.z_loss}; it is for tasks that predict tokens: leave it out",
            ),
            (
                optimizer.schedule == "wsd" and optimizer.warmup_steps + falling > steps,
                f"optimizer.warmup_steps is {optimizer.warmup_steps} and optimizer.decay_fraction "
                f"{optimizer.decay_fraction}, {falling} updates, but training.steps is {steps}; lower one of the two",
            ),
            # Tasks and attention.
            (
                model.attention.causal != task.is_causal,
                f"{named} and model.attention.causal {model.attention.causal}; it must be {task.is_causal}",
            ),
            (
                task.is_causal and model.norm == "batch",
                f"{named} and model.norm 'batch', whose means show later positions to earlier ones; use 'layer'",
            ),
            (
                task.replaces_attention and not model.replaced_layers,
                f"{named}, but every layer has model.attention; name the new one in model.attention_pattern",
            ),
            (
                task.replaces_attention and task.initial_run is None,
                f"{named} and task.initial_run none; name the run whose attention is replaced",
            ),
            (
                task.replaces_attention and added != own,
                f"{named}, and the new attention adds positions {added and added[0]!r} to the embedding where the "
                f"original adds {own and own[0]!r}; use a preset with the same, or train without this stage",
            ),
            (
                data.heldout_names and task.outputs is None,
                f"{named} and data.heldout_names {data.heldout_names}; these are for tasks with labels: leave them out",
            ),
            (
                not task.is_language_model and self.evaluation.context_lengths,
                f"{named} and evaluation.context_lengths {self.evaluation.context_lengths}; only decoders have losses "
                f"by position: set it to none",
            ),
            # Pairs of texts.
            (
                task.dual_encoder and (data.source != "tsv" or len(data.text_columns) != 2),
                f"task.dual_encoder is True, data.source {data.source!r} and data.text_columns {data.text_columns}; "
                f"a dual encoder needs source 'tsv' and the names of two columns of text",
            ),
            # Images.
            (
                (data.source == "images" and not data.image_tokens) != (side is not None),
                f"data.source is {data.source!r}, data.image_tokens {data.image_tokens} and model.patch_size {side}; "
                f"arrays of images have patches, and tokens have none",
            ),
            (
                side is not None and (data.image_size % side or data.context_length != patches),
                f"data.image_size is {data.image_size}, model.patch_size {side} and data.context_length "
                f"{data.context_length}; the patches must divide the image, and their number be the context length",
            ),
            # Meshes.
            *(
                (
                    size % tensor,
                    f"sharding.tensor is {tensor} and does not divide {name}, {size}; use a divisor of it",
                )
                for name, size in sizes.items()
            ),
            (
                context > 1 and not task.is_causal,
                f"{named} and sharding.context {context}, which is for causal attention; use sharding.data, "
                f"sharding.fsdp or sharding.tensor",
            ),
            (
                data.context_length % context,
                f"sharding.context is {context} and does not divide data.context_length {data.context_length}; use a "
                f"divisor of it",
            ),
            (
                context > 1 and channels is not None,
                f"sharding.context is {context} and attention.decay {channels!r}; gates by channel cannot divide the "
                f"sequence over devices: set sharding.context=1, or use decay 'learned'",
            ),
            *(
                (
                    context > 1 and not kernels_lib.KERNELS[kernel].divides_time,
                    f"sharding.context is {context} and attention.kernel {kernel!r}, which cannot divide the sequence "
                    f"over devices; set sharding.context=1",
                )
                for kernel in dict.fromkeys(x.kernel for x in model.attentions)
            ),
            (
                context > 1 and model.attention.implementation == "reference",
                f"sharding.context is {context} and attention.implementation 'reference', which cannot divide the "
                f"sequence over devices; leave it unset or set sharding.context=1",
            ),
            # A document may fill its row, and a traced model cannot check documents: beyond the table its outputs are
            # NaN.
            (
                longest is not None and data.context_length > longest,
                f"data.context_length is {data.context_length}, longer than the learned positions: set "
                f"max_document_length={data.context_length}, or use another position",
            ),
        )

    @property
    def heldout_every(self) -> int:
        """Steps between evaluations on a held-out batch; 0 if they are off."""
        every = self.evaluation.every
        return max(1, self.training.steps // 10) if every is None else every
