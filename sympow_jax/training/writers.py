"""Writers of metrics: `metrics.jsonl`, TensorBoard, Weights & Biases."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import pathlib
import textwrap
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from sympow_jax import config as config_lib
from sympow_jax.config import serialize
from sympow_jax.process import atomic
from sympow_jax.process import workdir as workdir_lib

# Events are in TensorBoard's file after this time. To flush it takes milliseconds, because it waits for the disk.
_FLUSH_SECONDS = 10.0


class Writer:
    """Receiver of metrics, in increasing order of steps.

    Attributes:
        every_step: whether it gets every step, or only those that are logged.
    """

    every_step = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step."""
        raise NotImplementedError

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts by name; does nothing if the receiver has none."""

    def close(self, *, failed: bool) -> None:
        """Writes remaining metrics; `failed` means that the run ends with an error."""
        raise NotImplementedError


def open_all(workdir: pathlib.Path, config: config_lib.Config, *, start: int) -> list[Writer]:
    """Continues the reports in a workdir after step `start`.

    Raises:
        ValueError: Weights & Biases refuses the run.
    """
    opened: list[Writer] = [
        JsonLines(workdir / "metrics.jsonl", start=start),
        TensorBoard(workdir, start=start),
    ]
    if config.training.wandb_project is not None:
        opened.append(Wandb(config.training.wandb_project, workdir, dataclasses.asdict(config)))
    return opened


class JsonLines(Writer):
    """JSON Lines file with one object per step."""

    every_step = True

    def __init__(self, path: pathlib.Path, *, start: int):
        """Continues after step `start`; lines of later steps are deleted."""
        serialize.require_file(path)
        kept = []
        for line in path.read_text().splitlines() if path.exists() else ():
            # A killed run can leave an incomplete line, which belongs to a step after the last checkpoint.
            with contextlib.suppress(ValueError):
                step = serialize.parse_object(line).get("step")
                if isinstance(step, int | float) and step <= start:
                    kept.append(f"{line}\n")
        # Written in any case, so that the file that is appended to later is never the target of a link.
        with atomic.replace(path) as draft:
            draft.write_text("".join(kept))
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a line and flushes it, so that a run that is killed later does not lose it."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard(Writer):
    """TensorBoard event files in a folder.

    Events are written in the caller's thread, so that errors are raised. `tensorboardX.SummaryWriter` has a thread
    with a queue instead. It ends if the disk is full or the clock is set back by a month, and the run would then wait
    for the queue indefinitely.
    """

    def __init__(self, folder: pathlib.Path, *, start: int):
        """Continues after step `start`; TensorBoard hides the points of later steps."""
        self._file = event_file_writer.EventsWriter(str(folder / "events"))
        self._flushed = -math.inf
        # TensorBoard purges the points from this step on.
        began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(step=start + 1, session_log=began))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to the curve of every metric."""
        for name, value in values.items():
            self._write(event_pb2.Event(step=step, summary=summary.scalar(name, value)))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Adds each text to those of its name, as code, so that Markdown leaves its lines and signs as they are."""
        for name, text in texts.items():
            code = textwrap.indent(text, "    ", lambda line: True)
            self._write(event_pb2.Event(step=step, summary=summary.text(name, code)))

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._file.write_event(event)
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()


class Wandb(Writer):
    """Run on Weights & Biases, which is resumed by its id in the workdir's `wandb.json`.

    wandb's environment variables apply. With WANDB_MODE=offline, everything is written to the workdir for `wandb sync`.
    Metrics are plotted over the metric `step` instead of wandb's own counter, which would drop the steps that a run
    repeats after it was killed.
    """

    def __init__(self, project: str, workdir: pathlib.Path, settings: Mapping[str, Any]):
        """Starts or resumes the run.

        Raises:
            ValueError: wandb refuses the run.
        """
        import wandb

        path = workdir / "wandb.json"
        run_id = serialize.read_object(path).get("id") if path.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=workdir.name,
                id=run_id,
                resume="allow",
                dir=str(workdir),
                config=dict(settings),
                allow_val_change=True,
            )
        except wandb.Error as error:
            raise ValueError(
                f"wandb refuses training.wandb_project={project!r}: {error}; use `wandb login`, WANDB_MODE=offline "
                f"or no project"
            ) from error
        if run_id != self._run.id:
            workdir_lib.write_json(path, {"id": self._run.id})
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the metrics in the background."""
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        """Waits until all metrics are sent."""
        self._run.finish(exit_code=int(failed))


def check_settings(config: config_lib.Config) -> None:
    """Raises ValueError, before anything is compiled, if Weights & Biases is requested but not installed."""
    if config.training.wandb_project is None:
        return
    spec = importlib.util.find_spec("wandb")
    # A folder `wandb`, such as wandb itself creates, is a namespace package without an origin.
    if spec is None or spec.origin is None:
        raise ValueError(
            "training.wandb_project is set but wandb is not installed: pip install 'sympow-jax[wandb]', or leave "
            "the project out"
        )
