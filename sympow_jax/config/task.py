"""What a model is trained to predict."""

import dataclasses

from sympow_jax.config import _checks as checks

__all__ = ["TaskConfig"]

TASKS = ("next_token", "masked_token", "classification", "regression")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is predicted: `next_token` by a decoder; by an encoder, which sees the whole row, `masked_token`, the class
    of a row (`classification`, one of `classes`) or a number (`regression`).

    `mask_fraction` of the tokens are predicted by `masked_token`: of ten such, eight become `mask_token`, one a random
    token and one stays (Devlin et al. 2019), drawn anew each epoch (Liu et al. 2019). `initial_run` is the workdir of
    a run whose last checkpoint the model starts from, an encoder from an encoder and a decoder from a decoder, whose
    attention may differ; None starts from nothing.
    """

    name: str = "next_token"
    classes: int | None = None
    mask_fraction: float = 0.15
    mask_token: int | None = None  # None: the last id of the vocabulary
    initial_run: str | None = None

    def __post_init__(self):
        checks.require_choice("task.name", self.name, TASKS)
        checks.require_fraction(**{"task.mask_fraction": self.mask_fraction})
        if self.name == "classification":
            checks.require_at_least(2, **{"task.classes": self.classes or 0})
        if self.name == "masked_token" and not self.mask_fraction:
            raise ValueError("task.mask_fraction is 0.0; task 'masked_token' has nothing to predict")

    @property
    def outputs(self) -> int | None:
        """The numbers predicted for a row; None for tasks that predict tokens."""
        match self.name:
            case "classification":
                return self.classes
            case "regression":
                return 1
        return None
