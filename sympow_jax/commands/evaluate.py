"""Evaluates trained runs on held-out data.

Decoders: loss on held-out documents by position, within and beyond the training context. Encoders and image
classifiers: the metrics of their task on held-out rows.

    sympow eval --workdir=runs/a,runs/b --context_lengths=64,...,65536 --out=runs/comparison
    sympow eval --workdir=runs/a,runs/b --context_lengths=256,...,65536 --tasks=recall,needle,variables,copy
"""

import pathlib
from collections.abc import Sequence

from sympow_jax import config
from sympow_jax.commands import command_line
from sympow_jax.config import checks, loading
from sympow_jax.process import compile_cache, signals, streams, workdir


def main(arguments: Sequence[str], program: str = "sympow eval") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
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
    parser.add_options(
        (
            *("workdir", str, "A[,B,...]", ...),
            "Workdirs of one or more training runs, overlaid in the plot.",
        ),
        (
            *("context_lengths", str, "64,128,...", None),
            "Increasing lengths in tokens. `64,...,65536` doubles in between; a last length that is no doubling is "
            "rounded down. Default: those in the first run's config.",
        ),
        ("out", str, "DIR", None, "Folder to write to. Default: `evaluation` in the first workdir."),
        (
            *("documents", int, "N", None),
            "Maximum number of documents, all of at least the longest length. Default: evaluation.documents in the "
            "first run's config. Not with --tasks.",
        ),
        (
            *("tasks", str, "A[,B,...]", None),
            "Tasks among recall, needle, variables and copy. --context_lengths then are those of a context with its "
            "question and answer; by default, those of the config that are long enough.",
        ),
        (
            *("trials", int, "N", None),
            "Minimum number of questions of each task at each context length. Default: 64.",
        ),
    )
    parser.add_tokenizer()
    parser.add_settings(only="data")
    with signals.user_errors():
        flags = parser.parse_args(arguments)
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
        others = ("trials", "tokenizer") if flags.tasks is None else ("documents",)
        when = (
            "for --tasks, which is not given"
            if flags.tasks is None
            else "for losses by position, not for --tasks"
        )
        checks.refuse(*((getattr(flags, x) is not None, f"--{x} is {when}; leave it out") for x in others))
        if flags.tasks is None:
            evaluation.evaluate(workdirs, lengths, out=out, documents=flags.documents, changes=changes)
        else:
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
