"""Position encodings of linear attention: perplexity, training curves and speed.

"Linearized Relative Positional Encoding" (Qin et al. 2023): Table 2 and Figure 2 (an autoregressive language model with
each encoding), Table 5 (three cores by three matrices P) and Table 6 (training speed). The feature map is elu + 1.
Queries and keys are encoded after it, and only in the numerator: the normalizer uses the features before they are
encoded, which keeps it positive. (SPE is applied before the feature map, and sinusoidal positions are added to the
embedding.) Rates of the unitary and the orthogonal core are learned; Householder vectors and permutations are not
(appendix D.1 there). Speeds are those of whole updates of this causal model, measured in turns; the paper's model is
bidirectional.

The paper's scale is configs/wikitext103.py; --data and --heldout are its `.bin` files. Tables 1, 3 and 4 are runs of
configs/glue.py, configs/deit_small.py and configs/lra.py on your own files; see README.md.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence

from experiments import _command, _figures, _report, _runs, _timing
from sympow_jax import config
from sympow_jax.training import cli

NAME = "lrpe"
PLANS = {
    "toy": _command.Plan(seeds=(0,), steps=300, contexts=(512,), lengths=(512,), documents=200),
    "paper": _command.Plan(seeds=(0,), steps=50_000, contexts=(512,), lengths=(512,), documents=1000),
    "tiny": _command.Plan(seeds=(0,), steps=2, contexts=(16,), lengths=(16,), documents=2),
}
_TABLE = ("base", "rope", "spe", "permuteformer", "type1", "type2", "type3")
_CORES = ("unitary", "orthogonal", "permutation")
_BASES = ("householder", "identity", "odd_even")
_ROUNDS = {"toy": 9, "paper": 20, "tiny": 2}


def _cell(core: str, basis: str) -> str:
    """Returns the variant's name for a cell of Table 5; four cells are also methods of Table 2."""
    names = {
        ("unitary", "householder"): "type1",
        ("orthogonal", "householder"): "type2",
        ("permutation", "householder"): "type3",
        ("permutation", "identity"): "permuteformer",
    }
    return names.get((core, basis), f"{core} {basis}")


def attentions() -> dict[str, config.AttentionConfig]:
    """Returns linear attention with each method of Table 2 and with the other cores and matrices of Table 5."""
    found = {name: config.lrpe_method(name) for name in _TABLE}
    for core, basis in itertools.product(_CORES, _BASES):
        lrpe = config.LrpeConfig(core=core, basis=basis, learned_rates=core != "permutation")
        found.setdefault(_cell(core, basis), dataclasses.replace(found["rope"], lrpe=lrpe))
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        options = _command.parse(NAME, __doc__ or "", arguments, plans=PLANS, variants=tuple(attentions()))
        rows, folders = _train(options)
        medians = _report.medians(rows, ("variant",), "perplexity")
        speeds = _speeds(options)
        path = _report.write(options, rows, folders, relative_speed=speeds)
        seeds = len(options.plan.seeds)
        (context,) = options.plan.contexts
        _figures.draw_values(
            path,
            [(name, *medians[name,]) for name in options.variants],
            title="Held-out perplexity of linear attention by position encoding",
            about=f"context {context:,}, {options.plan.steps:,} updates, "
            + (f"median and range of {seeds} seeds" if seeds > 1 else "one seed"),
            x_label="perplexity",
        )
        _figures.draw_lines(
            path.with_stem(f"{path.stem}_curves"),
            [_curves(options, folders)],
            title="Training loss of linear attention by position encoding",
            about="each point the mean of the updates since the one before; first seed",
        )
        _print(options, {name: median for (name,), (median, _, _) in medians.items()}, speeds)
        _report.print_place(options)
        return 0


def _settings(options: _command.Options, name: str, seed: int) -> config.Config:
    (context,) = options.plan.contexts
    return _runs.settings(
        options, attentions()[name], context=context, seed=seed, evaluated=True, paper="wikitext103:base"
    )


def _train(options: _command.Options):
    (context,) = options.plan.contexts
    chosen = {
        _runs.name(f"linear {name}", context, options.plan.steps, seed): (name, seed)
        for seed in options.plan.seeds
        for name in options.variants
    }
    folders = _runs.train_all(
        options, {run: _settings(options, name, seed) for run, (name, seed) in chosen.items()}
    )
    rows = []
    for run, (name, seed) in chosen.items():
        (bucket,) = _runs.evaluation(folders[run])
        rows.append(
            {
                "variant": name,
                "seed": seed,
                "context": context,
                "training_loss": _runs.final_loss(folders[run]),
            }
            | {key: bucket[key] for key in ("loss", "standard_error", "perplexity", "tokens", "documents")}
        )
    return rows, folders


def _speeds(options: _command.Options) -> dict[str, float]:
    """Measures updates per second relative to the baseline, as in the paper's Table 6; empty without `base`."""
    names = [name for name in _TABLE if name in options.variants]
    if "base" not in names:
        return {}
    calls = {name: _timing.update(_settings(options, name, 0)) for name in names}
    times = _timing.alternate(calls, rounds=_ROUNDS[options.scale])
    return {name: 1 / _timing.relative(times[name], times["base"])[1] for name in names}


def _curves(options: _command.Options, folders: Mapping) -> _figures.Panel:
    (context,) = options.plan.contexts
    lines = []
    for name in options.variants:
        if name in _TABLE:
            run = _runs.name(f"linear {name}", context, options.plan.steps, options.plan.seeds[0])
            points = _runs.thinned(_runs.curve(folders[run]))
            lines.append(
                _figures.Line(name=name, x=[step for step, _ in points], y=[loss for _, loss in points])
            )
    return _figures.curves_panel(lines)


def _print(options: _command.Options, perplexities: Mapping[str, float], speeds: Mapping[str, float]) -> None:
    _report.print_table(
        "Held-out perplexity (Table 2) and relative speed of training (Table 6)",
        ("", "perplexity", "loss", "relative speed"),
        (
            (name, perplexities[name], math.log(perplexities[name]), speeds.get(name, ""))
            for name in _TABLE
            if name in options.variants
        ),
    )
    _report.print_table(
        "Held-out perplexity by core and matrix P (Table 5)",
        ("P", *_CORES),
        ((basis, *(perplexities.get(_cell(core, basis), "") for core in _CORES)) for basis in _BASES),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
