"""NT tasks learned by expressive attention and by softmax, as curves and a table.

uv run python -m experiments.nt_tasks --task=NT --base=16 --delay=2 --context=32 --runs=16
uv run python -m experiments.nt_tasks --figure=3 --scale=toy

Figures 3 to 7 of "Reorganizing attention-space geometry with expressive attention" (Gros 2024).
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import _nt_model, _nt_report, _nt_training
from sympow_jax.commands import command_line
from sympow_jax.training import cli

# Values of options that are set by no flag and no figure.
_DEFAULTS: dict[str, Any] = {
    "task": "NT",
    "base": 16,
    "delay": 2,
    "context": "32",
    "weights": "shared",
    "initial": None,
    "attention": ",".join(_nt_model.ATTENTIONS),
    "runs": 16,
    "epochs": 14_000,
    "drop_after": None,
    "evaluations": 50,
    "test_series": 10_000,
}
# Tasks, contexts and 16 runs are the paper's. The epochs are where its curves end or, if it names none, enough to see
# what it describes. Weights are separate for each position, as its parameter counts imply. Figure 3 also has shared
# weights, which show its plateau near 0.55.
_FIGURES: dict[str, dict[str, Any]] = {
    "3": {"context": "32,52,56", "weights": "shared,position", "epochs": 14_000},
    "4": {"base": 2, "delay": 5, "context": "16", "weights": "position", "epochs": 10_000},
    "5": {"delay": 5, "context": "128", "weights": "position", "epochs": 2_000},
    "6": {"task": "NT,NT-S", "weights": "position", "epochs": 4_000, "drop_after": 2_500},
    "7": {"task": "NT-R", "context": "64,128", "weights": "position", "epochs": 4_000},
}
# Overrides for the toy scale, which finishes within 15 minutes on two cores.
_TOY: dict[str, dict[str, Any]] = {
    "3": {"context": "32", "runs": 4, "epochs": 1_500},
    "4": {"runs": 8, "epochs": 2_000},
    "5": {"runs": 2, "epochs": 1_000},
    "6": {"runs": 4, "epochs": 2_000, "drop_after": 1_500},
    "7": {"runs": 2, "epochs": 600},
}
_TOY_TESTS = 1_000


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="python -m experiments.nt_tasks",
        description="Trains one-layer transformers to continue series x(t) = x(t - delay) + x(t - delay - 1) modulo "
        "the base, and their variants; writes nt.csv, nt.json and nt.png, and prints a table.",
    )
    parser.add_argument(
        "--task", metavar="NT|NT-S|NT-R[,...]", help="Tasks; several are an even mixture. Default: NT."
    )
    parser.add_argument(
        "--base", type=int, metavar="N", help="Symbols, and the width of the model. Default: 16."
    )
    parser.add_argument(
        "--delay", type=int, metavar="TAU", help="Symbols between the next one and its sum. Default: 2."
    )
    parser.add_argument("--context", metavar="T[,...]", help="Symbols that the model sees. Default: 32.")
    parser.add_argument(
        "--attention", metavar="A[,B]", help="`expressive`, `softmax` or both. Default: both."
    )
    parser.add_argument(
        "--weights",
        metavar="shared|position",
        help="One set of weights for all positions, or one for each. Default: shared.",
    )
    parser.add_argument(
        "--initial",
        metavar="normal|uniform",
        help="Distribution of the initial weights. Default: normal if shared, else uniform, from which training "
        "does not diverge.",
    )
    parser.add_argument(
        "--runs", type=int, metavar="R", help="Models of each attention, of other seeds. Default: 16."
    )
    parser.add_argument(
        "--epochs", type=int, metavar="E", help="Series, of 40 predictions and updates each. Default: 14000."
    )
    parser.add_argument(
        "--drop_after",
        type=int,
        metavar="E",
        help="Epochs after which the rate is a quarter. Default: never.",
    )
    parser.add_argument("--test_series", type=int, metavar="S", help="Series at the end. Default: 10000.")
    parser.add_argument("--evaluations", type=int, metavar="E", help="Points of the curves. Default: 50.")
    parser.add_argument("--seed", type=int, default=0, metavar="SEED")
    parser.add_argument(
        "--figure", choices=tuple(_FIGURES), help="The paper's settings; other flags change them."
    )
    parser.add_argument(
        "--scale", choices=("toy", "paper"), help="Scale of a figure: minutes on two cores, or all of it."
    )
    parser.add_argument("--out", default="runs/nt", metavar="DIR", help="Folder to write to.")
    return parser.parse_args(arguments)


def _settings(flags: argparse.Namespace) -> list[_nt_training.Setting]:
    """Returns one setting for each context and choice of weights."""
    if flags.scale is not None and flags.figure is None:
        raise ValueError("scale is given without a figure; add --figure=3 to 7, or use --runs and --epochs")
    options: dict[str, Any] = _DEFAULTS | _FIGURES.get(flags.figure, {})
    if flags.scale == "toy":
        options |= _TOY[flags.figure] | {"test_series": _TOY_TESTS}
    options |= {name: value for name, value in vars(flags).items() if name in options and value is not None}
    return [
        _nt_training.Setting(
            tasks=_words("task", options["task"]),
            base=options["base"],
            delay=options["delay"],
            context=context,
            weights=weights,
            initial=options["initial"],
            attentions=_words("attention", options["attention"]),
            runs=options["runs"],
            epochs=options["epochs"],
            drop_after=options["drop_after"],
            evaluations=options["evaluations"],
            test_series=options["test_series"],
            seed=flags.seed,
        )
        for weights in _words("weights", options["weights"])
        for context in _lengths(options["context"])
    ]


def _words(name: str, text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    if len(set(words)) < len(words):
        raise ValueError(f"{name} is {text!r}; name each only once")
    return words


def _lengths(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise ValueError(f"context is {text!r}; use numbers such as 32 or 32,52,56")
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        flags = _parse(arguments)
        settings = _settings(flags)
        out = pathlib.Path(flags.out)
        out.mkdir(parents=True, exist_ok=True)
        results: list[_nt_report.Result] = []
        for setting in settings:
            progress: list[_nt_training.Progress] = []
            try:
                for step in _trained(setting):
                    progress.append(step)
            finally:
                # Interrupted runs are reported too.
                if progress:
                    results.append(_nt_report.Result(setting, progress))
                    _nt_report.write(out, "nt", results)
        _nt_report.print_table(results)
        print(f"wrote {out / 'nt.csv'}, nt.json and nt.png")
        return 0


def _trained(setting: _nt_training.Setting) -> Iterator[_nt_training.Progress]:
    """Trains and prints a line of progress at each evaluation."""
    begun = time.monotonic()
    for step in _nt_training.train(setting):
        means = ", ".join(f"{name} {x.mean():.3f}" for name, x in step.greedy.items())
        print(
            f"context {setting.context}, {setting.weights} weights, epoch {step.epoch:,} of {setting.epochs:,}: "
            f"{means}; {time.monotonic() - begun:,.0f} s",
            flush=True,
        )
        yield step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
