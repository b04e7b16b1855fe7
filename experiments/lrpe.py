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
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared
from sympow_jax import config

PLANS = {
    "toy": _shared.Plan(seeds=(0,), steps=300, contexts=(512,), lengths=(512,), documents=200),
    "paper": _shared.Plan(seeds=(0,), steps=50_000, contexts=(512,), lengths=(512,), documents=1000),
    "tiny": _shared.Plan(seeds=(0,), steps=2, contexts=(16,), lengths=(16,), documents=2),
}
_TABLE = ("base", "rope", "spe", "permuteformer", "type1", "type2", "type3")
_CORES = ("unitary", "orthogonal", "permutation")
_BASES = ("householder", "identity", "odd_even")
_PAPER = "wikitext103:base"
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
    return _shared.run("lrpe", __doc__, arguments, _experiment, plans=PLANS, variants=tuple(attentions()))


def _experiment(options: _shared.Options) -> None:
    folders = _shared.train(
        options, attentions(), lambda name: f"linear {name}", evaluated=True, paper=_PAPER
    )
    rows = []
    for (variant, context, seed), folder in folders.items():
        (bucket,) = _shared.evaluation(folder)
        about = {"variant": variant, "seed": seed, "context": context}
        about |= {"training_loss": _shared.final_loss(folder)}
        rows.append(
            about
            | {name: bucket[name] for name in ("loss", "standard_error", "perplexity", "tokens", "documents")}
        )
    perplexities = _shared.means(rows, ("variant",), "perplexity")
    speeds = _speeds(options)
    path = _shared.write(options, rows, folders.values(), relative_speed=speeds)
    (context,), (first, *more) = options.plan.contexts, options.plan.seeds
    _shared.draw_values(
        path,
        [(name, *perplexities[name,].band) for name in options.variants],
        title="Held-out perplexity of linear attention by position encoding",
        subtitle=f"context {context:,}, {options.plan.steps:,} updates, "
        + (f"mean of {1 + len(more)} seeds and its standard error" if more else "one seed"),
        x_label="perplexity",
    )
    curves = {
        name: list(zip(*_late(_shared.curve(folders[name, context, first]))))
        for name in options.variants
        if name in _TABLE
    }
    _shared.draw_lines(
        path.with_stem(f"{path.stem}_curves"),
        [_shared.Panel(lines=curves, x_label="updates", y_label="training loss (nats per token)")],
        title="Training loss of linear attention by position encoding",
        subtitle="each point the mean of the updates since the one before, without the first eighth; first seed",
    )
    _shared.print_tables(path, tables)


def _late(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    # The high losses of the first updates would compress everything else.
    return curve[len(curve) // 8 :]


def _speeds(options: _shared.Options) -> dict[str, float]:
    """Measures updates per second relative to the baseline, as in the paper's Table 6; empty without `base`."""
    names = [name for name in _TABLE if name in options.variants]
    if "base" not in names:
        return {}
    (context,) = options.plan.contexts
    calls = {
        name: _shared.update(
            _shared.settings(options, attentions()[name], context=context, seed=0, paper=_PAPER)
        )
        for name in names
    }
    times = _shared.alternate(calls, rounds=_ROUNDS[options.scale])
    return {name: 1 / _shared.relative(times[name], times["base"])[1] for name in names}


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    found = {
        name: str(mean)
        for (name,), mean in _shared.means(content["rows"], ("variant",), "perplexity").items()
    }
    speeds = content["relative_speed"]
    return [
        _shared.Table(
            title="Held-out perplexity (Table 2) and relative speed of training (Table 6)",
            columns=("", "perplexity", "speed"),
            rows=[
                (name, found[name], f"{speeds[name]:.2f}" if name in speeds else "")
                for name in _TABLE
                if name in found
            ],
        ),
        _shared.Table(
            title="Held-out perplexity by core and matrix P (Table 5)",
            columns=("P", *_CORES),
            rows=[(basis, *(found.get(_cell(core, basis), "") for core in _CORES)) for basis in _BASES],
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
