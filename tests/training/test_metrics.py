"""Tests of the metrics that a run writes."""

import dataclasses
import json
import pathlib
import time
import types

import jax.numpy as jnp
import pytest
from tensorboardX.event_file_writer import EventsWriter

from sympow_jax.tasks import flops
from sympow_jax.training import metrics, writers


def _scalars(loss: float = 1.0, **changes) -> dict[str, jnp.ndarray]:
    values = {
        "loss": loss,
        "grad_norm": 0.5,
        "parameter_norm": 2.0,
        "update_norm": 0.1,
        "learning_rate": 1e-3,
    }
    return {name: jnp.float32(value) for name, value in {**values, **changes}.items()}


def _device(kind="cpu", stats=None, process=0) -> types.SimpleNamespace:
    return types.SimpleNamespace(device_kind=kind, process_index=process, memory_stats=lambda: stats)


CPU = (_device(),)


@pytest.fixture
def report(tmp_path, with_training):
    """Reports the steps from `start` + 1 with the given losses."""

    def run(losses, *, start=0, steps=6, devices=CPU, wait=0.0, writes=True, **training) -> None:
        settings = with_training(steps=steps, **{"log_every": 4, **training})
        with metrics.Reporter(tmp_path, settings, start=start, devices=devices, writes=writes) as reporter:
            for number, loss in enumerate(losses, start + 1):
                with reporter.reading(number):
                    time.sleep(wait)
                reporter.report(number, _scalars(loss))

    return run


def _lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_object_a_step(tmp_path, report, capsys):
    report(range(1, 7))
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # A CPU has no known peak and does not say what memory is in use.
    assert set(lines[0]) == {"step", *_scalars()} | {
        "step_seconds",
        "tokens_per_second",
        "model_flops_per_second",
        "data_wait_seconds",
    }
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["4/6", "6/6"]
    assert "loss 6.0000" in printed[-1]
    assert "tokens/s" in printed[-1]
    assert "0:00 left" in printed[-1]
    assert "MFU" not in printed[-1]
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_rates_are_of_the_step(tmp_path, report, settings, capsys):
    kinds = [_device("NVIDIA H100 80GB HBM3"), _device("NVIDIA H200", process=1)]
    report([1] * 4, devices=kinds)
    a_token = flops.model_flops_per_token(settings.model, settings.data.context_length)
    for line in _lines(tmp_path):
        assert line["tokens_per_second"] == pytest.approx(64 / line["step_seconds"])
        assert line["model_flops_per_second"] == pytest.approx(a_token * line["tokens_per_second"])
        assert line["mfu"] == pytest.approx(line["model_flops_per_second"] / (2 * 989e12))
    assert "% MFU" in capsys.readouterr().out


def test_one_unknown_peak_leaves_mfu_out(tmp_path, report):
    report([1], devices=[_device("NVIDIA H200"), _device()])
    assert "mfu" not in _lines(tmp_path)[0]


def test_the_wait_for_data(tmp_path, report, capsys):
    report([1] * 4, wait=0.02)
    for line in _lines(tmp_path):
        assert 0.02 <= line["data_wait_seconds"] <= line["step_seconds"]
    assert "% waiting for data" in capsys.readouterr().out


def test_a_short_wait_is_not_shown(report, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "_SHOWN_WAIT", 1.0)
    report([1] * 4)
    assert "waiting" not in capsys.readouterr().out


def test_memory_of_the_fullest_device_of_this_process(tmp_path, report):
    devices = [
        _device(stats={"bytes_in_use": 5, "peak_bytes_in_use": 7}),
        _device(stats={"bytes_in_use": 4, "peak_bytes_in_use": 9}),
        _device(stats={"bytes_in_use": 100, "peak_bytes_in_use": 100}, process=1),
    ]
    report([1], devices=devices)
    (line,) = _lines(tmp_path)
    assert (line["memory_bytes"], line["peak_memory_bytes"]) == (5, 9)


def test_tensorboard_has_the_same_metrics(tmp_path, report, monkeypatch):
    seen = {}

    def record(self, event):
        seen.update({(value.tag, event.step): value.simple_value for value in event.summary.value})

    monkeypatch.setattr(EventsWriter, "write_event", record)
    report(range(1, 7))
    for line in _lines(tmp_path):
        step = line.pop("step")
        for name, value in line.items():
            if step in (4, 6):
                assert seen.pop((name, step)) == pytest.approx(value)
    assert not seen


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
    assert [(line["step"], line["loss"]) for line in _lines(tmp_path)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]


def test_held_out_metrics_are_written_and_printed_at_their_step(tmp_path, with_training, capsys):
    settings = with_training(steps=3, log_every=3)
    means = {"near_accuracy": 0.25, "near_loss": 1.5, "far_accuracy": 0.75, "far_loss": 0.5}
    with metrics.Reporter(tmp_path, settings, start=0, devices=CPU) as reporter:
        for number, held_out in enumerate([means, {}, {}], 1):
            with reporter.reading(number):
                pass
            reporter.report(number, _scalars(), held_out)
    written = [{k: v for k, v in line.items() if k.startswith("heldout_")} for line in _lines(tmp_path)]
    assert written == [{f"heldout_{name}": value for name, value in means.items()}, {}, {}]
    shown, last = (line for line in capsys.readouterr().out.splitlines() if line.startswith("step "))
    assert (
        "  held-out near accuracy 0.2500, near loss 1.5000, far accuracy 0.7500, far loss 0.5000  " in shown
    )
    assert last.startswith("step 3/3")
    assert "held-out" not in last


@pytest.mark.parametrize("name", ["loss", "grad_norm", "parameter_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error(tmp_path, settings, name, value):
    with metrics.Reporter(tmp_path, settings, start=0, devices=[_device()]) as reporter:
        for number, changes in enumerate([{}, {name: value}], 1):
            with reporter.reading(number):
                pass
            if not changes:
                reporter.report(number, _scalars())
                continue
            with pytest.raises(ValueError, match=f"{name} is {value} at step 2"):
                reporter.report(number, _scalars(**changes))
    assert [line["step"] for line in _lines(tmp_path)] == [1]


@pytest.mark.parametrize("steps", [(2,), (0, 2), (3, 2), (1, 2, 3)])
def test_profile_steps_are_a_first_and_a_last(settings, steps):
    with pytest.raises(ValueError, match=r"training.profile_steps is .* such as 11,13, or empty"):
        dataclasses.replace(settings.training, profile_steps=steps)
