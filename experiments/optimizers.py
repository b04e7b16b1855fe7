"""Held-out loss of each optimizer at its own best learning rate.

The toy scale is `configs/quickstart.py` with another optimizer. With the first seed, each optimizer is trained at three
rates a factor of 3 apart, and at up to two more while the best is at either end. The other seeds are trained at the
rate of the first seed's lowest held-out loss. Every optimizer has a warmup and a cosine schedule, except
`schedule_free`, whose rate stays constant after the warmup. Gradients are clipped to norm 1; weight decay is 0.1,
except for `adam`, which has none.
"""

import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments import _shared
from sympow_jax import config, training
from sympow_jax.config import loading
from sympow_jax.config import optimizer as optimizer_lib
from sympow_jax.training import sharding

PLANS = {
    "toy": _shared.Plan(seeds=(0, 1, 2), steps=450, contexts=(256,), lengths=(256,), documents=64),
    "paper": _shared.Plan(seeds=(0,), steps=10_000, contexts=(4096,), lengths=(4096,), documents=64),
    "tiny": _shared.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(16,), documents=2),
}
VARIANTS = optimizer_lib.OPTIMIZERS
# Middle of the first three rates.
_MIDDLE_RATES = {
    "adam": 6e-3,
    "adamw": 6e-3,
    "adafactor": 9e-2,
    "lion": 1e-3,
    "muon": 1.8e-2,
    "schedule_free": 6e-3,
    "sgd": 0.3,
}
_FACTOR = 3.0
_MAX_RATES = 5
_WEIGHT_DECAY = 0.1

# Folders of runs, by optimizer, learning rate and seed.
Folders = dict[tuple[str, float, int], pathlib.Path]


def _run(options: _shared.Options) -> None:
    folders: Folders = {}
    first, *others = options.plan.seeds

    def best_rate() -> float:
        return _best({rate: _loss(folder) for (name, rate, _), folder in folders.items() if name == variant})

    for variant in options.variants:
        rates = [_MIDDLE_RATES[variant] * _FACTOR**exponent for exponent in (-1, 0, 1)]
        folders |= _train(options, variant, rates, first)
        while (best := best_rate()) in (min(rates), max(rates)) and len(rates) < _MAX_RATES:
            rates.append(best / _FACTOR if best == min(rates) else best * _FACTOR)
            folders |= _train(options, variant, rates[-1:], first)
        for seed in others:
            folders |= _train(options, variant, [best], seed)
        # After each optimizer, so that a stopped experiment has the results so far.
        _report(options, folders)


def _train(options: _shared.Options, variant: str, rates: Sequence[float], seed: int) -> Folders:
    """Trains an optimizer at these rates; returns the folders of the runs."""
    runs = {}
    for rate in rates:
        name = f"{variant}_rate{rate:.2g}_steps{options.plan.steps}_seed{seed}"
        runs[variant, rate, seed] = name, settings(options, variant, rate=rate, seed=seed)
    return _shared.train_all(options, runs)


def settings(options: _shared.Options, variant: str, *, rate: float, seed: int) -> config.Config:
    """Returns the config of a run of an optimizer at a learning rate."""
    (context,) = options.plan.contexts
    base = _shared.settings(options, config.preset("conformal_paper"), context=context, seed=seed)
    optimizer = config.OptimizerConfig(
        name=variant,
        learning_rate=rate,
        warmup_steps=options.plan.steps // 10,
        schedule="constant" if variant == "schedule_free" else "cosine",
        weight_decay=0.0 if variant == "adam" else _WEIGHT_DECAY,
        clip_norm=1.0,
    )
    # A run that diverges continues and has a high loss, instead of ending the experiment.
    skips = {"training.skip_nonfinite": True, "training.max_skips": options.plan.steps + 1}
    changes = {"optimizer": optimizer} | skips
    if options.scale == "toy":
        # `_shared.settings` has smaller batches.
        changes["data.batch_tokens"] = config.load("quickstart").data.batch_tokens
    return loading.replace(base, changes)


