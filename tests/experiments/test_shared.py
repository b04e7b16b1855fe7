"""Tests of what experiments share: means, differences, times and saved arrays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _shared

pytestmark = pytest.mark.robust


def test_means_and_their_errors():
    rows = [{"a": name, "b": 1, "loss": loss} for name, loss in zip("xyxx", (3.0, 4.0, 8.0, 1.0))]
    means = _shared.means(rows, ("a", "b"), "loss")
    assert means["x", 1] == pytest.approx((4.0, math.sqrt(13 / 3)))
    assert (str(means["x", 1]), str(means["y", 1])) == ("4.000 ± 2.082", "4.000")
    # The mean over a run that diverged is NaN.
    assert str(_shared.mean([math.nan, 2.0])) == "nan"


def test_differences_are_seed_by_seed():
    losses = {"x": {0: 1.0, 1: 5.0}, "y": {1: 4.5, 0: 0.25}, "z": {0: 1.0}}
    rows = [
        {"variant": name, "seed": seed, "at": 8, "loss": loss}
        for name, of_seeds in losses.items()
        for seed, loss in of_seeds.items()
    ]
    pairs = [("x", "y"), ("z", "x"), ("x", "w")]
    found = _shared.differences(rows, "at", "loss", pairs)
    assert found["x", "y", 8] == pytest.approx((0.625, 0.125))
    assert list(found) == [("x", "y", 8), ("z", "x", 8)]
    # Bold beyond two standard errors, which one seed does not have.
    lines = ["| --- | --- |", "| x - y | **+0.625 ± 0.125** |", "| z - x | +0.000 |"]
    for by, column in (("at", "8"), (None, "difference")):
        table = _shared.difference_table("", rows, by, pairs).markdown()
        assert table.splitlines() == [f"|  | {column} |", *lines]


def test_times_are_taken_in_turns():
    made = []
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    times = _shared.alternate(calls, rounds=2)
    assert "".join(made) == "ab" + "ab" + "ba"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    # A round in which the machine was slow affects both.
    assert _shared.relative([1.0, 30.0, 1.0], [2.0, 20.0, 2.0]) == (0.5, 0.5, 1.0)


def test_arrays_are_restored_as_they_were_saved(tmp_path):
    path, state, about = tmp_path / "state.npz", {"w": jnp.arange(3.0), "n": jnp.array(2)}, {"rates": (1, 2)}
    assert _shared.restore_arrays(path, state, about) == ({}, state)
    _shared.save_arrays(path, state, about | {"step": 3})
    zeros = jax.tree.map(jnp.zeros_like, state)
    before, found = _shared.restore_arrays(path, zeros, about)
    assert before == {"rates": [1, 2], "step": 3}
    assert jax.tree.all(jax.tree.map(np.array_equal, found, state))
    assert _shared.restore_arrays(path, zeros, {"rates": (1, 3)}) == ({}, zeros)
    for other in ({"w": jnp.arange(4.0), "n": jnp.array(2)}, {"w": jnp.arange(3), "n": jnp.array(2)}):
        with pytest.raises(ValueError, match="has the arrays of another training; delete it, or use another"):
            _shared.restore_arrays(path, other, about)
    flipped = bytearray(path.read_bytes())
    flipped[200] ^= 255
    for damaged in (flipped[:-30], b"", flipped, b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a saved training or is damaged; delete it"):
            _shared.restore_arrays(path, state, about)
