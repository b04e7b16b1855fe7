"""A server of text with continuous batching: requests enter and leave a running batch between two tokens.

    uv run examples/serve.py --workdir=runs/quickstart --port=8000
    curl localhost:8000 -d '{"prompt": "def ", "max_tokens": 100, "seed": 1}'

Each request takes a slot. Its prompt is prefilled alone, and its state is inserted into the batch, of which one token
per slot is decoded at a time. A text is that of `generation.generate` for its prompt and seed, whatever the other
requests are. Bodies and answers are JSON.
"""

import argparse
import dataclasses
import http.server
import json
import pathlib
import queue
import threading
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import data, generation, training


@dataclasses.dataclass
class Request:
    """A prompt that is continued."""

    tokens: list[int]
    transcript: generation.Transcript
    seed: int
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


class Engine(threading.Thread):
    """Decodes a batch of requests, each in a slot; requests without one wait.

    max_length: tokens of the longest prompt and its continuation.
    """

    def __init__(self, model, codec, *, slots, max_length, sampling):
        super().__init__(daemon=True)
        self.program, self.codec, self.max_length = generation.Program(model), codec, max_length
        self.sampling = dataclasses.replace(sampling, vocab_size=codec.sampled_vocab_size)
        self.waiting: queue.Queue[Request] = queue.Queue()
        self.requests: list[Request | None] = [None] * slots
        state = self.program.init_state(slots, max_length=max_length)
        logits = jnp.zeros((slots, model.config.vocab_size))
        self.batch = {"logits": logits, "state": state}
        self.seeds, self.positions = np.zeros(slots, np.uint32), np.zeros(slots, np.int32)
        self.insert = jax.jit(generation.insert)

    def complete(self, prompt: str, max_tokens: int = 100, seed: int = 0, stops: tuple[str, ...] = ()) -> str:
        """Returns the continuation of a prompt; called by many threads."""
        tokens = self.codec.encode(prompt.encode(), "the prompt")
        if max_tokens < 1 or len(tokens) + max_tokens > self.max_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {max_tokens}; it must be at least 1, and both "
                f"together at most {self.max_length}"
            )
        transcript = generation.Transcript(self.codec, tokens, max_tokens=max_tokens, stops=stops)
        request = Request(tokens, transcript, int(seed) % 2**32)
        self.waiting.put(request)
        request.done.wait()
        return transcript.text

    def run(self):
        while True:
            self.admit()
            self.step()

    def admit(self):
        """Prefills waiting requests into free slots; waits if the batch is empty."""
        for slot, request in enumerate(self.requests):
            if request is not None:
                continue
            try:
                request = self.waiting.get(block=not any(self.requests))
            except queue.Empty:
                return
            # Padding to a power of two, so that there are few programs. It leaves the state unchanged.
            tokens = np.zeros((1, 1 << (len(request.tokens) - 1).bit_length()), np.int32)
            tokens[0, : len(request.tokens)] = request.tokens
            logits, state = self.program.prefill(
                tokens, np.array([len(request.tokens)]), max_length=self.max_length
            )
            self.batch = self.insert(self.batch, np.int32(slot), {"logits": logits, "state": state})
            self.requests[slot], self.seeds[slot] = request, request.seed
            self.positions[slot] = len(request.tokens)

    def step(self):
        """Decodes a token of each slot; free slots decode tokens that nobody reads."""
        tokens = generation.sample(
            self.batch["logits"], self.sampling, seed=self.seeds, position=self.positions
        )
        logits, state = self.program.decode(self.batch["state"], tokens)
        self.batch = {"logits": logits, "state": state}
        self.positions = self.positions + 1  # not in place, since JAX may still be reading it
        for slot, (request, token) in enumerate(zip(self.requests, np.asarray(tokens))):
            if request is not None:
                request.transcript.add([int(token)])
                if request.transcript.done:
                    self.requests[slot] = None
                    request.done.set()


def make_server(engine: Engine, port: int) -> http.server.ThreadingHTTPServer:
    """Returns a server of an engine, which runs from now on; port 0 is a free one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = 200, {"text": engine.complete(**body)}
            except (AttributeError, TypeError, ValueError) as error:
                status, answer = 400, {"error": str(error)}
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    engine.start()
    return http.server.ThreadingHTTPServer(("localhost", port), Handler)


def ask(port: int, prompt: str, **options) -> str:
    """Returns the continuation of a prompt by the server on a port of this machine."""
    body = json.dumps({"prompt": prompt, **options}).encode()
    with urllib.request.urlopen(f"http://localhost:{port}", body) as answer:
        return json.load(answer)["text"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=4096)
    flags = parser.parse_args()
    config, model, _ = training.restore_exact(flags.workdir)
    options = {"slots": flags.slots, "max_length": flags.max_length}
    sampling = generation.Sampling(temperature=0.8, min_p=0.05)
    make_server(
        Engine(model, data.codec_of_run(config), sampling=sampling, **options), flags.port
    ).serve_forever()
