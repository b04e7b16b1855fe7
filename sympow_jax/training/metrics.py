"""Writes training metrics to the workdir, the terminal and, optionally, Weights & Biases."""

import contextlib
import math
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import rich.console

from sympow_jax import config as config_lib
from sympow_jax import tasks
from sympow_jax.process import progress
from sympow_jax.tasks import flops
from sympow_jax.training import writers

# The terminal shows the wait for data if it is at least this fraction of the time.
_SHOWN_WAIT = 0.03


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
        config: config_lib.Config,
        *,
        start: int,
        devices: Iterable[jax.Device],
        writes: bool = True,
    ):
        """Continues the reports in `workdir` after step `start`, and deletes the reports of later steps.

        Args:
            workdir: folder of the run.
            config: config of the run.
            start: number of updates done.
            devices: devices of all processes.
            writes: whether this process writes. Only one does; the others wait for metrics and raise the same errors.

        Raises:
            ValueError: Weights & Biases refuses the run.
        """
        self._config, self._task, self._start = config, tasks.make(config), start
        devices = list(devices)
        self._local_devices = [x for x in devices if x.process_index == jax.process_index()]
        self._flops_per_token = self._task.flops_per_token()
        peaks = [flops.peak_flops(device) for device in devices]
        self._peak_flops = None if None in peaks else sum(filter(None, peaks))
        self._writers = writers.open_all(workdir, config, start=start) if writes else []
        self._trace = StepTrace(
            workdir / "profile", config.training.profile_steps if writes else (), start=start
        )
        console, steps = rich.console.Console(quiet=not writes), config.training.steps
        self._progress = progress.Progress(
            console, "step", steps, text="compiling", completed=start, is_log=True
        )
        self._waits: dict[int, float] = {}  # by step, until its metrics arrive, which is after the next wait
        self._wait_to_show = 0.0
        self._held_out = ""  # what the bar shows of the last held-out metrics

    def __enter__(self) -> "Reporter":
        self._progress.__enter__()
        # Times of the start, of the first update, of the last one, and of the last line on the terminal.
        self._began = self._first = self._last = self._shown = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._trace.stop()
        self._progress.__exit__()
        for writer in self._writers:
            writer.close(failed=kind is not None)

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Measures the wait for the batch of `step`, and starts the trace if `step` is its first."""
        self._trace.before(step)
        began = time.perf_counter()
        yield
        self._waits[step] = time.perf_counter() - began
        self._wait_to_show += self._waits[step]

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
        training = self._config.training
        values = {name: float(value) for name, value in metrics.items()}
        rows = {name: float(value) for name, value in (held_out or {}).items()}
        now = time.perf_counter()
        self._trace.after(step)
        seconds, self._last = now - self._last, now
        if step == self._start + 1:
            self._first = now

        # Before anything is written, because a run that ends here is resumed before this step.
        remedy = (
            "the last checkpoint is kept; a lower optimizer.learning_rate, optimizer.clip_norm or more "
            "optimizer.warmup_steps may help"
        )
        skipped = int(values.get("skipped_in_a_row", 0))
        if skipped >= training.max_skips:
            raise ValueError(
                f"the last {skipped} updates up to step {step} were skipped, this one with loss {values['loss']} and "
                f"grad_norm {values['grad_norm']}; {remedy}"
            )
        for name in ("parameter_norm",) if skipped else ("loss", "grad_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                raise ValueError(f"{name} is {values[name]} at step {step}; {remedy}")

        loss = values["loss"]
        values |= {f"heldout_{name}": value for name, value in rows.items()}
        if skipped:
            # JSON has no number that is not finite.
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        values |= {"step_seconds": seconds, **self._rates(seconds)}
        stats = [found for device in self._local_devices if (found := device.memory_stats())]
        for name, key in (("memory_bytes", "bytes_in_use"), ("peak_memory_bytes", "peak_bytes_in_use")):
            if stats and all(key in found for found in stats):
                values[name] = max(found[key] for found in stats)
        values["data_wait_seconds"] = self._waits.pop(step)
        if not self._writers:
            return
        is_logged = step % training.log_every == 0 or step == training.steps or bool(rows)
        for writer in self._writers:
            if is_logged or writer.every_step:
                writer.write(step, values)
        if is_logged:
            self._show(step, loss, rows, now)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts by name, after update `step`, to the writers that have texts."""
        for writer in self._writers:
            writer.write_texts(step, texts)

    def _rates(self, seconds: float) -> dict[str, float]:
        """Returns throughput metrics for a step that takes `seconds`."""
        tokens = self._config.data.batch_tokens / seconds
        per_second = tokens * self._flops_per_token
        rates = {"tokens_per_second": tokens, "model_flops_per_second": per_second}
        return rates if self._peak_flops is None else rates | {"mfu": per_second / self._peak_flops}

    def _show(self, step: int, loss: float, held_out: Mapping[str, float], now: float) -> None:
        """Shows a step on the terminal, with means over the steps since the first one."""
        # The first update includes compilation, so it is excluded from the average.
        since = step - self._start - 1
        seconds = (now - self._first) / since if since else now - self._began
        rates, steps = self._rates(seconds), self._config.training.steps
        parts = [f"loss {loss:.4f}"]
        if held_out:
            shown = self._task.shown(held_out).items()
            self._held_out = (
                f"held-out {', '.join(f'{name.replace("_", " ")} {value:.4f}' for name, value in shown)}"
            )
        if held_out or (self._progress.is_bar and self._held_out):
            parts.append(self._held_out)
        parts.append(f"{rates['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in rates:
            parts.append(f"{rates['mfu']:.1%} MFU")
        waited = self._wait_to_show / (now - self._shown)
        if waited >= _SHOWN_WAIT:
            parts.append(f"{waited:.0%} waiting for data")
        self._shown, self._wait_to_show = now, 0.0
        minutes, seconds = divmod(round(seconds * (steps - step)), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
        self._progress.show(step, "  ".join(parts))


class StepTrace:
    """Profiler trace, in `folder`, from the first to the last of `steps`, inclusive; none if `steps` is empty.

    Tracing does not synchronize. The trace also shows the end of the previous step, which may still run, and the
    beginning of the next. If the first step is at most `start`, which is already done, the trace begins after `start`.
    """

    def __init__(self, folder: pathlib.Path, steps: Sequence[int], *, start: int):
        first, self._last = steps or (0, 0)
        self._first = max(first, start + 1)
        self._folder = folder
        self._running = False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which is about to be dispatched, is its first."""
        if step == self._first and step <= self._last:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int) -> None:
        """Stops and writes the trace if `step`, which is done, is its last."""
        if step >= self._last:
            self.stop()

    def stop(self) -> None:
        """Stops and writes the trace if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
