"""Position encodings of linear attention: perplexity, validation curves and speed.

"Linearized Relative Positional Encoding" (Qin et al. 2023): Table 2 and Figure 2 (an autoregressive language model with
each encoding), Table 5 (three cores by three matrices P) and Table 6 (training speed of the bidirectional model).
Queries and keys are encoded after the feature map, which is elu + 1, or relu for cosFormer. (SPE is applied before it,
and sinusoidal positions are added to the embedding.) Rates of the unitary and the orthogonal core are learned;
Householder vectors and permutations are not (appendix D.1 there). The configs of the methods
(`sympow_jax.config.lrpe_method`) say which features the denominator has. `rope unrotated`, `type1 rotated`, `type2
rotated` and `type3 rotated` have the other ones. All cells of Table 5 have the unrotated ones.

The paper's scale is configs/wikitext103.py, and configs/roberta_wikibook.py for speeds; --data and --heldout are the
former's `.bin` files. Tables 1, 3 and 4 are runs of configs/glue.py, configs/deit_small.py and configs/lra.py on your
own files; see README.md.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from experiments import _shared
from sympow_jax import config
from sympow_jax.config import loading

PLANS = {
    "toy": _shared.Plan(seeds=(0, 1, 2), steps=160, contexts=(512,), lengths=(512,), documents=200),
    "paper": _shared.Plan(seeds=(0,), steps=50_000, contexts=(512,), lengths=(512,), documents=1000),
    "tiny": _shared.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(16,), documents=2),
}
_BASE = "base"
_METHODS = (_BASE, "rope", "spe", "permuteformer", "cosformer", "type1", "type2", "type3")
_CORES = ("unitary", "orthogonal", "permutation")
_BASES = ("householder", "identity", "odd_even")
# Variants with the other denominator, and their methods.
_OTHER = {"rope unrotated": "rope", **{f"{name} rotated": name for name in ("type1", "type2", "type3")}}
# The paper's perplexities on the test sets of WikiText-103 and Books (Table 2), and speeds (Table 6).
_PAPER_METHODS = {
    "base": ("33.74", "8.78", "1.00"),
    "rope": ("33.13", "8.65", "0.86"),
    "spe": ("41.91", "10.85", "0.61"),
    "permuteformer": ("32.53", "8.20", "0.94"),
    "type1": ("31.60", "8.19", "0.82"),
    "type2": ("31.71", "8.14", "0.82"),
    "type3": ("33.95", "8.43", "0.89"),
}
# The paper's perplexities on the validation set of WikiText-103 (Table 5), by matrix P, in the order of `_CORES`.
_PAPER_CORES = {
    "householder": ("31.90", "31.95", "33.90"),
    "identity": ("32.04", "31.86", "34.53"),
    "odd_even": ("32.09", "31.59", "34.16"),
}
_ROUNDS = {"toy": 9, "paper": 20, "tiny": 2}


def _cell(core: str, basis: str) -> str:
    """Returns the variant's name for a cell of Table 5; three cells are also methods of Table 2."""
    names = {"unitary": "type1", "orthogonal": "type2", "permutation": "type3"}
    return names[core] if basis == "householder" else f"{core} {basis}"


def attentions() -> dict[str, config.AttentionConfig]:
    """Returns the methods of Table 2 and cosFormer, four with the other denominator, and the other cells of Table 5."""
    found = {name: config.lrpe_method(name) for name in _METHODS}
    for other, name in _OTHER.items():
        found[other] = dataclasses.replace(found[name], normalizer=other.split()[1])
    for core, basis in itertools.product(_CORES, _BASES):
        lrpe = config.LrpeConfig(core=core, basis=basis, learned_rates=core != "permutation")
        found.setdefault(_cell(core, basis), dataclasses.replace(found["type2"], lrpe=lrpe))
    return found


