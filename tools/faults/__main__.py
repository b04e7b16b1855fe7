"""Fault injection for training runs: `python -m tools.faults [--brief] [--only=NAME]`.

Disturbs runs of a tiny model in every way of the table, then resumes them with the same command. A run survives if it
ends with the losses and parameters of an undisturbed run, bitwise. It must also have resumed from the newest
checkpoint, and have reported the fault in one line. All of it takes hours. The exit code is 1 if any run does not
survive.
"""

import argparse
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tools.faults import signals, storage
from tools.faults.stage import Reason, Stage

# What yields a reason for each of a number of tries, the number of tries, and that of `--brief`.
FAULTS: Mapping[str, tuple[Callable[[Stage, int], Iterator[Reason]], int, int]] = {
    "SIGKILL at a random instant": (signals.kills_anywhere, 400, 4),
    "SIGKILL while a checkpoint is written": (signals.kills_in_saves, 100, 4),
    "SIGTERM": (signals.terminations, 50, 1),
    "one of two processes killed": (signals.one_of_two, 20, 1),
    "one of four processes killed": (signals.one_of_four, 20, 0),
    "second run in the same workdir": (signals.two_runs, 10, 1),
    "disk full at a random byte": (storage.full_disk, 20, 1),
    "checkpoint file truncated": (storage.truncated_checkpoints, 50, 2),
    "one bit of a checkpoint flipped": (storage.flipped_checkpoints, 50, 2),
    "file of prepared data truncated": (storage.truncated_data, 50, 1),
    "one bit of prepared data flipped": (storage.flipped_data, 50, 1),
    "data shard vanishes and comes back": (storage.vanishing_chunks, 2, 1),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--brief", action="store_true", help="a few tries of each, in minutes")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    options = parser.parse_args(arguments)
    print("| fault | tries | survived | seconds |\n|---|---|---|---|", flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        for name, (inject, tries, brief) in FAULTS.items():
            if options.only not in name or not (tries := brief if options.brief else tries):
                continue
            folder, cache = pathlib.Path(temporary, name), pathlib.Path(temporary, "cache")
            folder.mkdir()
            cache.mkdir(exist_ok=True)
            reasons: list[Reason] = []
            began = time.monotonic()
            for reason in inject(Stage(folder, cache, f"{options.seed} {name}"), tries):
                reasons.append(reason)
                if reason:
                    print(f"  not survived: {reason}", file=sys.stderr, flush=True)
            seconds = time.monotonic() - began
            print(f"| {name} | {len(reasons)} | {reasons.count(None)} | {seconds:.0f} |", flush=True)
            failed |= any(reasons)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
