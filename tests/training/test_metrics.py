"""What a run writes down about its steps."""

import json

import jax.numpy as jnp
import pytest

from sympow_jax.training import metrics


def _scalars(loss: float = 1.0, **changes) -> dict[str, jnp.ndarray]:
    values = {"loss": loss, "grad_norm": 0.5, "parameter_norm": 2.0, "learning_rate": 1e-3, **changes}
    return {name: jnp.float32(value) for name, value in values.items()}


def _reporter(folder, start=0, steps=6) -> metrics.Reporter:
    return metrics.Reporter(folder, start=start, steps=steps, log_every=4, tokens_per_step=100)


def _lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_object_a_step(tmp_path, capsys):
    with _reporter(tmp_path) as reporter:
        for number in range(1, 7):
            reporter.report(number, _scalars(loss=number))
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert set(lines[0]) >= {"learning_rate", "grad_norm"}
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["4/6", "6/6"]
    assert "loss 6.0000" in printed[-1]
    assert "tokens/s" in printed[-1]
    assert "0:00 left" in printed[-1]
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_steps_after_the_restored_one_are_cut(tmp_path):
    with _reporter(tmp_path) as reporter:
        for number in range(1, 6):
            reporter.report(number, _scalars(loss=1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    with _reporter(tmp_path, start=3) as reporter:
        for number in range(4, 7):
            reporter.report(number, _scalars(loss=2))
    lines = _lines(tmp_path)
    assert [(line["step"], line["loss"]) for line in lines] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "parameter_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error(tmp_path, name, value):
    with _reporter(tmp_path) as reporter:
        reporter.report(1, _scalars())
        with pytest.raises(ValueError, match=f"{name} is {value} at step 2"):
            reporter.report(2, _scalars(**{name: value}))
    assert [line["step"] for line in _lines(tmp_path)] == [1]
