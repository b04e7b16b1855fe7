"""Measures the time per decoded token and the state size of power and softmax attention.

    uv run python -m benchmarks.decoding --out=DIR [--model=smollm2]

It compares models of the same size after prompts of 64 to 65,536 tokens; those of `smollm2` have the sizes of
SmolLM2-135M with its attention, or with that of retrofits. Their parameters are random, since no measured number
depends on them. Tokens are decoded in compiled blocks, as in `generation.generate`. No prompt is
computed, since the values of a state do not matter either: decoding starts from a state of the right size, which is the
recurrent state or a KV cache. Models and lengths take turns and times are medians, so a change of the machine's speed
affects all. The prefill of random prompts is timed against the forward pass of training, loss included, on the same
tokens. Writes `decoding.json` and `decoding.png`.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import _rows, _timing
from sympow_jax import config, generation, models, ops, plotting, tasks
from sympow_jax.generation import loop

WINDOW = 128
BLOCK = 64  # tokens between two folds, so that each block has one
ROUNDS = 7


class Comparison(NamedTuple):
    """Models of one size that are compared.

    Attributes:
        sizes: settings of `config.ModelConfig`.
        presets: attention of each, as a preset or a pattern of layers.
        lengths: tokens after which decoding is timed.
        prefilled: tokens of the prompts whose prefill is timed, with the first preset.
    """

    sizes: dict[str, Any]
    presets: tuple[str, ...]
    lengths: tuple[int, ...]
    prefilled: tuple[int, ...] = ()


_SMOLLM2: dict[str, Any] = {
    **{"vocab_size": 49_152, "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "mlp_width": 1536},
    "dtype": "float32",
}
MODELS = {
    "quickstart": Comparison(
        config.MODEL_SIZES["quickstart"],
        ("conformal", "softmax"),
        lengths=(64, 256, 1024, 4096, 16_384, 65_536),
        prefilled=(4096, 65_536),
    ),
    "smollm2": Comparison(
        config.MODEL_SIZES["llama32_1b"] | _SMOLLM2,
        (
            "softmax",
            "sliding_window",
            "2*sliding_window,softmax",
            "2*sliding_window,sympow_gated",
            "sympow_gated_window",
            "sympow_gated",
        ),
        lengths=(1024, 8192, 32_768),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the results and writes them to files."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder to write to")
    parser.add_argument("--model", choices=MODELS, default="quickstart", help="sizes of the models")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes, presets, lengths, prefilled = MODELS[options.model]
    rows = measure(sizes, presets, lengths, rounds=ROUNDS)
    prefills = [measure_prefill(presets[0], sizes, length, rounds=ROUNDS) for length in prefilled]
    for row in (*rows, *prefills):
        _rows.say(row)
    content = {"model": sizes, "machine": _rows.machine(), "rows": rows, "prefills": prefills}
    _rows.write(options.out / "decoding.json", content)
    plot(rows, options.out / "decoding.png")


def measure(sizes: dict, presets: Sequence[str], lengths: Sequence[int], *, rounds: int) -> list[dict]:
    """Returns, for each preset and length, the median seconds per token and the bytes of the state of one row."""
    contenders = {
        (preset, length): _Contender(preset, length, sizes) for preset in presets for length in lengths
    }
    calls = {key: contender.decode for key, contender in contenders.items()}
    seconds = _timing.medians(calls, rounds)
    return [
        {
            "preset": preset,
            "length": length,
            "seconds": seconds[preset, length] / BLOCK,
            "state_bytes": contender.nbytes,
            "kept": contender.kept,  # whether the state is a KV cache
        }
        for (preset, length), contender in contenders.items()
    ]


def measure_prefill(preset: str, sizes: dict, length: int, *, rounds: int) -> dict:
    """Times prefill and the forward pass of training in turns, on one row of random tokens."""
    model = _model(preset, sizes)
    row = np.random.default_rng(0).integers(sizes["vocab_size"], size=(1, length + 1), dtype=np.int32)
    batch = {"inputs": jnp.asarray(row[:, :-1]), "targets": jnp.asarray(row[:, 1:])}
    program = generation.Program(model)
    training = nnx.jit(tasks.make(config.Config(model=model.config)).sums)
    calls = {
        "prefill": lambda: program.prefill(batch["inputs"], np.array([length])),
        "training": lambda: training(model, batch),
    }
    seconds = _timing.medians(calls, rounds)
    found = {"seconds": seconds["prefill"], "training_seconds": seconds["training"]}
    return {"preset": preset, "length": length} | found


def _model(preset: str, sizes: dict) -> models.DecoderLM:
    attention = config.AttentionConfig(window=WINDOW)
    changed = config.ModelConfig(**sizes, attention=attention, attention_pattern=tuple(preset.split(",")))
    return models.DecoderLM(changed, rngs=nnx.Rngs(0))


class _Contender:
    """Decodes blocks of tokens after a context of `length` tokens."""

    def __init__(self, preset: str, length: int, sizes: dict):
        model = _model(preset, sizes)
        self._program = generation.Program(model)
        state = self._program.init_state(1, max_length=length + BLOCK)
        self.kept = isinstance(state.layers[0].memory, ops.KVCache)
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))

        def filled(memory):
            """Returns a KV cache with `length` tokens of one document, whose keys are equal; another memory itself."""
            if not isinstance(memory, ops.KVCache):
                return memory
            slots = jnp.arange(memory.capacity) >= memory.capacity - length
            segment_ids = jnp.where(slots, 0, memory.segment_ids)
            return dataclasses.replace(
                memory, segment_ids=segment_ids, segment=jnp.zeros_like(memory.segment)
            )

        layers = tuple(
            dataclasses.replace(layer, memory=filled(layer.memory), window=filled(layer.window))
            for layer in state.layers
        )

        self._rows = loop.Rows(
            token=jnp.zeros(1, jnp.int32),
            state=dataclasses.replace(state, layers=layers),
            position=jnp.array([length], jnp.int32),
            seen=None,
        )
        self.decode()  # fills the window

    def decode(self) -> jax.Array:
        # Blocks simply continue the same context: each reads the same number of keys and folds equally often.
        greedy, seeds = generation.Sampling(temperature=0), np.zeros(1, np.uint32)
        self._rows, tokens, _ = loop.decode_block(self._program, greedy, BLOCK, seeds, self._rows)
        return tokens


def plot(rows: Sequence[dict], path: pathlib.Path) -> None:
    """Plots time per token and bytes of the state against the length of the prompt, with logarithmic axes."""
    figure, panels = plotting.make(2, width=9.0, height=3.8, sharey=False)
    shown = (("microseconds a token", "seconds", 1e6), ("MiB of state", "state_bytes", 2**-20))
    for axes, (title, column, unit) in zip(panels, shown):
        presets = list(dict.fromkeys(row["preset"] for row in rows))
        for preset, (color, marker) in zip(presets, plotting.styles(presets)):
            chosen = [row for row in rows if row["preset"] == preset]
            lengths = [row["length"] for row in chosen]
            values = [unit * row[column] for row in chosen]
            axes.plot(lengths, values, color=color, marker=marker, label=preset)
        plotting.style(axes, x_label="tokens of the prompt", y_label="", title=title)
        plotting.set_log2_ticks(axes, lengths)
        axes.set_yscale("log")
        axes.tick_params("x", rotation=30)
        axes.legend(frameon=False)
    plotting.save(figure, path)


if __name__ == "__main__":
    main()
