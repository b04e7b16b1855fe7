"""The examples run as they are, and do what they say."""

import pathlib
import runpy

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_plain_jax(capsys):
    found = run("plain_jax")
    np.testing.assert_allclose(found["last"], found["whole"][:, -1], atol=1e-5)
    assert capsys.readouterr().out.startswith("a step from the state differs from the whole by ")
    lines = (EXAMPLES / "plain_jax.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 15


@pytest.mark.slow
def test_a_linen_model_learns():
    losses = run("linen_model")["losses"]
    assert losses[0] > 2.5  # log 16 = 2.77
    assert losses[-1] < 0.5


@pytest.mark.slow
def test_a_hand_written_model_learns_and_goes_on_from_its_state():
    found = run("hand_written")
    assert found["losses"][0] > 2.5
    assert found["losses"][-1] < 0.5
    assert found["text"] == [3, 5, 3, 5, 3, 5, 3, 5, 3]


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"plain_jax", "linen_model", "hand_written"}
