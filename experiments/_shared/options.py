"""Experiments as commands: their plans, flags, variants and files of results."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

import sympow_jax
from experiments._shared.statistics import Row
from experiments._shared.tables import Table
from sympow_jax import config, models
from sympow_jax.commands import command_line
from sympow_jax.config import serialize
from sympow_jax.evaluation import over_runs, report
from sympow_jax.process import atomic, signals, streams, workdir

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
# Digits after the decimal point, for losses in nats and for ratios.
_DIGITS = 6
_BYTES = 4  # of an element of a state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Defaults of a scale, which flags override. `contexts` are training contexts, `lengths` evaluation contexts."""

    seeds: tuple[int, ...]
    steps: int
    contexts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    documents: int = 20

    @property
    def average(self) -> str:
        """Description of the means over the seeds, for subtitles."""
        count = len(self.seeds)
        return f"mean of {count} seeds, band of one standard error" if count > 1 else "one seed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an experiment: its flags, with the plan of its scale as defaults."""

    scale: str
    paper: str  # config of the paper's scale
    plan: Plan
    variants: tuple[str, ...]
    power: int
    results: pathlib.Path  # folder that the experiment writes to
    runs: pathlib.Path  # folder of workdirs, which experiments share
    data: tuple[str, ...]
    heldout: tuple[str, ...]
    more: Mapping[str, Any]  # flags of this experiment alone, None for those that were not given
    command: str

    def at_context(self) -> "Options":
        """Returns the options with the training context that the flag of `CONTEXT` gives, or themselves without it."""
        if (context := self.more["context"]) is None:
            return self
        plan = dataclasses.replace(self.plan, contexts=(context,), lengths=(context, 4 * context))
        return dataclasses.replace(self, plan=plan)

    def write(self, rows: Sequence[Row], folders: Iterable[pathlib.Path] = (), **more: Any) -> pathlib.Path:
        """Writes the rows to NAME.csv, and the rows, their provenance and `more` to NAME.json.

        Returns the path at which to save the plot.
        """
        path, folders = self.results / self.results.name, list(folders)
        rows = [
            {name: round(x, _DIGITS) if isinstance(x, float) else x for name, x in row.items()}
            for row in rows
        ]
        report.write_csv(path.with_suffix(".csv"), rows, list(rows[0]))
        about = {
            "command": self.command,
            "scale": self.scale,
            "plan": dataclasses.asdict(self.plan),
            "versions": {"python": platform.python_version(), "sympow-jax": sympow_jax.__version__}
            | {name: importlib.metadata.version(name) for name in _PACKAGES},
            "devices": [device.device_kind for device in jax.devices()],
            "cpus": os.cpu_count(),
        } | workdir.revision()
        if folders:
            # The full settings of the first run, and the differences of each from them.
            flat = {folder.name: serialize.flatten(workdir.read_config(folder)) for folder in folders}
            first = flat[folders[0].name]
            about |= {
                "data": workdir.read_description(folders[0]),
                "settings": first,
                "runs": {
                    name: {path: value for path, value in values.items() if value != first.get(path)}
                    for name, values in flat.items()
                },
            }
        # A line for each row.
        content = json.dumps(report.without_nan(about | more), indent=1, allow_nan=False)
        lines = ",\n".join(f"  {json.dumps(report.without_nan(row), allow_nan=False)}" for row in rows)
        with atomic.replace(path.with_suffix(".json")) as draft:
            draft.write_text(f'{content.removesuffix("\n}")},\n "rows": [\n{lines}\n ]\n}}\n')
        return path.with_suffix(".png")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment as a command, which is called with the arguments after its name."""

    name: str  # of its module
    description: str | None  # docstring of its module
    run: Callable[[Options], None]  # calls `Options.write` and draws the plots
    tables: Callable[[Mapping[str, Any]], Iterable[Table]]  # makes its tables from its JSON alone
    plans: Mapping[str, Plan]  # by scale
    variants: Sequence[str]  # that --variants chooses from
    base: str | None = None  # variant that may not be left out
    powers: Sequence[int] = (2,)  # that --power offers
    trains: bool = True  # whether there are flags about data
    paper: str = "gpt2_124m:softmax"  # config of the paper's scale
    # Flags of this experiment alone, by name, each with the keyword arguments of `add_argument`.
    more: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({})

    def __call__(self, arguments: Sequence[str]) -> int:
        """Runs the experiment; returns the exit code. A mistake of the user ends it with one line."""
        with signals.user_errors():
            flags = self._parse(arguments)
            if flags.scale == "paper" and self.trains and not (flags.data and flags.heldout):
                raise ValueError(
                    "--scale=paper reads the paper's data: say where with --data=PATH and --heldout=PATH"
                )
            plan = self.plans[flags.scale]
            options = Options(
                scale=flags.scale,
                paper=self.paper,
                plan=dataclasses.replace(
                    plan, seeds=flags.seeds or plan.seeds, steps=flags.steps or plan.steps
                ),
                variants=flags.variants,
                power=flags.power,
                results=over_runs.writable_folder(flags.out / self.name),
                runs=flags.out / "runs" / flags.scale,
                data=flags.data,
                heldout=flags.heldout,
                more={flag: getattr(flags, flag) for flag in self.more},
                command=shlex.join(["python", "-m", f"experiments.{self.name}", *arguments]),
            )
            with jax.default_prng_impl("threefry2x32"), jax.threefry_partitionable(True):
                self.run(options)
            for table in self.tables(json.loads((options.results / f"{self.name}.json").read_text())):
                report.print_cells(table.title, table.columns, table.rows, report.make_console())
            streams.say(f"written to {options.results}")
            return 0

    def _parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        def chosen(text: str) -> tuple[str, ...]:
            names, base = names_among(self.variants, text), self.base
            if base is not None and (base not in names or names == (base,)):
                fault = f"it has only {base}" if base in names else f"it leaves out {base}"
                remedy = "add another" if base in names else "add it"
                raise argparse.ArgumentTypeError(f"{fault}, which all else is relative to; {remedy}")
            return names

        def seeds(text: str) -> tuple[int, ...]:
            words = text.split(",")
            numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) <= 10]
            if len(set(numbers)) < len(words) or max(numbers) >= 2**32:
                raise argparse.ArgumentTypeError(
                    f"{text!r} must be whole numbers below 2^32 that differ, such as 0,1,2"
                )
            return tuple(numbers)

        def paths(text: str) -> tuple[str, ...]:
            return tuple(filter(None, text.split(",")))

        parser = command_line.Parser(prog=f"python -m experiments.{self.name}", description=self.description)
        scale = "Minutes on two CPU cores, or more."
        scales = "|".join(name for name in self.plans if name != "tiny")
        where = "Folder for results, in DIR/NAME, and runs, in DIR/runs, where other experiments find them."
        default = ",".join(self.variants)
        add = parser.add_argument
        add("--scale", choices=tuple(self.plans), default="toy", metavar=scales, help=scale)
        add("--seeds", type=seeds, metavar="0,1,2", help="Seeds of parameters and the order of data.")
        add("--steps", type=positive, metavar="N", help="Updates of every run.")
        add("--variants", type=chosen, default=default, metavar="A,B", help="Variants to run.")
        add("--out", type=pathlib.Path, default=pathlib.Path("runs/experiments"), metavar="DIR", help=where)
        if len(self.powers) > 1:
            add("--power", type=int, choices=self.powers, help="Power p.")
        if self.trains:
            text = "Training data; by default, for toy, the standard library."
            add("--data", type=paths, metavar="PATHS", help=text)
            text = "Held-out data; by default, for toy, a tenth of the text."
            add("--heldout", type=paths, metavar="PATHS", help=text)
        for flag, about in self.more.items():
            add(f"--{flag}", **about)
        parser.set_defaults(power=self.powers[0], data=(), heldout=())
        return parser.parse_args(arguments)


def names_among(all_of: Iterable[str], text: str) -> tuple[str, ...]:
    """Returns the names that a flag lists with commas, in the order of `all_of`."""
    names, known = text.split(","), tuple(all_of)
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def positive(text: str) -> int:
    """Returns the whole number, from 1 to 2^31 - 1, that a flag has."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} must be one number of at least 1 and below 2^31")
    return int(text)


