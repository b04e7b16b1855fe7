"""A published model whose attention is replaced, against the original and against more training of the original.

    python -m experiments.published --weights=SmolLM2-135M-Instruct.Q4_1.gguf [--scale=gpu]

The model is imported, and text is tokenized by its own tokenizer: without --data and --heldout, it is trained on the
Python files of the installed packages and evaluated on those of the standard library. Each variant has a first stage,
in which the new layers learn the outputs of the old ones, and a second one, in which the whole model predicts the next
token. `softmax` is the original, trained with the second stage's data and updates, so that what new attention costs is
told apart from what the data teaches.
"""

import json
import os
import pathlib
import statistics
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from typing import Any

from experiments import _shared
from sympow_jax import config, evaluation
from sympow_jax.config import loading
from sympow_jax.data import prepare, tokenizer
from sympow_jax.data.sources import text, tokens
from sympow_jax.process import streams, workdir
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
    "tiny": _shared.Plan(seeds=(0,), steps=3, contexts=(16,), lengths=(8, 16, 32), documents=2),
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
    "gated and softmax": {"preset": "sympow_gated", "every": "3"},
}
ORIGINAL = "original"
# Updates of the first stage, relative to the second, and the rate of learning of each.
_FIRST_RATIO, _MATCH_RATE, _RATE = 0.6, 1e-3, 3e-4


def _report(options: _shared.Options) -> None:
    base = _original(options)
    folders = _train(options, base)
    lengths = options.plan.lengths
    untrained = options.runs / f"{base.name}_evaluation"
    evaluation.evaluate([base], lengths, out=untrained, documents=options.plan.documents)
    losses = {ORIGINAL: untrained} | {variant: second for variant, (_, second) in folders.items()}
    rows = [
        {"variant": variant}
        | {column: row[column] for column in ("context_length", "loss", "standard_error")}
        for variant, folder in losses.items()
        for row in _shared.evaluation(folder)
    ]
    stages = {
        (variant, stage): folder
        for variant, pair in folders.items()
        for stage, folder in zip(("first", "second"), pair)
        if folder is not None
    }
    path = options.write(
        rows,
        list(stages.values()),
        curves=_shared.curve_rows(stages, ("variant", "stage")),
        tokens_per_second={
            f"{variant}, {stage}": _speed(folder) for (variant, stage), folder in stages.items()
        },
    )
    (context,) = options.plan.contexts
    tokens_of = {
        stage: steps * _SETTINGS[options.scale]["data.batch_tokens"] / 1e6
        for stage, steps in (("first", _first(options)), ("second", options.plan.steps))
    }
    panel = _shared.Panel(
        lines=_shared.lines(_shared.means(rows, ("variant", "context_length"), "loss")),
        x_label="upper end of positions (tokens)",
        y_label="held-out loss (nats per token)",
        ticks=lengths,
        mark=(context, f"training context {context:,}"),
    )
    _shared.draw_lines(
        path,
        [panel],
        title=f"Attention replaced in {base.name}",
        subtitle=f"{tokens_of['first']:.1f}M tokens of its outputs, then {tokens_of['second']:.1f}M of the model; "
        "softmax is the original after the latter alone",
    )


def _original(options: _shared.Options) -> pathlib.Path:
    """Returns the folder of the imported model, whose settings name the tokenized text."""
    if (name := options.more["weights"]) is None:
        raise ValueError("--weights is missing; name a GGUF file or a folder of a published model")
    weights = pathlib.Path(name)
    folder = options.runs / weights.stem
    sides = {"train": options.data, "heldout": options.heldout}
    paths = {side: folder.with_name(f"{folder.name}_{side}.bin") for side in sides}
    if not workdir.checkpoint_steps(folder):
        (context,) = options.plan.contexts
        found = files.read_settings(files.settings_path(weights))
        changes = {
            "data.source": "tokens",
            "data.paths": (str(paths["train"]),),
            "data.heldout_paths": (str(paths["heldout"]),),
            "data.context_length": context,
        }
        runs.import_run(weights, loading.replace(found, changes | _SETTINGS[options.scale]), folder)
    # A folder has its tokenizer; that of a GGUF file is in the imported run.
    source = workdir.read_config(folder).data
    name = source.tokenizer or str(weights)
    for side, given in sides.items():
        if (paths[side] / tokens.METADATA).exists():
            continue
        streams.say(f"tokenizing {paths[side]}")
        codec = tokenizer.load(name)
        end = codec.end_of_text(source.document_separator, setting="data.document_separator")
        documents = given or list(_python_files(codec.decode([end]), heldout=side == "heldout"))
        prepared = prepare.Options(tokenizer=name, separator=end, workers=os.cpu_count() or 1)
        prepare.write_bin(str(paths[side]), documents, prepared)
    return folder


