"""Tests that the examples run unchanged and print the expected results."""

import asyncio
import concurrent.futures
import contextlib
import json
import pathlib
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest

from sympow_jax import config, data, generation, models
from tests import devices

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
@pytest.mark.parametrize("name", ["linen_model", "hand_written", "equinox_module"])
def test_a_model_learns(name):
    if name == "equinox_module":
        pytest.importorskip("equinox")
    result = run(name)
    assert result["losses"][0] > 2.5  # log 16 = 2.77
    assert result["losses"][-1] < 0.5
    # It goes on from its state.
    assert name != "hand_written" or result["text"] == [3, 5, 3, 5, 3, 5, 3, 5, 3]


@pytest.mark.slow
def test_the_delta_rule_learns_parity(capsys):
    run("parity")
    delta, power = (int(x) for x in re.findall(r": (\d+)%", capsys.readouterr().out))
    assert delta == 100
    assert power < 70


def run_on_devices(name, count, capsys):
    """Returns the output of an example on a number of devices; the mesh that it sets is reset."""
    with devices.seen(count), jax.set_mesh(jax.make_mesh((1,), ("before",))):
        run(name)
    return capsys.readouterr().out


@pytest.mark.robust
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("explicit_mesh", "output float32[8@data,256,4,32], state float32[8@data,4,528,32]"),
        ("in_shard_map", "output float32[4@data,256,4@heads,32]"),
    ],
)
def test_a_mesh(name, shapes, capsys):
    printed = run_on_devices(name, 4, capsys)
    assert f"{shapes}\n" in printed
    assert name != "explicit_mesh" or "gradient float32[8@data,256,4,32]\n" in printed
    assert float(printed.split()[-1]) < 1e-5


@pytest.mark.robust
def test_a_trainer_with_its_own_mesh(capsys):
    printed = run_on_devices("sharded_trainer", 4, capsys)
    assert "query float32[32@data,32@model]\n" in printed
    first, last = map(float, re.search(r"loss (\S+) at first, (\S+) after 20 steps", printed).groups())
    assert first > 2.5  # log 16 = 2.77
    assert last < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MESHES))
def test_meshes_of_one_device(name, capsys):
    run_on_devices(name, 1, capsys)


def small_model(preset="conformal"):
    settings = config.ModelConfig(
        vocab_size=256, layers=1, width=16, heads=2, dtype="float32", attention=config.preset(preset)
    )
    return models.DecoderLM(settings, rngs=0), data.Codec(data.tokenizer.load("byte"), vocab_size=256)


SAMPLING = generation.Sampling(temperature=0.8, min_p=0.001)


@contextlib.contextmanager
def serving(serve, engine):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = {}

    async def main():
        running["loop"], running["task"] = asyncio.get_running_loop(), asyncio.current_task()
        with contextlib.suppress(asyncio.CancelledError):
            await serve["serve"](engine, port)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            with contextlib.suppress(ConnectionError):
                socket.create_connection(("localhost", port)).close()
                break
        yield port
    finally:
        running["loop"].call_soon_threadsafe(running["task"].cancel)
        thread.join()


