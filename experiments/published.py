"""A published model whose attention is replaced, against the original and against more training of the original.

    python -m experiments.published --weights=SmolLM2-135M-Instruct.Q4_1.gguf [--scale=gpu]

The model is imported, and text is tokenized by its own tokenizer: without --data and --heldout, it is trained on the
Python files of the installed packages and evaluated on those of the standard library. New attention has a first stage,
in which it learns the outputs of the old, and a second one, in which the whole model predicts the next token. `softmax`
is the original with the second stage alone, so that what new attention costs is told apart from what the data teaches.
`window` is softmax over the last tokens, half a training context, whose memory has a constant size too, and `gated with
window` has both in each layer. `window and chosen softmax` keeps softmax in as many layers as `window and softmax`, but
in those where a window, in this layer alone, costs the original most when it copies random tokens; `gated with window
and chosen softmax` adds a state to each window. Every model is evaluated by position, is asked for something earlier in
contexts of the training length and of the longest one, and continues the same prompts.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
import statistics
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments import _shared
from sympow_jax import config, evaluation, generation, hub, models, training
from sympow_jax import data as data_lib
from sympow_jax.config import literals, loading, serialize
from sympow_jax.data import files as file_lib
from sympow_jax.data import prepare, tokenizer
from sympow_jax.data.sources import text, tokens
from sympow_jax.process import atomic, streams, workdir
from sympow_jax.weights import files, runs

PLANS = {
    "toy": _shared.Plan(seeds=(0,), steps=200, contexts=(256,), lengths=(128, 256, 512, 1024, 2048)),
    "gpu": _shared.Plan(
        seeds=(0,),
        steps=400,
        contexts=(2048,),
        lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        documents=24,
    ),
    "tiny": _shared.Plan(seeds=(0,), steps=3, contexts=(16,), lengths=(16, 32, 256), documents=2),
}
# Settings of every run. The small scales have the dtype that CPUs are fast in.
_SETTINGS: dict[str, dict[str, Any]] = {
    "toy": {"data.batch_tokens": 1024},
    "gpu": {"data.batch_tokens": 32_768, "model.dtype": "bfloat16"},
    "tiny": {"data.batch_tokens": 32},
}
# Arguments of `configs/retrofit.py`, by variant; none for the original.
VARIANTS: dict[str, dict[str, str]] = {
    "softmax": {},
    "gated": {"preset": "sympow_gated"},
    "conformal": {"preset": "conformal"},
    "gated with window": {"preset": "sympow_gated_window"},
    "gated with window and softmax": {"preset": "sympow_gated_window", "every": "3"},
    "gated and softmax": {"preset": "sympow_gated", "every": "3"},
    "window": {"preset": "sliding_window"},
    "window and softmax": {"preset": "sliding_window", "every": "3"},
    "window and half softmax": {"preset": "sliding_window", "every": "2"},
    "window and chosen softmax": {"preset": "sliding_window", "keep": "chosen"},
    "window and gated": {"preset": "sliding_window", "every": "3", "other": "sympow_gated"},
    "gated with window and chosen softmax": {"preset": "sympow_gated_window", "keep": "chosen"},
}
ORIGINAL = "original"
# The model's layers for each that is chosen to keep its attention.
_CHOSEN = 3
# Updates of the first stage, relative to the second, and the rate of learning of each.
_FIRST_RATIO, _MATCH_RATE, _RATE = 0.6, 1e-3, 3e-4
# Questions of each task of `evaluation.evaluate_context_tasks`. Half of a context of `copy` are answers.
_TASKS = {"needle": 32, "recall": 32, "copy": 8}
_LEAST_CONTEXT = 256
# Rows of random tokens, of twice the training context, that are repeated to see which layers copy.
_COPIES = 2
_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n',
)
_SAMPLE_TOKENS, _GREEDY = 64, generation.Sampling(temperature=0)


def _report(options: _shared.Options) -> None:
    weights, documents, options = _inputs(options)
    base, data = _imported(options, weights, documents)
    copying = _copying(options, base) if any("keep" in VARIANTS[x] for x in options.variants) else []
    folders = _train(options, base, data, copying)
    plan = options.plan
    untrained = options.runs / f"{ORIGINAL}_evaluation"
    evaluation.evaluate([base], plan.lengths, out=untrained, documents=plan.documents, changes=data)
    evaluated = {(ORIGINAL, seed): base for seed in plan.seeds}
    evaluated |= {key: stages_of[-1] for key, stages_of in folders.items()}
    rows = [
        {"variant": variant, "seed": seed}
        | {column: row[column] for column in ("context_length", "loss", "standard_error")}
        for (variant, seed), folder in evaluated.items()
        for row in _shared.evaluation(untrained if folder == base else folder)
    ]
    stages = {
        (*key, name): folder
        for key, stages_of in folders.items()
        for name, folder in zip(("second", "first"), reversed(stages_of))
    }
    # By tokens spent; new attention has a first stage, which does not predict tokens.
    batch = _SETTINGS[options.scale]["data.batch_tokens"]
    heldout = [
        {
            "variant": variant,
            "seed": seed,
            "tokens": batch * (step + _first(options) * (len(stages_of) - 1)),
            "loss": loss,
        }
        for (variant, seed), stages_of in folders.items()
        for step, loss in _shared.heldout_curve(stages_of[-1])
    ]
    speeds: dict[str, list[float]] = {}
    for (variant, _, stage), folder in stages.items():
        speeds.setdefault(f"{variant}, {stage}", []).append(_speed(folder))
    path = options.write(
        rows,
        list(stages.values()),
        curves=_shared.curve_rows(stages, ("variant", "seed", "stage")),
        heldout_curves=heldout,
        copying=[{"layer": layer, "loss": loss} for layer, loss in enumerate(copying)],
        tasks=_tasks(options, evaluated, data),
        samples=_samples(options, evaluated),
        tokens_per_second={name: statistics.median(found) for name, found in speeds.items()},
    )
    _draw(options, path, rows, heldout)


def _draw(
    options: _shared.Options, path: pathlib.Path, rows: Sequence[_shared.Row], heldout: Sequence[_shared.Row]
) -> None:
    """Draws losses by position and during training beside the JSON."""
    plan, batch = options.plan, _SETTINGS[options.scale]["data.batch_tokens"]
    (context,) = plan.contexts
    first, second = (f"{steps * batch / 1e6:.1f}M" for steps in (_first(options), plan.steps))
    by_position = _shared.Panel(
        lines=_shared.lines(_shared.means(rows, ("variant", "context_length"), "loss")),
        x_label="upper end of positions (tokens)",
        y_label="held-out loss (nats per token)",
        title="after training",
        ticks=plan.lengths,
        mark=(context, f"training context {context:,}"),
    )
    thousands = [{**row, "tokens": row["tokens"] / 1e3} for row in heldout]
    by_tokens = _shared.Panel(
        lines=_shared.lines(_shared.means(thousands, ("variant", "tokens"), "loss")),
        x_label="thousands of tokens of both stages",
        y_label="held-out loss (nats per token)",
        title=f"during training, rows of {context:,}",
    )
    _shared.draw_lines(
        path,
        [by_position, by_tokens],
        title=f"Attention replaced in {options.runs.name.rpartition('_')[0]}",
        subtitle=f"{first} tokens to learn its outputs, then {second} of the whole model; softmax has the latter",
    )


def _inputs(options: _shared.Options) -> tuple[pathlib.Path, dict[str, list[str]], _shared.Options]:
    """Returns the model's files, the text files by setting, and the options with a folder of runs for these inputs."""
    if (name := options.more["weights"]) is None:
        raise ValueError("--weights is missing; name a GGUF file or a folder of a published model")
    weights = hub.local_path(name, hub.WEIGHTS).absolute()
    if not weights.exists():
        raise ValueError(f"--weights={name}: there is no such file or folder")
    own = {
        "data.paths": file_lib.below(sysconfig.get_paths()["purelib"], suffix=".py"),
        "data.heldout_paths": text.standard_library(),
    }
    given = {
        "data.paths": options.data and file_lib.find("--data", options.data),
        "data.heldout_paths": options.heldout and file_lib.find("--heldout", options.heldout),
    }
    documents = {setting: given[setting] or own[setting] for setting in own}
    contents = [
        file_lib.digest(found, lambda file: [file_lib.read(file.path)]) for found in documents.values()
    ]
    contents.append(file_lib.digest(file_lib.find("--weights", [str(weights)]), lambda _: (), samples=True))
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:8]
    label = re.sub(r"[^\w.-]+", "_", pathlib.Path(name).absolute().name.removesuffix(".gguf"))
    folder = options.runs / f"{label}_{digest}"
    paths = {setting: [file.path for file in found] for setting, found in documents.items()}
    return weights, paths, dataclasses.replace(options, runs=folder)


