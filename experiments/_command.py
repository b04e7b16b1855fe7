"""Command-line options shared by the experiments."""

import dataclasses
import pathlib
import shlex
import tempfile
from collections.abc import Mapping, Sequence

from sympow_jax.commands import command_line

__all__ = ["SCALES", "Options", "Plan", "parse"]

SCALES = ("toy", "paper", "tiny")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Defaults of a scale, which flags override. `contexts` are training contexts, `lengths` evaluation contexts."""

    seeds: tuple[int, ...]
    steps: int
    contexts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    documents: int = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an experiment: its flags, with the plan of its scale as defaults.

    `results` is the folder that the experiment writes to. `runs` is the folder of workdirs, which experiments share.
    """

    scale: str
    plan: Plan
    variants: tuple[str, ...]
    power: int
    results: pathlib.Path
    runs: pathlib.Path
    data: tuple[str, ...]
    heldout: tuple[str, ...]
    command: str


def parse(
    name: str,
    description: str,
    arguments: Sequence[str],
    *,
    plans: Mapping[str, Plan],
    variants: Sequence[str],
    powers: Sequence[int] = (2,),
    trains: bool = True,
) -> Options:
    """Parses the options of experiment `name`; by default it runs all of its `variants`.

    `plans` maps each scale to its plan. `powers` are the degrees that --power offers. An experiment that does not train
    has no flags about data.

    Raises:
      ValueError: A flag, scale or variant is unknown, a value is not a number, the paper's scale lacks its data, or a
        folder cannot be written.
    """
    parser = command_line.Parser(prog=f"python -m experiments.{name}", description=description)
    parser.add_argument(
        "--scale",
        default="toy",
        metavar="toy|paper",
        help="Two CPU cores and 15 minutes, or the paper's models.",
    )
    parser.add_argument("--seeds", metavar="0,1,2", help="Seeds of parameters and the order of data.")
    parser.add_argument("--steps", metavar="N", help="Updates of every run.")
    parser.add_argument("--variants", metavar="A,B", help=f"Variants to run. Default: {','.join(variants)}.")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("runs/experiments"),
        metavar="DIR",
        help="Folder for results, in DIR/NAME, and runs, in DIR/runs, where other experiments find them.",
    )
    if len(powers) > 1:
        parser.add_argument("--power", default=str(powers[0]), metavar="P", help=f"One of {_join(powers)}.")
    if trains:
        parser.add_argument(
            "--data",
            metavar="PATHS",
            help="Training data. For toy: text, or if not given, that of the standard library.",
        )
        parser.add_argument(
            "--heldout", metavar="PATHS", help="Held-out data. For toy: if not given, a tenth of the text."
        )
    known = parser.parse_args(arguments)

    if known.scale not in plans:
        raise ValueError(f"--scale is {known.scale!r}; it must be one of toy, paper")
    plan = plans[known.scale]
    if known.seeds is not None:
        plan = dataclasses.replace(plan, seeds=_read_numbers("--seeds", known.seeds))
    if known.steps is not None:
        plan = dataclasses.replace(plan, steps=_read_number("--steps", known.steps))
    power = int(powers[0])
    if len(powers) > 1:
        power = _read_number("--power", known.power)
        if power not in powers:
            raise ValueError(f"--power is {power}; it must be one of {_join(powers)}")
    data, heldout = (_read_paths(getattr(known, flag, None)) for flag in ("data", "heldout"))
    if known.scale == "paper" and trains and not (data and heldout):
        raise ValueError(
            "--scale=paper reads the paper's data: say where with --data=PATH and --heldout=PATH"
        )
    results = _writable_folder(known.out / name)
    return Options(
        scale=known.scale,
        plan=plan,
        variants=_read_variants(known.variants, variants),
        power=power,
        results=results,
        runs=known.out / "runs" / known.scale,
        data=data,
        heldout=heldout,
        command=shlex.join(["python", "-m", f"experiments.{name}", *arguments]),
    )


def _writable_folder(path: pathlib.Path) -> pathlib.Path:
    """Creates the folder and checks that it is writable, so that a failure shows before the work, not after it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f"cannot write to {path}: {error.strerror}; use another --out") from error
    return path


def _read_number(flag: str, text: str) -> int:
    numbers = _read_numbers(flag, text)
    if len(numbers) > 1 or not numbers[0]:
        raise ValueError(f"{flag} is {text!r}; it must be one number of at least 1")
    return numbers[0]


def _read_numbers(flag: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words) or len(set(words)) < len(words):
        raise ValueError(f"{flag} is {text!r}; it must be whole numbers that differ, such as 0,1,2")
    return tuple(int(word) for word in words)


def _read_variants(text: str | None, variants: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return tuple(variants)
    chosen = text.split(",")
    for name in chosen:
        if name not in variants:
            raise ValueError(f"--variants names {name!r}; there are {', '.join(variants)}")
    return tuple(name for name in variants if name in chosen)


def _read_paths(text: str | None) -> tuple[str, ...]:
    return tuple(part for part in (text or "").split(",") if part)


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
