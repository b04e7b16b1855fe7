"""A server of text with continuous batching: requests enter and leave a running batch between two tokens.

    uv run examples/serve.py --workdir=runs/quickstart --port=8000
    curl localhost:8000 -d '{"prompt": "def ", "max_tokens": 100, "seed": 1}'

Each request takes a slot. Its prompt is prefilled alone, and its state is inserted into the batch, of which one token
per slot is decoded at a time. A text is that of `generation.generate` for its prompt and seed, whatever the other
requests are. A client that leaves frees its slot. Bodies and answers are JSON.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import data, generation, training

SECONDS = 10  # to send a request, and to receive its answer
BYTES = 1 << 20  # of the body of a request


@dataclasses.dataclass
class Request:
    """A prompt that is continued, until its answer is known or canceled."""

    tokens: list[int]
    transcript: generation.Transcript
    seed: int
    answer: asyncio.Future[str]


class Engine:
    """Decodes a batch of requests, each in a slot; requests without one wait.

    max_length: tokens of the longest prompt and its continuation.
    """

    def __init__(self, model, codec, *, slots, max_length, sampling):
        if slots < 1:
            raise ValueError(f"slots is {slots}; it must be at least 1")
        longest = model.config.longest_document
        if longest is not None and max_length > longest:
            raise ValueError(
                f"max_length is {max_length}, but the model's learned positions end at {longest}"
            )
        self.program, self.codec, self.max_length = generation.Program(model), codec, max_length
        sampling = dataclasses.replace(sampling, vocab_size=codec.sampled_vocab_size)
        self.sample = jax.jit(functools.partial(generation.sample, sampling=sampling))
        self.insert = jax.jit(generation.insert)
        self.waiting: asyncio.Queue[Request] = asyncio.Queue()
        self.requests: list[Request | None] = [None] * slots
        state = self.program.init_state(slots, max_length=max_length)
        self.batch = {"logits": jnp.zeros((slots, model.config.vocab_size)), "state": state}
        self.seeds, self.positions = np.zeros(slots, np.uint32), np.zeros(slots, np.int32)

    async def complete(self, body: bytes) -> str:
        """Returns the continuation that a request asks for; raises ValueError for one that is malformed."""
        valid = {
            "prompt": lambda x: type(x) is str,
            "max_tokens": lambda x: type(x) is int and 1 <= x < self.max_length,
            "seed": lambda x: type(x) is int and 0 <= x < 2**32,
            "stops": lambda x: type(x) is list and len(x) <= 16 and all(type(y) is str and y for y in x),
        }
        given = json.loads(body)
        if not isinstance(given, dict) or "prompt" not in given:
            raise ValueError("the body must be a JSON object with a prompt")
        for name, value in given.items():
            if name not in valid or not valid[name](value):
                raise ValueError(
                    f"{name[:40]!r} is wrong; a request has a prompt (text), max_tokens (1 to {self.max_length - 1}), "
                    f"seed (0 to 2^32 - 1) and stops (at most 16 texts)"
                )
        tokens = await asyncio.to_thread(self.codec.encode, given["prompt"].encode(), "the prompt")
        max_tokens = given.get("max_tokens", 100)
        if len(tokens) + max_tokens > self.max_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {max_tokens}; together they may be "
                f"{self.max_length}"
            )
        stops, answer = given.get("stops", ()), asyncio.get_running_loop().create_future()
        transcript = generation.Transcript(self.codec, tokens, max_tokens=max_tokens, stops=stops)
        self.waiting.put_nowait(Request(tokens, transcript, given.get("seed", 0), answer))
        return await answer

    async def run(self):
        """Prefills waiting requests into free slots, and decodes a token of each slot, forever."""
        while True:
            self.requests = [x if x and not x.answer.done() else None for x in self.requests]
            while None in self.requests and (not self.waiting.empty() or not any(self.requests)):
                request, slot = await self.waiting.get(), self.requests.index(None)
                if not request.answer.done():
                    await self.attempt([request], self.prefill, slot, request)
            await self.attempt(self.requests, self.step)
            for request in filter(None, self.requests):
                if request.transcript.done and not request.answer.done():
                    request.answer.set_result(request.transcript.text)

    async def attempt(self, requests, work, *arguments):
        """Calls a function in a thread; its error is the answer to the requests, and the engine continues."""
        try:
            await asyncio.to_thread(work, *arguments)
        except Exception as error:
            for request in filter(None, requests):
                if not request.answer.done():
                    request.answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def prefill(self, slot, request):
        """Fills a slot with the state after a request's prompt."""
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
        tokens = self.sample(self.batch["logits"], seed=self.seeds, position=self.positions)
        logits, state = self.program.decode(self.batch["state"], tokens)
        self.batch = {"logits": logits, "state": state}
        for request, token in zip(self.requests, np.asarray(tokens)):
            if request is not None:
                request.transcript.add([int(token)])
        self.positions += 1


async def receive(reader: asyncio.StreamReader) -> bytes:
    """Returns the body of a request; raises ValueError for one without or with too long a body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = re.search(r"\r\ncontent-length: *([0-9]+) *\r\n", head, re.IGNORECASE)
    if not head.startswith("POST ") or length is None:
        raise ValueError("send a POST request with a JSON body and its Content-Length")
    if int(length[1]) > BYTES:
        raise ValueError(f"the body has {length[1]} bytes; it may have {BYTES}")
    return await reader.readexactly(int(length[1]))


async def until_closed(reader: asyncio.StreamReader):
    """Waits until a client leaves; what it still sends is dropped."""
    with contextlib.suppress(OSError):
        while await reader.read(BYTES):
            pass


async def handle(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
    """Answers the request of a connection, unless its client leaves first."""
    left = None
    try:
        async with asyncio.timeout(SECONDS):
            body = await receive(reader)
        text = asyncio.create_task(engine.complete(body))
        left = asyncio.create_task(until_closed(reader))
        left.add_done_callback(lambda _: text.cancel())
        status, answer = "200 OK", {"text": await text}
    except TimeoutError:
        status, answer = "408 Request Timeout", {"error": f"the request took more than {SECONDS} seconds"}
    except (asyncio.CancelledError, EOFError, OSError):  # the client has left
        return writer.transport.abort()
    except (ValueError, RecursionError, asyncio.LimitOverrunError) as error:
        status, answer = "400 Bad Request", {"error": str(error)}
    except Exception as error:
        status, answer = "500 Internal Server Error", {"error": str(error)}
    content = json.dumps(answer).encode() + b"\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close"
    with contextlib.suppress(OSError):
        writer.write(f"{head}\r\n\r\n".encode() + content)
        writer.write_eof()
        # A connection that is closed with unread input is reset, and its client might miss the answer.
        async with asyncio.timeout(SECONDS):
            await (left or until_closed(reader))
    writer.transport.abort()


async def serve(engine: Engine, port: int):
    """Serves an engine on a port of this machine, forever."""
    server = await asyncio.start_server(functools.partial(handle, engine), "localhost", port)
    print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
    await engine.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=4096)
    flags = parser.parse_args()
    try:
        config, model, _ = training.restore_exact(flags.workdir)
        options = {"slots": flags.slots, "max_length": flags.max_length}
        sampling = generation.Sampling(temperature=0.8, min_p=0.05)
        engine = Engine(model, data.codec_of_run(config), sampling=sampling, **options)
        asyncio.run(serve(engine, flags.port))
    except KeyboardInterrupt:
        parser.exit(130)
    except (ValueError, OSError, OverflowError) as error:
        parser.exit(1, f"error: {error}\n")
