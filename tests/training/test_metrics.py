"""Tests of the metrics that a run writes."""

import dataclasses
import pathlib
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.event_file_writer import EventsWriter

from sympow_jax.tasks import flops
from sympow_jax.training import metrics, writers
from tests import mistakes
from tests.training import small


def _scalars(loss: float = 1.0, **changes) -> dict[str, jnp.ndarray]:
    values = {"loss": loss, "learning_rate": 1e-3}
    values |= {"grad_norm": 0.5, "parameter_norm": 2.0, "update_norm": 0.1}
    return {name: jnp.float32(value) for name, value in (values | changes).items()}


def _device(kind="cpu", stats=None, process=0) -> types.SimpleNamespace:
    return types.SimpleNamespace(device_kind=kind, process_index=process, memory_stats=lambda: stats)


CPU = (_device(),)


@pytest.fixture
def report(tmp_path, with_training):
    def run(losses, *, start=0, steps=6, devices=CPU, wait=0.0, writes=True, held_out=(), **training) -> None:
        settings = with_training(steps=steps, **{"log_every": 4, **training})
        rows = dict(enumerate(held_out, start + 1))
        with metrics.Reporter(tmp_path, settings, start=start, devices=devices, writes=writes) as reporter:
            for number, loss in enumerate(losses, start + 1):
                with reporter.reading(number):
                    time.sleep(wait)
                scalars = loss if isinstance(loss, dict) else _scalars(loss)
                reporter.report(number, scalars, rows.get(number))

    return run


def test_an_object_a_step_and_the_same_in_tensorboard(tmp_path, report, capsys, monkeypatch):
    seen, write = {}, EventsWriter.write_event

    def record(self, event):
        seen.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
        write(self, event)

    monkeypatch.setattr(EventsWriter, "write_event", record)
    report(range(1, 7))
    lines = small.lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # A CPU has no known peak and does not say what memory is in use.
    timed = {"step_seconds", "tokens_per_second", "model_flops_per_second", "data_wait_seconds"}
    assert set(lines[0]) == {"step", *_scalars()} | timed
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["4/6", "6/6"]
    assert "loss 6.0000" in printed[-1]
    assert "tokens/s" in printed[-1]
    assert "0:00 left" in printed[-1]
    assert "MFU" not in printed[-1]
    assert list(tmp_path.glob("events.out.tfevents.*"))
    shown = {(name, line["step"]): x for line in lines if line["step"] in (4, 6) for name, x in line.items()}
    assert seen == pytest.approx({key: x for key, x in shown.items() if key[0] != "step"})


def test_rates_are_of_the_step(tmp_path, report, settings, capsys):
    kinds = [_device("NVIDIA H100 80GB HBM3"), _device("NVIDIA H200", process=1)]
    report([1] * 4, devices=kinds)
    a_token = flops.model_flops_per_token(settings.model, settings.data.context_length)
    for line in small.lines(tmp_path):
        assert line["tokens_per_second"] == pytest.approx(64 / line["step_seconds"])
        assert line["model_flops_per_second"] == pytest.approx(a_token * line["tokens_per_second"])
        assert line["mfu"] == pytest.approx(line["model_flops_per_second"] / (2 * 989e12))
    assert "% MFU" in capsys.readouterr().out
    report([1], devices=[_device("NVIDIA H200"), _device()])  # of an unknown peak
    assert "mfu" not in small.lines(tmp_path)[0]


def test_the_wait_for_data_is_shown_if_it_is_long(tmp_path, report, capsys, monkeypatch):
    report([1] * 4, wait=0.02)
    for line in small.lines(tmp_path):
        assert 0.02 <= line["data_wait_seconds"] <= line["step_seconds"]
    assert "% waiting for data" in capsys.readouterr().out
    monkeypatch.setattr(metrics, "_SHOWN_WAIT", 1.0)
    report([1] * 4)
    assert "waiting" not in capsys.readouterr().out


def test_memory_of_the_fullest_device_of_this_process(tmp_path, report):
    stats = [(5, 7, 0), (4, 9, 0), (100, 100, 1)]  # in use, peak, process
    devices = [
        _device(stats={"bytes_in_use": used, "peak_bytes_in_use": peak}, process=process)
        for used, peak, process in stats
    ]
    report([1], devices=devices)
    (line,) = small.lines(tmp_path)
    assert (line["memory_bytes"], line["peak_memory_bytes"]) == (5, 9)


