"""Options, runs, timing, results and plots that the experiments share.

Runs are trained with the settings of a scale, in folders from which they are resumed and reused.
"""

import argparse
import csv
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import shlex
import time
import types
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.axes
import numpy as np
from flax import nnx
from jaxtyping import Float, Int32

from sympow_jax import config, loop, models, plotting, training
from sympow_jax.commands import command_line
from sympow_jax.config import serialize
from sympow_jax.data import masking
from sympow_jax.evaluation import over_runs, report
from sympow_jax.process import atomic, compile_cache, signals, streams, workdir
from sympow_jax.training import sharding

__all__ = [
    "Mean",
    "Options",
    "Panel",
    "Plan",
    "Row",
    "Table",
    "Tables",
    "alternate",
    "bands",
    "curve",
    "curves_panel",
    "difference_table",
    "differences",
    "draw_lines",
    "draw_values",
    "evaluation",
    "final_loss",
    "from_json",
    "heldout_curve",
    "loss_table",
    "mean",
    "mean_curves",
    "means",
    "model",
    "parameters",
    "positive",
    "power_label",
    "power_variants",
    "print_tables",
    "relative",
    "restore_arrays",
    "run",
    "save_arrays",
    "settings",
    "train",
    "train_all",
    "update",
    "write",
    "write_csv",
]

Row = Mapping[str, Any]
# Folders of runs by variant, training context and seed.
Folders = dict[tuple[str, int, int], pathlib.Path]

# Tokens per update; small, so that many updates fit into fifteen minutes.
_TOY_TOKENS = 2048
# Points of a training curve.
_POINTS = 25
# The smallest model, for tests.
_TINY = config.ModelConfig(vocab_size=256, layers=1, width=16, heads=2, dtype="float32")
_PACKAGES = ("sympow-jax", "jax", "jaxlib", "flax", "optax", "numpy")
# Digits after the decimal point, for losses in nats and for ratios.
_DIGITS = 6
# Presets that variants have shorter names for.
_PRESETS = {"gated": "sympow_gated"}


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
    """Options of an experiment: its flags, with the plan of its scale as defaults.

    `results` is the folder that the experiment writes to. `runs` is the folder of workdirs, which experiments share.
    `more` has the flags of this experiment alone, None for those that were not given.
    """

    scale: str
    plan: Plan
    variants: tuple[str, ...]
    power: int
    results: pathlib.Path
    runs: pathlib.Path
    data: tuple[str, ...]
    heldout: tuple[str, ...]
    more: Mapping[str, Any]
    command: str