CONTEXT: Mapping[str, Mapping[str, Any]] = {
    "context": {
        "type": positive,
        "metavar": "T",
        "help": "Training context; held-out losses are of positions to it and to four times it.",
    }
}
"""Flag of `Options.at_context`, for `Experiment.more`."""


def power_variants(power: int, start: str = "paper") -> dict[str, config.AttentionConfig]:
    """Returns softmax and the symmetric-power variants of the conformal paper.

    Gates and learned rates begin as in the paper or, if `start` is `preset`, as in the presets of their names.
    """
    ending = {"paper": "_paper", "preset": ""}[start]
    presets = {"sympow": "sympow", "gated": f"sympow_gated{ending}", "conformal": f"conformal{ending}"}
    return {
        "softmax": config.preset("softmax"),
        **{name: config.preset(preset, power=power) for name, preset in presets.items()},
    }


def state_bytes(model: config.ModelConfig, cached: int) -> int:
    """Returns the bytes of a model's state in float32, without one those of the keys and values of `cached` tokens."""
    if model.attention.kernel in ("softmax", "expressive"):
        return 2 * model.width * model.layers * _BYTES * cached
    return models.state_bytes(model, bytes_per_element=_BYTES)


def power_label(variant: str, power: int) -> str:
    """Returns the variant's name with its power; softmax has no power."""
    return variant if variant == "softmax" else f"{variant}_p{power}"
