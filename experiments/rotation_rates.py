"""Conformal against gated, with a smaller step for the projection that learned rotation rates are computed by.

In "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025, Figures 1 and 3) conformal is below
gated. The rates beta = 1 + tanh(W x) are summed over a document, so a step of W changes the angle between distant
tokens by many radians. Each conformal variant has another factor of the learning rate of W
(`optimizer.learning_rate_factors`); 1 is the paper's optimizer. With the same seed all variants see the same data in
the same order, so differences from gated are taken seed by seed. Held-out losses are those of positions within the
training context and up to four times it.
"""

import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared
from sympow_jax import config

PLANS = {
    "toy": _shared.Plan(seeds=(0, 1, 2), steps=1000, contexts=(256,), lengths=(256, 1024)),
    "paper": _shared.Plan(
        seeds=(0, 1, 2), steps=100_000, contexts=(4096,), lengths=(4096, 16_384), documents=64
    ),
    "tiny": _shared.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(16, 32), documents=2),
}
# Factor of the learning rate of W in each conformal variant.
_FACTORS = {"conformal": 1.0, "conformal 0.3": 0.3, "conformal 0.1": 0.1}
_BASE = "gated"
VARIANTS = ("sympow", _BASE, *_FACTORS)
# Half of the other experiments' tokens per update: more updates in the time.
_TOY_TOKENS = 1024


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    return _shared.run(
        "rotation_rates",
        __doc__,
        arguments,
        _experiment,
        plans=PLANS,
        variants=VARIANTS,
        base=_BASE,
        powers=(2, 4),
    )


def settings(options: _shared.Options, variant: str, seed: int) -> config.Config:
    """Returns the config of a variant's run."""
    (context,) = options.plan.contexts
    attention = _shared.power_variants(options.power)["conformal" if variant in _FACTORS else variant]
    found = _shared.settings(options, attention, context=context, seed=seed, evaluated=True)
    if options.scale == "toy":
        found = dataclasses.replace(found, data=dataclasses.replace(found.data, batch_tokens=_TOY_TOKENS))
    factor = _FACTORS.get(variant, 1.0)
    factors = () if factor == 1 else (f"*.attention.rate.kernel={factor}",)
    return dataclasses.replace(
        found, optimizer=dataclasses.replace(found.optimizer, learning_rate_factors=factors)
    )


def _experiment(options: _shared.Options) -> None:
    plan, variants, seeds = options.plan, options.variants, len(options.plan.seeds)
    wanted = {
        (variant, seed): settings(options, variant, seed) for seed in plan.seeds for variant in variants
    }
    names = (
        f"{_shared.power_label(variant, options.power).replace(' ', '_')}_context{run.data.context_length}"
        f"_tokens{run.data.batch_tokens}_steps{plan.steps}_seed{seed}"
        for (variant, seed), run in wanted.items()
    )
    folders = dict(zip(wanted, _shared.train_all(options, dict(zip(names, wanted.values())))))
    rows: list[dict[str, Any]] = []
    for (variant, seed), folder in folders.items():
        heldout = {f"heldout_{row['context_length']}": row["loss"] for row in _shared.evaluation(folder)}
        rows.append({"variant": variant, "seed": seed, "training": _shared.final_loss(folder)} | heldout)
    columns = tuple(rows[0])[2:]
    losses = {
        column: {name: [row[column] for row in rows if row["variant"] == name] for name in variants}
        for column in columns
    }
    differences = {column: differences_from(_BASE, of_variants) for column, of_variants in losses.items()}
    path = _shared.write(options, rows, folders.values(), differences_from_gated=differences)
    _shared.draw_lines(
        path,
        [_panel(options, folders)],
        title="Conformal against gated",
        subtitle=f"mean of {seeds} seeds, band of one standard error; numbers are factors of W's learning rate",
    )
    _shared.print_table(
        "Final loss, nats per token, mean of seeds; in brackets the difference from gated and its standard error",
        ("", *columns),
        (
            (name, *(_cell(losses[column][name], differences[column][name]) for column in columns))
            for name in variants
        ),
    )


def _panel(options: _shared.Options, folders: Mapping[tuple[str, int], pathlib.Path]) -> _shared.Panel:
    """Returns the difference from gated of the training loss of the conformal variants, against updates."""
    curves = {key: _shared.curve(folder) for key, folder in folders.items()}
    points = []
    for number, (step, _) in enumerate(next(iter(curves.values()))):
        losses = {
            name: [curves[name, seed][number][1] for seed in options.plan.seeds] for name in options.variants
        }
        points.append((step, differences_from(_BASE, losses)))
    # Sympow is far above all others.
    lines = {
        name: ([step for step, _ in points], *zip(*(_band(found[name]) for _, found in points)))
        for name in options.variants
        if name in _FACTORS
    }
    return _shared.Panel(
        lines=lines,
        x_label="updates",
        y_label="training loss minus gated's (nats per token)",
        linear=True,
        level=0.0,
    )


def differences_from(base: str, losses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns the mean over seeds of each variant's loss minus that of `base`, and its standard error.

    The losses of a variant are in the order of seeds. The standard error of one seed is NaN.
    """
    found = {}
    for name, of_seeds in losses.items():
        by_seed = [loss - other for loss, other in zip(of_seeds, losses[base], strict=True)]
        count = len(by_seed)
        error = statistics.stdev(by_seed) / math.sqrt(count) if count > 1 else math.nan
        found[name] = {"mean": statistics.mean(by_seed), "standard_error": error}
    return found


def _band(difference: Mapping[str, float]) -> tuple[float, float, float]:
    mean, error = difference["mean"], difference["standard_error"]
    return mean, mean - error, mean + error


def _cell(losses: Sequence[float], difference: Mapping[str, float]) -> str:
    return f"{statistics.mean(losses):.3f} ({difference['mean']:+.3f} ± {difference['standard_error']:.3f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
