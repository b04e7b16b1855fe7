"""Settings of the optimizer: its name, learning rate, weight decay and terms of the loss."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from sympow_jax.config import checks, fields, literals

SCHEDULES = ("constant", "cosine", "inverse_sqrt", "linear", "wsd")

OPTIMIZERS = ("adam", "adamw", "adafactor", "lion", "muon", "schedule_free", "sgd")

# Settings that not every optimizer or schedule reads: the field that decides, and its values that read the setting.
_READERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "b2": ("name", ("adam", "adamw", "lion", "muon", "schedule_free")),
    "epsilon": ("name", ("adam", "adamw", "adafactor", "muon", "schedule_free")),
    "weight_decay": ("name", ("adamw", "adafactor", "lion", "muon", "schedule_free", "sgd")),
    "momentum": ("name", ("muon",)),
    "decay_fraction": ("schedule", ("wsd",)),
    "final_fraction": ("schedule", ("cosine", "linear", "wsd")),
}

# Lowest `b1` of `schedule_free`: with a lower one, its average may not be finite in float32.
_LOWEST_INTERPOLATION = 1e-3
# Values that replace None.
_DEFAULTS = {"b1": 0.9, "b2": 0.999, "epsilon": 1e-8}
# Values of optimizers whose authors recommend others.
_OWN_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "adafactor": {"b1": 0.0, "epsilon": 1e-30},
    "lion": {"b2": 0.99},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optax optimizer; the default is the papers': Adam at 6e-4 with no schedule.

    A setting that the optimizer does not read must have its default.
    """

    name: str = fields.setting("adam", "Optimizer.", choices=OPTIMIZERS)
    learning_rate: float = fields.setting(6e-4, "Learning rate after the warmup.", least=0)
    b1: float | None = fields.setting(
        None,
        "Decay of the mean of gradients. For `sgd`, the momentum; for `schedule_free`, the weight of the average in "
        "the parameters that gradients are taken at. If none, 0.9, and 0 for `adafactor`.",
        derived="mean_decay",
        least=0,
        below=1,
    )
    b2: float | None = fields.setting(
        None,
        "Decay of the mean of squared gradients; for `lion`, of the stored mean of gradients. If none, 0.999, and 0.99 "
        "for `lion`. Not for `adafactor` and `sgd`.",
        derived="square_decay",
        least=0,
        below=1,
    )
    epsilon: float | None = fields.setting(
        None,
        "Number added to the root of the mean square; for `adafactor`, to squared gradients. If none, 1e-8, and 1e-30 "
        "for `adafactor`. Not for `lion` and `sgd`.",
        derived="added_epsilon",
        least=fields.TINY,
    )
    momentum: float = fields.setting(
        0.95, "Decay of the mean of gradients that `muon` orthogonalizes.", least=0, below=1
    )
    schedule: str = fields.setting(
        "constant",
        "Learning rate after the warmup. `cosine` and `linear` fall to `final_fraction`, `wsd` is constant and falls "
        "linearly at the end, and `inverse_sqrt` falls as 1 / sqrt(step).",
        choices=SCHEDULES,
    )
    warmup_steps: int = fields.setting(
        0, "Updates over which the learning rate rises linearly from 0.", least=0
    )
    final_fraction: float = fields.setting(
        0.1,
        "Final learning rate of a schedule that falls to it, as a fraction of the first.",
        least=0,
        most=1,
    )
    decay_fraction: float = fields.setting(
        0.1, "Last fraction of `training.steps`, over which `wsd` falls.", least=0, most=1
    )
    weight_decay: float = fields.setting(
        0.0,
        "Decoupled weight decay of matrices, times the learning rate in each update. Not for `adam`.",
        least=0,
    )
    clip_norm: float | None = fields.setting(
        None, "Largest global norm of gradients. If none, they are not clipped.", least=fields.TINY
    )
    learning_rate_factors: tuple[str, ...] = fields.setting(
        (),
        "Factors of the learning rate of parameters by name, such as `*.attention.rate.kernel=0.1`, in which `*` "
        "matches any text. 0 keeps parameters as they are. The factors of several patterns are multiplied.",
    )
    ema_decay: float | None = fields.setting(
        None,
        "Decay of an exponential moving average of the parameters, which everything except training then uses. If "
        "none, there is no average.",
        above=0,
        below=1,
    )
    z_loss: float = fields.setting(
        0.0,
        "Coefficient of the mean squared log-normalizer in the training loss; PaLM's is 1e-4.",
        least=0,
    )
    accumulate: int = fields.setting(
        1, "Micro-batches per update. `data.batch_tokens` counts the tokens of an update.", least=1
    )

    def __post_init__(self):
        fields.validate(self, "optimizer")
        defaults = {field.name: field.default for field in dataclasses.fields(self)} | _DEFAULTS
        for name, (choice, readers) in _READERS.items():
            value, chosen = getattr(self, name), getattr(self, choice)
            if chosen not in readers and value not in (None, defaults[name]):
                raise ValueError(
                    f"optimizer.{name} is {value} but optimizer.{choice} is {chosen!r}, which does not read it; use "
                    f"{', '.join(readers)}, or leave it at {literals.written(defaults[name])}"
                )
        if self.name == "schedule_free":
            named = "optimizer.name is 'schedule_free'"
            checks.refuse(
                (
                    self.schedule != "constant",
                    f"{named}, which averages in place of a schedule, and optimizer.schedule {self.schedule!r}; use "
                    f"'constant', with warmup_steps",
                ),
                (
                    self.ema_decay is not None,
                    f"{named}, which has an average of its own; leave optimizer.ema_decay {self.ema_decay} out",
                ),
                (
                    self.mean_decay < _LOWEST_INTERPOLATION,
                    f"{named}, which divides by optimizer.b1, {self.mean_decay}; it must be at least "
                    f"{_LOWEST_INTERPOLATION}",
                ),
            )
        _ = self.rate_factors_by_pattern  # which raises an error for those that are wrong

    @property
    def mean_decay(self) -> float:
        """Value of `b1`."""
        return self._given_or_own("b1")

    @property
    def square_decay(self) -> float:
        """Value of `b2`."""
        return self._given_or_own("b2")

    @property
    def added_epsilon(self) -> float:
        """Value of `epsilon`."""
        return self._given_or_own("epsilon")

    def _given_or_own(self, name: str) -> float:
        given = getattr(self, name)
        return _OWN_DEFAULTS.get(self.name, {}).get(name, _DEFAULTS[name]) if given is None else given

    @functools.cached_property
    def rate_factors_by_pattern(self) -> tuple[tuple[str, float], ...]:
        """Pairs of a pattern and a factor in `learning_rate_factors`."""
        pairs = []
        for item in self.learning_rate_factors:
            pattern, _, text = item.partition("=")
            try:
                factor = float(text)
            except ValueError:
                factor = math.nan
            if not (pattern and 0 <= factor < math.inf):
                raise ValueError(
                    f"optimizer.learning_rate_factors has {item!r}; it must be PATTERN=FACTOR with a factor of at "
                    f"least 0, such as *.attention.rate.kernel=0.1"
                )
            pairs.append((pattern, factor))
        return tuple(pairs)
