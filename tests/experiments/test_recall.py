"""Tests of the recall experiment: its sequences, training, the command, and the tables of its results."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _shared, recall
from sympow_jax import models

pytestmark = pytest.mark.robust

SETTING = recall.Setting(keys=40, values=10, noise=7, points=(1, 2, 4, 8, 24), context=32, distances=(3, 50))
TINY = recall.SETTINGS["tiny"]


@pytest.mark.parametrize("new_keys", [1.0, 0.25])
@pytest.mark.parametrize("documents", [(24,), (24, 5), (8,)])
def test_pairs(documents, new_keys):
    """The last value of a key in the document so far is the answer of each query. Documents share no key."""
    drawn = recall.draw_pairs(SETTING, jax.random.key(0), 4, documents, new_keys=new_keys)
    drawn, count = jax.tree.map(np.asarray, drawn), 0
    for row in range(4):
        length, seen, keys = documents[row % len(documents)], {}, []
        assert [
            len(x)
            for x in np.split(drawn.segment_ids[row], np.flatnonzero(np.diff(drawn.segment_ids[row])) + 1)
        ][:-1] == [2 * length] * ((24 - 1) // length)
        for place, (token, value, answer) in enumerate(zip(*(part[row] for part in drawn[:3]), strict=True)):
            if place % (2 * length) == 0:
                keys += seen
                seen = {}
            if place % 2 == 0:
                assert answer == -1
                assert 40 <= value < 50
                seen[token] = value - 40
            else:
                assert value == -1
                assert answer == seen[token]
        keys += seen
        assert len(set(keys)) == len(keys)
        assert set(keys) <= set(range(40))
        count += len(keys)
    # With new keys only, each of the 96 pairs has one; else about a quarter and the first of each document.
    assert count == 96 if new_keys == 1 else 10 < count < 60


@pytest.mark.parametrize("things", [2, 5])
@pytest.mark.parametrize("documents", [(24,), (24, 5)])
def test_swaps(documents, things):
    drawn = jax.tree.map(
        np.asarray, recall.draw_swaps(SETTING, jax.random.key(0), 4, documents, things=things)
    )
    swaps = [(0, 0), *itertools.combinations(range(things), 2)]
    for row in range(4):
        length = documents[row % len(documents)]
        for place, (token, value, answer) in enumerate(zip(*(part[row] for part in drawn[:3]), strict=True)):
            assert value == -1
            assert drawn.segment_ids[row, place] == place // (2 * length)
            if place % (2 * length) == 0:
                order = list(range(things))
            if place % 2 == 0:
                first, second = swaps[token]
                order[first], order[second] = order[second], order[first]
                assert answer == -1
            else:
                assert answer == order[token - len(swaps)]
    assert set(drawn.tokens.ravel()) == set(range(len(swaps) + things))


def test_queries_of_pairs_are_even():
    """Each of the pairs so far is asked for as often as any other."""
    drawn = recall.draw_pairs(SETTING, jax.random.key(0), 4000, (24,))
    for pairs in (2, 8):
        asked = drawn.tokens[:, 2 * pairs - 1 : 2 * pairs] == drawn.tokens[:, : 2 * pairs : 2]
        np.testing.assert_allclose(asked.mean(0), 1 / pairs, atol=5 * np.sqrt(1 / pairs / 4000))


@pytest.mark.parametrize("distances", [None, (3, 50)])
def test_needles(distances):
    drawn = jax.tree.map(np.asarray, recall.draw_needles(SETTING, jax.random.key(0), 50, distances))
    assert len(drawn.tokens[0]) == (SETTING.needle + 51 if distances else 32)
    pairs = queries = 0
    for tokens, values, answers in zip(*drawn[:3], strict=True):
        seen = {}
        for token, value, answer in zip(tokens, values, answers, strict=True):
            if value >= 0:
                assert token < 40
                assert token not in seen
                assert answer == -1
                seen[token] = value - 40
            elif answer >= 0:
                assert answer == seen[token]
                queries += 1
            else:
                assert 50 <= token < 57
        pairs += len(seen)
        if distances:
            assert np.flatnonzero(values >= 0) == SETTING.needle
            assert (np.flatnonzero(answers >= 0) - SETTING.needle).tolist() == [3, 50]
    # An eighth of 50 x 32 tokens, which is 200; there are no queries before the first pair.
    assert distances or (150 < pairs < 250 and 80 < queries < 200)


@pytest.mark.parametrize("task", recall.TASKS)
def test_accuracy_of_a_perfect_predictor_and_of_chance(task):
    draws = [recall.draw(SETTING, task, jax.random.key(i), test=True) for i in range(100)]
    drawn = recall.Series(*map(jnp.concatenate, zip(*draws, strict=True)))
    points = len(recall.places(SETTING, task))
    perfect = jax.nn.one_hot(drawn.answers, SETTING.values)
    assert recall.accuracy(SETTING, task, perfect, drawn.answers).tolist() == [1.0] * points
    chance = jax.random.uniform(jax.random.key(100), perfect.shape)
    found = recall.accuracy(SETTING, task, chance, drawn.answers)
    error = np.sqrt(0.1 * 0.9 / len(drawn.answers))
    np.testing.assert_allclose(found, [1 / SETTING.values] * points, atol=5 * error)


def test_recalled():
    points = (1, 4, 16, 64)
    assert recall.recalled(points, (1.0, 0.95, 0.9, 0.91)) == 64
    assert recall.recalled(points, (0.89, 0.95, 1.0, 1.0)) == 0
    assert recall.recalled(points, (1.0, 1.0, 0.8, 0.95)) == pytest.approx(8)
    assert recall.recalled(points, (1.0, 1.0, 0.9, 0.1)) == pytest.approx(16)
    assert recall.recalled(points, (np.nan, 1.0, 1.0, 1.0)) == 0


def test_state_of_softmax_is_its_cache():
    shape = recall.model_config(SETTING, "pairs", recall.ATTENTIONS["softmax"], 16)
    cache = models.DecoderLM(shape, rngs=0).init_state(1, max_length=2 * SETTING.pairs, kv_cache=True)
    (layer,) = cache.layers
    assert recall.state_bytes(SETTING, "pairs", shape) == layer.memory.key.nbytes + layer.memory.value.nbytes


def test_states_of_the_toy_scale_grow_with_power_and_head_size():
    """Heads * F * (D + 1) elements of 4 bytes, with F = binomial(D + p - 1, p) features."""
    setting = recall.SETTINGS["toy"]
    expected = {
        "linear": (1152, 2176, 4224),
        "p=2": (5184, 18_496, 69_696),
        "p=4": (47_520, 527_136, 6_911_520),
    }
    for variant, sizes in expected.items():
        shapes = (
            recall.model_config(setting, "pairs", recall.ATTENTIONS[variant], size) for size in (8, 16, 32)
        )
        assert tuple(recall.state_bytes(setting, "pairs", shape) for shape in shapes) == sizes


def trained(
    tmp_path, name="run", *, seeds=(0,), variant="softmax", steps=8, setting=TINY, task="pairs", head_dim=8
):
    shape = recall.model_config(setting, task, recall.ATTENTIONS[variant], head_dim)
    return recall.train(setting, task, shape, seeds, tmp_path / f"{name}.npz", steps=steps, series=64)


@pytest.mark.slow
def test_softmax_learns_what_has_one_answer(tmp_path):
    setting = dataclasses.replace(TINY, batch=32, distances=(2, 4, 6))
    for task in ("pairs", "needle"):
        found = trained(tmp_path, task, steps=1000, setting=setting, task=task)
        assert found.min() > 0.9


def test_a_stopped_training_is_resumed(tmp_path, monkeypatch, capsys):
    whole, save = trained(tmp_path, "whole"), _shared.save_arrays

    def interrupt(path, state, about):
        if about["step"] == 6:
            raise KeyboardInterrupt
        save(path, state, about)

    with monkeypatch.context() as patch:
        patch.setattr(_shared, "save_arrays", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path)
    capsys.readouterr()
    resumed = trained(tmp_path)
    assert capsys.readouterr().out == "  update 6 of 8\n  update 8 of 8\n"
    np.testing.assert_array_equal(resumed, whole)
    with np.load(tmp_path / "whole.npz") as expected, np.load(tmp_path / "run.npz") as found:
        assert expected.files == found.files
        for name in expected.files:
            np.testing.assert_array_equal(found[name], expected[name])


def test_keys_begin_with_the_matrix_of_the_queries():
    shape = recall.model_config(TINY, "pairs", recall.ATTENTIONS["p=2"], 8)
    attention = recall.initial(shape, jax.random.key(0))["blocks"][0]["attention"]
    np.testing.assert_array_equal(attention["key"]["kernel"][...], attention["query"]["kernel"][...])
    for name in ("query", "value"):
        assert np.std(attention[name]["kernel"][...]) == pytest.approx(1 / np.sqrt(TINY.width), rel=0.2)


def test_divergence_is_an_error(tmp_path):
    # A training of one update has no warmup.
    with pytest.raises(ValueError, match="run: training diverged by update 1; choose other --seeds"):
        trained(tmp_path, setting=dataclasses.replace(TINY, rate=np.inf), steps=1)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    flags = "--scale=tiny", "--variants=p=2,softmax", "--tasks=pairs,overwritten,needle"
    assert recall.main([*flags, f"--out={tmp_path}"]) == 0
    assert "pairs, p=2, heads of 8, 8 updates, seeds 0-1" in capsys.readouterr().out
    path = tmp_path / "recall" / "recall.json"
    content = json.loads(path.read_text())
    models = [("pairs", "p=2", 8), ("pairs", "p=2", 16), ("pairs", "softmax", 16)]
    models += [(task, name, 16) for task in ("overwritten", "needle") for name in ("p=2", "softmax")]
    names = ("task", "variant", "head_dim", "seed", "point")
    assert [tuple(row[name] for name in names) for row in content["rows"]] == [
        (*model, seed, point)
        for model in models
        for seed in (0, 1)
        for point in (TINY.distances if model[0] == "needle" else TINY.points)
    ]
    pairs, overwritten, needles = recall.tables(content)
    assert [tuple(row[:3]) for row in pairs.rows] == [
        ("p=2", "8", "2,592"),
        ("p=2", "16", "9,248"),
        ("softmax", "16", "1,024"),
    ]
    assert [row[0] for row in overwritten.rows] == [row[0] for row in needles.rows] == ["p=2", "softmax"]
    assert all(0 <= row["accuracy"] <= 1 for row in content["rows"])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
