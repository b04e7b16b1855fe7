"""Measures the error of decoding with bfloat16 weights and recurrent states.

    uv run python -m benchmarks.rounding --workdirs=runs/conformal,runs/sympow --out=benchmarks/results/rounding.json

Decodes four texts of the Python standard library one token at a time, from the recurrent state (softmax: a KV cache),
and compares the logits with those of float32. Errors are given for the first 512 tokens, and for the last 512 of 4,096,
which show whether rounding accumulates. The runs must read bytes.
"""

import argparse
import dataclasses
import inspect
import pathlib
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _rows
from sympow_jax import generation, models, training
from sympow_jax.array_types import Array, Float, Int

TEXTS = (argparse, dataclasses, inspect, typing)
TOKENS, RANGE = 4096, 512
# Dtypes of weights and of the state.
VARIANTS = {
    "weights": ("bfloat16", "float32"),
    "state": ("float32", "bfloat16"),
    "both": ("bfloat16", "bfloat16"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the results and writes them to a file."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--workdirs", required=True, help="workdirs of runs, separated by commas")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens of each text, {TOKENS}")
    options = parser.parse_args(arguments)
    if options.tokens < RANGE:
        parser.error(f"--tokens is {options.tokens}; it must be at least {RANGE}")
    rows = []
    for folder in map(pathlib.Path, options.workdirs.split(",")):
        for row in measure(folder, options.tokens):
            _rows.say(row)
            rows.append(row)
    _rows.write(options.out, {"machine": _rows.machine(), "texts": len(TEXTS), "rows": rows})


def measure(folder: pathlib.Path, count: int) -> list[dict]:
    """Returns the differences from float32 for each variant and range of positions, which are from 1."""
    tokens = read_texts(count)

    def restore(weights_dtype="float32", state_dtype="float32") -> models.DecoderLM:
        _, model, _ = training.restore_exact(folder, weights_dtype=weights_dtype, state_dtype=state_dtype)
        return typing.cast(models.DecoderLM, model)

    model = restore()
    expected, _ = decoded(model, tokens)
    rows = []
    for rounded, (weights_dtype, state_dtype) in VARIANTS.items():
        if state_dtype != "float32" and None in model.kv_cache_lengths:
            continue  # There is no recurrent state.
        actual, size = decoded(restore(weights_dtype, state_dtype), tokens)
        for start in sorted({0, count - RANGE}):
            part = np.s_[:, start : start + RANGE]
            errors = compare(actual[part], expected[part], tokens[:, 1:][part])
            about = {"run": folder.name, "rounded": rounded, "first": start + 1, "last": start + RANGE}
            rows.append(about | dict(zip(("rms", "kl", "agreement", "loss"), errors)) | {"state_bytes": size})
    return rows


def read_texts(count: int) -> Int[np.ndarray, "B T"]:
    """Returns the first `count` + 1 bytes of each text."""
    contents = (pathlib.Path(inspect.getfile(module)).read_bytes() for module in TEXTS)
    return np.stack([np.frombuffer(content[: count + 1], np.uint8) for content in contents]).astype(np.int32)


def decoded(
    model: models.DecoderLM, tokens: Int[np.ndarray, "B T"]
) -> tuple[Float[np.ndarray, "B T V"], int]:
    """Returns the logits after each token but the last, decoded one by one, and the bytes of the state of a row."""
    batch, time = tokens.shape
    length = time if None in model.kv_cache_lengths else None
    program = generation.Program(model)
    state = program.init_state(batch, max_length=length)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) // batch

    @jax.jit
    def run(
        program: generation.Program, state: models.DecoderState, tokens: Int[Array, "T B"]
    ) -> Float[Array, "T B V"]:
        def step(state, token):
            logits, state = program.decode(state, token)
            return state, logits

        return jax.lax.scan(step, state, tokens)[1]

    with jax.default_matmul_precision("highest"):
        logits = run(program, state, jnp.asarray(tokens[:, :-1].T))
    return np.asarray(logits).swapaxes(0, 1), size


def compare(actual, expected, targets) -> tuple[float, float, float, float]:
    """Compares the logits after each token with float32, in float64.

    Returns:
        RMS of the difference of logits, each without their mean over the vocabulary, over their RMS; mean of
        KL(float32 || bfloat16) of the next token, in nats; fraction of positions whose likeliest token is the same; and
        change of the mean loss, in nats per token.
    """
    wide = [x.astype(np.float64) for x in (actual, expected)]
    logs = [x - np.logaddexp.reduce(x, -1, keepdims=True) for x in wide]
    centered = [x - x.mean(-1, keepdims=True) for x in logs]
    rms = np.sqrt(np.mean((centered[0] - centered[1]) ** 2) / np.mean(centered[1] ** 2))
    kl = (np.exp(logs[1]) * (logs[1] - logs[0])).sum(-1).mean()
    agreement = (actual.argmax(-1) == expected.argmax(-1)).mean()
    losses = [-np.take_along_axis(x, targets[..., None], -1).mean() for x in logs]
    return float(rms), float(kl), float(agreement), float(losses[0] - losses[1])


if __name__ == "__main__":
    main()
