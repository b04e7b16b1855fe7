"""Tests of the NT tasks experiment: series and their cycles, the paper's formulas, training, and the command."""

import collections
import csv
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import nt_tasks

pytestmark = pytest.mark.robust

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
TINY = {"base": 3, "delay": 1, "context": 6, "epochs": 4}


def series(task, base, first, length):
    x, delay = list(first), len(first) - 1
    while len(x) < length:
        delayed, summed = x[-delay] + x[-delay - 1], sum(x[-delay - 1 :])
        rare = task == "NT-R" and x[-delay - 1] == 0
        x.append((summed if task == "NT-S" or rare else delayed) % base)
    return x


@pytest.mark.parametrize(("task", "base", "delay"), [("NT", 3, 4), ("NT-S", 16, 5), ("NT-R", 3, 4)])
def test_series(task, base, delay):
    setting = nt_tasks.Setting(base=base, delay=delay, context=30)
    rows = nt_tasks.draw(setting, jax.random.key(0), (4, 4), (task,), 10)
    for symbols in rows.reshape(-1, 40).tolist():
        assert symbols == series(task, base, symbols[: delay + 1], 40)


def test_mixtures_have_every_task():
    setting = nt_tasks.Setting(base=5, context=6)
    rows = nt_tasks.draw(setting, jax.random.key(1), (64,), nt_tasks.TASKS, 20)
    possible = [
        {task for task in nt_tasks.TASKS if symbols == series(task, 5, symbols[:3], 26)}
        for symbols in rows.tolist()
    ]
    assert all(possible)
    counts = collections.Counter(x for tasks in possible if len(tasks) == 1 for x in tasks)
    assert min(counts[task] for task in nt_tasks.TASKS) > 8


def cycles(task, base, delay):
    """Counts the cycles of each length that the series of a task consist of."""
    states = np.array(list(itertools.product(range(base), repeat=delay + 1)))
    after = nt_tasks.continue_series(jnp.array(states), (task,), jnp.zeros(len(states), int), base, delay + 2)
    following = dict(zip(map(tuple, states.tolist()), map(tuple, after[:, 1:].tolist()), strict=True))
    lengths = collections.Counter()
    while following:
        start, state = next(iter(following.items()))
        length = 1
        while state != start:
            state, length = following.pop(state), length + 1
        del following[start]
        lengths[length] += 1
    return lengths


def test_cycles():
    """Equations 6 and 7, and the mean lengths of section 5, "Mixture of tasks"."""
    assert cycles("NT", 16, 3) == {120: 512, 60: 64, 30: 8, 15: 1, 1: 1}
    assert (found := cycles("NT", 16, 2)) == {56: 64, 28: 16, 14: 4, 7: 1, 1: 1}
    assert cycles("NT", 2, 5) == {63: 1, 1: 1}
    assert round(16**3 / found.total(), 1) == 47.6
    assert round(16**3 / cycles("NT-S", 16, 2).total(), 1) == 23.8


def reference(setting, parameters, symbols):
    """Computes the model of section 4 with the weights of equations 1 and 2, by loops over positions."""

    def normalized(x, bias):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) + bias

    x = np.eye(setting.base)[symbols]
    for layer in range(setting.layers):
        attention, hidden, output, bias = (
            parameters[name][layer] for name in ("attention", "hidden", "output", "norm_bias")
        )
        query, key, value = np.split(
            np.stack([normalized(x[t], bias[t]) @ attention[t] for t in range(setting.context)]), 3, axis=1
        )
        attended = np.zeros_like(x)
        for channels in np.split(np.arange(setting.base), setting.heads):
            for m in range(setting.context):
                z = np.array([query[m, channels] @ key[k, channels] for k in range(m + 1)])
                softmax = setting.attention == "softmax"
                a = np.exp(setting.beta * z) if softmax else z**2 / (1 + z**2)
                attended[m, channels] = a / a.sum() @ value[: m + 1, channels]
        x = x + attended
        for t in range(setting.context):
            x[t] += np.tanh(normalized(x[t], bias[t]) @ hidden[t]) @ output[t]
    return x.ravel() @ parameters["readout"] + parameters["readout_bias"]