def test_an_event_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    board = writers.TensorBoard(tmp_path, start=0)
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(time, "time", lambda: -1e9)  # the clock is set back
    board.write(1, {"loss": 2.0})
    monkeypatch.setattr(writers, "_FLUSH_SECONDS", 0)
    before = path.stat().st_size
    board.write(2, {"loss": 2.0})
    assert path.stat().st_size > before
    with pathlib.Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(board._file._py_recordio_writer, "_writer", full)
        for step in range(3, 20):
            with pytest.raises(OSError, match="No space left"):
                board.write(step, {"loss": 2.0})


def test_only_one_process_writes(tmp_path, report, capsys):
    report(range(1, 7), writes=False, profile_steps=(1, 2))
    assert not list(tmp_path.glob("*.jsonl"))
    assert not list(tmp_path.glob("events*"))
    assert not (tmp_path / "profile").exists()
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="loss is nan at step 1"):
        report([float("nan")], writes=False)


def test_steps_after_the_restored_one_are_cut(tmp_path, report):
    report([1] * 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'"no object"\n{{}}\n{{"step": null}}\n{"[" * 1000}\n')  # by another program
        file.write('{"step": 6, "lo')  # killed while writing
    report([2] * 3, start=3)
    assert list(small.losses(tmp_path).items()) == [*zip((1, 2, 3), (1, 1, 1)), *zip((4, 5, 6), (2, 2, 2))]


def test_held_out_metrics_are_written_and_printed_at_their_step(tmp_path, report, capsys):
    means = {"near_accuracy": 0.25, "near_loss": 1.5, "far_accuracy": 0.75, "far_loss": 0.5}
    report([1] * 3, steps=3, log_every=3, held_out=[means])
    written = [{k: v for k, v in line.items() if k.startswith("heldout_")} for line in small.lines(tmp_path)]
    assert written == [{f"heldout_{name}": value for name, value in means.items()}, {}, {}]
    shown, last = (line for line in capsys.readouterr().out.splitlines() if line.startswith("step "))
    assert "held-out near accuracy 0.2500, near loss 1.5000, far accuracy 0.7500, far loss 0.5000" in shown
    assert last.startswith("step 3/3")
    assert "held-out" not in last


@pytest.mark.parametrize(
    ("name", "value"), [("loss", np.nan), ("loss", np.inf), ("grad_norm", np.inf), ("parameter_norm", np.nan)]
)
def test_what_is_not_finite_is_an_error(tmp_path, report, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value} at step 2"):
        report([1, _scalars(**{name: value})])
    assert [line["step"] for line in small.lines(tmp_path)] == [1]


def test_the_run_ends_after_several_skipped_updates_in_a_row_and_names_the_step(tmp_path, report):
    steps = []
    for number, in_a_row in enumerate([1, 2, 0, 1, 2, 3], 1):
        skipped = {"loss": np.nan, "grad_norm": np.inf} if in_a_row else {}
        steps.append(_scalars(**skipped, skipped_updates=number, skipped_in_a_row=in_a_row))
    with mistakes.refused("the last 3 updates up to step 6 were skipped"):
        report(steps, skip_nonfinite=True, max_skips=3)
    lines = small.lines(tmp_path)
    assert ["loss" in line for line in lines] == [False, False, True, False, False]
    assert [line["skipped_updates"] for line in lines] == [1, 2, 3, 4, 5]


def test_profile_steps_are_a_first_and_a_last(settings):
    for steps in ((2,), (0, 2), (3, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"training.profile_steps is .* such as 11,13, or empty"):
            dataclasses.replace(settings.training, profile_steps=steps)


def test_a_trace_is_from_the_first_to_the_last_of_its_steps(tmp_path, monkeypatch):
    calls: list = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(folder.name))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    for steps, start, expected in (
        ((), 0, [1, 2, 3, 4, 5]),
        ((2, 3), 0, [1, "profile", 2, 3, 4, "stop", 5]),
        ((2, 2), 0, [1, "profile", 2, 3, "stop", 4, 5]),
        ((4, 9), 0, [1, 2, 3, "profile", 4, 5, "stop"]),
        # A resumed run: the first of the steps to be traced, or all of them, are already done.
        ((2, 4), 2, ["profile", 3, 4, 5, "stop"]),
        ((1, 2), 2, [3, 4, 5]),
        ((7, 8), 0, [1, 2, 3, 4, 5]),
    ):
        calls.clear()
        trace = metrics.StepTrace(tmp_path / "profile", steps, start=start)
        # As in training, where a step's metrics arrive after the next one is dispatched.
        for number in range(start + 1, 6):
            trace.before(number)
            calls.append(number)
            if number > start + 1:
                trace.after(number - 1)
        trace.after(5)
        trace.stop()
        assert calls == expected
