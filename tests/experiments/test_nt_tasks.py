"""Tests of the NT tasks experiment: the paper's model, its training, and the command's output."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import nt_tasks
from sympow_jax import ops

TINY = {
    "tasks": ("NT",),
    "base": 3,
    "delay": 1,
    "context": 4,
    "weights": "shared",
    "attentions": ("expressive",),
    "epochs": 3,
    "test_series": 100,
    "evaluations": 2,
}


def model(**changes):
    return nt_tasks.Model(
        **{"attention": "expressive", "base": 4, "context": 8, "weights": "shared"} | changes
    )


def test_parameters_are_the_papers():
    """The paper has 802 for N = 2 and 16 positions, and "about 4e5" for N = 16 and 128."""
    assert model(base=2, context=16, weights="position").parameters() == 802
    assert 3.9e5 < model(base=16, context=128, weights="position").parameters() < 4.1e5


@pytest.mark.parametrize(
    ("attention", "op"), [("expressive", ops.expressive_attention), ("softmax", ops.softmax_attention)]
)
def test_attention_is_that_of_the_op(attention, op):
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.standard_normal((9, 5)), jnp.float32) for _ in range(3))
    weights = nt_tasks.attention_weights(attention, query @ key.T)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    expected = op(*(x[None, :, None] for x in (query, key, value)), scale=1.0)[0, :, 0]
    np.testing.assert_allclose(weights @ value, expected, rtol=1e-4, atol=1e-5)


def test_weights_of_positions_that_agree_are_shared_ones():
    shared, own = model(), model(weights="position")
    parameters = shared.initial(jax.random.key(0))
    spread = {
        name: jnp.broadcast_to(parameters[name], shape.shape)
        for name, shape in jax.eval_shape(own.initial, jax.random.key(0)).items()
    }
    symbols = jnp.array([0, 3, 2, 2, 1, 0, 3, 1])
    np.testing.assert_allclose(own.outputs(spread, symbols), shared.outputs(parameters, symbols), rtol=1e-5)


def trained(**changes):
    return list(nt_tasks.train(nt_tasks.Setting(**TINY | changes)))


def test_many_runs_at_once_are_single_ones():
    """A run gives the same result in a group as by itself, and differs from the other runs of the group."""
    both, alone = trained(runs=2), trained(runs=1)
    assert [progress.epoch for progress in both] == [2, 3]
    for many, one in zip(both, alone, strict=True):
        np.testing.assert_allclose(many.loss["expressive"][:1], one.loss["expressive"], rtol=1e-5)
        np.testing.assert_allclose(many.greedy["expressive"][:1], one.greedy["expressive"], rtol=1e-5)
    assert both[-1].loss["expressive"][0] != both[-1].loss["expressive"][1]


def test_a_lower_rate_after_so_many_epochs():
    setting = nt_tasks.Setting(**TINY | {"runs": 1, "drop_after": 2})
    rates = [float(nt_tasks.learning_rate(setting, epoch)) for epoch in (0, 1, 2, 3)]
    np.testing.assert_allclose(rates, [0.02, 0.02, 0.005, 0.005])


def test_the_command(tmp_path, capsys):
    flags = [
        "--base=2",
        "--delay=1",
        "--context=6",
        "--runs=3",
        "--epochs=60",
        "--test_series=100",
        "--evaluations=2",
    ]
    arguments = [*flags, "--task=NT,NT-R", "--weights=position", f"--out={tmp_path}"]
    assert nt_tasks.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "N2T1 NT-R" in printed
    assert "epoch 60 of 60" in printed
    with (tmp_path / "nt.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["attention"], row["task"]) for row in rows} == {
        (attention, task) for attention in ("expressive", "softmax") for task in ("NT", "NT-R")
    }
    assert rows[-1]["epoch"] == "60"
    assert float(rows[-1]["loss"]) < 0.5 * float(rows[0]["loss"])
    (summary,) = json.loads((tmp_path / "nt.json").read_text())
    assert summary["cycles"]["NT"] == {"3": 1, "1": 1}
    accuracies = summary["results"]["expressive"]["greedy"]["NT"]
    assert len(accuracies) == 3
    assert np.mean(accuracies) == pytest.approx(float(rows[-4]["greedy_mean"]), abs=1e-3)
    assert (tmp_path / "nt.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("figure", "34567")
@pytest.mark.parametrize("scale", ["toy", "paper"])
def test_figures(figure, scale):
    settings = nt_tasks.settings([f"--figure={figure}", f"--scale={scale}"])[0]
    found = {(s.tasks, f"N{s.base}T{s.delay}") for s in settings}
    expected = {
        "3": (("NT",), "N16T2"),
        "4": (("NT",), "N2T5"),
        "5": (("NT",), "N16T5"),
        "6": (("NT", "NT-S"), "N16T2"),
        "7": (("NT-R",), "N16T2"),
    }
    assert found == {expected[figure]}
    if scale == "paper":
        assert {s.runs for s in settings} == {16}
        contexts = {"3": [32, 52, 56], "4": [16], "5": [128], "6": [32], "7": [64, 128]}
        assert sorted({s.context for s in settings}) == contexts[figure]
    (changed, *_) = nt_tasks.settings([f"--figure={figure}", "--runs=5"])[0]
    assert changed.runs == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base=1"], "base is 1; it must be at least 2"),
        (["--delay=0"], "delay is 0; it must be at least 1"),
        (["--task=NT,XOR"], "task is 'XOR'; it must be one of NT, NT-S, NT-R"),
        (["--task=NT,NT"], "task is 'NT,NT'; name each only once"),
        (["--attention=linear"], "attention is 'linear'; it must be one of expressive, softmax"),
        (["--weights=own"], "weights is 'own'; it must be one of shared, position"),
        (["--context=2"], "context is 2; with delay 2"),
        (["--context=a"], "context is 'a'; use numbers such as 32"),
        (["--runs=0"], "runs is 0; it must be at least 1"),
        (["--test_series=101"], "test_series is 101; it must be a multiple of the 100"),
        (["--drop_after=-1"], "drop_after is -1"),
        (["--scale=toy"], "scale is given without a figure"),
        (["--figure=8"], "argument --figure: invalid choice: '8'"),
        (["--runs=many"], "argument --runs: invalid int value"),
        (["--epoch=3"], "unknown option '--epoch'; did you mean --epochs?"),
    ],
)
def test_wrong_flags_are_one_line(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        nt_tasks.main([*flags, f"--out={tmp_path}"])
    assert error.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_ctrl_c_is_one_line(tmp_path, capsys, monkeypatch):
    """The curves up to the interruption are written."""

    def interrupted(setting):
        accuracy = {name: np.full((setting.runs, 1), 0.5) for name in setting.attentions}
        yield nt_tasks.Progress(7, {name: x[:, 0] for name, x in accuracy.items()}, accuracy, accuracy)
        raise KeyboardInterrupt

    monkeypatch.setattr(nt_tasks, "train", interrupted)
    with pytest.raises(SystemExit) as error:
        nt_tasks.main([f"--out={tmp_path}"])
    assert error.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert ",7,16,0,0.5," in (tmp_path / "nt.csv").read_text()
