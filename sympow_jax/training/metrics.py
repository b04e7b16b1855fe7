"""Writes training metrics to the workdir, the terminal and, optionally, Weights & Biases."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping

import jax
import rich.console
import rich.progress

from sympow_jax import config, tasks
from sympow_jax.tasks import flops
from sympow_jax.training import profile, writers

__all__ = ["Reporter", "check_settings"]

# The terminal shows the wait for data if it is at least this fraction of the time.
_SHOWN_WAIT = 0.03


def check_settings(settings: config.Config) -> None:
    """Raises ValueError, before anything is compiled, if a requested writer is not installed."""
    if settings.training.wandb_project is not None:
        writers.require_wandb()


class Reporter:
    """Context manager that reports every update.

    `metrics.jsonl` gets one object per step; that of a skipped update lacks what is not finite. The terminal,
    TensorBoard and Weights & Biases get every `log_every`-th step, those with held-out metrics, and the last. A
    terminal shows a progress bar; other outputs get plain lines. To the metrics of the update are added:

    * those of a batch of held-out rows, where there are any, with `heldout_` before their names.
    * step_seconds: time since the metrics of the previous step were available. It includes saves, compilation and
      everything else in the loop. tokens_per_second is derived from it.
    * data_wait_seconds: time for which the loop waited until this step's batch was read and sent to the devices. The
      devices may still have computed the previous step meanwhile.
    * model_flops_per_second, for all devices together (`flops.model_flops_per_token`), and mfu, its fraction of the
      devices' peak (`flops.peak_flops`). mfu is absent if a peak is unknown.
    * memory_bytes and peak_memory_bytes: memory in use, and its maximum so far, each of the local device with the
      most. They are absent if devices do not report them. The peak is the allocator's, since the start of the process.

    The steps `training.profile_steps` are traced into the workdir's folder `profile`.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        settings: config.Config,
        *,
        start: int,
        devices: Iterable[jax.Device],
        writes: bool = True,
    ):
        """Continues the reports in `workdir` after step `start`, and deletes the reports of later steps.

        Args:
            workdir: folder of the run.
            settings: settings of the run.
            start: number of updates done.
            devices: devices of all processes.
            writes: whether this process writes. Only one does; the others wait for metrics and raise the same errors.

        Raises:
            ValueError: Weights & Biases is requested, but is not installed or refuses the run.
        """
        training, devices = settings.training, list(devices)
        self._max_skips, self._task = training.max_skips, tasks.make(settings)
        self._start, self._steps, self._log_every = start, training.steps, training.log_every
        self._tokens_per_step = settings.data.batch_tokens
        self._flops_per_step = self._tokens_per_step * self._task.flops_per_token()
        peaks = [peak for device in devices if (peak := flops.peak_flops(device)) is not None]
        self._peak_flops = sum(peaks) if len(peaks) == len(devices) else None
        self._local_devices = [device for device in devices if device.process_index == jax.process_index()]
        self._waits: dict[int, float] = {}
        self._shown_wait = 0.0
        self._held_out = ""

        self._writes = writes
        self._each: list[writers.Writer] = []
        self._every: list[writers.Writer] = []
        if writes:
            self._each = [writers.JsonLines(workdir / "metrics.jsonl", start=start)]
            self._every = [writers.TensorBoard(workdir, start=start)]
            if training.wandb_project is not None:
                flat = dataclasses.asdict(settings)
                self._every.append(writers.Wandb(training.wandb_project, workdir, flat))
        self._trace = profile.StepTrace(
            workdir / "profile", training.profile_steps if writes else (), start=start
        )
        self._console = rich.console.Console()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.completed}/{task.total}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.description}"),
            console=self._console,
            disable=not (self._console.is_terminal and writes),
        )
        self._shown_task = self._bar.add_task("compiling", total=self._steps, completed=start)
        self._began = self._first = self._last = self._shown = time.perf_counter()

    def __enter__(self) -> "Reporter":
        self._bar.start()
        self._began = self._first = self._last = self._shown = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._trace.stop()
        self._bar.stop()
        for writer in (*self._each, *self._every):
            writer.close(failed=kind is not None)

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Measures the wait for the batch of `step`, and starts the trace if `step` is its first."""
        self._trace.before(step)
        began = time.perf_counter()
        yield
        self._waits[step] = time.perf_counter() - began
        self._shown_wait += self._waits[step]

    def report(
        self, step: int, metrics: Mapping[str, jax.Array], held_out: Mapping[str, jax.Array] | None = None
    ) -> None:
        """Waits for the metrics of update `step` and writes them.

        Args:
            step: number of updates done.
            metrics: metrics of the update.
            held_out: metrics of held-out rows after it; None for none.

        Raises:
            ValueError: one of loss, grad_norm and parameter_norm is not finite, and the update was not skipped; or
                `training.max_skips` updates in a row were.
        """
        values = {name: float(value) for name, value in metrics.items()}
        rows = {name: float(value) for name, value in (held_out or {}).items()}
        values |= {f"heldout_{name}": value for name, value in rows.items()}
        now = time.perf_counter()
        self._trace.after(step)
        seconds, self._last = now - self._last, now
        if step == self._start + 1:
            self._first = now
        self._check(step, values)
        shown = values["loss"]
        if values.get("skipped_in_a_row"):
            # JSON has no number that is not finite.
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        values |= {"step_seconds": seconds, **self._rates(seconds), **self._memory()}
        values["data_wait_seconds"] = self._waits.pop(step)
        if not self._writes:
            return
        for writer in self._each:
            writer.write(step, values)
        if step % self._log_every == 0 or step == self._steps or rows:
            for writer in self._every:
                writer.write(step, values)
            self._show(step, shown, rows, now)
        if step == self._steps and (line := self._task.last_line(values)) is not None:
            print(line, flush=True)

    def _check(self, step: int, values: Mapping[str, float]) -> None:
        """Raises ValueError if the run cannot continue after an update with these metrics."""
        remedy = (
            "the last checkpoint is kept; a lower optimizer.learning_rate, optimizer.clip_norm or more "
            "optimizer.warmup_steps may help"
        )
        skipped = int(values.get("skipped_in_a_row", 0))
        if skipped >= self._max_skips:
            raise ValueError(
                f"the last {skipped} updates up to step {step} were skipped, this one with loss {values['loss']} and "
                f"grad_norm {values['grad_norm']}; {remedy}"
            )
        for name in ("parameter_norm",) if skipped else ("loss", "grad_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                raise ValueError(f"{name} is {values[name]} at step {step}; {remedy}")

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts by name, after update `step`, to the writers that have texts."""
        for writer in self._every:
            writer.write_texts(step, texts)

    def _rates(self, seconds: float) -> dict[str, float]:
        """Returns throughput metrics for a step that takes `seconds`."""
        per_second = self._flops_per_step / seconds
        rates = {
            "tokens_per_second": self._tokens_per_step / seconds,
            "model_flops_per_second": per_second,
        }
        return rates if self._peak_flops is None else rates | {"mfu": per_second / self._peak_flops}

    def _memory(self) -> dict[str, float]:
        stats = [found for device in self._local_devices if (found := device.memory_stats())]
        names = {"memory_bytes": "bytes_in_use", "peak_memory_bytes": "peak_bytes_in_use"}
        return {
            name: max(found[key] for found in stats)
            for name, key in names.items()
            if stats and all(key in found for found in stats)
        }

    def _show(self, step: int, loss: float, held_out: Mapping[str, float], now: float) -> None:
        # The first update includes compilation, so it is excluded from the average.
        since = step - self._start - 1
        seconds = (now - self._first) / since if since else now - self._began
        rates = self._rates(seconds)
        parts = [f"loss {loss:.4f}"]
        if held_out:
            shown = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in held_out.items()]
            self._held_out = f"held-out {', '.join(shown)}"
        if held_out or (self._console.is_terminal and self._held_out):
            parts.append(self._held_out)
        parts.append(f"{rates['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in rates:
            parts.append(f"{rates['mfu']:.1%} MFU")
        waited = self._shown_wait / (now - self._shown)
        if waited >= _SHOWN_WAIT:
            parts.append(f"{waited:.0%} waiting for data")
        self._shown, self._shown_wait = now, 0.0
        text = "  ".join([*parts, f"{_clock(seconds * (self._steps - step))} left"])
        if self._console.is_terminal:
            self._bar.update(self._shown_task, completed=step, description=text)
        else:
            print(f"step {step}/{self._steps}  {text}", flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
