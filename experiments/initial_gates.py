"""Where gates and rotation rates begin: the needle of `recall` and language, by their initial values.

A gate sigmoid(W x) begins at 1/2 and forgets a token within 20 steps, so that older ones hardly have a gradient. With
an initial bias b it is sigmoid(W x + b), with a half-life of about 5 tokens at b = 2, 38 at 4 and 280 at 6. Variants
are named by their bias. `alibi` has a bias for each head, from ALiBi's slopes: half-lives of 11 and 177 tokens with two
heads. Variants of one word have no bias, as in "Conformal Transformations for Symmetric Power Transformers" (Kumar et
al. 2025).

The paper's rotation rates are theta_m (1 + tanh(W x)), with theta_m = 2 pi / 65,536^(2m / D). With a small random W the
angle between two tokens begins as a random walk, in which the fastest pairs turn by several radians within a few
tokens. In `zero` W begins at 0, and so with the angles of fixed rates, and in `10k` theta_m is 10,000^(-2m / D).

Each variant learns two tasks, each at the context, updates and tokens of its experiment: `needle`, as in `recall`, and
the language of `rotation_rates`, to which `--steps` belongs. With `--context`, language is the only task.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared, recall, rotation_rates
from sympow_jax import config
from sympow_jax.config import loading

PLANS = rotation_rates.PLANS
_CHANGES: dict[str, dict[str, Any]] = {
    "2": {"decay_bias": 2.0},
    "4": {"decay_bias": 4.0},
    "6": {"decay_bias": 6.0},
    "alibi": {"decay": "learned_alibi"},
    "10k": {"rope.base": 10_000.0},
    "zero": {"learned_rope_start": "rope"},
}
_BIASES = ("2", "4", "6", "alibi")
_RATES = ("alibi zero", "alibi 10k", "alibi 10k zero")
VARIANTS = (
    *("softmax", "softmax 10k", "sympow", "sympow 10k", "learned_rope", "learned_rope 10k zero"),
    *("gated", *(f"gated {bias}" for bias in _BIASES), "gated alibi 10k"),
    *("conformal", *(f"conformal {start}" for start in (*_BIASES, *_RATES))),
)
_PAIRS = (
    *((name, name.split()[0]) for name in VARIANTS if " " in name),
    *((name, name.replace("conformal", "gated")) for name in VARIANTS if name.startswith("conformal")),
    *((f"conformal {start}", "conformal alibi") for start in _RATES),
    *((f"conformal {start}", "gated alibi") for start in _RATES),
)
_HEAD_DIM = 16  # of the models of the needle


def attention(variant: str, power: int) -> config.AttentionConfig:
    """Returns the attention of a variant: its first word, with the changes that the other words name."""
    name, *changes = variant.split()
    plain = _shared.power_variants(power)
    plain["learned_rope"] = dataclasses.replace(plain["conformal"], decay="none")
    return loading.replace(plain[name], {k: v for change in changes for k, v in _CHANGES[change].items()})


def _needles(options: _shared.Options) -> list[dict[str, Any]]:
    """Returns the accuracy of each variant and seed at each distance of a needle."""
    plan, setting = recall.PLANS[options.scale], recall.SETTINGS[options.scale]
    folder, rows = options.runs / "initial_gates", []
    folder.mkdir(parents=True, exist_ok=True)
    for variant in options.variants:
        seeds = "-".join(map(str, options.plan.seeds))
        print(f"needle, {variant}, {plan.steps} updates, seeds {seeds}", flush=True)
        path = folder / f"needle_{variant.replace(' ', '_')}_p{options.power}_{plan.steps}_{seeds}.npz"
        shape = recall.model_config(setting, "needle", attention(variant, options.power), _HEAD_DIM)
        found = recall.train(
            setting, "needle", shape, options.plan.seeds, path, steps=plan.steps, series=plan.documents
        )
        rows += [
            {"task": "needle", "variant": variant, "seed": seed, "point": distance, "value": float(right)}
            for seed, accuracies in zip(options.plan.seeds, found)
            for distance, right in zip(setting.distances, accuracies)
        ]
    return rows


def _experiment(options: _shared.Options) -> None:
    options = options.at_context()
    plan, setting = options.plan, recall.SETTINGS[options.scale]
    rows = [] if options.more["context"] else _needles(options)
    folders, losses = rotation_rates.train(
        options,
        {name: attention(name, options.power) for name in options.variants},
        lambda name: f"bias_{_shared.power_label(name, options.power)}",
    )
    points = {0: "training"} | {length: f"heldout_{length}" for length in plan.lengths}
    rows += [
        {"task": "language", "variant": row["variant"], "seed": row["seed"]}
        | {"point": point, "value": row[name]}
        for row in losses
        for point, name in points.items()
    ]
    path = options.write(rows, folders.values())
    if not options.more["context"]:
        _draw(path, setting, rows, plan.average)


def _draw(path: pathlib.Path, setting: recall.Setting, rows: Sequence[dict[str, Any]], about: str) -> None:
    """Draws accuracy against the distance of a needle, with a panel for gated and one for conformal attention."""
    panels = []
    for name in ("gated", "conformal"):
        shown = [
            row | {"variant": row["variant"].removeprefix(name).strip() or "no bias"}
            for row in rows
            if row["task"] == "needle" and row["variant"].startswith((name, "softmax"))
        ]
        panels.append(
            _shared.Panel(
                lines=_shared.lines(_shared.means(shown, ("variant", "point"), "value")),
                x_label="distance of a needle, tokens",
                y_label="accuracy",
                title=name,
                ticks=[x for x in setting.distances if x & (x - 1) == 0 and x.bit_length() % 2],
                mark=(setting.context, "training context"),
            )
        )
    _shared.draw_lines(
        path,
        panels,
        title="A needle by the initial bias of the gates",
        subtitle=f"{about}; without a bias a gate begins at 1/2",
    )


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    lengths = content["plan"]["lengths"]
    names = dict(zip((0, *lengths), _shared.loss_labels(lengths)))
    needles = [row for row in content["rows"] if row["task"] == "needle"]
    losses = [row | {"loss of": names[row["point"]]} for row in content["rows"] if row["task"] == "language"]
    variants = list(dict.fromkeys(row["variant"] for row in losses))
    pairs = [pair for pair in _PAIRS if set(pair) <= set(variants)]
    found = [
        _shared.loss_table("Final loss, nats per token", losses, "loss of", "value"),
        _shared.difference_table("Differences, nats per token", losses, "loss of", pairs, "value"),
    ]
    if needles:
        accuracies = _shared.means(needles, ("variant", "point"), "value")
        shown = [x for x in dict.fromkeys(row["point"] for row in needles) if x & (x - 1) == 0]
        cells = [(name, *(f"{accuracies[name, x].value:.2f}" for x in shown)) for name in variants]
        columns = "", *(f"{x:,}" for x in shown)
        found.insert(0, _shared.Table("Accuracy against the distance of a needle", columns, cells))
    return found


main = _shared.Experiment(
    name="initial_gates",
    description=__doc__,
    plans=PLANS,
    variants=VARIANTS,
    powers=(2, 4),
    more=_shared.CONTEXT,
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
