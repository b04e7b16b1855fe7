"""Evaluates a run on tasks of `lm-eval`: `sympow lm_eval --workdir=DIR --tasks=NAMES`."""

import json
import pathlib
from collections.abc import Sequence

from sympow_jax import extras
from sympow_jax.commands import command_line
from sympow_jax.process import atomic, compile_cache, signals, streams


def main(arguments: Sequence[str], program: str = "sympow lm_eval") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = command_line.Parser(
        prog=program, description="Evaluates a run on tasks of lm-eval and prints its table."
    )
    parser.add_workdir()
    parser.add_options(
        ("tasks", str, "A[,B,...]", ..., "Names of tasks; `lm-eval ls tasks` lists them."),
        ("include_path", str, "DIR", None, "Folder with YAML files of further tasks."),
        ("num_fewshot", int, "N", None, "Examples before each question. Default: the task's."),
        ("limit", float, "N", None, "Maximum number of documents of each task; below 1 a fraction of them."),
        (
            *("out", str, "FILE", None),
            "JSON file of the results. Default: evaluation/lm_eval.json in the workdir.",
        ),
    )
    parser.add_tokenizer()
    with signals.user_errors():
        flags = parser.parse_args(arguments)
        compile_cache.cache_programs()
        with extras.required("lm_eval", program, exits=True):
            from sympow_jax.evaluation.lm_eval import harness
        from lm_eval import utils

        results = harness.evaluate(
            harness.WorkdirModel(flags.workdir, flags.tokenizer),
            flags.tasks.split(","),
            include_path=flags.include_path,
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
        )
        out = pathlib.Path(flags.out or pathlib.Path(flags.workdir, "evaluation", "lm_eval.json"))
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replace(out) as draft:
            draft.write_text(json.dumps(results, indent=2, default=str) + "\n")
        print(utils.make_table(results))
        streams.say(f"the results are in {out}")
        return 0
