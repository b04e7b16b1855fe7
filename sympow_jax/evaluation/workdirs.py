"""Workdirs of the runs to evaluate, names of runs, and the folder of the results."""

import contextlib
import os
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.markup
import rich.progress

from sympow_jax import config as config_lib
from sympow_jax import data, spelling
from sympow_jax.evaluation import report
from sympow_jax.process import hosts, workdir

__all__ = [
    "describe_run",
    "open_heldout",
    "progress",
    "read_runs",
    "require_comparable",
    "require_held_apart",
    "run_names",
    "say",
    "warn",
    "warn_of_changed_data",
    "warn_of_different_training",
    "writable_folder",
    "writing",
]

# Seconds between lines of progress where there is no terminal.
_LINE_SECONDS = 30.0


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


def require_comparable(paths: Sequence[pathlib.Path], settings: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless the flattened settings of every run are those of the first."""
    for path, other in zip(paths[1:], settings[1:]):
        different = [
            f"{name} is {spelling.shown(value)} and {spelling.shown(other.get(name))}"
            for name, value in settings[0].items()
            if value != other.get(name)
        ]
        if different:
            raise ValueError(
                f"{paths[0]} and {path} cannot be compared: {', '.join(different)}; evaluate them apart"
            )


def open_heldout(
    console: rich.console.Console, folder: pathlib.Path, config: config_lib.Config
) -> data.HeldoutData:
    """Prints the paths that a run's settings name, which a stranger may have chosen, and opens its held-out data."""
    paths = spelling.listed((*config.data.paths, *config.data.heldout_paths))
    say(console, f"data of {folder}: {config.data.source}{f' of {paths}' if paths else ''}")
    return data.HeldoutData(config.data, config.task, vocab_size=config.model.vocab_size)


def warn_of_changed_data(
    console: rich.console.Console, paths: Sequence[pathlib.Path], config: config_lib.Config
) -> None:
    """Warns of runs whose data has changed since training; all runs are evaluated on the data as it is now.

    Imported weights have no record of data.
    """
    records = {path: record for path in paths if (record := workdir.read_description(path))}
    description = data.describe(config.data) if records else {}
    for path, record in records.items():
        if any(record.get(name) != description.get(name) for name in ("digest", "tokenizer")):
            warn(
                console,
                f"the data has changed since {path} was trained on it; what is held out now may have been trained "
                f"on, or have other ids; see its data.json",
            )


def warn_of_different_training(console: rich.console.Console, rows: Sequence[report.Run]) -> None:
    """Warns if the runs differ in updates, tokens per update or training data."""
    if differences := report.training_differences(rows):
        each = "; ".join(f"{name}: {difference}" for name, difference in differences.items())
        warn(console, f"the runs were not trained alike: {each}")


def describe_run(name: str, path: pathlib.Path, config: config_lib.Config, step: int) -> report.Run:
    """Returns what results say of a run, of which the checkpoint of `step` is evaluated."""
    return report.Run(
        run=name,
        preset=config.model.attention_name,
        train_context=config.data.context_length,
        updates=step,
        update_tokens=config.data.batch_tokens,
        data=workdir.read_description(path).get("digest", "unknown")[:8],
    )


def run_names(paths: Sequence[pathlib.Path], configs: Sequence[config_lib.Config]) -> list[str]:
    """Returns unique names: the base names of workdirs, else with the preset added, else the full paths."""
    base = [path.absolute().name for path in paths]
    with_preset = [f"{name} ({config.model.attention_name})" for name, config in zip(base, configs)]
    for names in (base, with_preset):
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def warn(console: rich.console.Console, message: str) -> None:
    """Prints a warning."""
    say(console, f"warning: {message}", style="yellow")


def say(console: rich.console.Console, line: str, *, style: str | None = None) -> None:
    """Prints a line without markup, with control characters escaped."""
    console.print(spelling.printable(line), style=style, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress(console: rich.console.Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar and yields the function that advances it; without a terminal, writes a line now and then."""
    if console.is_terminal:
        with rich.progress.Progress(console=console, transient=True) as progress:
            task = progress.add_task(rich.markup.escape(spelling.printable(name)), total=total)
            yield lambda done: progress.advance(task, done)
        return
    finished, last = 0, time.monotonic()

    def advance(done: int) -> None:
        nonlocal finished, last
        finished += done
        if time.monotonic() - last >= _LINE_SECONDS:
            hosts.say(f"{name}: {finished / total:.0%}", error=True)
            last = time.monotonic()

    yield advance


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
