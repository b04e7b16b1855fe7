"""A server of text with continuous batching, in OpenAI's protocol of completions.

    uv run examples/serve.py --workdir=runs/quickstart --port=8000
    curl localhost:8000/v1/completions -d '{"model": "quickstart", "prompt": "def ", "max_tokens": 100, "seed": 1}'

Requests enter and leave a running batch between two tokens. A prompt starts from the longest kept state that it begins
with: states are kept after prompts, and where a prompt parts from an earlier one. It gets a slot of the batch, of which
one token per slot is decoded at a time. A text is that of `generation.generate`, whatever the other requests are. A
client that leaves frees its slot.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import data, generation, training

SECONDS = 10  # to send a request, and to receive a part of its answer
BYTES = 1 << 20  # of the body of a request
SHARED = 16  # tokens that two prompts must begin with for a state to be kept where they part
DEFAULTS = {"model": "", "prompt": "", "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "seed": 0}
DEFAULTS |= {"stop": [], "stream": False, "n": 1}  # values have these types; seed is the time
DEFAULTS |= {"stream_options": {"include_usage": False}}
STATUSES = dict.fromkeys((ValueError, EOFError, RecursionError, asyncio.LimitOverrunError), "400 Bad Request")
STATUSES |= {LookupError: "404 Not Found", TimeoutError: "408 Request Timeout", Exception: "500 Server Error"}


@dataclasses.dataclass
class Request:
    """A prompt that is continued until it is over: at its end, at an error, or when its client leaves."""

    tokens: np.ndarray
    transcript: generation.Transcript
    sampling: generation.Sampling
    seed: int
    stream: dict | None  # options of a stream; None for an answer in one piece
    # The new text after each token, with the reason if it is the last; or an error.
    pieces: asyncio.Queue = dataclasses.field(default_factory=asyncio.Queue)
    cached: int = 0  # tokens of the prompt that were not prefilled
    over: bool = False


class Engine:
    """Decodes a batch of requests of at most `max_length` tokens, each in a slot; requests without one wait."""

    def __init__(self, model, codec, *, name, slots, max_length, cache_bytes):
        self.program, self.codec, self.name = generation.Program(model), codec, name
        self.max_length = min(max_length, model.config.longest_document or max_length)
        self.sample = jax.jit(generation.sample, static_argnames="sampling")
        self.insert = jax.jit(generation.insert)
        self.waiting, self.requests = asyncio.Queue(), [None] * slots
        state = self.program.init_state(1, max_length=self.max_length)
        self.empty = jnp.zeros((1, model.config.vocab_size)), state
        self.batch = generation.fork(self.empty, slots)
        self.seeds, self.positions = np.zeros(slots, np.uint32), np.zeros(slots, np.int32)
        # Logits and states after prompts and where they part, by the bytes of their tokens; the last was used last.
        self.kept, self.cache_bytes = {}, cache_bytes

    async def submit(self, body: bytes) -> Request:
        """Returns the request of a body, which waits for a slot; raises ValueError or LookupError for a wrong one."""
        given = json.loads(body)
        if not isinstance(given, dict):
            raise ValueError("the body must be a JSON object")
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(given.get("prompt"), list) and len(given["prompt"]) == 1:
            given["prompt"] = given["prompt"][0]
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        for name, value in given.items():
            kind = type(DEFAULTS.get(name))
            wrong = type(value) is not kind and (type(value), kind) != (int, float)
            if kind is dict and not wrong:
                wrong = any((x, type(y)) != ("include_usage", bool) for x, y in value.items())
            if wrong:
                raise ValueError(f"{name[:40]!r} is wrong; a request is such as {json.dumps(DEFAULTS)}")
        given = DEFAULTS | {"seed": time.time_ns() % 2**32} | given
        if given["model"] != self.name:
            raise LookupError(f"there is no model {given['model'][:40]!r}; this server has {self.name!r}")
        if given["n"] != 1 or not 0 <= given["seed"] < 2**32 or len(given["stop"]) > 16:
            raise ValueError("n must be 1, seed from 0 to 2^32 - 1, and stop at most 16 texts")
        options = {name: given[name] for name in ("temperature", "top_p")}
        sampling = generation.Sampling(**options, vocab_size=self.codec.sampled_vocab_size)
        tokens = await asyncio.to_thread(self.codec.encode, given["prompt"].encode(), "the prompt")
        most = given["max_tokens"]
        if len(tokens) + most > self.max_length:
            raise ValueError(
                f"the prompt's {len(tokens)} tokens and max_tokens, {most}, exceed {self.max_length}"
            )
        transcript = generation.Transcript(self.codec, tokens, max_tokens=most, stops=given["stop"])
        stream = given["stream_options"] if given["stream"] else None
        request = Request(np.array(tokens, np.int32), transcript, sampling, given["seed"], stream)
        self.waiting.put_nowait(request)
        return request

    async def run(self):
        """Prefills waiting requests into free slots, and decodes a token of each slot, forever."""
        while True:
            self.requests = [x if x and not x.over else None for x in self.requests]
            while None in self.requests and (not self.waiting.empty() or not any(self.requests)):
                request, slot = await self.waiting.get(), self.requests.index(None)
                if not request.over:
                    await self.attempt([request], self.prefill, slot, request)
            for request, text in await self.attempt(self.requests, self.step) or ():
                end = request.transcript
                request.over |= end.done
                request.pieces.put_nowait((text, end.done and ("stop" if end.stopped else "length")))

    async def attempt(self, requests, work, *arguments):
        """Calls a function in a thread; its error is the answer to the requests, and the engine continues."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except Exception as error:
            for request in filter(None, requests):
                request.over = True
                request.pieces.put_nowait(RuntimeError(f"{type(error).__name__}: {error}"))

    def prefill(self, slot, request):
        """Fills a slot with the state after a prompt, and keeps it; the least recently used states make room."""
        tokens, key, width = request.tokens, request.tokens.tobytes(), request.tokens.itemsize
        prefix = max(filter(key.startswith, self.kept), key=len, default=b"")
        row, start = self.kept.pop(prefix, self.empty), len(prefix) // width
        parting = max((shared(tokens, np.frombuffer(x, np.int32)) for x in self.kept), default=0)
        self.kept[prefix], request.cached = row, start
        for end in (parting, len(tokens)) if parting >= start + SHARED else (len(tokens),):
            if (count := end - start) > 0:
                # Padding to a power of two, so that there are few programs. It leaves the state unchanged.
                padded = np.zeros((1, 1 << (count - 1).bit_length()), np.int32)
                padded[0, :count] = tokens[start:end]
                row = self.program.prefill(padded, np.array([count]), initial_state=row[1])
            self.kept[key[: end * width]], start = row, end
        size = sum(x.nbytes for x in jax.tree.leaves(row))  # of each
        while sum(size + len(key) for key in self.kept) > self.cache_bytes:
            del self.kept[next(iter(self.kept))]
        self.batch = self.insert(self.batch, np.int32(slot), row)
        self.requests[slot], self.seeds[slot], self.positions[slot] = request, request.seed, len(tokens)

    def step(self):
        """Decodes a token of each slot, and returns the new texts; free slots decode tokens that nobody reads."""
        tokens, (logits, state) = np.zeros(len(self.requests), np.int32), self.batch
        for sampling in {request.sampling for request in self.requests if request}:
            chosen = [request is not None and request.sampling == sampling for request in self.requests]
            drawn = self.sample(logits, sampling, seed=self.seeds, position=self.positions)
            tokens = np.where(chosen, drawn, tokens)
        self.batch = self.program.decode(state, tokens)
        self.positions += 1
        return [(x, x.transcript.add([int(token)])) for x, token in zip(self.requests, tokens) if x]