@pytest.mark.parametrize(
    ("attention", "heads", "layers", "beta"), [("expressive", 1, 1, 1.0), ("softmax", 2, 2, 0.5)]
)
def test_outputs_and_loss_are_the_papers_formulas(attention, heads, layers, beta):
    """In float64, with the loss summed over the outputs and averaged over the predictions of a series."""
    with jax.enable_x64(True):
        setting = nt_tasks.Setting(
            base=4, context=5, heads=heads, layers=layers, beta=beta, attention=attention, initial="normal"
        )
        random = np.random.default_rng(0)
        shapes = jax.eval_shape(lambda: nt_tasks.initial(setting, jax.random.key(0)))
        parameters = {name: random.standard_normal(x.shape) for name, x in shapes.items()}
        series = random.integers(4, size=8)
        squares = []
        for start in range(3):
            window, following = series[start : start + 5], series[start + 5]
            expected = reference(setting, parameters, window)
            outputs, weights = nt_tasks.forward(setting, jax.tree.map(jnp.asarray, parameters), window)
            np.testing.assert_allclose(outputs, expected, rtol=1e-11)
            np.testing.assert_allclose(weights[0].sum(-1), 1, rtol=1e-12)
            squares.append(np.square(expected - np.eye(4)[following]).sum())
        loss = nt_tasks.loss(setting, jax.tree.map(jnp.asarray, parameters), jnp.asarray(series))
        np.testing.assert_allclose(loss, np.mean(squares), rtol=1e-11)


def test_parameters_are_the_papers():
    """The paper has 802 for N = 2 and 16 positions, and "about 4e5" for N = 16 and 128."""

    def count(setting):
        shapes = jax.eval_shape(lambda: nt_tasks.initial(setting, jax.random.key(0)))
        return sum(x.size for x in jax.tree.leaves(shapes))

    assert count(nt_tasks.Setting(base=2, context=16)) == 802
    assert 3.9e5 < count(nt_tasks.Setting(context=128)) < 4.1e5


def test_initial_matrices():
    """All matrices of n inputs have `scale` / sqrt(n) except the readout, which has 1 / sqrt(n)."""
    for initial, scale in (("small", 0.1), ("normal", 1.0)):
        parameters = nt_tasks.initial(nt_tasks.Setting(initial=initial), jax.random.key(0))
        spread = {name: float(x.std() * np.sqrt(x.shape[-2])) for name, x in parameters.items() if x.ndim > 1}
        expected = {"attention": scale, "hidden": scale, "output": scale, "readout": 1, "norm_bias": 0}
        assert spread == pytest.approx(expected, rel=0.03)


def trained(tmp_path, seeds=(0,), name="run", **changes):
    setting = nt_tasks.Setting(**TINY | changes)
    return nt_tasks.train(setting, seeds, tmp_path / f"{name}.npz", points=2, series=25)


