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
    reflecting, *others = (int(x) for x in re.findall(r": (\d+)%", capsys.readouterr().out))
    assert reflecting > 95
    assert len(others) == 2
    assert max(others) < 70


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


def new_engine(serve, *, preset="conformal", slots=2, max_length=64, cache_bytes=1 << 20):
    options = {"slots": slots, "max_length": max_length, "cache_bytes": cache_bytes}
    return serve["Engine"](*small_model(preset), name="small", **options)


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


def request(body):
    return b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def ask(port, body, *, path="completions", **options):
    """Returns the answer to a prompt, or the status and error for a body that is refused; None for no body."""
    if isinstance(body, str | list):
        body = json.dumps({"model": "small", "prompt": body, **options}).encode()
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/v1/{path}", body, timeout=100) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        status, fault = error.code, json.load(error)["error"]
    assert fault.keys() == {"message", "type", "param", "code"}
    assert fault["type"] == ("server_error" if status == 500 else "invalid_request_error")
    return status, fault["message"]


def text_of(answer):
    return answer["choices"][0]["text"]


def events(port, prompt, **options):
    """Returns the events of a stream; the last one is text."""
    body = json.dumps({"model": "small", "prompt": prompt, "stream": True, **options}).encode()
    with urllib.request.urlopen(f"http://localhost:{port}/v1/completions", body, timeout=100) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        found = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    return [*map(json.loads, found[:-1]), found[-1]]


@pytest.mark.robust
@pytest.mark.parametrize("preset", ["conformal", pytest.param("softmax", marks=pytest.mark.slow)])
def test_a_server_of_concurrent_requests(preset):
    """Requests share two slots; each text is that of `generation.complete` for its prompt alone."""
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    engine = new_engine(serve, preset=preset)
    requests = [
        ("def ", 40, 1, {"temperature": 0.8}),
        ("é=", 9, 2, {"temperature": 0.8, "top_p": 0.9}),
        ("def ", 40, 1, {"temperature": 0}),
        ("for ", 9, 3, {}),
        ("def f", 9, 4, {"temperature": 0.8}),
    ]
    expected = [
        generation.complete(
            *small_model(preset),
            [prompt],
            max_tokens=count,
            seed=seed,
            sampling=generation.Sampling(**options),
        )[0]
        for prompt, count, seed, options in requests
    ]

    def complete(prompt, count, seed, options):
        return text_of(ask(port, prompt, max_tokens=count, seed=seed, **options))

    with serving(serve, engine) as port, concurrent.futures.ThreadPoolExecutor(5) as pool:
        assert list(pool.map(complete, *zip(*requests), timeout=100)) == expected
        assert [complete(*request) for request in requests] == expected
        options = {"max_tokens": 40, "seed": 1, "temperature": 0.8}
        stop = expected[0][5:7]
        answer = ask(port, ["def "], stop=stop, **options)
        assert text_of(answer) == expected[0][: expected[0].index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        *pieces, end = events(port, "def ", **options)
        assert end == "[DONE]"
        assert "".join(map(text_of, pieces)) == expected[0]
        reasons = [piece["choices"][0]["finish_reason"] for piece in pieces]
        assert reasons == [None] * 39 + ["length"]
        assert "".join(map(text_of, events(port, "def ", stop=[stop], **options)[:-1])) == text_of(answer)
        *pieces, usage, _ = events(port, "def ", stream_options={"include_usage": True}, **options)
        assert "".join(map(text_of, pieces)) == expected[0]
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 40)
        models = ask(port, None, path="models")
        assert [model["id"] for model in models["data"]] == ["small"]