def run(
    name: str,
    description: str | None,
    arguments: Sequence[str],
    experiment: Callable[[Options], None],
    *,
    plans: Mapping[str, Plan],
    variants: Sequence[str],
    base: str | None = None,
    powers: Sequence[int] = (2,),
    trains: bool = True,
    more: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({}),
) -> int:
    """Runs an experiment with the arguments after its name, and returns the exit code.

    Args:
        name: name of the experiment's module.
        description: its docstring.
        arguments: its flags.
        experiment: is called with the options; by default they have all `variants`.
        plans: plan of each scale.
        variants: what --variants chooses from.
        base: variant that may not be left out.
        powers: degrees that --power offers.
        trains: whether there are flags about data.
        more: flags of this experiment alone, by name, each with the keyword arguments of `add_argument`.
    """

    def chosen(text: str) -> tuple[str, ...]:
        names = text.split(",")
        if unknown := [name for name in names if name not in variants]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(variants)}")
        if base is not None and base not in names:
            raise argparse.ArgumentTypeError(f"it leaves out {base}, which all else is relative to; add it")
        if names == [base]:
            raise argparse.ArgumentTypeError(
                f"it has only {base}, which all else is relative to; add another"
            )
        return tuple(name for name in variants if name in names)

    with signals.user_errors():
        parser = command_line.Parser(prog=f"python -m experiments.{name}", description=description)
        parser.set_defaults(power=powers[0], data=None, heldout=None)
        parser.add_argument(
            "--scale",
            choices=tuple(plans),
            default="toy",
            metavar="toy|paper",
            help="Minutes on two CPU cores, or the paper's models.",
        )
        parser.add_argument(
            "--seeds", type=_seeds, metavar="0,1,2", help="Seeds of parameters and the order of data."
        )
        parser.add_argument("--steps", type=positive, metavar="N", help="Updates of every run.")
        parser.add_argument(
            "--variants", type=chosen, default=",".join(variants), metavar="A,B", help="Variants to run."
        )
        parser.add_argument(
            "--out",
            type=pathlib.Path,
            default=pathlib.Path("runs/experiments"),
            metavar="DIR",
            help="Folder for results, in DIR/NAME, and runs, in DIR/runs, where other experiments find them.",
        )
        if len(powers) > 1:
            parser.add_argument("--power", type=int, choices=powers, default=powers[0], help="Power p.")
        if trains:
            parser.add_argument(
                "--data",
                type=_paths,
                metavar="PATHS",
                help="Training data. For toy: text, or if not given, that of the standard library.",
            )
            parser.add_argument(
                "--heldout",
                type=_paths,
                metavar="PATHS",
                help="Held-out data. For toy: if not given, a tenth of the text.",
            )
        for flag, about in more.items():
            parser.add_argument(f"--{flag}", **about)
        flags = parser.parse_args(arguments)
        if flags.scale == "paper" and trains and not (flags.data and flags.heldout):
            raise ValueError(
                "--scale=paper reads the paper's data: say where with --data=PATH and --heldout=PATH"
            )
        plan = plans[flags.scale]
        options = Options(
            scale=flags.scale,
            plan=dataclasses.replace(plan, seeds=flags.seeds or plan.seeds, steps=flags.steps or plan.steps),
            variants=flags.variants,
            power=flags.power,
            results=over_runs.writable_folder(flags.out / name),
            runs=flags.out / "runs" / flags.scale,
            data=flags.data or (),
            heldout=flags.heldout or (),
            more={flag: getattr(flags, flag) for flag in more},
            command=shlex.join(["python", "-m", f"experiments.{name}", *arguments]),
        )
        with jax.default_prng_impl("threefry2x32"), jax.threefry_partitionable(True):
            experiment(options)
        streams.say(f"written to {options.results}")
        return 0


def _seeds(text: str) -> tuple[int, ...]:
    words = text.split(",")
    numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) <= 10]
    if len(set(numbers)) < len(words) or max(numbers) >= 2**32:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be whole numbers below 2^32 that differ, such as 0,1,2"
        )
    return tuple(numbers)


def positive(text: str) -> int:
    """Returns the whole number, from 1 to 2^31 - 1, that a flag has."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} must be one number of at least 1 and below 2^31")
    return int(text)


def _paths(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def power_variants(power: int) -> dict[str, config.AttentionConfig]:
    """Returns softmax and the symmetric-power variants of the conformal paper."""
    presets = {"sympow": "sympow", "gated": "sympow_gated", "conformal": "conformal"}
    return {
        "softmax": config.preset("softmax"),
        **{name: config.preset(preset, power=power) for name, preset in presets.items()},
    }


def power_label(variant: str, power: int) -> str:
    """Returns the variant's name with its power; softmax has no power."""
    return variant if variant == "softmax" else f"{variant}_p{power}"


def train(
    options: Options,
    attentions: Mapping[str, config.AttentionConfig],
    label: Callable[[str], str],
    *,
    evaluated: bool = False,
    paper: str = "gpt2_124m:softmax",
) -> Folders:
    """Trains every variant at every context of the plan with every seed; returns the folders of the runs.

    Args:
        options: of the experiment.
        attentions: attention of each variant.
        label: maps a variant to its name in folders, which is the same in every experiment that uses its runs.
        evaluated: as in `settings`, like `paper`.
        paper: name of the config for the paper's scale.

    Raises:
        ValueError: as `settings` and `train_all`.
    """
    plan = options.plan
    keys = [
        (variant, context, seed)
        for seed, context, variant in itertools.product(plan.seeds, plan.contexts, options.variants)
    ]
    names = [
        f"{label(variant).replace(' ', '_')}_context{context}_steps{plan.steps}_seed{seed}"
        for variant, context, seed in keys
    ]
    wanted = [
        settings(options, attentions[variant], context=context, seed=seed, evaluated=evaluated, paper=paper)
        for variant, context, seed in keys
    ]
    return dict(zip(keys, train_all(options, dict(zip(names, wanted))), strict=True))


