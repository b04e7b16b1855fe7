"""What a run reports: `metrics.jsonl` and TensorBoard in the workdir, progress on the terminal."""

import json
import math
import pathlib
import time
from collections.abc import Mapping

import jax
import rich.console
import rich.progress
import tensorboardX

__all__ = ["Reporter"]


class Reporter:
    """Reports every update; a context manager.

    `metrics.jsonl` gets an object a step. The terminal and TensorBoard get every `log_every`-th and the last:
    a progress bar where there is a terminal, else plain lines.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        start: int,
        steps: int,
        log_every: int,
        tokens_per_step: int,
        writes: bool = True,
    ):
        """Continues the reports in `workdir` after step `start`; what was written of later steps is cut."""
        path = workdir / "metrics.jsonl"
        self._writes = writes
        if writes:
            _cut(path, start)
            self._file = path.open("a")
            self._board = tensorboardX.SummaryWriter(str(workdir), purge_step=start + 1)
        self._start, self._steps = start, steps
        self._log_every, self._tokens_per_step = log_every, tokens_per_step
        self._console = rich.console.Console()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.completed}/{task.total}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.description}"),
            console=self._console,
            disable=not (self._console.is_terminal and writes),
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=start)
        self._began = self._first = self._last = time.perf_counter()

    def __enter__(self) -> "Reporter":
        self._bar.start()
        self._began = self._first = self._last = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()
        if self._writes:
            self._board.close()
            self._file.close()

    def report(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Waits for the metrics of the update that made `step` and writes them down.

        Raises:
          ValueError: one of them is not finite.
        """
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        values["tokens_per_second"] = self._tokens_per_step / (now - self._last)
        self._last = now
        if step == self._start + 1:
            self._first = now
        for name in ("loss", "grad_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                raise ValueError(
                    f"{name} is {values[name]} at step {step}; the last checkpoint is kept; a lower "
                    f"optimizer.learning_rate, optimizer.clip_norm or more optimizer.warmup_steps may help"
                )
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if step % self._log_every == 0 or step == self._steps:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._show(step, values["loss"], now)

    def _show(self, step: int, loss: float, now: float) -> None:
        # The first update, which is compiled first, says nothing about the others.
        since = step - self._start - 1
        seconds = (now - self._first) / since if since else now - self._began
        left = _clock(seconds * (self._steps - step))
        text = f"loss {loss:.4f}  {self._tokens_per_step / seconds:,.0f} tokens/s  {left} left"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, description=text)
        else:
            print(f"step {step}/{self._steps}  {text}", flush=True)


def _cut(path: pathlib.Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if _step(line) <= last_step]
    draft = path.with_suffix(".jsonl.tmp")
    draft.write_text("".join(f"{line}\n" for line in kept))
    draft.replace(path)


def _step(line: str) -> float:
    # A killed run can leave half a line, which belongs to a step after the last checkpoint.
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return math.inf


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
