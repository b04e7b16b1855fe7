"""Bad inputs for readers, made by hypothesis: `python -m tools.fuzz [--only=NAME] [--results=DIR] [--out=FILE.md]`.

Gives random inputs, and good ones after random changes, to every reader of files, settings and arguments. Each must
end in success, or in an error of one line of at most 600 characters, of the types that programs print without a
traceback. It must take less than 20 seconds of processor time, and less than 2 GiB of memory more than before.

The exit code is 1 if an input does not. It is shrunk and printed, and belongs into the `cases` of its reader.
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

_HEAD = """| reader | inputs | accepted | refused in one line | problems | longest line | seconds |
|---|---|---|---|---|---|---|"""


def _row(name: str, one: trying.Outcome) -> str:
    total = one.accepted + one.refused + len(one.problems)
    parts = (name, total, one.accepted, one.refused, len(one.problems), one.longest, round(one.seconds))
    return f"| {' | '.join(map(str, parts))} |"


def _page(outcomes: Mapping[str, trying.Outcome], command: str) -> str:
    summary = (__doc__ or "").split("\n\n")[1].replace("\n", " ")
    made = f"Made by `{command}` (hypothesis {hypothesis.__version__}, jax {jax.__version__})."
    table = "\n".join([_HEAD, *(_row(name, one) for name, one in outcomes.items())])
    total = sum(one.accepted + one.refused for one in outcomes.values())
    problems = sum(len(one.problems) for one in outcomes.values())
    return f"# Bad inputs\n\n{summary}\n\n{made}\n\n{table}\n\n{total + problems:,} inputs, {problems} problems.\n"


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, help="inputs per reader, instead of each reader's own number")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--only", default="", help="readers whose name contains this")
    parser.add_argument(
        "--results", type=pathlib.Path, help="folder of earlier results, which are not repeated"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="also write the table of all readers to this Markdown file"
    )
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the readers' processes
    outcomes: dict[str, trying.Outcome] = {}
    print(_HEAD, flush=True)
    for name, reader in readers.READERS.items():
        path = options.results and options.results / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
        if path and path.exists():
            outcomes[name] = trying.Outcome(**json.loads(path.read_text()))
        elif options.only in name:
            examples = options.examples or reader.examples
            outcomes[name] = trying.try_in_process(
                functools.partial(trying.try_reader, name, examples, options.seed)
            )
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(dataclasses.asdict(outcomes[name])))
        else:
            continue
        print(_row(name, outcomes[name]), flush=True)
        for problem in outcomes[name].problems:
            print(f"  {problem}", file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(_page(outcomes, f"python -m tools.fuzz {' '.join(arguments)}"))
    return int(any(one.problems for one in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