def _imported(
    options: _shared.Options, weights: pathlib.Path, documents: Mapping[str, Sequence[str]]
) -> tuple[pathlib.Path, dict[str, str]]:
    """Returns the folder of the imported model, and the settings of its tokenized text."""
    folder = options.runs / ORIGINAL
    if not workdir.checkpoint_steps(folder):
        found = files.read_settings(files.settings_path(weights))
        (context,) = options.plan.contexts
        changes = {"data.context_length": context, "model.attention.window": context // 2}
        changes |= _SETTINGS[options.scale]
        runs.import_run(weights, loading.replace(found, changes), folder)
    source = workdir.read_config(folder).data
    if source.tokenizer is None:
        raise ValueError(f"{weights} has no tokenizer; put its tokenizer.json into its folder")
    codec = tokenizer.load(source.tokenizer)
    end = codec.end_of_text(source.document_separator, setting="data.document_separator")
    settings = {"data.source": "tokens", "data.document_separator": str(end)}
    for setting, paths in documents.items():
        path = options.runs / f"{setting}.bin"
        record = path / tokens.METADATA
        if not (record.exists() and "documents" in serialize.read_object(record)):
            streams.say(f"tokenizing {path}")
            prepared = prepare.Options(tokenizer=source.tokenizer, separator=end, workers=os.cpu_count() or 1)
            prepare.write_bin(str(path), list(_without(paths, codec.decode([end]))), prepared)
        settings[setting] = literals.written((str(path),))
        settings["data.token_dtype"] = serialize.read_object(record)["token_dtype"]
    return folder, settings


def _without(paths: Iterable[str], end: bytes) -> Iterable[str]:
    """Yields the files of text in UTF-8 that do not contain `end`, which ends a document."""
    for path in paths:
        content = file_lib.read(path)
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        if content and end not in content:
            yield path


def _first(options: _shared.Options) -> int:
    return max(1, round(_FIRST_RATIO * options.plan.steps))


def _copying(options: _shared.Options, base: pathlib.Path) -> list[float]:
    """Returns, for a window in each layer alone, the original's loss on random tokens that repeat earlier ones."""
    path = options.runs / "copying.json"
    if not path.exists():
        streams.say(f"measuring which layers copy: {path}")
        settings, model, _ = training.restore_model(base)
        assert isinstance(model, models.DecoderLM)
        attention = dataclasses.replace(settings.model.attention, kernel="sliding_window")
        windowed = models.DecoderLM(
            dataclasses.replace(settings.model, attention=attention), rngs=nnx.Rngs(0)
        )
        nnx.update(windowed, nnx.state(model))
        half = 2 * settings.data.context_length
        tokens = np.random.default_rng(0).integers(settings.model.vocab_size, size=(_COPIES, half))
        copies = jnp.asarray(np.concatenate([tokens, tokens], 1), jnp.int32)

        def loss(layer: int) -> float:
            model.blocks[layer], own = windowed.blocks[layer], model.blocks[layer]
            hidden = model.hidden(copies[:, :-1], compiled=True)[:, half:]
            model.blocks[layer] = own
            return float(_loss(model.unembed(hidden), copies[:, half + 1 :]))

        losses = [loss(layer) for layer in range(settings.model.layers)]
        with atomic.replace(path) as draft:
            draft.write_text(json.dumps(losses))
    return json.loads(path.read_text())


def _worst(copying: Sequence[float]) -> list[int]:
    """Returns the third of layers with the highest losses, the highest first."""
    layers = sorted(range(len(copying)), key=copying.__getitem__, reverse=True)
    return layers[: max(1, len(layers) // _CHOSEN)]


@jax.jit
def _loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def _train(
    options: _shared.Options, base: pathlib.Path, data: Mapping[str, str], copying: Sequence[float]
) -> dict[tuple[str, int], list[pathlib.Path]]:
    """Trains all runs; returns the folders of their stages, one or two, by variant and seed."""
    first, steps = _first(options), options.plan.steps
    chosen = {"chosen": f'"{",".join(map(str, sorted(_worst(copying))))}"'}
    # Made before any is trained, because an attention may not fit the model.
    starts = {
        variant: config.load(
            f'retrofit:run="{base}",match=true,{",".join(f"{key}={chosen.get(x, x)}" for key, x in arguments.items())}'
        )
        for variant, arguments in VARIANTS.items()
        if arguments and variant in options.variants
    }
    original = loading.replace(workdir.read_config(base), {"task": config.TaskConfig(initial_run=str(base))})

    def train(label: str, settings: config.Config, seed: int, rate: float, steps: int) -> pathlib.Path:
        settings = config.override(settings, data)
        often = {"checkpoint_every": min(steps, 500), "log_every": 50}
        run = _shared.stage(options, settings, rate=rate, warmup=50, steps=steps, seed=seed, **often)
        return _shared.train_all(options, {label: (f"{label}{steps}_seed{seed}", run)})[label]

    # One after the other, so that what a stopped command has is whole variants.
    folders = {}
    for seed, variant in itertools.product(options.plan.seeds, options.variants):
        name = variant.replace(" ", "_")
        found: list[pathlib.Path] = []
        if variant in starts:
            found.append(train(f"{name}_first", starts[variant], seed, _MATCH_RATE, first))
            name, second = f"{name}_after{first}", config.load(f'retrofit:run="{found[0]}"')
        else:
            second = original
        folders[variant, seed] = [*found, train(f"{name}_steps", second, seed, _RATE, steps)]
    _shared.require_same_data(options, [folder for found in folders.values() for folder in found])
    return folders


def _tasks(
    options: _shared.Options, evaluated: Mapping[tuple[str, int], pathlib.Path], data: Mapping[str, str]
) -> list[_shared.Row]:
    """Returns a row for each variant, seed and task, at the training context and at the longest."""
    lengths = sorted({max(_LEAST_CONTEXT, *options.plan.contexts), options.plan.lengths[-1]})
    folders = list(dict.fromkeys(evaluated.values()))
    columns = ("task", "context_length", "exact_match", "token_accuracy", "chance", "questions")
    found: dict[str, list[dict[str, Any]]] = {folder.name: [] for folder in folders}
    for task, trials in _TASKS.items():
        out = options.runs / f"tasks_{task}"
        for row in evaluation.evaluate_context_tasks(
            folders, [task], lengths, out=out, trials=trials, changes=data
        ):
            found[row.run].append({column: getattr(row, column) for column in columns})
    return [
        {"variant": variant, "seed": seed} | row
        for (variant, seed), folder in evaluated.items()
        for row in found[folder.name]
    ]


def _samples(
    options: _shared.Options, evaluated: Mapping[tuple[str, int], pathlib.Path]
) -> list[_shared.Row]:
    """Returns the greedy continuation of each prompt by each variant with the first seed."""
    found: list[_shared.Row] = []
    for (variant, seed), folder in evaluated.items():
        if seed == options.plan.seeds[0]:
            settings, model, _ = training.restore_model(folder)
            codec = data_lib.codec_of_run(settings)
            texts = generation.complete(
                cast(Any, model), codec, _PROMPTS, max_tokens=_SAMPLE_TOKENS, sampling=_GREEDY
            )
            found += [{"variant": variant, "prompt": x, "text": y} for x, y in zip(_PROMPTS, texts)]
    return found


def _speed(folder: pathlib.Path) -> float:
    """Returns the median tokens per second of a run's updates."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["tokens_per_second"] for line in lines)


def tables(content: Mapping[str, Any]) -> Iterator[_shared.Table]:
    """Returns the tables of the experiment's JSON: held-out losses by position, and the tasks, if it has them."""
    yield _shared.loss_table("Held-out loss at positions up to", content["rows"], "context_length")
    if losses := [row["loss"] for row in content.get("copying", [])]:
        worst = _worst(losses)
        found = {"original": [losses[layer] for layer in worst]}
        yield _shared.number_table("Loss of copies, with a window in layer", "", worst, found)
    rows = content.get("tasks", [])
    for task in dict.fromkeys(row["task"] for row in rows):
        part = "tokens" if task == "copy" else "answers"
        yield _shared.loss_table(
            f"Fraction of {part} right, {task}, at a context of",
            [row for row in rows if row["task"] == task],
            "context_length",
            "token_accuracy" if task == "copy" else "exact_match",
        )


main = _shared.Experiment(
    name="published",
    description=__doc__,
    plans=PLANS,
    variants=tuple(VARIANTS),
    run=_report,
    tables=tables,
    more={
        "weights": {
            "metavar": "PATH",
            "help": "Published model: a GGUF file, a folder, or hf://ORG/NAME.",
        }
    },
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