def ask(port, body, **options):
    """Returns the text for a prompt, or the status and error for a body that is refused."""
    if isinstance(body, str):
        body = json.dumps({"prompt": body, **options}).encode()
    try:
        with urllib.request.urlopen(f"http://localhost:{port}", body, timeout=100) as answer:
            return json.load(answer)["text"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.mark.robust
@pytest.mark.parametrize("preset", ["conformal", pytest.param("softmax", marks=pytest.mark.slow)])
def test_a_server_of_concurrent_requests(preset):
    """Five requests share two slots; each text is that of its prompt alone."""
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    model, codec = small_model(preset)
    engine = serve["Engine"](model, codec, slots=2, max_length=64, sampling=SAMPLING)
    requests = [("def ", 40, 1), ("é=", 9, 2), ("def ", 40, 1), ("for ", 9, 3), ("def ", 9, 4)]

    def complete(prompt, count, seed):
        return ask(port, prompt, max_tokens=count, seed=seed)

    with serving(serve, engine) as port, concurrent.futures.ThreadPoolExecutor(5) as pool:
        texts = list(pool.map(complete, *zip(*requests), timeout=100))
        assert texts == [complete(*request) for request in requests]
        options = {"max_tokens": 40, "sampling": SAMPLING, "seed": 1}
        assert texts[:1] == generation.complete(model, codec, ["def "], **options)
        stop = texts[0][5:7]
        stopped = ask(port, "def ", max_tokens=40, seed=1, stops=[stop])
        assert stopped == texts[0][: texts[0].index(stop)]


@pytest.mark.robust
def test_a_server_survives_its_requests(monkeypatch):
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    monkeypatch.setitem(serve["handle"].__globals__, "SECONDS", 0.5)
    engine = serve["Engine"](*small_model(), slots=1, max_length=100_000, sampling=SAMPLING)
    with serving(serve, engine) as port:
        text = ask(port, "def ", max_tokens=20)

        def send(content):
            connection = socket.create_connection(("localhost", port), timeout=100)
            connection.sendall(content)
            return connection

        wrong = {b"stops": (b"[1]", b'"a"', b"null"), b"seed": (b"-1", b"1e999"), b"temperature": (b"NaN",)}
        wrong[b"max_tokens"] = (b"NaN", b"true", b"2.0", b'"2"', b"0", b"100000")
        for body, fault in [
            *(
                (b'{"prompt": "a", "%s": %s}' % (name, value), f"'{name.decode()}' is wrong")
                for name, values in wrong.items()
                for value in values
            ),
            (b'{"prompt": "a", "max_tokens": %s}' % (b"1" * 5000), "limit"),
            (b'{"prompt": 3}', "'prompt' is wrong"),
            (b'{"prompt": "\\ud800"}', "surrogates"),
            (b'{"prompt": ""}', "prompt is empty"),
            (b'{"prompt": "%s"}' % (b"a" * 99_990), "together they may be"),
            (b'["prompt"]', "with a prompt"),
            (b"", "Expecting value"),
            (b"[" * 100_000, "recursion"),
        ]:
            status, error = ask(port, body)
            assert status == 400
            assert fault in error
            assert "\n" not in error
        for content, status in {
            b"POST / HTTP/1.1\r\nContent-Length: 200000000\r\n\r\n": b"400",
            b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n": b"400",
            b"GET / HTTP/1.1\r\n\r\n": b"400",
            b"x" * 100_000: b"400",
            b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n{": b"408",  # half of a request
            b"POST /": b"408",
        }.items():
            with send(content) as connection:
                assert connection.recv(100).split()[1] == status
        # The only slot and the queue are free again once their clients leave.
        body = b'{"prompt": "def ", "max_tokens": 90000}'
        long = [send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) for _ in "ab"]
        for connection in long:
            connection.close()
        assert ask(port, "def ", max_tokens=20) == text
        # An error of the engine is that of its request.
        with monkeypatch.context() as patch:
            patch.setattr(engine, "insert", None)
            assert ask(port, "def ") == (500, "TypeError: 'NoneType' object is not callable")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "sample", None)
            assert ask(port, "def ")[0] == 500
        assert ask(port, "def ", max_tokens=20) == text


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.1, 15], ids=["compiling", "decoding"])
def test_a_server_ends_at_an_interrupt(wait):
    code = (
        "import runpy, sys; from sympow_jax import data, training; from tests import test_examples as tests\n"
        "training.restore_exact = lambda _: (None, tests.small_model()[0], None)\n"
        "data.codec_of_run = lambda _: tests.small_model()[1]\n"
        "sys.argv = ['serve.py', '--workdir=x', '--port=0', '--max_length=100000']\n"
        "runpy.run_path(str(tests.EXAMPLES / 'serve.py'), run_name='__main__')"
    )
    body = json.dumps({"prompt": "def ", "max_tokens": 90_000}).encode()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        port = int(server.stdout.readline().split()[-1])
        with socket.create_connection(("localhost", port)) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            time.sleep(wait)
            server.send_signal(signal.SIGINT)
            assert server.communicate(timeout=60) == ("", "")
    assert server.returncode == 130


def test_every_example_is_tested():
    tested = {"plain_jax", "serve", "linen_model", "hand_written", "equinox_module", *MESHES}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
