"""Evaluates trained runs on held-out data.

Decoders: loss on held-out documents by position, within and beyond the training context. Encoders and image
classifiers: the metrics of their task on held-out rows.

    sympow eval --workdir=runs/a,runs/b --context_lengths=64,...,65536 --out=runs/comparison
    sympow eval --workdir=runs/a,runs/b --context_lengths=256,...,65536 --tasks=recall,needle,variables,copy
"""

import argparse
import pathlib
from collections.abc import Sequence

from sympow_jax import config
from sympow_jax.commands import command_line
from sympow_jax.config import loading
from sympow_jax.process import compile_cache, signals, streams, workdir

__all__ = ["main"]


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_line.Parser(
        prog=program,
        description="Evaluates runs on held-out data.\n\n"
        "For decoders, computes the mean loss by position: for each context length, the loss of predicting the "
        "positions in (previous length, this length], of the same documents throughout. Writes context_loss.csv, "
        "context_loss.json, context_loss.png and context_loss.pdf.\n\n"
        "For runs of other tasks than the next token, computes loss and metrics of the held-out rows. Writes "
        "heldout.json.\n\n"
        "With --tasks, asks decoders for something earlier in the context instead, and writes tasks.csv, tasks.json, "
        "tasks.png and tasks.pdf. `recall` asks for the value of a key among pairs, `needle` for numbers that are "
        "hidden in held-out text, `variables` for the variables of one value, and `copy` for random tokens once "
        "more.\n\n"
        "The held-out data is that of the first run's config. Each --config.data.NAME=VALUE replaces a setting of it: "
        "with --config.data.heldout_paths=PATH, runs are evaluated on all of PATH.",
    )
    parser.add_argument(
        "--workdir",
        required=True,
        metavar="A[,B,...]",
        help="Workdirs of one or more training runs, overlaid in the plot.",
    )
    parser.add_argument(
        "--context_lengths",
        metavar="64,128,...",
        help="Increasing lengths in tokens. `64,...,65536` doubles in between; a last length that is no doubling is "
        "rounded down. Default: those in the first run's config.",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="Folder to write to. Default: `evaluation` in the first workdir.",
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="Maximum number of documents, all of at least the longest length. Default: evaluation.documents in the "
        "first run's config. Not with --tasks.",
    )
    parser.add_argument(
        "--tasks",
        metavar="A[,B,...]",
        help="Tasks among recall, needle, variables and copy. --context_lengths then are those of a context with its "
        "question and answer; by default, those of the config that are long enough.",
    )
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="Minimum number of questions of each task at each context length. Default: 64.",
    )
    parser.add_tokenizer()
    parser.add_settings(only="data")
    return parser.parse_args(arguments)


def _reject(flags: argparse.Namespace, names: Sequence[str], when: str) -> None:
    for name in names:
        if getattr(flags, name) is not None:
            raise ValueError(f"--{name} is {when}; leave it out")


def main(arguments: Sequence[str], program: str = "sympow eval") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with signals.user_errors():
        flags = _parse(arguments, program)
        compile_cache.cache_programs()
        # Imported only now, because it takes seconds and needs the extra `train`, which `--help` does not.
        from sympow_jax import evaluation

        workdirs = flags.workdir.split(",")
        changes = command_line.changed_settings(flags)
        # The data is that of the first run.
        first = config.override(workdir.read_config(pathlib.Path(workdirs[0])), changes)
        loading.require_named(first, changes, workdirs[0])
        lengths = None if flags.context_lengths is None else evaluation.parse_lengths(flags.context_lengths)
        # Not the workdir itself, which has the evaluation at the end of training.
        out = pathlib.Path(workdirs[0], "evaluation") if flags.out is None else pathlib.Path(flags.out)
        if flags.tasks is None:
            _reject(flags, ("trials", "tokenizer"), "for --tasks, which is not given")
            evaluation.evaluate(workdirs, lengths, out=out, documents=flags.documents, changes=changes)
        else:
            _reject(flags, ("documents",), "for losses by position, not for --tasks")
            evaluation.evaluate_context_tasks(
                workdirs,
                flags.tasks.split(","),
                lengths,
                out=out,
                trials=flags.trials,
                tokenizer=flags.tokenizer,
                changes=changes,
            )
        streams.say(f"the results are in {out}")
        return 0