def _experiment(options: _shared.Options) -> None:
    folders = _shared.train(options, attentions(), lambda name: f"lrpe {name}")
    rows: list[dict[str, Any]] = []
    for (variant, context, seed), folder in folders.items():
        (bucket,) = _shared.evaluation(folder)
        about = {"variant": variant, "seed": seed, "context": context}
        about["training_loss"] = _shared.final_loss(folder)
        columns = ("loss", "standard_error", "perplexity", "tokens", "documents")
        rows.append(about | {name: bucket[name] for name in columns})
    perplexities = _shared.means(rows, ("variant",), "perplexity")
    path = options.write(rows, folders.values(), relative_speed=_speeds(options))
    (context,) = options.plan.contexts
    seeds = len(options.plan.seeds)
    over = f"mean of {seeds} seeds and its standard error" if seeds > 1 else "one seed"
    _shared.draw_values(
        path,
        [(name, *perplexities[name,].band) for name in options.variants],
        title="Held-out perplexity of linear attention by position encoding",
        subtitle=f"context {context:,}, {options.plan.steps:,} updates, {over}",
        x_label="perplexity",
    )
    # The methods against updates, without the high losses of the first fifth.
    methods = {run: folder for run, folder in folders.items() if run[0] in _METHODS}
    curves = _shared.curve_rows(methods, ("variant", "context", "seed"), _late_losses)
    lines = _shared.lines(_shared.means(curves, ("variant", "step"), "loss"))
    _shared.draw_lines(
        path.with_stem(f"{path.stem}_curves"),
        [_shared.Panel(lines=lines, x_label="updates", y_label="held-out loss (nats per token)")],
        title="Held-out loss of linear attention by position encoding, during training",
        subtitle=f"always the same rows; {over}",
    )


def _late_losses(folder: pathlib.Path) -> list[tuple[int, float]]:
    losses = _shared.heldout_curve(folder)
    return losses[len(losses) // 5 :]


def _speeds(options: _shared.Options) -> dict[str, float]:
    """Measures updates per second of the bidirectional model relative to the baseline's (Table 6)."""
    names = [name for name in _METHODS if name in options.variants]
    calls = {name: _shared.update(encoder_settings(options, name)) for name in names}
    times = _shared.alternate(calls, rounds=_ROUNDS[options.scale])
    return {name: 1 / _shared.relative(times[name], times[_BASE])[1] for name in names}


def encoder_settings(options: _shared.Options, method: str) -> config.Config:
    """Returns the config of an encoder of masked tokens with a method of Table 6.

    The toy scale has the encoder of configs/roberta_wikibook.py in the shape of the experiment's decoders.
    """
    found = config.load(f"roberta_wikibook:{method}")
    if options.scale == "paper":
        return found
    (context,) = options.plan.contexts
    decoder = _shared.settings(options, config.lrpe_method(method), context=context, seed=0)
    task = dataclasses.replace(found.task, mask_token=None)
    evaluation = config.EvaluationConfig(context_lengths=())
    changes = {"model.attention": found.model.attention, "task": task, "evaluation": evaluation}
    return loading.replace(decoder, changes)


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    rows, speeds = content["rows"], content["relative_speed"]
    perplexities = {name: mean for (name,), mean in _shared.means(rows, ("variant",), "perplexity").items()}
    cells = {name: str(mean) for name, mean in perplexities.items()}
    # Methods and the baseline, the two denominators, matrices P and the Householder matrix.
    pairs = [(name, _BASE) for name in _METHODS if name != _BASE] + list(_OTHER.items())
    pairs += [(_cell(core, basis), _cell(core, _BASES[0])) for core in _CORES for basis in _BASES[1:]]
    order = sorted((name for name in _METHODS if name in cells), key=lambda name: perplexities[name].value)
    return [
        _shared.Table(
            "Held-out perplexity (Table 2) and relative speed of the bidirectional model (Table 6)",
            ("", "perplexity", "WikiText-103", "Books", "speed", "the paper's"),
            [
                (name, cells[name], *words, f"{speeds[name]:.2f}" if name in speeds else "", speed)
                for name in (*_METHODS, *_OTHER)
                if name in cells
                for *words, speed in [_PAPER_METHODS.get(name, ("", "", ""))]
            ],
        ),
        _shared.Table(
            "Held-out perplexity by core and matrix P (Table 5)",
            ("P", *_CORES),
            [
                (basis, *(f"{cells.get(_cell(core, basis), '')} ({x})" for core, x in zip(_CORES, papers)))
                for basis, papers in _PAPER_CORES.items()
            ],
        ),
        _shared.difference_table("Differences of loss, nats per token", rows, None, pairs),
        _shared.difference_table(
            "Differences of loss between neighbors in the order of these perplexities, nats per token",
            rows,
            None,
            itertools.pairwise(order[::-1]),
        ),
    ]


main = _shared.Experiment(
    name="lrpe",
    description=__doc__,
    plans=PLANS,
    variants=tuple(attentions()),
    base=_BASE,
    paper="wikitext103:base",
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
