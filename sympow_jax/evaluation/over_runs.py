"""Driver of evaluations over runs: checks, restores each run, collects its results, writes and prints them.

An evaluation is a class of one file: `Evaluation` has what differs between them.
"""

import abc
import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich.console

from sympow_jax import config as config_lib
from sympow_jax import data, models, spelling, training
from sympow_jax.config import fields, serialize
from sympow_jax.evaluation import report
from sympow_jax.process import hosts, progress, workdir
from sympow_jax.training import checkpoint


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs to evaluate on the same held-out data.

    Attributes:
        paths: their workdirs.
        configs: their settings, with those of the data that were replaced.
        heldout: held-out data of the first.
        warn: prints a warning.
    """

    paths: Sequence[pathlib.Path]
    configs: Sequence[config_lib.Config]
    heldout: data.HeldoutData
    warn: Callable[[str], None]

    @property
    def first(self) -> config_lib.Config:
        """Settings of the first run, whose held-out data and evaluation all runs have."""
        return self.configs[0]


class Evaluation[Row: report.Run](abc.ABC):
    """An evaluation of runs. The driver calls the methods in this order, `score` for each run."""

    def cause_of_refusal(self, config: config_lib.Config) -> str | None:
        """Returns why a run with these settings cannot be evaluated, to follow the name of its workdir."""
        return None

    def compared(self, config: config_lib.Config) -> dict[str, Any]:
        """Returns the flattened settings of a run that all runs must have in common."""
        vocab_size, task = config.model.vocab_size, {"name": config.task.name}
        values = {"task": task, "model": {"vocab_size": vocab_size}, "data": config.data}
        return serialize.flatten(values, fields.Occasion.HELDOUT_DOCUMENTS)

    @abc.abstractmethod
    def prepare(self, runs: Runs) -> int:
        """Checks what needs the held-out data and reads what all runs share; returns the units of work of a run."""

    @abc.abstractmethod
    def score(self, model: models.Model, run: report.Run, advance: Callable[[int], None]) -> list[Row]:
        """Returns the results of a run; `advance` is called with the units of work that are done."""

    @abc.abstractmethod
    def write(self, folder: pathlib.Path, rows: list[Row], runs: list[dict[str, Any]]) -> None:
        """Writes the results, and what is recorded of each run, into a folder."""

    @abc.abstractmethod
    def print(self, rows: list[Row], console: rich.console.Console) -> None:
        """Prints a table."""


def evaluate[Row: report.Run](
    evaluation: Evaluation[Row],
    workdirs: Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    heldout: data.HeldoutData | None = None,
    changes: Mapping[str, str] | None = None,
) -> list[Row]:
    """Evaluates the newest checkpoint of every run on the held-out data of the first, writes and prints the results.

    With several processes, each evaluates on its own, and only the first writes and prints. Arguments are those of
    `evaluate_runs`.

    Raises:
        ValueError: a workdir holds no run or no checkpoint, the runs cannot be compared, one was trained on the
            held-out data, or `out` cannot be written. Or the evaluation raised it.
    """
    console = report.make_console() if hosts.is_first() else rich.console.Console(quiet=True)

    # What is wrong is found before the data is read, and before hours are spent on earlier runs.
    paths, configs = read_runs(workdirs, changes)
    for path, config in zip(paths, configs):
        if cause := evaluation.cause_of_refusal(config):
            raise ValueError(f"{path} {cause}")
    settings = [evaluation.compared(config) for config in configs]
    for path, other in zip(paths, settings):
        different = [
            f"{name} is {spelling.shown(value)} and {spelling.shown(other.get(name))}"
            for name, value in settings[0].items()
            if value != other.get(name)
        ]
        if different:
            raise ValueError(
                f"{paths[0]} and {path} cannot be compared: {', '.join(different)}; evaluate them apart"
            )
    require_held_apart(configs[0].data, paths)
    for path in paths:
        checkpoint.require_checkpoint(path)

    def warn(message: str) -> None:
        _say(console, f"warning: {message}", style="yellow")

    # The paths are printed before they are opened, because a stranger may have chosen them.
    first, is_open = configs[0], heldout is not None
    if heldout is None:
        opened = spelling.listed((*first.data.paths, *first.data.heldout_paths))
        _say(console, f"data of {paths[0]}: {first.data.source}{f' of {opened}' if opened else ''}")
        heldout = data.HeldoutData(first.data, first.task, vocab_size=first.model.vocab_size)
    work = evaluation.prepare(Runs(paths, configs, heldout, warn))
    folder = writable_folder(out)
    # All runs are evaluated on the data as it is now. Imported weights have no record of data, and a run that ends
    # has compared its own.
    records = {} if changes or is_open else {path: workdir.read_description(path) for path in paths}
    description = data.describe(first.data) if any(records.values()) else {}
    for path, record in records.items():
        if record and any(record.get(name) != description.get(name) for name in ("digest", "tokenizer")):
            warn(
                f"the data has changed since {path} was trained on it; what is held out now may have been trained on, "
                f"or have other ids; see its data.json"
            )

    rows: list[Row] = []
    runs: list[dict[str, Any]] = []
    # Unique names: the base names of workdirs, else with the preset added, else the full paths.
    names = [path.absolute().name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} ({config.model.attention_name})" for name, config in zip(names, configs)]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    for name, path, config in zip(names, paths, configs):
        started = time.perf_counter()
        trained, model, step = training.restore_model(path)
        run = report.Run(
            run=name,
            preset=trained.model.attention_name,
            train_context=trained.data.context_length,
            updates=step,
            update_tokens=trained.data.batch_tokens,
            data=workdir.read_description(path).get("digest", "unknown")[:8],
        )
        with progress.Progress(console, "part", work, text=name) as shown:
            rows += evaluation.score(model, run, functools.partial(shown.advance, text=name))
        del model  # its memory is free for the next
        _say(console, f"{name}: step {step:,}, {time.perf_counter() - started:.1f} s")
        runs.append({"run": name, "workdir": str(path), "step": step, "config": dataclasses.asdict(config)})

    if differences := report.training_differences(rows):
        each = "; ".join(f"{name}: {difference}" for name, difference in differences.items())
        warn(f"the runs were not trained alike: {each}")
    values = [dataclasses.asdict(row) for row in rows]
    if diverged := sorted({row["run"] for row in values if report.without_nan(row) != row}):
        warn(f"numbers of {', '.join(diverged)} are not finite; they are null in the JSON")
    if hosts.is_first():
        with writing(folder):
            evaluation.write(folder, rows, runs)
    evaluation.print(rows, console)
    return rows


def read_runs(
    workdirs: Sequence[str | os.PathLike[str]], changes: Mapping[str, str] | None = None
) -> tuple[list[pathlib.Path], list[config_lib.Config]]:
    """Returns the workdirs and the settings of their runs.

    Args:
        workdirs: workdirs of the runs.
        changes: settings of the data to replace in all of them, as for `config.override`.

    Raises:
        ValueError: no workdir is given, one is an empty name or given twice, or one holds no run. Or a setting cannot
            be replaced.
    """
    if not workdirs:
        raise ValueError("no workdir is given")
    if "" in workdirs:
        raise ValueError("a workdir has an empty name; separate the names of workdirs with one comma")
    paths = [pathlib.Path(path) for path in workdirs]
    configs = [workdir.read_config(path) for path in paths]
    resolved = Counter(map(os.path.realpath, paths))
    for path in paths:
        if resolved[os.path.realpath(path)] > 1:
            raise ValueError(f"workdir {path} is given more than once")
    if changes and "data.labels" in changes:
        raise ValueError(
            "data.labels cannot be changed here: outputs of the model have the labels of its training"
        )
    return paths, [config_lib.override(config, changes) if changes else config for config in configs]


def require_held_apart(source: config_lib.DataConfig, paths: Sequence[pathlib.Path]) -> None:
    """Raises ValueError if held-out data was trained on by a run, or by one that it began from.

    Prints a warning if that cannot be found out, because the run or its data is gone.

    Args:
        source: settings of the held-out data.
        paths: workdirs of the runs.
    """
    runs = list(paths)
    for path in runs:  # `task.initial_run` of each is appended
        unknown = f"warning: nothing checks that the held-out data was not trained on by {path}"
        if not (path / "config.json").is_file():
            hosts.say(f"{unknown}, which is gone", error=True)
            continue
        config = workdir.read_config(path)
        known = data.require_held_apart(source, config.data, name=str(path))
        # An import has no record, and its config may be without its data.
        if not known and (path / "data.json").is_file():
            hosts.say(f"{unknown}, whose {', '.join(config.data.paths)} cannot be read", error=True)
        initial = config.task.initial_run
        if initial is not None and pathlib.Path(initial) not in runs:
            runs.append(pathlib.Path(initial))


def _say(console: rich.console.Console, line: str, *, style: str | None = None) -> None:
    """Prints a line without markup, with control characters escaped."""
    console.print(spelling.printable(line), style=style, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Turns an OSError while writing results to a folder into ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write the results to {folder}: {error.strerror or error}") from error


def writable_folder(out: str | os.PathLike[str]) -> pathlib.Path:
    """Creates the folder `out` and checks, before any work is done, that it can be written to."""
    folder = pathlib.Path(out)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder
