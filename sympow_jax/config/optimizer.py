"""Settings of the optimizer: its name, learning rate, weight decay and terms of the loss."""

import dataclasses
import math
from collections.abc import Mapping

from sympow_jax.config import checks, fields

__all__ = ["OPTIMIZERS", "SCHEDULES", "OptimizerConfig"]

SCHEDULES = ("constant", "cosine", "inverse_sqrt", "linear", "wsd")

OPTIMIZERS = ("adam", "adamw", "adafactor", "lion", "muon", "schedule_free", "sgd")

# Settings that not every optimizer reads, with the optimizers that do.
_READERS: Mapping[str, tuple[str, ...]] = {
    "b2": ("adam", "adamw", "lion", "muon", "schedule_free"),
    "epsilon": ("adam", "adamw", "adafactor", "muon", "schedule_free"),
    "weight_decay": ("adamw", "adafactor", "lion", "muon", "schedule_free", "sgd"),
    "weight_decay_factors": ("adamw", "adafactor", "lion", "muon", "schedule_free", "sgd"),
    "factored_size": ("adafactor",),
    "parameter_scale": ("adafactor",),
    "momentum": ("muon",),
    "orthogonalized": ("muon",),
}

# Lowest `b1` of `schedule_free`: with a lower one, its average may not be finite in float32.
_LOWEST_INTERPOLATION = 1e-3
# Values that replace None.
_DEFAULTS = {"learning_rate": 6e-4, "b1": 0.9, "b2": 0.999, "epsilon": 1e-8}
# Values of optimizers whose authors recommend others.
_OWN_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "adafactor": {"b1": 0.0, "epsilon": 1e-30},
    "lion": {"b2": 0.99},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optax optimizer; the default is the papers': Adam at 6e-4 with no schedule.

    A setting that the optimizer does not read must have its default. After initialization, `learning_rate`, `b1`, `b2`
    and `epsilon` are numbers: those of the optimizer, where they were None. `dataclasses.replace` with another `name`
    keeps them; `config.override` derives them again.
    """

    name: str = dataclasses.field(default="adam", metadata=fields.about("Optimizer.", choices=OPTIMIZERS))
    learning_rate: float | None = dataclasses.field(
        default=None,
        metadata=fields.about("Learning rate after the warmup. If none, 6e-4."),
    )
    b1: float | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Decay of the mean of gradients, in [0, 1). For `sgd`, the momentum. For `schedule_free`, the weight of "
            "the average in the parameters that gradients are taken at. If none, 0.9, and 0 for `adafactor`."
        ),
    )
    b2: float | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Decay of the mean of squared gradients, in [0, 1); for `lion`, of the mean of gradients that is kept. "
            "If none, 0.999, and 0.99 for `lion`. Not for `adafactor` and `sgd`."
        ),
    )
    epsilon: float | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Number that is added to the root of the mean square; for `adafactor`, to squared gradients. If none, "
            "1e-8, and 1e-30 for `adafactor`. Not for `lion` and `sgd`."
        ),
    )
    momentum: float = dataclasses.field(
        default=0.95,
        metadata=fields.about("Decay of the mean of gradients of the matrices that `muon` orthogonalizes."),
    )
    orthogonalized: tuple[str, ...] = dataclasses.field(
        default=tuple(
            f"blocks.*.{name}.kernel"
            for name in ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.*")
        ),
        metadata=fields.about(
            "Patterns of the names of the matrices that `muon` orthogonalizes. All other parameters, such as "
            "embeddings, gates and norms, have the updates of `adamw`."
        ),
    )
    factored_size: int = dataclasses.field(
        default=128,
        metadata=fields.about(
            "Smallest size of both axes of a matrix whose squared gradients `adafactor` keeps as means of rows and "
            "columns."
        ),
    )
    parameter_scale: bool = dataclasses.field(
        default=True,
        metadata=fields.about(
            "Whether `adafactor` multiplies an update by the root mean square of its parameter."
        ),
    )
    schedule: str = dataclasses.field(
        default="constant",
        metadata=fields.about(
            "Shape of the learning rate after the warmup. `cosine` is a half cosine and `linear` a straight line, both "
            "down to `final_fraction`. `inverse_sqrt` falls as 1 / sqrt(step). `wsd` is constant and at the end a "
            "straight line down to `final_fraction`.",
            choices=SCHEDULES,
        ),
    )
    warmup_steps: int = dataclasses.field(
        default=0, metadata=fields.about("Updates over which the learning rate rises linearly from 0.")
    )
    final_fraction: float = dataclasses.field(
        default=0.1,
        metadata=fields.about(
            "Final learning rate of the schedules `cosine`, `linear` and `wsd`, divided by `learning_rate`."
        ),
    )
    decay_fraction: float = dataclasses.field(
        default=0.1,
        metadata=fields.about("Last fraction of `training.steps`, over which the schedule `wsd` falls."),
    )
    weight_decay: float = dataclasses.field(
        default=0.0,
        metadata=fields.about(
            "Decoupled weight decay, applied to matrices only. An update subtracts the learning rate times this "
            "times the parameter. Not for `adam`."
        ),
    )
    weight_decay_factors: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=fields.about(
            "Factors of the weight decay, as PATTERN=FACTOR, for the matrices whose names match, such as "
            "`*embedding=0`. They multiply as `learning_rate_factors` do."
        ),
    )
    clip_norm: float | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Global norm that gradients are scaled down to if theirs is larger. If none, they are not clipped."
        ),
    )
    learning_rate_factors: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=fields.about(
            "Factors of the learning rate, as PATTERN=FACTOR, for the parameters whose names match, such as "
            "`*.attention.rate.kernel=0.1`. `*` matches any text. A factor of 0 keeps them as they are. A parameter "
            "that matches several patterns has the product of their factors."
        ),
    )
    ema_decay: float | None = dataclasses.field(
        default=None,
        metadata=fields.about(
            "Decay of an exponential moving average of the parameters, in (0, 1). Everything except training then "
            "uses the average: held-out metrics, `sympow eval`, generation, exports and `task.initial_run`. If "
            "none, there is no average."
        ),
    )
    z_loss: float = dataclasses.field(
        default=0.0,
        metadata=fields.about(
            "Coefficient of the mean squared log-normalizer of the predicted tokens, which is added to the training "
            "loss; PaLM's is 1e-4."
        ),
    )
    accumulate: int = dataclasses.field(
        default=1,
        metadata=fields.about(
            "Micro-batches per update. `data.batch_tokens` counts the tokens of an update."
        ),
    )

    def __post_init__(self):
        fields.validate(self, "optimizer")
        for name, value in (_DEFAULTS | dict(_OWN_DEFAULTS.get(self.name, {}))).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_reads()
        for least, names in (
            (0, ("learning_rate", "warmup_steps", "weight_decay", "z_loss")),
            (1, ("accumulate", "factored_size")),
        ):
            checks.require_at_least(least, **{f"optimizer.{name}": getattr(self, name) for name in names})
        fractions = ("b1", "b2", "momentum")
        checks.require_fraction(**{f"optimizer.{name}": getattr(self, name) for name in fractions})
        for name in ("final_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it must lie in [0, 1]")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"optimizer.ema_decay is {self.ema_decay}; it must lie in (0, 1)")
        if self.clip_norm is not None:
            checks.require_positive(**{"optimizer.clip_norm": self.clip_norm})
        # With an epsilon of 0, a gradient of 0 would be divided by 0.
        checks.require_positive(**{"optimizer.epsilon": self.epsilon})
        if self.weight_decay_factors and not self.weight_decay:
            raise ValueError(
                f"optimizer.weight_decay_factors is {self.weight_decay_factors} but optimizer.weight_decay is 0; set "
                f"weight_decay, or leave the factors out"
            )
        if self.name == "schedule_free":
            self._check_schedule_free()
        for name in ("learning_rate_factors", "weight_decay_factors"):
            self.factors_by_pattern(name)  # which raises an error for those that are wrong

    def _check_reads(self):
        defaults = {field.name: field.default for field in dataclasses.fields(self)} | _DEFAULTS
        for name, readers in _READERS.items():
            value = getattr(self, name)
            if self.name not in readers and value != defaults[name]:
                raise ValueError(
                    f"optimizer.{name} is {value} but optimizer.name is {self.name!r}, which does not read it; use "
                    f"{', '.join(readers)}, or leave it at {fields.written(defaults[name])}"
                )

    def _check_schedule_free(self):
        if self.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule is {self.schedule!r} but optimizer.name 'schedule_free' averages in place of a "
                f"schedule; use 'constant', with warmup_steps"
            )
        if self.ema_decay is not None:
            raise ValueError(
                f"optimizer.ema_decay is {self.ema_decay} but optimizer.name 'schedule_free' has an average of its "
                f"own; leave it out"
            )
        if self.b1 < _LOWEST_INTERPOLATION:
            raise ValueError(
                f"optimizer.b1 is {self.b1} and optimizer.name is 'schedule_free', whose average is computed by "
                f"dividing by it; it must be at least {_LOWEST_INTERPOLATION}"
            )

    def factors_by_pattern(self, name: str) -> tuple[tuple[str, float], ...]:
        """Returns `learning_rate_factors` or `weight_decay_factors`, by name, as pairs of a pattern and a factor."""
        return tuple(_read_factor(name, item) for item in getattr(self, name))


def _read_factor(name: str, item: str) -> tuple[str, float]:
    pattern, _, text = item.partition("=")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (pattern and 0 <= factor < math.inf):
        raise ValueError(
            f"optimizer.{name} has {item!r}; it must be PATTERN=FACTOR with a factor of at least 0, such as "
            f"*.attention.rate.kernel=0.1"
        )
    return pattern, factor
