"""Continues prompts with a trained model: `sympow generate --workdir=runs/quickstart --prompt="def "`.

Prompts are processed in one pass. Then tokens are decoded one at a time from a fixed-size state.
"""

import argparse
import codecs
import itertools
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import cast

import jax

from sympow_jax import config, data, generation, models, training
from sympow_jax.commands import command_line
from sympow_jax.config import model as model_lib
from sympow_jax.process import compile_cache, signals, streams, workdir
from sympow_jax.training import checkpoint

_PROMPTS_BYTES = 1 << 28
_MAX_SAMPLES = 4096


def _read_prompts(flags: argparse.Namespace) -> list[tuple[str, bytes]]:
    """Returns the prompts, each with a name for error messages."""
    if flags.prompt is not None:
        # The bytes exactly as the shell passed them, whether they are UTF-8 or not.
        return [("--prompt", os.fsencode(flags.prompt))]
    try:
        with pathlib.Path(flags.prompts).open("rb") as stream:
            content = stream.read(_PROMPTS_BYTES + 1)
        if len(content) > _PROMPTS_BYTES:
            raise ValueError(
                f"--prompts={flags.prompts} has more than {_PROMPTS_BYTES:,} bytes; use shorter files"
            )
        # Editors of Windows begin a file with a mark, and end its lines with CRLF.
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts={flags.prompts} is not UTF-8 (byte {error.start + 1})") from error
    except OSError as error:
        raise ValueError(
            f"--prompts={flags.prompts} cannot be read: {error.strerror}; name a file"
        ) from error
    lines = text.removesuffix("\n").split("\n")
    if lines == [""]:
        raise ValueError(f"--prompts={flags.prompts} is empty; it needs a prompt a line")
    return [
        (f"line {number} of {flags.prompts}", line.removesuffix("\r").encode())
        for number, line in enumerate(lines, 1)
    ]


def _write(text: str) -> None:
    """Writes a part of a text to stdout, without what its terminal or encoding would not show."""
    if sys.stdout.isatty():
        text = "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def generate(flags: argparse.Namespace) -> int:
    """Prints prompts and their continuations; returns the exit code.

    Raises:
      ValueError: Flags, prompts and run do not fit each other.
    """
    # Checks that need no model come first, so that their errors do not wait for the model to load.
    if not 1 <= flags.samples <= _MAX_SAMPLES:
        raise ValueError(f"--samples is {flags.samples}; it must be from 1 to {_MAX_SAMPLES:,}")
    folder = pathlib.Path(flags.workdir)
    settings = workdir.read_config(folder)
    if not settings.task.is_language_model or settings.model.patch_size is not None:
        raise ValueError(
            f"{folder} holds a run of task {settings.task.name!r}; only models of the next token make text"
        )
    checkpoint.require_checkpoint(folder)
    codec = data.codec_of_run(settings, flags.tokenizer)
    trained = workdir.read_description(folder).get("tokenizer")
    if trained not in (None, codec.tokenizer.identity):
        streams.say(
            f"warning: {folder} was trained with another tokenizer than {codec.tokenizer.name}; see its data.json",
            error=True,
        )
    draws = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = generation.Sampling(**{name: getattr(flags, name) for name in draws})
    prompts = _read_prompts(flags)
    tokens = [codec.encode(prompt, name) for name, prompt in prompts]

    data_axis, tensor_axis = vars(flags)["sharding.data"], vars(flags)["sharding.tensor"]
    sizes = None  # one device
    if data_axis is not None or tensor_axis is not None:
        sizes = config.ShardingConfig(data=data_axis, tensor=1 if tensor_axis is None else tensor_axis)
    _, model, _ = training.restore_exact(
        folder, sizes=sizes, weights_dtype=flags.weights_dtype, state_dtype=flags.state_dtype
    )
    # By default, GPUs would round the factors of float32 products.
    with jax.default_matmul_precision("highest"):
        texts = generation.stream(
            cast(models.DecoderLM, model),
            codec,
            tokens,
            max_tokens=flags.max_tokens,
            sampling=sampling,
            stops=flags.stop,
            samples=flags.samples,
            seed=flags.seed,
        )
        # Each text below its heading; one is streamed when those above it are done.
        headings = []
        for (number, prompt), sample in itertools.product(
            enumerate((text.decode(errors="replace") for _, text in prompts), 1), range(1, flags.samples + 1)
        ):
            counts = [f"{number} of {len(prompts)}"] if len(prompts) > 1 else []
            counts += [f"sample {sample} of {flags.samples}"] if flags.samples > 1 else []
            headings.append((f"--- {', '.join(counts)} ---\n" if counts else "") + prompt)
        _write(headings[0])
        held, current = [""] * len(headings), 0
        for pieces in texts:
            held = [before + piece.text for before, piece in zip(held, pieces)]
            while current < len(headings):
                _write(held[current])
                held[current] = ""
                if not pieces[current].done:
                    break
                current += 1
                _write("\n" + "".join(headings[current : current + 1]))
    return 0


def main(arguments: Sequence[str], program: str = "sympow generate") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = command_line.Parser(
        prog=program,
        description="Prints prompts and their continuations by a trained model. The same prompt, seed and settings "
        "give the same text, whatever other prompts there are.",
    )
    parser.add_workdir()
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="Prompt to continue.")
    prompts.add_argument(
        "--prompts", metavar="FILE", help="File with prompts in UTF-8, one per line, processed as a batch."
    )
    parser.add_options(
        ("max_tokens", int, "N", 256, "Maximum number of tokens after each prompt."),
        ("temperature", float, "T", 0.8, "Temperature of the draws; 0 takes the likeliest token."),
        ("top_k", int, "K", None, "Draw from the K likeliest tokens only."),
        ("top_p", float, "P", 1.0, "Draw from the fewest likeliest tokens that together have probability P."),
        ("min_p", float, "P", 0.0, "Never draw tokens whose probability is below P times the largest."),
        (
            *("repetition_penalty", float, "R", 1.0),
            "Make tokens of the prompt and its continuation less likely: their logits are divided by R if positive, "
            "multiplied otherwise.",
        ),
        ("samples", int, "N", 1, "Continuations of each prompt, which have seeds S, S + 1, ..."),
        ("seed", int, "S", 0, "Seed of the draws."),
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="Text to end before; may be repeated."
    )
    parser.add_options(
        (
            *("weights_dtype", model_lib.DTYPES, None, "float32"),
            "Dtype that matrices are rounded to when they are loaded. Products are in float32.",
        ),
        (
            *("state_dtype", model_lib.DTYPES, None, "float32"),
            "Dtype that recurrent states are stored in between tokens. bfloat16 is for models with decays.",
        ),
        *(
            (
                *(f"sharding.{axis}", int, "N", None),
                f"Number of shards of {sharded}. With one of these flags all devices are used, otherwise one.",
            )
            for axis, sharded in (("data", "prompts and samples"), ("tensor", "heads, matrices and states"))
        ),
    )
    parser.add_tokenizer()
    with signals.user_errors():
        flags = parser.parse_args(arguments)
        compile_cache.cache_programs()
        return generate(flags)