@pytest.mark.robust
@pytest.mark.parametrize("preset", ["conformal", pytest.param("softmax", marks=pytest.mark.slow)])
def test_a_server_keeps_states_after_prompts(preset):
    """A prompt starts after the longest one that it begins with; there is memory for two states."""
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    engine = new_engine(serve, preset=preset)
    engine.cache_bytes = int(2.5 * sum(x.nbytes for x in jax.tree.leaves(engine.empty)))
    model, codec = small_model(preset)

    def cached(prompt):
        """Returns the number of tokens that were not prefilled, after a comparison of the text."""
        answer = ask(port, prompt, max_tokens=9, seed=5)
        expected = generation.complete(
            model, codec, [prompt], max_tokens=9, seed=5, sampling=generation.Sampling()
        )
        assert text_of(answer) == expected[0]
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        assert usage["completion_tokens"] == 9
        assert usage["total_tokens"] == len(prompt) + 9
        return usage["prompt_tokens_details"]["cached_tokens"]

    with serving(serve, engine) as port, concurrent.futures.ThreadPoolExecutor(2) as pool:
        # The empty prompt's state is also kept.
        assert cached("def f") == 0
        assert cached("def f(x)") == 5
        assert cached("def f(x)") == 8
        assert cached("def f(y)") == 5  # drops the longer prompt
        assert cached("def f(x)") == 5
        assert cached("de") == 0
        assert sorted(len(key) // 4 for key in engine.kept) == [0, 2]
        engine.cache_bytes = 1 << 20
        # A state is kept where prompts part, and the third begins there.
        assert [cached(f"def a_long_beginning{end}") for end in ("x", "y", "z", "")] == [2, 2, 20, 20]
        assert list(pool.map(cached, ["def", "de 1"], timeout=100)) == [2, 2]
        engine.cache_bytes = 0
        assert cached("def f") == 3
        assert not engine.kept
        assert cached("def f") == 0


@pytest.mark.robust
def test_a_server_survives_its_requests(monkeypatch):
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    monkeypatch.setitem(serve["handle"].__globals__, "SECONDS", 0.5)
    engine = new_engine(serve, slots=1, max_length=100_000)
    with serving(serve, engine) as port:
        text = text_of(ask(port, "def ", max_tokens=20, seed=1))

        def send(content):
            connection = socket.create_connection(("localhost", port), timeout=100)
            connection.sendall(content)
            return connection

        wrong = {
            b"stop": (b"[1]", b"{}", b'["a", ""]', b"3", b"[%s]" % b", ".join([b'"a"'] * 17)),
            b"seed": (b"-1", b"1e999", b"4294967296", b"true"),
            b"temperature": (b"NaN", b"-1", b'"1"', b"true", b"1e999"),
            b"top_p": (b"0", b"1.5", b"[]"),
            b"max_tokens": (b"NaN", b"true", b"2.0", b'"2"', b"0", b"-1", b"100000"),
            b"stream": (b"1", b'"true"'),
            b"n": (b"2", b"true"),
            b"stream_options": (b"true", b"[]", b'{"usage": true}', b'{"include_usage": 1}'),
            b"prompt": (b"3", b'["a", "b"]', b"[]", b"[[1]]", b"null", b'""', b'"\\ud800"'),
            b"logprobs": (b"1",),
            b"model": (b"3",),
        }
        valid = b'{"model": "small", "prompt": "a", '
        for name, values in wrong.items():
            for value in values:
                status, error = ask(port, b'%s"%s": %s}' % (valid, name, value))
                assert status == 400, (name, value)
                assert "\n" not in error
        for body, status, fault in [
            (b'%s"max_tokens": %s}' % (valid, b"1" * 5000), 400, "limit"),
            (
                b'%s"prompt": "%s"}' % (valid, b"a" * 99_990),
                400,
                "99990 tokens and max_tokens, 16, exceed 100000",
            ),
            (b'{"prompt": "a"}', 404, "no model ''"),
            (b'{"model": "other", "prompt": "a"}', 404, "no model 'other'; this server has 'small'"),
            (b'["prompt"]', 400, "a JSON object"),
            (b"", 400, "Expecting value"),
            (b"\xff", 400, "decode"),
            (b"[" * 100_000, 400, "recursion"),
        ]:
            actual, error = ask(port, body)
            assert (actual, fault in error) == (status, True), error
            assert "\n" not in error
        for content, status in {
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 200000000\r\n\r\n": b"400",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n": b"400",
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": b"400",
            b"GET /v1/models HTTP/1.1\r\nContent-Length: 200000000\r\n\r\n": b"400",
            b"GET / HTTP/1.1\r\n\r\n": b"404",
            b"GET /v1/completions HTTP/1.1\r\n\r\n": b"404",
            b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}": b"404",
            b"x" * 100_000: b"400",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{": b"408",  # half of a request
            b"POST /": b"408",
        }.items():
            with send(content) as connection:
                assert connection.recv(100).split()[1] == status
        # The only slot and the queue are free again once their clients leave, one of them in the middle of a stream.
        body = b'%s"max_tokens": 90000, "stream": %s}'
        long = [send(request(body % (valid, stream))) for stream in (b"true", b"false", b"true")]
        assert b"text/event-stream" in long[0].recv(1000)
        for connection in long:
            connection.close()
        assert text_of(ask(port, "def ", max_tokens=20, seed=1)) == text
        # An error of the engine is that of its request.
        with monkeypatch.context() as patch:
            patch.setattr(engine, "insert", None)
            assert ask(port, "def ") == (500, "TypeError: 'NoneType' object is not callable")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "sample", None)
            assert ask(port, "def ")[0] == 500
        # In a stream it is an event.
        with send(request(body % (valid, b"true"))) as connection, monkeypatch.context() as patch:
            connection.recv(1000)
            patch.setattr(engine, "sample", None)
            received = b""
            while part := connection.recv(1 << 16):
                received += part
            assert b'data: {"error": {"message": "TypeError' in received.split(b"\n\n")[-2]
        assert text_of(ask(port, "def ", max_tokens=20, seed=1)) == text


@pytest.mark.slow
def test_a_server_answers_openai_client():
    """OpenAI's own client: `uv pip install openai && uv run --no-sync pytest -n 1 -m slow tests/test_examples.py`."""
    openai = pytest.importorskip("openai")
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    engine = new_engine(serve)
    drawn = {"temperature": 0.8, "top_p": 0.9}
    options = {"model": "small", "prompt": "def ", "max_tokens": 40, "seed": 1, **drawn}
    sampling = generation.Sampling(**drawn)
    (expected,) = generation.complete(*small_model(), ["def "], max_tokens=40, seed=1, sampling=sampling)
    with serving(serve, engine) as port:
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["small"]
        answer = client.completions.create(**options)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 40)
        chunks = list(client.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            client.completions.create(model="other", prompt="def ")
        with pytest.raises(openai.BadRequestError, match="exceed 64"):
            client.completions.create(**options | {"max_tokens": 64})
        engine.sample = None
        with pytest.raises(openai.InternalServerError, match="TypeError"):
            client.completions.create(**options)


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
    body = json.dumps({"model": "x", "prompt": "def ", "max_tokens": 90_000}).encode()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        port = int(server.stdout.readline().split()[-1])
        with socket.create_connection(("localhost", port)) as connection:
            connection.sendall(request(body))
            time.sleep(wait)
            server.send_signal(signal.SIGINT)
            assert server.communicate(timeout=60) == ("", "")
    assert server.returncode == 130


def test_every_example_is_tested():
    tested = {"plain_jax", "serve", "linen_model", "hand_written", "equinox_module", "parity", *MESHES}
    tested.add("retrofit_smollm2")  # in tests/weights/test_gguf.py, which writes a model
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
