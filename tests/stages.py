"""Runs of a tiny model for `tests.faults`, and checks that they ended like undisturbed ones."""

import json
import pathlib
import random
import tempfile
from collections.abc import Sequence

import jax
import numpy as np

from sympow_jax.training import checkpoint
from tests.training import launching

# Tolerance of losses on another number of devices, where sums have another order.
_CLOSE = 1e-5
_SETTINGS = {
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


class NotSurvived(Exception):
    """Raised with the reason if a try was not survived."""


class Stage:
    """Environment of the runs: a corpus, a cache of compiled programs and a folder for each run."""

    def __init__(self, folder: pathlib.Path, seed: int):
        self.random = random.Random(seed)
        self.folder = folder
        self.half_written = 0  # checkpoints that a SIGKILL left so
        corpus = folder / "corpus"
        corpus.mkdir()
        for index in range(40):
            words = self.random.choices(("quick", "brown", "fox", "jumps", "over", "lazy", "dog"), k=60)
            (corpus / f"{index}.txt").write_text(" ".join(words))
        self._config = f"--config=configs/text.py:{corpus}/*.txt"
        self._undisturbed: dict[tuple[object, ...], pathlib.Path] = {}

    def new(self, name: str) -> pathlib.Path:
        """Returns a workdir that no run has used."""
        return pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    def start(self, run: pathlib.Path, *, processes=1, devices=1, prepare=None, **changes):
        """Starts the run in a workdir; `changes` are settings, with `__` for a dot."""
        changed = {name.replace("__", "."): value for name, value in changes.items()}
        arguments = [f"--config.{name}={value}" for name, value in (_SETTINGS | changed).items()]
        return launching.start(
            [self._config, f"--workdir={run}", *arguments],
            self.folder / "says",
            processes=processes,
            devices=devices,
            cache=self.folder / "cache",
            prepare=prepare,
        )

    def finish(self, run: pathlib.Path, **options) -> list[launching.Started]:
        """Starts the run and waits until it ends successfully."""
        started = self.start(run, **options)
        codes = [one.wait() for one in started]
        if any(codes):
            raise NotSurvived(f"going on ended with {codes}: {[one.errors()[-3:] for one in started]}")
        return started

    def undisturbed(self, **options) -> pathlib.Path:
        """Returns the workdir of an undisturbed run with these settings."""
        key = tuple(sorted(options.items()))
        if key not in self._undisturbed:
            self._undisturbed[key] = self.new("undisturbed")
            self.finish(self._undisturbed[key], **options)
        return self._undisturbed[key]


def losses(run: pathlib.Path) -> list[tuple[int, float]]:
    """Returns the steps that a run has reported, with their losses."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def steps(run: pathlib.Path) -> list[int]:
    """Returns the steps that a run has checkpoints of."""
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


def began(started: Sequence[launching.Started]) -> int:
    """Returns the step from which a run resumed."""
    (line,) = [line for line in started[0].said() if line.startswith(("training: step", "trained: step"))]
    return int(line.split()[2])


def check_same(run: pathlib.Path, expected: pathlib.Path) -> None:
    """Raises NotSurvived unless losses and parameters are bitwise identical to those of the other run."""
    if losses(run) != losses(expected):
        raise NotSurvived("the losses are not those of the undisturbed run")
    (_, model, step), (_, other, at) = map(checkpoint.restore_model, (run, expected))
    same = map(np.array_equal, jax.tree.leaves(model), jax.tree.leaves(other))
    if step != at or not all(same):
        raise NotSurvived("the parameters are not those of the undisturbed run")


def check_close(run: pathlib.Path, expected: pathlib.Path) -> None:
    """Raises NotSurvived unless the run's losses equal those of the other up to rounding."""
    found, other = (np.array(losses(folder)) for folder in (run, expected))
    if found.shape != other.shape or not np.allclose(found, other, rtol=_CLOSE, atol=0):
        raise NotSurvived("the losses are not those of the undisturbed run")


def check_error(one: launching.Started, code: int, words: str) -> None:
    """Raises NotSurvived unless a process ended with exit code 1 and one line that contains the words."""
    lines = one.errors()
    if code != 1 or len(lines) != 1 or words not in lines[0]:
        raise NotSurvived(f"it ended with {code} and said {lines[-3:]}")