def _loss(folder: pathlib.Path) -> float:
    (row,) = _shared.evaluation(folder)
    return _shared.from_json(row["loss"])


def _rank(loss: float) -> float:
    """Returns the loss, or infinity if it is not finite: Python's `min` and `sorted` cannot order NaN."""
    return loss if math.isfinite(loss) else math.inf


def _best(losses: Mapping[float, float]) -> float:
    """Returns the rate of the lowest loss, or the lowest rate if none is finite."""
    return min(losses, key=lambda rate: (_rank(losses[rate]), rate))


def _report(options: _shared.Options, folders: Folders) -> None:
    """Writes rows, CSV, JSON and the plot.

    Raises:
        ValueError: the folders have runs on different data.
    """
    # `_shared.train_all` compares those of one call.
    _shared.require_same_data(options, list(folders.values()))
    rows = [
        {"variant": variant, "learning_rate": rate, "seed": seed}
        | {"loss": _loss(folder), "training_loss": _shared.final_loss(folder)}
        for (variant, rate, seed), folder in folders.items()
    ]
    names = dict.fromkeys(str(row["variant"]) for row in rows)
    bytes_per_parameter = {name: state_bytes(options, name) for name in names}
    path = options.write(rows, list(folders.values()), bytes_per_parameter=bytes_per_parameter)
    _shared.draw_values(
        path,
        [(name, *_shared.mean(losses).band) for name, (_, losses) in _at_best_rates(rows).items()],
        title="Optimizers at their own best learning rates",
        subtitle=f"held-out loss after {options.plan.steps:,} updates, {options.plan.average}",
        x_label="nats per token",
    )


def state_bytes(options: _shared.Options, variant: str) -> float:
    """Returns the bytes of optimizer state per parameter; no state is allocated."""
    program = training.Program(
        settings(options, variant, rate=_MIDDLE_RATES[variant], seed=0), sharding.whole_mesh()
    )
    state_leaves = jax.tree.leaves(program.abstract.opt_state)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in state_leaves)
    return num_bytes / sum(leaf.size for leaf in jax.tree.leaves(program.abstract.params))


def _at_best_rates(rows: Sequence[_shared.Row]) -> dict[str, tuple[float, list[float]]]:
    """Returns the best rate of each optimizer, and the losses of all seeds at that rate."""
    found = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        # The other seeds were trained at the best rate of the first one.
        rate = _best({row["learning_rate"]: row["loss"] for row in own if row["seed"] == own[0]["seed"]})
        found[name] = rate, [row["loss"] for row in own if row["learning_rate"] == rate]
    return found


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    rows = [{**row, "loss": _shared.from_json(row["loss"])} for row in content["rows"]]
    found, sizes = _at_best_rates(rows), content["bytes_per_parameter"]
    found = dict(sorted(found.items(), key=lambda item: _rank(_shared.mean(item[1][1]).value)))
    tried: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["seed"] == rows[0]["seed"]:
            tried.setdefault(row["variant"], []).append((row["learning_rate"], row["loss"]))
    return [
        _shared.Table(
            "Held-out loss at the best rate, nats per token",
            ("", "loss", "learning rate", "bytes of state per parameter"),
            [
                (name, str(_shared.mean(losses)), f"{rate:.2g}", f"{sizes[name]:.1f}")
                for name, (rate, losses) in found.items()
            ],
        ),
        _shared.Table(
            "Held-out loss of the first seed by learning rate",
            ("", "loss at each rate"),
            [
                (name, ", ".join(f"{rate:.2g}: {loss:.3f}" for rate, loss in sorted(tried[name])))
                for name in found
            ],
        ),
    ]


main = _shared.Experiment(
    name="optimizers", description=__doc__, plans=PLANS, variants=VARIANTS, run=_run, tables=tables
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
