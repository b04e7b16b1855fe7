"""Settings of the training task."""

import dataclasses
import enum
import os
from typing import NamedTuple

from sympow_jax.config import checks, fields

MASK_FRACTION = 0.15
"""Fraction of the tokens that `masked_token` predicts (Devlin et al. 2019, section 3.1)."""


class Predicted(enum.Enum):
    """Quantity that is predicted for each token or row."""

    TOKEN = enum.auto()
    ATTENTION = enum.auto()
    CLASS = enum.auto()
    NUMBER = enum.auto()


class _Kind(NamedTuple):
    """Properties of a task that settings, data and models must know."""

    predicted: Predicted
    causal: bool = False  # whether the model is a decoder; otherwise it is an encoder


TASKS = {
    "next_token": _Kind(Predicted.TOKEN, causal=True),
    "match_attention": _Kind(Predicted.ATTENTION, causal=True),
    "masked_token": _Kind(Predicted.TOKEN),
    "classification": _Kind(Predicted.CLASS),
    "regression": _Kind(Predicted.NUMBER),
}
"""Tasks by name; `tasks.TASKS` has their classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Quantity that a model is trained to predict."""

    name: str = fields.setting(
        "next_token",
        "Task. `next_token` trains a decoder. `match_attention` trains the layers of a decoder that are not `shared` "
        "in `model.attention_pattern` to give the outputs of `model.attention`, which they replace. The others train "
        "an encoder, which sees the whole row: to predict masked tokens, one of `classes` or a number.",
        choices=tuple(TASKS),
    )
    classes: int | None = fields.setting(None, "Number of classes of `classification`.")
    dual_encoder: bool = fields.setting(
        False,
        "Whether the two texts of a row of `tsv` are encoded independently, as in the Long Range Arena's retrieval, "
        "instead of joined. The head reads their means, and the product and the difference of these.",
    )
    mask_token: int | None = fields.setting(
        None, "Id of the mask of `masked_token`. If none, the last id of the vocabulary."
    )
    initial_run: str | None = fields.setting(
        None,
        "Workdir of a run whose last checkpoint initializes the model, whose attention may differ. An encoder starts "
        "from an encoder, a decoder from a decoder. If none, the model is initialized at random.",
        may_differ=(fields.Occasion.HELDOUT_ROWS,),
    )

    def __post_init__(self):
        fields.validate(self, "task")
        if self.initial_run is not None:
            object.__setattr__(self, "initial_run", os.path.expanduser(self.initial_run))
        if self.predicted is Predicted.CLASS:
            if self.classes is None:
                raise ValueError(f"set task.classes: task.name {self.name!r} needs the number of classes")
            checks.require_at_least(2, **{"task.classes": self.classes})
        if self.dual_encoder and self.outputs is None:
            raise ValueError(
                f"task.dual_encoder is True and task.name {self.name!r}; pairs of texts have classes or numbers"
            )

    @property
    def predicted(self) -> Predicted:
        """Quantity that the model predicts."""
        return TASKS[self.name].predicted

    @property
    def is_causal(self) -> bool:
        """True for the tasks of decoders."""
        return TASKS[self.name].causal

    @property
    def is_language_model(self) -> bool:
        """True if the model predicts the next token, so that it can continue a text."""
        return self.is_causal and self.predicted is Predicted.TOKEN

    @property
    def masks_tokens(self) -> bool:
        """True if an encoder predicts tokens of its row, which must be hidden from it."""
        return not self.is_causal and self.predicted is Predicted.TOKEN

    @property
    def replaces_attention(self) -> bool:
        """True if new attention learns the outputs of that of `initial_run`."""
        return self.predicted is Predicted.ATTENTION

    @property
    def outputs(self) -> int | None:
        """Number of outputs per row; None for tasks without labels."""
        return {Predicted.CLASS: self.classes, Predicted.NUMBER: 1}.get(self.predicted)