def shared(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of tokens with which both begin."""
    length = min(len(first), len(second))
    return int(np.append(first[:length] != second[:length], True).argmax())


async def receive(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Returns the method and path of a request, and its body; raises ValueError for one without a valid length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = re.search(r"\r\ncontent-length: *([0-9]{1,9}) *\r\n", head, re.IGNORECASE)
    count = int(length[1]) if length else 0
    if count > BYTES or not (length or head.startswith("GET ")):
        raise ValueError(f"send a JSON body of at most {BYTES} bytes with its Content-Length")
    return head.split(" HTTP/")[0], await reader.readexactly(count)


async def until_closed(reader: asyncio.StreamReader):
    """Waits until a client leaves; what it still sends is dropped."""
    with contextlib.suppress(OSError):
        while await reader.read(BYTES):
            pass


async def answer(engine: Engine, line: str, body: bytes, send):
    """Sends the answer to a request."""
    if line == "GET /v1/models":
        model = {"id": engine.name, "object": "model", "created": 0, "owned_by": "sympow_jax"}
        return await send(json.dumps({"object": "list", "data": [model]}))
    if line != "POST /v1/completions":
        raise LookupError(f"there is no {line[:40]!r}, only GET /v1/models and POST /v1/completions")
    request, used, reason, now = await engine.submit(body), 0, None, time.time_ns()
    about = {"id": f"cmpl-{now}", "object": "text_completion", "created": now // 10**9, "model": engine.name}
    try:
        while not reason:
            piece = await request.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            (text, reason), used = piece, used + 1
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason or None}
            if request.stream is not None:
                await send("data: " + json.dumps(about | {"choices": [choice]}))
    finally:
        request.over = True
    count, details = len(request.tokens), {"cached_tokens": request.cached}
    usage = {"prompt_tokens": count, "completion_tokens": used, "total_tokens": count + used}
    about |= {"usage": usage | {"prompt_tokens_details": details}}
    if request.stream is not None:
        if request.stream.get("include_usage"):
            await send("data: " + json.dumps(about | {"choices": []}))
        return await send("data: [DONE]")
    await send(json.dumps(about | {"choices": [choice | {"text": request.transcript.text}]}))


async def handle(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
    """Answers the request of a connection, until its client leaves."""
    task, left, begun = asyncio.current_task(), None, False

    async def send(part, status="200 OK"):
        """Sends JSON or an event, after the head of the answer if it is the first."""
        nonlocal begun
        kind = "text/event-stream" if part.startswith("data: ") else "application/json"
        head = "" if begun else f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        begun = True
        writer.write(f"{head}{part}\n\n".encode())
        async with asyncio.timeout(SECONDS):
            await writer.drain()

    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, asyncio.CancelledError):
        stack.callback(writer.transport.abort)  # the client has left, is too slow, or has its answer
        try:
            async with asyncio.timeout(SECONDS):
                line, body = await receive(reader)
            left = asyncio.create_task(until_closed(reader))
            left.add_done_callback(lambda _: task and task.cancel())
            await answer(engine, line, body, send)
        except Exception as error:
            status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
            kind = "server_error" if status.startswith("5") else "invalid_request_error"
            fault = {"message": str(error), "type": kind, "param": None, "code": None}
            await send(("data: " if begun else "") + json.dumps({"error": fault}), status)
        writer.write_eof()
        # A connection that is closed with unread input is reset, and its client might miss the answer.
        async with asyncio.timeout(SECONDS):
            await (left or until_closed(reader))


async def serve(engine: Engine, port: int):
    """Serves an engine on a port of this machine, forever."""
    server = await asyncio.start_server(functools.partial(handle, engine), "localhost", port)
    print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
    await engine.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    for name, default in {"port": 8000, "slots": 8, "max_length": 4096, "cache_bytes": 1 << 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = vars(parser.parse_args())
    workdir, port = flags.pop("workdir"), flags.pop("port")
    if not 0 <= port < 1 << 16 or flags["slots"] < 1 or flags["cache_bytes"] < 0:
        parser.error("--port must be from 0 to 65535, --slots at least 1 and --cache_bytes at least 0")
    try:
        config, model, _ = training.restore_exact(workdir)
        engine = Engine(model, data.codec_of_run(config), name=workdir.resolve().name, **flags)
        asyncio.run(serve(engine, port))
    except KeyboardInterrupt:
        parser.exit(130)
    except (ValueError, OSError, OverflowError) as error:
        parser.exit(1, f"error: {error}\n")
