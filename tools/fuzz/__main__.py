"""Bad inputs for readers, made by hypothesis: `python -m tools.fuzz [--only=NAME] [--results=DIR] [--out=FILE.md]`.

`_SUMMARY` says how each input must end. The exit code is 1 if an input ends otherwise. That input is shrunk and
printed; add it to the `cases` of its reader.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

import hypothesis
import jax

from tools.fuzz import readers, trying

_SUMMARY = """Gives random inputs, and good ones after random changes, to every reader of files, settings and \
arguments. Each must end in success, or in an error of one line of at most 600 characters, of the types that programs \
print without a traceback. It must take less than 20 seconds of processor time, and less than 2 GiB of memory more \
than before."""
_HEAD = """| reader | inputs | accepted | refused in one line | problems | longest line | seconds |
|---|---|---|---|---|---|---|"""


def _row(name: str, outcome: trying.Outcome) -> str:
    problems = int(outcome.problem is not None)
    total = outcome.accepted + outcome.refused + problems
    cells = (total, outcome.accepted, outcome.refused, problems, outcome.longest, round(outcome.seconds))
    return f"| {name} | {' | '.join(map(str, cells))} |"


def _page(outcomes: Mapping[str, trying.Outcome], command: str) -> str:
    made = f"Made by `{command}` (hypothesis {hypothesis.__version__}, jax {jax.__version__})."
    table = "\n".join([_HEAD, *(_row(name, outcome) for name, outcome in outcomes.items())])
    problems = sum(outcome.problem is not None for outcome in outcomes.values())
    total = problems + sum(outcome.accepted + outcome.refused for outcome in outcomes.values())
    return f"# Bad inputs\n\n{_SUMMARY}\n\n{made}\n\n{table}\n\n{total:,} inputs, {problems} problems.\n"


def _read_result(path: pathlib.Path, options: Mapping[str, int | None]) -> trying.Outcome:
    """Returns an earlier result.

    Raises:
        ValueError: it was made with other options than these, of which None stands for any.
    """
    record = json.loads(path.read_text())
    for name, value in options.items():
        if value not in (None, record[name]):
            raise ValueError(
                f"{path} was made with --{name}={record[name]}, not {value}; remove it or choose another --results"
            )
    return trying.Outcome(**record["outcome"])


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=_SUMMARY)
    parser.add_argument("--examples", type=int, help="inputs per reader, instead of each reader's own number")
    parser.add_argument("--seed", type=int, help="of what is random; 0 if it is not given")
    parser.add_argument("--only", default="", help="readers whose name contains this")
    parser.add_argument(
        "--results", type=pathlib.Path, help="folder of earlier results, which are not repeated"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="also write the table of all readers to this Markdown file"
    )
    options = parser.parse_args(arguments)
    requested = {"examples": options.examples, "seed": options.seed}
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the readers' processes
    outcomes: dict[str, trying.Outcome] = {}
    print(_HEAD, flush=True)
    for name, reader in readers.READERS.items():
        selected = options.only in name
        path = options.results and options.results / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
        if path and path.exists():
            try:
                outcome = _read_result(path, requested if selected else {})
            except ValueError as error:
                parser.error(str(error))
        elif selected:
            examples, seed = options.examples or reader.examples, options.seed or 0
            outcome = trying.try_in_process(functools.partial(trying.try_reader, name, examples, seed))
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                record = {"examples": examples, "seed": seed, "outcome": dataclasses.asdict(outcome)}
                path.write_text(json.dumps(record))
        else:
            continue
        outcomes[name] = outcome
        print(_row(name, outcome), flush=True)
        if outcome.problem is not None:
            print(f"  {outcome.problem}", file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(_page(outcomes, f"python -m tools.fuzz {' '.join(arguments)}"))
    return int(any(outcome.problem is not None for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
