"""Tests that the examples run unchanged and print the expected results."""

import concurrent.futures
import os
import pathlib
import re
import runpy
import subprocess
import sys
import threading
import urllib.error

import numpy as np
import pytest

from sympow_jax import config, data, generation, models

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
# Examples for meshes, which run on any number of devices.
MESHES = {"explicit_mesh", "in_shard_map", "sharded_trainer"}


def run(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_plain_jax(capsys):
    result = run("plain_jax")
    np.testing.assert_allclose(result["last"], result["whole"][:, -1], atol=1e-5)
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
    result = run("hand_written")
    assert result["losses"][0] > 2.5
    assert result["losses"][-1] < 0.5
    assert result["text"] == [3, 5, 3, 5, 3, 5, 3, 5, 3]


@pytest.mark.slow
def test_an_equinox_model_learns():
    pytest.importorskip("equinox")
    losses = run("equinox_module")["losses"]
    assert losses[0] > 2.5
    assert losses[-1] < 0.5


def run_on_devices(name, devices):
    """Returns the output of an example on a given number of devices."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_an_explicit_mesh():
    printed = run_on_devices("explicit_mesh", 4)
    assert "output float32[8@data,256,4,32], state float32[8@data,4,528,32]\n" in printed
    assert "gradient float32[8@data,256,4,32]\n" in printed
    assert float(printed.split()[-1]) < 1e-5


def test_shard_map():
    printed = run_on_devices("in_shard_map", 4)
    assert "output float32[4@data,256,4@heads,32]\n" in printed
    assert float(printed.split()[-1]) < 1e-5


def test_a_trainer_with_its_own_mesh():
    printed = run_on_devices("sharded_trainer", 4)
    assert "query float32[32@data,32@model]\n" in printed
    first, last = map(float, re.search(r"loss (\S+) at first, (\S+) after 20 steps", printed).groups())
    assert first > 2.5  # log 16 = 2.77
    assert last < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MESHES))
def test_meshes_of_one_device(name):
    run_on_devices(name, 1)


@pytest.mark.parametrize("preset", ["conformal", pytest.param("softmax", marks=pytest.mark.slow)])
def test_a_server_of_concurrent_requests(preset):
    """Five requests share two slots; each text is that of its prompt alone."""
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    settings = config.ModelConfig(
        vocab_size=256, layers=1, width=16, heads=2, dtype="float32", attention=config.preset(preset)
    )
    model = models.DecoderLM(settings, rngs=0)
    codec = data.Codec(data.tokenizer.load("byte"), vocab_size=256)
    sampling = generation.Sampling(temperature=0.8, min_p=0.001)
    engine = serve["Engine"](model, codec, slots=2, max_length=64, sampling=sampling)
    server = serve["make_server"](engine, 0)
    port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    requests = [("def ", 40, 1), ("a", 9, 2), ("def ", 40, 1), ("class A:", 25, 3), ("é", 30, 4)]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        calls = [
            pool.submit(serve["ask"], port, prompt, max_tokens=count, seed=seed)
            for prompt, count, seed in requests
        ]
        texts = [call.result(timeout=100) for call in calls]
    for text, (prompt, count, seed) in zip(texts, requests):
        options = {"max_tokens": count, "sampling": sampling, "seed": seed}
        assert [text] == generation.complete(model, codec, [prompt], **options)
    stop = texts[0][5:7]
    assert serve["ask"](port, "def ", max_tokens=40, seed=1, stops=[stop]) == texts[0][: texts[0].index(stop)]
    for mistake in (
        {"prompt": "def ", "max_tokens": 61},
        {"prompt": 3},
        {"prompt": "a", "top": 1},
        {"prompt": ""},
    ):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            serve["ask"](port, **mistake)
    server.shutdown()
    server.server_close()


def test_every_example_is_tested():
    tested = {"plain_jax", "serve", "linen_model", "hand_written", "equinox_module", *MESHES}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
