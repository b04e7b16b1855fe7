"""Curves and tables of NT tasks: CSV, JSON, PNG, and a table on the terminal."""

import csv
import dataclasses
import json
import pathlib
from collections.abc import Sequence

import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import rich.console
import rich.table

from experiments import _nt_training
from sympow_jax import atomic
from sympow_jax.data import nt_tasks

__all__ = ["Result", "print_table", "write"]

_FIELDS = (
    "context",
    "weights",
    "attention",
    "task",
    "epoch",
    "runs",
    "diverged",
    "loss",
    "greedy_mean",
    "greedy_median",
    "greedy_min",
    "greedy_max",
    "given_mean",
)
_COLORS = {"expressive": "#0072B2", "softmax": "#D55E00"}
_LINES = ("-", "--", ":")


@dataclasses.dataclass(frozen=True)
class Result:
    """A training setting and its progress over the epochs."""

    setting: _nt_training.Setting
    progress: list[_nt_training.Progress]


def write(folder: pathlib.Path, name: str, results: Sequence[Result]) -> None:
    """Writes NAME.csv (curves over the runs), NAME.json (settings and the end of every run) and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic.replace(folder / f"{name}.csv") as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS)
        writer.writeheader()
        for result in results:
            writer.writerows(row for progress in result.progress for row in _rows(result.setting, progress))
    summary = [_summary(result) for result in results]
    with atomic.replace(folder / f"{name}.json") as draft:
        draft.write_text(json.dumps(summary, indent=1) + "\n")
    with atomic.replace(folder / f"{name}.png") as draft:
        _plot(draft, results)


def print_table(results: Sequence[Result]) -> None:
    """Prints a table of the final accuracies by attention."""
    table = rich.table.Table(title="Greedy accuracy over 50 symbols at the end of training, over runs")
    columns = ["task", "context", "weights", "attention", "parameters", "epochs", "runs"]
    columns += ["diverged", "median", "mean", "least", "most", "symbols given"]
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in (0, 2, 3) else "right")
    for result in results:
        setting, last = result.setting, result.progress[-1]
        for row in _rows(setting, last):
            table.add_row(
                f"N{setting.base}T{setting.delay} {row['task']}",
                str(setting.context),
                setting.weights,
                row["attention"],
                f"{setting.model(row['attention']).parameters():,}",
                f"{last.epoch:,}",
                str(setting.runs),
                str(row["diverged"]),
                *(
                    f"{row[x]:.3f}"
                    for x in ("greedy_median", "greedy_mean", "greedy_min", "greedy_max", "given_mean")
                ),
            )
    rich.console.Console(width=160).print(table)


def _rows(setting, progress):
    for attention in setting.attentions:
        for index, task in enumerate(setting.tasks):
            greedy, loss = progress.greedy[attention][:, index], progress.loss[attention]
            finite = np.isfinite(loss)
            yield {
                "context": setting.context,
                "weights": setting.weights,
                "attention": attention,
                "task": task,
                "epoch": progress.epoch,
                "runs": setting.runs,
                "diverged": int((~finite).sum()),
                "loss": round(float(loss[finite].mean()), 6) if finite.any() else "",
                "greedy_mean": round(float(greedy.mean()), 4),
                "greedy_median": round(float(np.median(greedy)), 4),
                "greedy_min": round(float(greedy.min()), 4),
                "greedy_max": round(float(greedy.max()), 4),
                "given_mean": round(float(progress.given[attention][:, index].mean()), 4),
            }


def _summary(result):
    setting, last = result.setting, result.progress[-1]
    small = setting.base ** (setting.delay + 1) <= 2**16
    return dataclasses.asdict(setting) | {
        "parameters": setting.model(setting.attentions[0]).parameters(),
        "cycles": {t: nt_tasks.cycles(t, setting.base, setting.delay) for t in setting.tasks}
        if small
        else None,
        "results": {
            attention: {
                "loss": _rounded(last.loss[attention], 6),
                "greedy": _by_task(setting, last.greedy[attention]),
                "given": _by_task(setting, last.given[attention]),
            }
            for attention in setting.attentions
        },
    }


def _by_task(setting, accuracies):
    return {task: _rounded(accuracies[:, index], 4) for index, task in enumerate(setting.tasks)}


def _rounded(x, digits):
    return [round(float(v), digits) if np.isfinite(v) else None for v in x]


def _plot(path, results):
    """Plots mean greedy accuracy over epochs, with a band from the worst to the best run; one panel per training."""
    figure = matplotlib.figure.Figure(figsize=(4.6 * len(results), 3.6), dpi=110, layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    for index, result in enumerate(results):
        setting = result.setting
        axes = figure.add_subplot(1, len(results), index + 1)
        epochs = [progress.epoch for progress in result.progress]
        for attention in setting.attentions:
            for number, task in enumerate(setting.tasks):
                greedy = np.stack([progress.greedy[attention][:, number] for progress in result.progress])
                label = f"{attention}, {task}" if len(setting.tasks) > 1 else attention
                color = _COLORS[attention]
                axes.plot(epochs, greedy.mean(1), color=color, linestyle=_LINES[number], label=label)
                axes.fill_between(epochs, greedy.min(1), greedy.max(1), color=color, alpha=0.12, linewidth=0)
        if setting.drop_after is not None:
            axes.axvline(setting.drop_after, color="#888888", linestyle=":", linewidth=1)
        name = " + ".join(f"N{setting.base}T{setting.delay}{task[2:]}" for task in setting.tasks)
        axes.set_title(
            f"{name}, context {setting.context}\nweights: {setting.weights}, {setting.runs} runs", fontsize=9
        )
        axes.set_xlabel("epochs")
        axes.set_ylabel("greedy accuracy over 50 symbols")
        axes.set_ylim(0, 1.02)
        axes.grid(axis="y", color="#e6e6e6")
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path)