def settings(
    options: Options,
    attention: config.AttentionConfig,
    *,
    context: int,
    seed: int,
    evaluated: bool = False,
    paper: str = "gpt2_124m:softmax",
) -> config.Config:
    """Returns the config of a run with this attention at a training context.

    If `evaluated` is set, the run ends with an evaluation at the plan's lengths. The toy scale uses the byte model and
    the optimizer of `configs/quickstart.py`; `paper` names the config for the paper's scale. The seed
    determines parameters and the order of the data in the same way for every attention.

    Raises:
        ValueError: the settings contradict each other.
    """
    plan = options.plan
    base = config.load("quickstart:softmax" if options.scale != "paper" else paper)
    changed = dataclasses.replace(base.training, steps=plan.steps, seed=seed)
    tokens = base.data.batch_tokens
    if options.scale != "paper":
        tokens = _TOY_TOKENS if options.scale == "toy" else 2 * context
        changed = dataclasses.replace(changed, checkpoint_every=100, keep_checkpoints=1, log_every=100)
    shape = _TINY if options.scale == "tiny" else base.model
    data = dataclasses.replace(
        base.data,
        paths=options.data,
        heldout_paths=options.heldout,
        context_length=context,
        batch_tokens=tokens,
        seed=seed,
    )
    lengths = plan.lengths if evaluated else ()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(shape, attention=attention),
        data=data,
        training=changed,
        evaluation=config.EvaluationConfig(context_lengths=lengths, documents=plan.documents),
    )


def train_all(options: Options, runs: Mapping[str, config.Config]) -> list[pathlib.Path]:
    """Trains and evaluates every run in a folder of its name below `options.runs`; returns the folders.

    A finished run is not repeated, and a stopped one is resumed. Ctrl-C saves the current run and ends the program.

    Raises:
        ValueError: `train.train` raised it, or the folders have runs on different data.
    """
    # Runs with different seeds compile the same programs.
    compile_cache.cache_programs()
    folders = [options.runs / name for name in runs]
    for number, (folder, wanted) in enumerate(zip(folders, runs.values()), start=1):
        done = _is_done(folder, wanted)
        streams.say(f"run {number} of {len(runs)}: {folder.name}{', done before' if done else ''}")
        if not done and (code := loop.train(wanted, folder)):
            raise SystemExit(code)
    require_same_data(options, folders)
    return folders


def require_same_data(options: Options, folders: Sequence[pathlib.Path]) -> None:
    """Raises ValueError if the runs in these folders were trained on different data."""
    if len({_read_json(folder / "data.json")["digest"] for folder in folders}) > 1:
        raise ValueError(f"the runs in {options.runs} were trained on different data; use another --out")


def _is_done(folder: pathlib.Path, wanted: config.Config) -> bool:
    if not (folder / workdir.CHECKPOINTS / str(wanted.training.steps)).is_dir():
        return False
    found = workdir.read_config(folder)
    if dataclasses.replace(found, evaluation=wanted.evaluation) != wanted:
        return False  # train.train then raises an error that lists the differences
    lengths = wanted.evaluation.context_lengths
    return not lengths or (
        found.evaluation == wanted.evaluation
        and (folder / "context_loss.json").is_file()
        and tuple(row["context_length"] for row in evaluation(folder)) == lengths
    )


def _read_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


def from_json(number: float | None) -> float:
    """Returns a number of a JSON file, which has null in place of NaN and infinities; returns NaN for null."""
    return math.nan if number is None else number


