"""Retrofit: a trained softmax model whose attention is replaced, against the same model from scratch.

A model with the body of Llama is trained with softmax, once. Then each variant replaces its attention and continues on
the same data, as `configs/retrofit.py` does: directly, or after a first stage (`matched`) in which the new layers learn
the outputs of the old ones. `scratch` is a new model of the variant. All three have the same number of updates.
"""

import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared
from sympow_jax import config
from sympow_jax.config import loading

PLANS = {
    "toy": _shared.Plan(
        seeds=(0, 1, 2), steps=100, contexts=(256,), lengths=(64, 128, 256, 512, 1024, 2048, 4096)
    ),
    "paper": _shared.Plan(
        seeds=(0,),
        steps=5000,
        contexts=(4096,),
        lengths=tuple(2**exponent for exponent in range(8, 17)),
        documents=64,
    ),
    "tiny": _shared.Plan(seeds=(0, 1), steps=4, contexts=(16,), lengths=(8, 16, 32), documents=2),
}
# Arguments of `configs/retrofit.py`. The models of the toy scale have two layers.
VARIANTS: dict[str, dict[str, str]] = {
    "sympow": {"preset": "sympow"},
    "gated": {"preset": "sympow_gated"},
    "conformal": {"preset": "conformal"},
    "gated and softmax": {"preset": "sympow_gated", "every": "2"},
}
STARTS = ("direct", "matched", "scratch")
# Updates of the softmax model and of the first stage, relative to the second stage.
_BASE_RATIO, _FIRST_RATIO = 15, 1 / 3
_RATES = {"base": 2e-3, "match": 2e-3, "direct": 1e-3, "matched": 1e-3, "scratch": 2e-3}
_BODY: dict[str, Any] = {"model.norm": "rms", "model.activation": "swiglu", "model.embedding_norm": False}


def _report(options: _shared.Options) -> None:
    base, folders = _train(options)
    lengths = options.plan.lengths
    columns = ("context_length", "loss")
    softmax = [{key: row[key] for key in columns} for row in _shared.evaluation(base)]
    names = ("variant", "start", "seed")
    rows = [
        dict(zip(names, key)) | {column: row[column] for column in columns}
        for key, folder in folders.items()
        for row in _shared.evaluation(folder)
    ]
    curves = _shared.curve_rows(folders, names, _shared.heldout_curve)
    path = options.write(rows, [base, *folders.values()], curves=curves, softmax=softmax)
    # Held-out losses during training. The first stage comes before the first update of a matched model.
    begins = {start: _first(options) if start == "matched" else 0 for start in STARTS}
    panels = []
    for variant in options.variants:
        own = [
            row | {"step": begins[row["start"]] + row["step"]} for row in curves if row["variant"] == variant
        ]
        panels.append(
            _shared.Panel(
                lines=_shared.lines(_shared.means(own, ("start", "step"), "loss")),
                x_label="updates, both stages",
                y_label="held-out loss (nats per token)",
                title=variant,
            )
        )
    matched = [row for row in rows if row["start"] == "matched"]
    base_updates = _BASE_RATIO * options.plan.steps
    lines: dict[str, Sequence[Sequence[float]]] = {
        f"softmax, {base_updates:,} updates": [lengths, [row["loss"] for row in softmax]]
    }
    lines |= _shared.lines(_shared.means(matched, ("variant", "context_length"), "loss"))
    (context,) = options.plan.contexts
    panels.append(
        _shared.Panel(
            lines=lines,
            x_label="upper end of positions (tokens)",
            y_label="held-out loss (nats per token)",
            title="matched, after training",
            ticks=lengths,
            mark=(context, f"training context {context:,}"),
        )
    )
    _shared.draw_lines(
        path,
        panels,
        title="Attention replaced in a trained softmax model",
        subtitle=f"{options.plan.average}; {options.plan.steps:,} updates after a first stage of "
        f"{_first(options):,}, softmax after {base_updates:,}",
    )


def _first(options: _shared.Options) -> int:
    return max(1, round(_FIRST_RATIO * options.plan.steps))


def _train(options: _shared.Options) -> tuple[pathlib.Path, dict[tuple[str, str, int], pathlib.Path]]:
    """Trains all runs; returns the folder of the softmax model, and those of its retrofits by variant, start, seed."""
    plan = options.plan
    steps, first = plan.steps, _first(options)
    base_steps = _BASE_RATIO * steps
    (context,) = plan.contexts
    base = _shared.settings(options, config.preset("llama3"), context=context, seed=0)
    base = loading.replace(base, _BODY | {"model.layers": max(2, base.model.layers)})
    base = _stage(options, base, _RATES["base"], base_steps, seed=0)
    (folder,) = _shared.train_all(options, {"base": (f"retrofit_base_steps{base_steps}", base)}).values()
    keys, whole = list(itertools.product(options.variants, plan.seeds)), first + steps

    def retrofit(variant: str, **more: str) -> config.Config:
        arguments = VARIANTS[variant] | more
        return config.load(
            f'retrofit:run="{folder}",{",".join(f"{name}={x}" for name, x in arguments.items())}'
        )

    def run(
        start: str, variant: str, seed: int, found: config.Config, steps: int
    ) -> tuple[str, config.Config]:
        length = f"{first}_{steps}" if start == "matched" else f"{steps}"
        label = f"retrofit_{variant.replace(' ', '_')}_of{base_steps}_seed{seed}_{start}{length}"
        return label, _stage(options, found, _RATES[start], steps, seed)

    match = {key: run("match", *key, retrofit(key[0], match="true"), first) for key in keys}
    matches = _shared.train_all(options, match)
    runs = {}
    for variant, seed in keys:
        direct, matched = retrofit(variant), config.load(f'retrofit:run="{matches[variant, seed]}"')
        # Gates of a new model begin at 1/2.
        changes = {"model.attention.decay_bias": None, "task": config.TaskConfig()}
        scratch = loading.replace(direct, changes)
        starts = ("direct", direct, whole), ("matched", matched, steps), ("scratch", scratch, whole)
        for start, found, updates in starts:
            runs[variant, start, seed] = run(start, variant, seed, found, updates)
    return folder, _shared.train_all(options, runs)


def _stage(options: _shared.Options, base: config.Config, rate: float, steps: int, seed: int):
    often = {"checkpoint_every": 100, "log_every": 100}
    return _shared.stage(options, base, rate=rate, warmup=20, steps=steps, seed=seed, **often)


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of the experiment's JSON."""
    rows, softmax = content["rows"], content["softmax"]
    found = _shared.means(rows, ("variant", "start", "context_length"), "loss")
    lengths = [row["context_length"] for row in softmax]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    made = []
    for start in STARTS:
        losses = {name: [found[name, start, length].value for length in lengths] for name in variants}
        losses = {"softmax": [row["loss"] for row in softmax]} | losses
        title = f"Held-out loss at positions up to, {start}"
        made.append(_shared.number_table(title, "", lengths, losses))
    pairs = (("matched", "direct"), ("matched", "scratch"))
    for variant in variants:
        of_variant = [row | {"variant": row["start"]} for row in rows if row["variant"] == variant]
        made.append(_shared.difference_table(f"Differences, {variant}", of_variant, "context_length", pairs))
    return made


main = _shared.Experiment(
    name="retrofit", description=__doc__, plans=PLANS, variants=tuple(VARIANTS), run=_report, tables=tables
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