def _python_files(end: bytes, *, heldout: bool) -> Iterable[str]:
    """Yields the Python files of the installed packages or, held out, of the standard library.

    Files that are not UTF-8, or that contain `end`, which ends a document, are left out.
    """
    if heldout:
        found = [file.path for file in text.standard_library()]
    else:
        found = sorted(map(str, pathlib.Path(sysconfig.get_paths()["purelib"]).rglob("*.py")))
    for path in found:
        content = pathlib.Path(path).read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        if content and end not in content:
            yield path


def _first(options: _shared.Options) -> int:
    return max(1, round(_FIRST_RATIO * options.plan.steps))


def _train(
    options: _shared.Options, base: pathlib.Path
) -> dict[str, tuple[pathlib.Path | None, pathlib.Path]]:
    """Trains all runs; returns the folders of both stages by variant. Softmax has no first stage."""
    first, steps = _first(options), options.plan.steps
    replaced = [variant for variant in options.variants if VARIANTS[variant]]

    def name(variant: str) -> str:
        return f"{base.name}_{variant.replace(' ', '_')}"

    # One after the other, so that what a stopped command has is whole variants.
    matched: dict[str, pathlib.Path] = {}
    trained: dict[str, pathlib.Path] = {}
    for variant in options.variants:
        if variant in replaced:
            arguments = ",".join(f"{key}={x}" for key, x in (VARIANTS[variant] | {"match": "true"}).items())
            settings = _changed(options, config.load(f'retrofit:"{base}",{arguments}'), _MATCH_RATE, first)
            run = f"{name(variant)}_first{first}", settings
            matched |= _shared.train_all(options, {variant: run})
            settings = config.load(f'retrofit:"{matched[variant]}"')
        else:
            task = config.TaskConfig(initial_run=str(base))
            settings = loading.replace(workdir.read_config(base), {"task": task})
        label = f"{name(variant)}_{f'after{first}_' if variant in replaced else ''}steps{steps}"
        run = label, _changed(options, settings, _RATE, steps)
        trained |= _shared.train_all(options, {variant: run})
    return {variant: (matched.get(variant), trained[variant]) for variant in options.variants}


def _changed(options: _shared.Options, settings: config.Config, rate: float, steps: int) -> config.Config:
    """Returns settings with the optimizer, length and evaluation of this experiment."""
    (seed,) = options.plan.seeds
    lengths = () if settings.task.replaces_attention else options.plan.lengths
    changes = {
        "optimizer": config.OptimizerConfig(
            learning_rate=rate, schedule="cosine", warmup_steps=min(50, steps // 2), clip_norm=1.0
        ),
        "evaluation": config.EvaluationConfig(context_lengths=lengths, documents=options.plan.documents),
        "training.steps": steps,
        "training.seed": seed,
        "training.checkpoint_every": min(steps, 500),
        "training.keep_checkpoints": 1,
        "training.log_every": 50,
        "data.seed": seed,
    }
    return loading.replace(settings, changes)


def _speed(folder: pathlib.Path) -> float:
    """Returns the median tokens per second of a run's updates."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["tokens_per_second"] for line in lines)


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the table of the experiment's JSON: held-out losses by position."""
    rows = content["rows"]
    return [_shared.loss_table("Held-out loss at positions up to", rows, "context_length")]


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
            "help": "GGUF file or folder of a published model, as for `sympow weights import`.",
        }
    },
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