def evaluation(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads an evaluated run's held-out loss by position (rows of `sympow_jax.evaluation.Row`)."""
    return _read_json(folder / "context_loss.json")["rows"]


def _metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    with (folder / "metrics.jsonl").open() as file:
        return [json.loads(line) for line in file]


def _losses(folder: pathlib.Path) -> Float[np.ndarray, " steps"]:
    # Updates that were skipped because of their loss have none.
    return np.array([values.get("loss", math.nan) for values in _metrics(folder)])


def curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Returns at most 25 points of the training loss: updates, and the mean loss since the point before."""
    losses = _losses(folder)
    parts = np.array_split(np.arange(len(losses)), min(_POINTS, len(losses)))
    return [(int(part[-1]) + 1, float(losses[part].mean())) for part in parts]


def heldout_curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Returns the held-out losses during training: updates, and the loss of a batch that is always the same."""
    return [
        (values["step"], values["heldout_loss"]) for values in _metrics(folder) if "heldout_loss" in values
    ]


def mean_curves(folders: Folders) -> list[dict[str, Any]]:
    """Returns rows of the training curves: the mean loss over seeds and its error, by variant, context and step."""
    rows = [
        {"variant": variant, "context": context, "step": step, "loss": loss}
        for (variant, context, _), folder in folders.items()
        for step, loss in curve(folder)
    ]
    return [
        {"variant": variant, "context": context, "step": step, "loss": loss.value, "error": loss.error}
        for (variant, context, step), loss in means(rows, ("variant", "context", "step"), "loss").items()
    ]


def curves_panel(rows: Sequence[Row], context: int) -> "Panel":
    """Returns a panel of the curves at one context, without the first eighth.

    The high losses of the first updates would compress everything else.
    """
    lines = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = [row for row in rows if (row["variant"], row["context"]) == (name, context)]
        late = points[len(points) // 8 :]
        lines[name] = bands([row["step"] for row in late], [Mean(row["loss"], row["error"]) for row in late])
    return Panel(
        lines=lines, x_label="updates", y_label="training loss (nats per token)", title=f"context {context:,}"
    )


def final_loss(folder: pathlib.Path) -> float:
    """Returns the mean training loss over the last tenth of the updates, as the papers' figures are read."""
    losses = _losses(folder)
    return float(losses[-max(1, len(losses) // 10) :].mean())


def model(size: str, attention: config.AttentionConfig) -> config.ModelConfig:
    """Returns the config of a model of one of `config.MODEL_SIZES` with this attention."""
    sizes: Any = config.MODEL_SIZES[size]
    return config.ModelConfig(**sizes, attention=attention)


def parameters(shape: config.ModelConfig) -> int:
    """Counts a model's parameters without allocating anything."""

    def count(layers: int) -> int:
        smaller = dataclasses.replace(shape, layers=layers)
        abstract = nnx.eval_shape(lambda: models.DecoderLM(smaller, rngs=nnx.Rngs(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param)))

    # All layers have the same parameters, and many layers take long to trace.
    return count(1) + (shape.layers - 1) * (count(2) - count(1))


def update(wanted: config.Config) -> Callable[[], None]:
    """Returns a function that makes one update of a decoder or an encoder of masked tokens on random tokens."""
    mesh = sharding.make_mesh(wanted)
    program = training.Program(wanted, mesh)
    state = program.init_state()
    batch = sharding.place_batch(_random_batch(wanted), mesh)

    def call() -> None:
        nonlocal state
        state, metrics = program.update(state, batch)
        jax.block_until_ready(metrics)

    return call


def _random_batch(wanted: config.Config) -> dict[str, Int32[np.ndarray, "B T"]]:
    """Returns inputs and targets of random tokens."""
    rng, vocab_size = np.random.default_rng(0), wanted.model.vocab_size
    shape = wanted.data.batch_size, wanted.data.context_length + 1
    tokens = rng.integers(vocab_size, size=shape, dtype=np.int32)
    if wanted.task.name == "next_token":
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    mask_token = vocab_size - 1 if wanted.task.mask_token is None else wanted.task.mask_token
    fraction = wanted.task.mask_fraction
    masked = [
        masking.mask(row, rng, fraction=fraction, mask_token=mask_token, vocab_size=vocab_size)
        for row in tokens[:, 1:]
    ]
    return {name: np.stack(part) for name, part in zip(("inputs", "targets"), zip(*masked))}


def alternate(calls: Mapping[str, Callable[[], None]], *, rounds: int) -> dict[str, list[float]]:
    """Measures the seconds of every call in each round, after one warm-up call; a call must block until done.

    Calls take turns, so that other load on the machine affects all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for number in range(rounds):
        # The order alternates, so that no call always follows the slowest one.
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            began = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - began)
    return times


def relative(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Returns the quartiles over rounds of the ratio of one call's seconds to another's in the same round."""
    low, middle, high = np.percentile(np.array(seconds) / np.array(base), (25, 50, 75))
    return float(low), float(middle), float(high)


class Mean(NamedTuple):
    """Mean over runs and its standard error, which is NaN for a single run."""

    value: float
    error: float

    def __str__(self) -> str:
        return self.text(3)

    def text(self, digits: int) -> str:
        """Returns the mean and its error, with this number of digits after the decimal point."""
        return f"{self.value:.{digits}f}{self.error_text(digits)}"

    def error_text(self, digits: int) -> str:
        """Returns ` ± error`; empty if the error is NaN or rounds to 0, because a few equal runs are no such proof."""
        error = f"{self.error:.{digits}f}"
        return "" if math.isnan(self.error) or not float(error) else f" ± {error}"

    @property
    def band(self) -> tuple[float, float, float]:
        """The mean, and one standard error below and above it."""
        error = 0.0 if math.isnan(self.error) else self.error
        return self.value, self.value - error, self.value + error


def mean(values: Sequence[float]) -> Mean:
    """Returns the mean of a value over runs, with its standard error."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(float(np.mean(values)), error)


def means(rows: Iterable[Row], by: Sequence[str], value: str) -> dict[tuple[Any, ...], Mean]:
    """Returns the mean of column `value` over each group of rows with equal columns `by`."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(from_json(row[value]))
    return {key: mean(values) for key, values in groups.items()}


def differences(
    rows: Iterable[Row], by: str | None, value: str, pairs: Iterable[tuple[str, str]]
) -> dict[tuple[str, str, Any], Mean]:
    """Returns the mean difference between two variants, taken seed by seed.

    Runs with the same seed see the same data in the same order, so their differences vary less than their losses.

    Args:
        rows: with columns `variant`, `seed`, `by` and `value`.
        by: column whose values are compared separately, None if there is none.
        value: column that is compared.
        pairs: variants to compare. Those without rows are left out.

    Returns:
        Mean of the first variant's value minus the second's, by (first, second, value of `by`).
    """
    found = {(row["variant"], row[by] if by else None, row["seed"]): row[value] for row in rows}
    places = dict.fromkeys((place, seed) for _, place, seed in found)
    groups: dict[tuple[str, str, Any], list[float]] = {}
    for (first, second), (place, seed) in itertools.product(pairs, places):
        keys = (first, place, seed), (second, place, seed)
        if all(key in found for key in keys):
            groups.setdefault((first, second, place), []).append(found[keys[0]] - found[keys[1]])
    return {key: mean(values) for key, values in groups.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Table that a command prints and that the page of experiments has."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Returns the table as the page has it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def loss_table(title: str, rows: Sequence[Row], by: str, value: str = "loss") -> Table:
    """Returns the mean over seeds of each variant, with the values of column `by` as columns."""
    places = list(dict.fromkeys(row[by] for row in rows))
    found = means(rows, ("variant", by), value)
    return Table(
        title=title,
        columns=("", *(f"{place:,}" if isinstance(place, int) else place for place in places)),
        rows=[
            (name, *(f"{found[name, place].value:.3f}" for place in places))
            for name in dict.fromkeys(row["variant"] for row in rows)
        ],
    )


def difference_table(
    title: str, rows: Sequence[Row], by: str, pairs: Iterable[tuple[str, str]], value: str = "loss"
) -> Table:
    """Returns the differences between pairs of variants, with the values of column `by` as columns.

    Those of more than two standard errors are bold.
    """
    places = list(dict.fromkeys(row[by] for row in rows))
    found = differences(rows, by, value, pairs)
    return Table(
        title=title,
        columns=("", *(f"{place:,}" if isinstance(place, int) else place for place in places)),
        rows=[
            (f"{first} - {second}", *(_signed(found[first, second, place]) for place in places))
            for first, second in dict.fromkeys(key[:2] for key in found)
        ],
    )


def _signed(difference: Mean) -> str:
    text = f"{difference.value:+.3f}{difference.error_text(3)}"
    return f"**{text}**" if abs(difference.value) > 2 * difference.error else text


# Makes an experiment's tables from its JSON alone.
Tables = Callable[[Mapping[str, Any]], Iterable[Table]]


def print_tables(path: pathlib.Path, tables: Tables) -> None:
    """Prints the tables that `tables` makes from the JSON written with the plot's `path`."""
    for table in tables(_read_json(path.with_suffix(".json"))):
        report.print_cells(table.title, table.columns, table.rows, report.make_console())


def save_arrays(path: pathlib.Path, state: Any, about: Mapping[str, Any]) -> None:
    """Saves the arrays of a training's state to an npz file, with JSON that describes them."""
    with atomic.replace(path) as draft:
        np.savez(draft, *jax.tree.leaves(state), about=json.dumps(about))


def restore_arrays(path: pathlib.Path, state: Any) -> tuple[dict[str, Any], Any]:
    """Returns what `save_arrays` saved: the JSON, and arrays in the structure of `state`.

    Without a file, the JSON is empty, and the state is returned as it is.

    Raises:
        ValueError: the file is damaged, or its arrays are those of another state.
    """
    if not path.exists():
        return {}, state
    leaves, tree = jax.tree.flatten(state)
    try:
        with np.load(path) as file:
            about = json.loads(str(file["about"]))
            saved = [file[f"arr_{index}"] for index in range(len(leaves))]
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a saved training or is damaged; delete it, or use another --out"
        ) from error
    kinds = [[(x.shape, x.dtype) for x in arrays] for arrays in (leaves, saved)]
    if kinds[0] != kinds[1] or not isinstance(about, dict):
        raise ValueError(f"{path} has the arrays of another training; delete it, or use another --out")
    return about, jax.tree.unflatten(tree, [jnp.asarray(x) for x in saved])


def write(
    options: Options, rows: Sequence[Row], folders: Iterable[pathlib.Path], **more: Any
) -> pathlib.Path:
    """Writes the rows to NAME.csv, and the rows, their provenance and `more` to NAME.json.

    Returns the path at which to save the plot.
    """
    path = options.results / options.results.name
    rows = [
        {name: round(x, _DIGITS) if isinstance(x, float) else x for name, x in row.items()} for row in rows
    ]
    write_csv(path.with_suffix(".csv"), rows)
    about = json.dumps(_without_nan(_about(options, list(folders)) | more), indent=1, allow_nan=False)
    lines = ",\n".join(f"  {json.dumps(_without_nan(row), allow_nan=False)}" for row in rows)
    with atomic.replace(path.with_suffix(".json")) as draft:
        draft.write_text(f'{about.removesuffix("\n}")},\n "rows": [\n{lines}\n ]\n}}\n')
    return path.with_suffix(".png")


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes rows with the columns of the first."""
    with atomic.replace(path) as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _about(options: Options, folders: Sequence[pathlib.Path]) -> dict[str, Any]:
    about = {
        "command": options.command,
        "scale": options.scale,
        "plan": dataclasses.asdict(options.plan),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": [device.device_kind for device in jax.devices()],
        "cpus": os.cpu_count(),
    } | workdir.revision()
    if folders:
        # The full settings of the first run, and the differences of each from them.
        flat = {folder.name: serialize.flatten(workdir.read_config(folder)) for folder in folders}
        first = flat[folders[0].name]
        about |= {
            "data": _read_json(folders[0] / "data.json"),
            "settings": first,
            "runs": {
                name: {path: value for path, value in values.items() if value != first.get(path)}
                for name, values in flat.items()
            },
        }
    return about


def _without_nan(value: Any) -> Any:
    """Returns the value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def bands(x: Sequence[float], means: Iterable[Mean]) -> Sequence[Sequence[float]]:
    """Returns a line of a panel: x, the means, and the edges of a band of one standard error."""
    return (x, *zip(*(point.band for point in means)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over one x axis, by name: x, y and, optionally, the edges of a band around y.

    Ticks are those of a logarithmic axis unless `linear` is set. `level` is a gray horizontal line, `mark` a dashed
    vertical one with its name.
    """

    lines: Mapping[str, Sequence[Sequence[float]]]
    x_label: str
    y_label: str
    title: str = ""
    ticks: Sequence[int] | None = None
    linear: bool = False
    log_y: bool = False
    level: float | None = None
    mark: tuple[float, str] | None = None


def draw_lines(
    path: pathlib.Path, panels: Sequence[Panel], *, title: str, subtitle: str, columns: int | None = None
) -> None:
    """Draws the panels side by side; one panel has its lines named at their ends, several have a legend.

    If `columns` is given, panels are drawn in rows of so many.
    """
    many = len(panels) > 1
    shared = len({panel.y_label for panel in panels}) == 1
    columns = min(columns or len(panels), len(panels))
    rows = -(-len(panels) // columns)
    height = 4.8 if rows == 1 else 1.2 + 2.8 * rows
    figure, all_axes = plotting.make(
        columns, rows=rows, width=max(8.0, 3.6 * columns), height=height, sharey=shared
    )
    for axes in all_axes[len(panels) :]:
        axes.remove()
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    variants = [name.partition(",")[0] for name in names]
    styles = dict(zip(names, plotting.styles([_PRESETS.get(variant, variant) for variant in variants])))
    for axes, panel in zip(all_axes, panels):
        ends = [_draw(axes, name, *styles[name], *line) for name, line in panel.lines.items()]
        if panel.ticks and panel.linear:
            axes.set_xticks(panel.ticks)
        elif panel.ticks:
            plotting.set_log2_ticks(axes, panel.ticks)
        if panel.log_y:
            axes.set_yscale("log")
        if panel.level is not None:
            axes.axhline(panel.level, color="#999999", linewidth=1.0, zorder=1)
        above = {"title": panel.title} if many else {"title": title, "subtitle": subtitle}
        y_label = "" if shared and all_axes.index(axes) % columns else panel.y_label
        plotting.style(axes, x_label=panel.x_label, y_label=y_label, **above)
        if panel.mark is not None:
            plotting.mark(axes, *panel.mark)
        if not many:
            plotting.label_lines(axes, ends)
    if many:
        figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, color=plotting.INK, gid=plotting.TITLE)
        figure.text(0.01, 1 - 0.36 / height, subtitle, fontsize=9, color=plotting.GRAY, gid=plotting.TITLE)
        shown = {
            line.get_label(): line for axes in all_axes for line in axes.lines if line.get_label() in names
        }
        figure.legend(
            handles=list(shown.values()),
            loc="outside lower center",
            ncols=len(shown),
            frameon=False,
            labelcolor=plotting.INK,
        )
    plotting.save(figure, path)


def _draw(
    axes: matplotlib.axes.Axes, name: str, color: str, marker: str, x, y, *band
) -> tuple[str, str, float]:
    """Draws a line; returns its name, its color and its final height."""
    heights = np.where(np.isfinite(y), y, np.nan)
    if band:
        axes.fill_between(x, *band, color=color, alpha=0.13, linewidth=0)
    few = len(heights) <= 20
    axes.plot(
        x,
        heights,
        color=color,
        label=name,
        linewidth=1.8 if few else 1.3,
        marker=marker if few else "",
        markersize=5,
        markeredgecolor="white",
    )
    finite = heights[np.isfinite(heights)]
    return name, color, float(finite[-1]) if len(finite) else math.nan


def draw_values(
    path: pathlib.Path,
    values: Sequence[tuple[str, float, float, float]],
    *,
    title: str,
    subtitle: str,
    x_label: str,
) -> None:
    """Draws a dot for each (name, middle, low, high), from the top, with a line from low to high."""
    figure, (axes,) = plotting.make(height=1.6 + 0.28 * len(values))
    places = range(len(values))[::-1]
    for place, (_, middle, low, high) in zip(places, values):
        axes.plot([low, high], [place, place], color=plotting.COLORS[5], linewidth=3, solid_capstyle="round")
        axes.plot(middle, place, marker="o", color=plotting.COLORS[0], markersize=6, markeredgecolor="white")
        axes.annotate(
            f"{middle:.3f}",
            xy=(1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=plotting.INK,
        )
    plotting.style(axes, x_label=x_label, y_label="", title=title, subtitle=subtitle)
    axes.set_yticks(places, [name for name, *_ in values])
    plotting.save(figure, path)
