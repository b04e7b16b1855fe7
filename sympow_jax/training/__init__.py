"""Training of a run: its program, checkpoints and metrics."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympow_jax.training.program import Program, Update
    from sympow_jax.training.restore import restore_exact, restore_model
    from sympow_jax.training.state import TrainState

__all__ = ["Program", "TrainState", "Update", "restore_exact", "restore_model"]


def __getattr__(name: str):
    # Imported on first use, because they take seconds, for which other modules of this package should not wait.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"TrainState": "state", "restore_exact": "restore", "restore_model": "restore"}.get(
        name, "program"
    )
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
