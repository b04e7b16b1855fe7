"""Environment of disturbed runs, and the checks that a run survived."""

import json
import pathlib
import random
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sympow_jax import training
from tools import launching

# Seconds for a process to end. Eight processes on one slow core take minutes.
PATIENCE = 600
SETTINGS = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.attention.kernel": "softmax",
    "model.attention.decay": "none",
    "model.attention.position": "rope",
    "data.context_length": 32,
    "data.batch_tokens": 256,
    "data.heldout_fraction": 0.3,
    "optimizer.learning_rate": 1e-2,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "training.log_every": 1000,
}

# Why a try was not survived, or None if it was.
Reason = str | None


class NotSurvived(Exception):
    """Raised with the reason if a try was not survived."""


class Stage:
    """Environment of the runs of one fault: a corpus, a cache of compiled programs and a folder for each run."""

    def __init__(self, folder: pathlib.Path, cache: pathlib.Path, seed: str):
        self.random = random.Random(seed)
        self.folder = folder
        self._cache = cache
        self.corpus = folder / "corpus"
        self.corpus.mkdir()
        words = random.Random(0)
        for index in range(40):
            text = words.choices(("quick", "brown", "fox", "jumps", "over", "lazy", "dog"), k=60)
            (self.corpus / f"{index}.txt").write_text(" ".join(text))
        self._config = f"--config=configs/text.py:{self.corpus}/*.txt"
        self._undisturbed: dict[tuple[object, ...], pathlib.Path] = {}

    def new(self, name: str) -> pathlib.Path:
        """Returns a workdir that no run has used."""
        return pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    def start(self, run: pathlib.Path, *, processes=1, devices=1, before_start=None, **changes):
        """Starts the run in a workdir; `changes` are settings, with `__` for a dot."""
        changed = {name.replace("__", "."): value for name, value in changes.items()}
        arguments = [f"--config.{name}={value}" for name, value in (SETTINGS | changed).items()]
        return launching.start(
            [self._config, f"--workdir={run}", *arguments],
            self.folder / "says",
            processes=processes,
            devices=devices,
            cache=self._cache,
            before_start=before_start,
        )

    def finish(self, run: pathlib.Path, *, resumes_at: int | None = None, **options) -> None:
        """Starts the run and waits until it ends; raises NotSurvived unless it succeeds without a line on stderr.

        It also raises NotSurvived if the run resumed at another step than `resumes_at`.
        """
        started = self.start(run, **options)
        check_success(started, resumes_at=resumes_at)
        if lines := [line for one in started for line in one.errors()]:
            raise NotSurvived(f"it succeeded, but said {lines[-3:]}")

    def undisturbed(self, **options) -> pathlib.Path:
        """Returns the workdir of an undisturbed run with these settings."""
        key = tuple(sorted(options.items()))
        if key not in self._undisturbed:
            run = self.new("undisturbed")
            self.finish(run, **options)
            # Only now, because after a failure the next try must not be compared with an incomplete run.
            self._undisturbed[key] = run
        return self._undisturbed[key]


def losses(run: pathlib.Path) -> list[tuple[int, float]]:
    """Returns the steps that a run has reported, with their losses; a line that is being written is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith("\n"))
    return [(line["step"], line["loss"]) for line in whole]


def steps(run: pathlib.Path) -> list[int]:
    """Returns the steps that a run has checkpoints of."""
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


def resumed_at(one: launching.Started) -> int | None:
    """Returns the step at which a process says that it resumes, or begins at 0.

    None if it has not printed its plan yet, which it does after the state is initialized or restored.
    """
    plans = (re.match(r"(?:training|trained): step (\d+) of ", line) for line in one.said())
    return next((int(plan[1]) for plan in plans if plan), None)


def check_success(started: list[launching.Started], *, resumes_at: int | None = None) -> None:
    """Waits; raises NotSurvived unless all processes end successfully, and began at this step, if it is given."""
    codes = [one.wait(PATIENCE) for one in started]
    if any(codes):
        raise NotSurvived(f"the run ended with exit codes {codes}: {[one.errors()[-3:] for one in started]}")
    began = resumed_at(started[0])
    if began is None:
        raise NotSurvived("it printed no plan")
    if resumes_at is not None and began != resumes_at:
        raise NotSurvived(f"it resumed from step {began} instead of {resumes_at}")


def check_same(run: pathlib.Path, expected: pathlib.Path, *, after: str = "") -> None:
    """Raises NotSurvived unless losses and parameters are bitwise identical to those of the other run.

    The message begins with `after`, which says what was done to the run.
    """
    begin = f"{after}: " if after else ""
    if losses(run) != losses(expected):
        raise NotSurvived(f"{begin}the losses are not those of the undisturbed run")
    (_, model, step), (_, other, at) = map(training.restore_model, (run, expected))
    if step != at or _bits(model) != _bits(other):
        raise NotSurvived(f"{begin}the parameters are not those of the undisturbed run")


def _bits(model: Any) -> tuple[jax.tree_util.PyTreeDef, list[tuple[Any, ...]]]:
    """Returns the structure of a tree, and the dtype, shape and bytes of each array, in which NaN and -0.0 count."""
    leaves, structure = jax.tree.flatten(model)
    arrays = map(np.asarray, leaves)
    return structure, [(array.dtype, array.shape, array.tobytes()) for array in arrays]


def check_error(one: launching.Started, *words: str) -> None:
    """Waits; raises NotSurvived unless the process ended with exit code 1 and one line that contains one of the words.

    A line has at most 600 characters.
    """
    code, lines = one.wait(PATIENCE), one.errors()
    clear = len(lines) == 1 and len(lines[0]) <= 600 and any(word in lines[0] for word in words)
    if code != 1 or not clear:
        raise NotSurvived(f"it ended with {code} and said {lines[-3:]}")


def tried(attempt: Callable[..., None], *arguments: Any) -> Reason:
    """Returns why an attempt failed; any exception means that it did."""
    try:
        attempt(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None
