"""Evaluation of a run according to its task."""

import os
import pathlib
from collections.abc import Mapping, Sequence

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.evaluation import context_length, heldout, over_runs


def check_settings(config: config_lib.Config, opened: data.HeldoutData) -> None:
    """Raises ValueError, before hours of training, if a run could not be evaluated at its end on its held-out data."""
    data.require_held_apart(config.data, config.data)
    if config.task.initial_run is not None:
        over_runs.require_held_apart(config.data, [pathlib.Path(config.task.initial_run)])
    if config.evaluation.context_lengths:  # otherwise they are chosen to fit model and documents
        runs = over_runs.Runs([pathlib.Path("this run")], [config], opened, warn=lambda _: None)
        context_length.ContextLoss().prepare(runs)


def finish(
    config: config_lib.Config, folder: pathlib.Path, opened: data.HeldoutData
) -> dict[str, pathlib.Path]:
    """Evaluates a run at the end of training on its held-out data: a decoder by position, others on rows.

    A run of `match_attention` is a stage of another run, and is not evaluated.

    Returns:
        The table and the plot that were written to the folder; empty if there is no evaluation.
    """
    if config.task.is_language_model:
        if lengths := context_length.lengths_of(config, opened):
            context_length.evaluate_runs([folder], lengths, out=folder, heldout=opened)
            return {"table": folder / "context_loss.csv", "plot": folder / "context_loss.png"}
    elif opened.rows is not None and not config.task.replaces_attention:
        heldout.evaluate_heldout([folder], out=folder, heldout=opened)
        return {"table": folder / "heldout.json"}
    return {}


def evaluate(
    workdirs: Sequence[str | os.PathLike[str]],
    lengths: Sequence[int] | None = None,
    *,
    out: str | os.PathLike[str],
    documents: int | None = None,
    changes: Mapping[str, str] | None = None,
) -> None:
    """Calls `evaluate_runs` for runs that predict the next token, and `evaluate_heldout` for others.

    Raises:
        ValueError: as these functions, or lengths or documents are given for runs that do not predict the next token.
    """
    (path, *_), (config, *_) = over_runs.read_runs(workdirs, changes)
    if config.task.is_language_model:
        context_length.evaluate_runs(workdirs, lengths, out=out, documents=documents, changes=changes)
        return
    if (lengths is not None or documents is not None) and not config.task.replaces_attention:
        raise ValueError(
            f"--context_lengths and --documents are for runs that predict the next token; {path} is of the task "
            f"{config.task.name!r}: leave them out"
        )
    heldout.evaluate_heldout(workdirs, out=out, changes=changes)
