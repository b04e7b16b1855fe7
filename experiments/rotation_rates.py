"""Conformal against gated, with a smaller step for the projection that learned rotation rates are computed by.

In "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, Figures 1 and 3) conformal is below
gated. The rates beta = 1 + tanh(W x) are summed over a document, so a step of W changes the angle between distant
tokens by many radians. Each conformal variant has another factor of the learning rate of W
(`optimizer.learning_rate_factors`); 1 is the paper's optimizer. With the same seed all variants see the same data in
the same order, so differences from gated are taken seed by seed. Held-out losses are those of positions within the
training context and up to four times it.

With `--start=preset`, gates and rates begin as in the presets `sympow_gated` and `conformal`, and not as in the paper.
"""

import itertools
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from experiments import _shared
from sympow_jax import config
from sympow_jax.config import loading

PLANS = {
    "toy": _shared.Plan(seeds=(0, 1, 2), steps=1000, contexts=(256,), lengths=(256, 1024)),
    "paper": _shared.Plan(
        seeds=(0, 1, 2), steps=100_000, contexts=(4096,), lengths=(4096, 16_384), documents=64
    ),
    "tiny": _shared.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(16, 32), documents=2),
}
_START = "Whether gates and rates begin as in the paper or as in the presets."
# Factor of the learning rate of W in each conformal variant.
_FACTORS = {"conformal": 1.0, "conformal 0.3": 0.3, "conformal 0.1": 0.1}
_BASE = "gated"
VARIANTS = ("sympow", _BASE, *_FACTORS)
_PAIRS = (
    ("sympow", _BASE),
    *((name, _BASE) for name in _FACTORS),
    ("conformal 0.3", "conformal"),
    ("conformal 0.1", "conformal"),
)
# Half of the other experiments' tokens per update: more updates in the time.
TOY_TOKENS = 1024


def train(
    options: _shared.Options,
    attentions: Mapping[str, config.AttentionConfig],
    label: Callable[[str], str],
    rate_factors: Mapping[str, float] = types.MappingProxyType({}),
) -> tuple[dict[tuple[str, int], pathlib.Path], list[dict[str, Any]]]:
    """Trains every variant with every seed on the language of this experiment.

    Args:
        options: of the experiment, with one training context.
        attentions: attention of each variant.
        label: maps a variant to its name in folders, where experiments find each other's runs.
        rate_factors: factors of the learning rate of W.

    Returns:
        The folders of the runs by variant and seed, and a row of losses for each.
    """
    runs, (context,) = {}, options.plan.contexts
    changes: dict[str, Any] = {"data.batch_tokens": TOY_TOKENS} if options.scale == "toy" else {}
    for seed, variant in itertools.product(options.plan.seeds, options.variants):
        found = _shared.settings(options, attentions[variant], context=context, seed=seed)
        factor = rate_factors.get(variant, 1.0)
        factors = () if factor == 1 else (f"*.attention.rate.kernel={factor}",)
        found = loading.replace(found, changes | {"optimizer.learning_rate_factors": factors})
        name = f"{label(variant).replace(' ', '_')}_context{context}_tokens{found.data.batch_tokens}"
        runs[variant, seed] = f"{name}_steps{options.plan.steps}_seed{seed}", found
    folders, rows = _shared.train_all(options, runs), []
    for (variant, seed), folder in folders.items():
        heldout = {f"heldout_{row['context_length']}": row["loss"] for row in _shared.evaluation(folder)}
        rows.append({"variant": variant, "seed": seed, "training": _shared.final_loss(folder)} | heldout)
    return folders, rows


def loss_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each loss of the rows of an experiment's JSON, with its label as `loss of`."""
    lengths = content["plan"]["lengths"]
    names = ("training", *(f"heldout_{length}" for length in lengths))
    return [
        {"variant": row["variant"], "seed": row["seed"], "loss of": label, "loss": row[name]}
        for label, name in zip(_shared.loss_labels(lengths), names, strict=True)
        for row in content["rows"]
    ]


def _experiment(options: _shared.Options) -> None:
    options = options.at_context()
    variants, seeds, start = options.variants, len(options.plan.seeds), options.more["start"]
    plain = _shared.power_variants(options.power, start)
    attentions = {name: plain["conformal" if name in _FACTORS else name] for name in variants}

    def label(variant):
        name = _shared.power_label(variant, options.power)
        return name if start == "paper" else f"{name}_{start}"

    folders, rows = train(options, attentions, label, _FACTORS)
    path = options.write(rows, folders.values())
    # The difference from gated of the conformal variants, by updates. Sympow is far above all others.
    pairs = [(name, _BASE) for name in variants if name in _FACTORS]
    found = _shared.differences(_shared.curve_rows(folders, ("variant", "seed")), "step", "loss", pairs)
    panel = _shared.Panel(
        lines=_shared.lines({(name, step): mean for (name, _, step), mean in found.items()}),
        x_label="updates",
        y_label="training loss minus gated's (nats per token)",
        linear=True,
        level=0.0,
    )
    _shared.draw_lines(
        path,
        [panel],
        title="Conformal against gated",
        subtitle=f"mean of {seeds} seeds, band of one standard error; numbers are factors of W's learning rate",
    )


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    long = loss_rows(content)
    return [
        _shared.loss_table("Final loss, nats per token", long, "loss of"),
        _shared.difference_table("Differences, nats per token", long, "loss of", _PAIRS),
    ]


main = _shared.Experiment(
    name="rotation_rates",
    description=__doc__,
    plans=PLANS,
    variants=VARIANTS,
    base=_BASE,
    powers=(2, 4),
    more={**_shared.CONTEXT, "start": {"choices": ("paper", "preset"), "default": "paper", "help": _START}},
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