@pytest.mark.slow
def test_an_epoch_is_one_update_of_sgd_with_momentum(tmp_path):
    """Equals two updates by hand, the second at a quarter of the rate."""
    result = trained(tmp_path, epochs=2, drop_after=1)
    setting = nt_tasks.Setting(**TINY)
    parameters = nt_tasks.initial(setting, jax.random.key(0))
    velocity = jax.tree.map(jnp.zeros_like, parameters)
    for index, rate in enumerate((0.02, 0.005)):
        key = jax.random.fold_in(jax.random.key(0), index)
        series = nt_tasks.draw(setting, key, (), setting.tasks, 40)
        assert series.shape == (46,)
        gradient = jax.grad(lambda x, series=series: nt_tasks.loss(setting, x, series))(parameters)
        velocity = jax.tree.map(lambda v, g: 0.8 * v + g, velocity, gradient)
        parameters = jax.tree.map(lambda p, v, rate=rate: p - rate * v, parameters, velocity)
    for name, expected in parameters.items():
        np.testing.assert_allclose(result["weights"][name][0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_others(tmp_path):
    both, one = trained(tmp_path, (0, 3), "both"), trained(tmp_path, (3,), "one")
    for name, expected in one["weights"].items():
        np.testing.assert_allclose(both["weights"][name][1:], expected, rtol=1e-4, atol=1e-6)
    assert [run[1] for run in (point["greedy"] for point in both["curve"])] == [
        run[0] for run in (point["greedy"] for point in one["curve"])
    ]


def test_a_stopped_training_is_resumed(tmp_path, monkeypatch, capsys):
    whole, test = trained(tmp_path, name="whole"), nt_tasks._test

    def interrupt(*arguments):
        if arguments[-1] == 4:
            raise KeyboardInterrupt
        return test(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(nt_tasks, "_test", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path)
    capsys.readouterr()
    resumed = trained(tmp_path)
    assert "epoch 2 of 4" not in (printed := capsys.readouterr().out)
    assert "epoch 4 of 4" in printed
    assert resumed["curve"] == whole["curve"]


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    flags = ["--scale=tiny", "--variants=figure4,figure6", "--context=6", "--steps=60", f"--out={tmp_path}"]
    assert nt_tasks.main(["--base=2", "--delay=1", *flags]) == 0
    printed = capsys.readouterr().out
    assert "figure6: N2T1 + N2T1-S, 6, softmax, 60 epochs, seeds 0-1, 50 series" in printed
    folder = tmp_path / "nt_tasks"
    content = json.loads((folder / "nt_tasks.json").read_text())
    assert content["command"].startswith("python -m experiments.nt_tasks --base=2")
    assert set(content) >= {"git_revision", "git_changed", "versions", "settings"}
    rows = content["rows"]
    with (folder / "nt_tasks.csv").open() as file:
        assert [row["greedy"] for row in csv.DictReader(file)] == [str(row["greedy"]) for row in rows]
    assert {(row["attention"], row["task"]) for row in rows if row["figure"] == "figure6"} == {
        (attention, task) for attention in nt_tasks.MODELS for task in ("N2T1", "N2T1-S")
    }
    ends = [row for row in rows if row["solved"] is not None]
    assert {row["epoch"] for row in ends} == {60}
    first = [row for row in rows if row["epoch"] == min(row["epoch"] for row in rows)]
    assert all(end["loss"] < row["loss"] for end, row in zip(ends, first, strict=True))
    for name in ("nt_tasks.png", "nt_tasks_attention.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_claims_of_rank_are_beyond_two_standard_errors():
    """Softmax is below expressive attention, or both solve the task, and it is level with the readout on N16T2."""
    rows = json.loads((EXPERIMENTS / "results/nt_tasks/nt_tasks.json").read_text())["rows"]
    by = {
        (row["setting"], row["task"], row["attention"]): row
        for row in rows
        if row["solved"] is not None and row["figure"] != "robustness"
    }

    def above(setting, task, *attentions):
        best, other = (by[setting, task, attention] for attention in attentions)
        errors = 2 * np.hypot(best["greedy_error"], other["greedy_error"])
        return best["greedy"] - other["greedy"] > errors

    keys = dict.fromkeys(key[:2] for key in by)
    mixture = "N16T2 + N16T2-S, 32"
    assert {key for key in keys if not above(*key, "expressive", "softmax")} == {
        ("N16T2, 56", "N16T2"),
        ("N2T5, 16", "N2T5"),
        (mixture, "N16T2-S"),
    }
    assert {key for key in keys if not above(*key, "softmax", "readout")} == {
        ("N16T2, 32", "N16T2"),
        ("N16T2, 52", "N16T2"),
        ("N16T2, 56", "N16T2"),
        (mixture, "N16T2"),
        (mixture, "N16T2-S"),
        ("N16T2-R, 64", "N16T2-R"),
    }
