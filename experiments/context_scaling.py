"""Final training loss against the training context.

Figure 1 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025): with the same number of
tokens per batch, loss falls as the context grows while the state suffices. The paper trains p = 4 at 1,024 to 65,536
and p = 2 at 256 to 8,192 (--power). The toy scale trains p = 2 at 64, 256 and 1,024.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from experiments import _command, _figures, _report, _runs
from sympow_jax.training import cli

NAME = "context_scaling"
VARIANTS = tuple(_runs.power_variants(2))
PLANS = {
    "toy": _command.Plan(seeds=(0,), steps=300, contexts=(64, 256, 1024)),
    "paper": _command.Plan(seeds=(0,), steps=100_000),
    "tiny": _command.Plan(seeds=(0,), steps=2, contexts=(8, 16)),
}
_PAPER_CONTEXTS = {2: (256, 1024, 4096, 8192), 4: (1024, 4096, 16_384, 65_536)}


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        options = parse(NAME, __doc__ or "", arguments)
        runs, folders = train(options)
        rows = [
            {"variant": variant, "context": context, "seed": seed, "loss": _runs.final_loss(folders[run])}
            for run, (variant, context, seed) in runs.items()
        ]
        medians = _report.medians(rows, ("variant", "context"), "loss")
        contexts = options.plan.contexts
        path = _report.write(options, rows, folders, medians=_report.nested(medians))
        _figures.draw_lines(
            path,
            _panels(options, medians),
            title="Final training loss at each training context",
            about=f"p = {options.power}; mean of the last tenth of {options.plan.steps:,} updates of as many tokens",
        )
        _report.print_table(
            "Final training loss, nats a token, against the training context",
            ("training context", *(f"{context:,}" for context in contexts)),
            ((name, *(medians[name, context][0] for context in contexts)) for name in options.variants),
        )
        _report.print_place(options)
        return 0


def parse(name: str, description: str, arguments: Sequence[str]) -> _command.Options:
    """Parses the options of this experiment, or of another one that uses the same runs."""
    options = _command.parse(
        name, description, arguments, plans=PLANS, variants=VARIANTS, powers=tuple(_PAPER_CONTEXTS)
    )
    if options.scale != "paper":
        return options
    plan = dataclasses.replace(options.plan, contexts=_PAPER_CONTEXTS[options.power])
    return dataclasses.replace(options, plan=plan)


def train(options: _command.Options):
    """Trains every variant at every context; returns each run's (variant, context, seed) and its folder."""
    variants = _runs.power_variants(options.power)
    runs = {
        _runs.name(_runs.labeled(variant, options.power), context, options.plan.steps, seed): (
            variant,
            context,
            seed,
        )
        for seed in options.plan.seeds
        for context in options.plan.contexts
        for variant in options.variants
    }
    wanted = {
        run: _runs.settings(options, variants[variant], context=context, seed=seed)
        for run, (variant, context, seed) in runs.items()
    }
    return runs, _runs.train_all(options, wanted)


def _panels(options: _command.Options, medians: Mapping) -> list[_figures.Panel]:
    """Returns a panel of losses and, if softmax is among the variants, one of losses relative to softmax's."""
    contexts = options.plan.contexts

    def panel(
        y_label: str, parts: Mapping[str, Sequence[Sequence[float]]], level: float | None
    ) -> _figures.Panel:
        lines = [
            _figures.Line(name=name, x=contexts, y=y, low=low, high=high)
            for name, (y, low, high) in parts.items()
        ]
        x_label = "training context (tokens)"
        return _figures.Panel(lines=lines, x_label=x_label, y_label=y_label, ticks=contexts, level=level)

    losses = {
        name: [[medians[name, context][part] for context in contexts] for part in range(3)]
        for name in options.variants
    }
    panels = [panel("training loss (nats per token)", losses, None)]
    if "softmax" in losses:
        base = losses["softmax"][0]
        ratios = {
            name: [[value / one for value, one in zip(part, base)] for part in parts]
            for name, parts in losses.items()
            if name != "softmax"
        }
        panels.append(panel("training loss relative to softmax", ratios, 1.0))
    return panels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
