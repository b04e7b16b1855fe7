"""NT tasks learned by expressive attention and by softmax, as curves and a table.

uv run python -m experiments.nt_tasks --task=NT --base=16 --delay=2 --context=32 --runs=16
uv run python -m experiments.nt_tasks --figure=3 --scale=toy

Figures 3 to 7 of "Reorganizing attention-space geometry with expressive attention" (Gros 2024). A task is to continue
series in which each symbol, 0 to base - 1, is a sum of earlier ones. With base N, delay tau and x(t) the symbol at t
(equations 4, 8 and 9):

NT: x(t) = x(t - tau) + x(t - tau - 1) mod N; XOR for N = 2, tau = 1.
NT-S: x(t) = x(t - 1) + ... + x(t - tau - 1) mod N.
NT-R: NT-S where x(t - tau - 1) = 0, NT elsewhere.

The first tau + 1 symbols determine a series, so there are N^(tau + 1) of each task.

The model (section 4) has one head as wide as the base, one-hot symbols, no positions, LayerNorm before attention and
before the feed-forward layer, skip connections, and one matrix from all positions to the next symbol. Weights are
either separate for each position, as the paper's count of 802 parameters (N = 2, 16 positions) implies, or shared by
all positions. Many copies are trained in one compiled program.

Of the 802 parameters, 66 belong to the readout with its bias. Each position has 46: 12 in attention, 32 in the
feed-forward layer, and a vector of 2 that the paper does not name. Here that vector is the bias of both LayerNorms; the
matrices after them absorb their gains. Without the bias the model could not compute XOR: for N = 2 LayerNorm leaves
only a sign, so z^2 would be the same for all symbols and the outputs would be odd functions of them.
"""

import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _shared
from sympow_jax import atomic
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.commands import command_line
from sympow_jax.evaluation import figures
from sympow_jax.training import cli

TASKS = ("NT", "NT-S", "NT-R")
ATTENTIONS = ("expressive", "softmax")
WEIGHTS = ("shared", "position")
INITIALS = ("normal", "uniform")
LEARNING_RATE, MOMENTUM = 0.02, 0.8
PREDICTIONS = 40  # predictions per epoch, on one series, with one update each
GREEDY = 50  # symbols predicted per test series
TEST_BATCH = 100  # test series per batch; evaluations during training use one batch

# Tasks, contexts and 16 runs are the paper's. The epochs are where its curves end or, if it names none, enough to see
# what it describes. Weights are separate for each position, as its parameter counts imply. Figure 3 also has shared
# weights, which show its plateau near 0.55.
FIGURES: dict[str, dict[str, Any]] = {
    "3": {"context": "32,52,56", "weights": "shared,position", "epochs": 14_000},
    "4": {"base": 2, "delay": 5, "context": "16", "weights": "position", "epochs": 10_000},
    "5": {"delay": 5, "context": "128", "weights": "position", "epochs": 2_000},
    "6": {"task": "NT,NT-S", "weights": "position", "epochs": 4_000, "drop_after": 2_500},
    "7": {"task": "NT-R", "context": "64,128", "weights": "position", "epochs": 4_000},
}
# Overrides for the toy scale, which finishes within 15 minutes on two cores.
TOY: dict[str, dict[str, Any]] = {
    "3": {"context": "32", "runs": 4, "epochs": 1_500},
    "4": {"runs": 8, "epochs": 2_000},
    "5": {"runs": 2, "epochs": 1_000},
    "6": {"runs": 4, "epochs": 2_000, "drop_after": 1_500},
    "7": {"runs": 2, "epochs": 600},
}


def continue_series(
    first: Int[Array, "*batch W"], tasks: tuple[str, ...], task: Int[Array, "*batch"], base: int, length: int
) -> Int[Array, "*batch T"]:
    """Returns the series of `length` symbols that begin with `first`.

    Args:
        first: first delay + 1 symbols of each series.
        tasks: names of tasks.
        task: index into `tasks`, per series.
        base: number of symbols.
        length: number of symbols to return, including `first`.
    """

    def step(last, _):
        return jnp.concatenate([last[..., 1:], _next(last, tasks, task, base)[..., None]], -1), last[..., 0]

    _, symbols = jax.lax.scan(step, first, length=length)
    return jnp.moveaxis(symbols, 0, -1)


def draw(
    key: Array, shape: tuple[int, ...], *, tasks: tuple[str, ...], base: int, delay: int, length: int
) -> tuple[Int[Array, "*batch T"], Int[Array, "*batch"]]:
    """Returns random series and the index of each one's task.

    All tasks are equally likely, and so are all series of a task.
    """
    of_task, of_first = jax.random.split(key)
    task = jax.random.randint(of_task, shape, 0, len(tasks))
    first = jax.random.randint(of_first, (*shape, delay + 1), 0, base)
    return continue_series(first, tasks, task, base, length), task


def cycles(task: str, base: int, delay: int) -> dict[int, int]:
    """Returns {length: number of cycles} of the cycles that a task's series end in, longest first.

    These are equations 6 and 7 of the paper. Takes base^(delay + 1) steps and integers of memory.
    """
    states = np.stack(np.unravel_index(np.arange(base ** (delay + 1)), (base,) * (delay + 1)), -1)
    symbols = np.asarray(_next(states, (task,), 0, base))
    following = (np.arange(len(states)) * base % len(states) + symbols).tolist()
    seen_from = [-1] * len(following)
    lengths: collections.Counter[int] = collections.Counter()
    for start in range(len(following)):
        path, state = [], start
        while seen_from[state] < 0:
            seen_from[state] = start
            path.append(state)
            state = following[state]
        if seen_from[state] == start:
            lengths[len(path) - path.index(state)] += 1
    return dict(sorted(lengths.items(), reverse=True))


def _next(last, tasks, task, base):
    """Returns the symbol after the last delay + 1 symbols; last[..., 0] is the oldest of them."""
    delayed, summed = (last[..., 0] + last[..., 1]) % base, last.sum(-1) % base
    symbols = {"NT": delayed, "NT-S": summed, "NT-R": jnp.where(last[..., 0] == 0, summed, delayed)}
    return jnp.select(
        [jnp.asarray(task) == index for index in range(len(tasks))], [symbols[name] for name in tasks]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model with one kind of attention; its parameters are a dict of arrays."""

    attention: str
    base: int
    context: int
    weights: str = "shared"
    initial_weights: str = "normal"

    def initial(self, key: Array) -> dict[str, Array]:
        """Draws random parameters; the paper does not specify how.

        Biases are zero. Matrices with n inputs are `normal` with variance 1 / n, or `uniform` within 1 / sqrt(n), which
        is a third of that variance and PyTorch's default.
        """
        width, hidden = self.base, 4 * self.base
        own = (self.context,) if self.weights == "position" else ()
        shapes = {
            "attention": (*own, width, 3 * width),
            "hidden": (*own, width, hidden),
            "output": (*own, hidden, width),
            "readout": (self.context * width, width),
        }
        uniform = functools.partial(jax.random.uniform, minval=-1, maxval=1)
        draw = jax.random.normal if self.initial_weights == "normal" else uniform
        drawn = {
            name: draw(key, shape) / np.sqrt(shape[-2])
            for key, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
        }
        return drawn | {"norm_bias": jnp.zeros((*own, width)), "readout_bias": jnp.zeros(width)}

    def parameters(self) -> int:
        """Returns the number of trained parameters."""
        shapes = jax.eval_shape(self.initial, jax.random.key(0))
        return sum(x.size for x in shapes.values())

    def outputs(self, parameters: dict[str, Array], symbols: Int[Array, " T"]) -> Float[Array, " base"]:
        """Computes the outputs, which are trained to be the one-hot next symbol."""
        multiply = "ti,tij->tj" if self.weights == "position" else "ti,ij->tj"

        def times(x, name):
            return jnp.einsum(multiply, x, parameters[name])

        bias = parameters["norm_bias"]
        x = jax.nn.one_hot(symbols, self.base)
        query, key, value = jnp.split(times(_normalized(x) + bias, "attention"), 3, axis=-1)
        x = x + attention_weights(self.attention, query @ key.T) @ value
        x = x + times(jnp.tanh(times(_normalized(x) + bias, "hidden")), "output")
        return x.reshape(-1) @ parameters["readout"] + parameters["readout_bias"]

    def loss(
        self, parameters: dict[str, Array], symbols: Int[Array, " T"], following: Int[Array, ""]
    ) -> Array:
        """Computes the mean squared error of the outputs."""
        return jnp.square(self.outputs(parameters, symbols) - jax.nn.one_hot(following, self.base)).mean()


def attention_weights(attention: str, scores: Float[Array, "T T"]) -> Float[Array, "T T"]:
    """Computes causal attention weights by equation 2, or for softmax by equation 1 with beta = 1.

    It does not call `ops.expressive_attention`, whose blocks of time are longer than these whole sequences.
    """
    seen = np.tri(len(scores), dtype=bool)
    if attention == "softmax":
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    weights = jnp.where(seen, 1 - 1 / (1 + jnp.square(scores)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def _normalized(x):
    # Not `jax.nn.standardize`, whose E[x^2] - E[x]^2 cancels if the entries of x are nearly equal.
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of one training, which has `runs` models for each attention.

    After `drop_after` epochs the learning rate is a quarter. `initial` is the distribution of the initial matrices. If
    None, it is normal for shared weights and uniform for weights per position, which diverge from normal ones.
    """

    tasks: tuple[str, ...]
    base: int
    delay: int
    context: int
    weights: str
    attentions: tuple[str, ...]
    runs: int
    epochs: int
    initial: str | None = None
    drop_after: int | None = None
    evaluations: int = 50
    test_series: int = 10_000
    seed: int = 0

    def __post_init__(self):
        if self.initial is None:
            object.__setattr__(self, "initial", "normal" if self.weights == "shared" else "uniform")
        chosen = [("weights", self.weights, WEIGHTS), ("initial", self.initial, INITIALS)]
        chosen += [("task", task, TASKS) for task in self.tasks]
        chosen += [("attention", attention, ATTENTIONS) for attention in self.attentions]
        for name, choice, choices in chosen:
            if choice not in choices:
                raise ValueError(f"{name} is {choice!r}; it must be one of {', '.join(choices)}")
        least = {"base": 2, "drop_after": 0} | dict.fromkeys(("delay", "runs", "epochs", "evaluations"), 1)
        for name, limit in least.items():
            if (value := getattr(self, name)) is not None and value < limit:
                raise ValueError(f"{name} is {value}; it must be at least {limit}")
        if self.context <= self.delay:
            raise ValueError(
                f"context is {self.context}; with delay {self.delay} the next symbol is determined by the last "
                f"{self.delay + 1}: use at least as many"
            )
        if self.test_series < 1 or self.test_series % TEST_BATCH:
            raise ValueError(
                f"test_series is {self.test_series}; it must be a multiple of the {TEST_BATCH} that are continued at "
                f"once"
            )

    def model(self, attention: str) -> Model:
        """Returns the model with this attention."""
        assert self.initial is not None  # __post_init__ derives it
        return Model(
            attention=attention,
            base=self.base,
            context=self.context,
            weights=self.weights,
            initial_weights=self.initial,
        )

    def series(self, tasks: tuple[str, ...], key: Array, shape: tuple[int, ...], after: int) -> Array:
        """Draws series that have `after` symbols after the context."""
        length = self.context + after
        return draw(key, shape, tasks=tasks, base=self.base, delay=self.delay, length=length)[0]


@dataclasses.dataclass(frozen=True)
class Progress:
    """Results after `epoch` epochs, for each attention.

    loss: [runs], the mean loss since the previous progress. greedy: [runs, tasks], the fraction of correct symbols when
    predictions are fed back. given: the same when the true symbols are fed instead.
    """

    epoch: int
    loss: dict[str, np.ndarray]
    greedy: dict[str, np.ndarray]
    given: dict[str, np.ndarray]


def train(setting: Setting) -> Iterator[Progress]:
    """Trains all runs of all attentions and yields progress; the last is on `test_series` series, others on 100."""
    # Each run folds its index into the key, so that its result does not depend on the number of runs.
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(setting.seed)))(
        jnp.arange(setting.runs)
    )
    state = jax.jit(lambda: {name: _initial(setting, name, keys) for name in setting.attentions})()
    advance = jax.jit(functools.partial(_advance, setting), donate_argnums=0)
    test = jax.jit(functools.partial(_tested, setting))
    points = np.unique(np.linspace(0, setting.epochs, setting.evaluations + 1).round().astype(int))
    for start, stop in itertools.pairwise(points):
        state, loss = advance(state, keys, start, stop)
        batches = setting.test_series // TEST_BATCH if stop == setting.epochs else 1
        accuracies = [jax.device_get(test(state, keys, stop, batch)) for batch in range(batches)]
        greedy, given = jax.tree.map(lambda *x: np.mean(x, axis=0), *accuracies)
        yield Progress(int(stop), jax.device_get(loss), greedy, given)


def _initial(setting, attention, keys):
    parameters = jax.vmap(setting.model(attention).initial)(keys)
    return parameters, jax.tree.map(jnp.zeros_like, parameters)


def _advance(setting, state, keys, start, stop):
    """Runs epochs `start` to `stop` of all runs; returns the state and the mean losses by attention."""
    losses = {}
    for name in setting.attentions:

        def run(state, key, name=name):
            def epoch(index, carry):
                state, total = carry
                state, loss = _epoch(setting, setting.model(name), key, state, index)
                return state, total + loss

            return jax.lax.fori_loop(start, stop, epoch, (state, 0.0))

        state[name], total = jax.vmap(run)(state[name], keys)
        losses[name] = total / (stop - start)
    return state, losses


def _epoch(setting, model, key, state, epoch):
    """Trains on one fresh series: predicts the next symbol 40 times, with an update for each."""
    of_epoch = jax.random.fold_in(jax.random.fold_in(key, 0), epoch)
    series = setting.series(setting.tasks, of_epoch, (), PREDICTIONS)
    rate = learning_rate(setting, epoch)

    def update(state, step):
        parameters, velocity = state
        symbols = jax.lax.dynamic_slice_in_dim(series, step, setting.context)
        loss, gradient = jax.value_and_grad(model.loss)(parameters, symbols, series[step + setting.context])
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        return (jax.tree.map(lambda p, v: p - rate * v, parameters, velocity), velocity), loss

    state, losses = jax.lax.scan(update, state, jnp.arange(PREDICTIONS))
    return state, losses.mean()


def learning_rate(setting: Setting, epoch: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the learning rate of an epoch."""
    dropped = False if setting.drop_after is None else epoch >= setting.drop_after
    return jnp.where(dropped, LEARNING_RATE / 4, LEARNING_RATE)


def _tested(setting, state, keys, epoch, batch):
    """Returns greedy and given accuracies [runs, tasks] by attention, over 100 fresh series of each task."""
    greedy, given = {}, {}
    for name in setting.attentions:

        def run(parameters, key, name=name):
            of_batch = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 1), epoch), batch)
            return _tested_run(setting, setting.model(name), parameters, of_batch)

        greedy[name], given[name] = jax.vmap(run)(state[name][0], keys)
    return greedy, given


def _tested_run(setting, model, parameters, key):
    def predict(symbols):
        return jnp.argmax(model.outputs(parameters, symbols)).astype(jnp.int32)

    def right(series):
        def step(seen, place):
            truth, own = series[place], predict(seen)
            window = jax.lax.dynamic_slice_in_dim(series, place - setting.context, setting.context)
            return jnp.append(seen[1:], own), (own == truth, predict(window) == truth)

        places = setting.context + jnp.arange(GREEDY)
        return jax.lax.scan(step, series[: setting.context], places)[1]

    series = [setting.series((task,), key, (TEST_BATCH,), GREEDY) for task in setting.tasks]
    greedy, given = jax.vmap(jax.vmap(right))(jnp.stack(series))
    return greedy.mean((1, 2)), given.mean((1, 2))


@dataclasses.dataclass(frozen=True)
class Result:
    """A training setting and its progress over the epochs."""

    setting: Setting
    progress: list[Progress]


def write(folder: pathlib.Path, results: Sequence[Result]) -> None:
    """Writes nt.csv (curves over the runs), nt.json (settings and the end of every run) and nt.png."""
    rows = [
        row for result in results for progress in result.progress for row in _rows(result.setting, progress)
    ]
    _shared.write_csv(folder / "nt.csv", rows)
    with atomic.replace(folder / "nt.json") as draft:
        draft.write_text(json.dumps([_summary(result) for result in results], indent=1) + "\n")
    _plot(folder / "nt.png", results)


def _rows(setting, progress):
    for attention in setting.attentions:
        for index, task in enumerate(setting.tasks):
            greedy, loss = progress.greedy[attention][:, index], progress.loss[attention]
            finite = np.isfinite(loss)
            yield {
                "context": setting.context,
                "weights": setting.weights,
                "attention": attention,
                "task": task,
                "epoch": progress.epoch,
                "runs": setting.runs,
                "diverged": int((~finite).sum()),
                "loss": round(float(loss[finite].mean()), 6) if finite.any() else "",
                "greedy_mean": round(float(greedy.mean()), 4),
                "greedy_median": round(float(np.median(greedy)), 4),
                "greedy_min": round(float(greedy.min()), 4),
                "greedy_max": round(float(greedy.max()), 4),
                "given_mean": round(float(progress.given[attention][:, index].mean()), 4),
            }


def _summary(result):
    setting, last = result.setting, result.progress[-1]
    small = setting.base ** (setting.delay + 1) <= 2**16

    def rounded(values, digits=4):
        return [round(float(value), digits) if np.isfinite(value) else None for value in values]

    def by_task(accuracies):
        return {task: rounded(accuracies[:, index]) for index, task in enumerate(setting.tasks)}

    return dataclasses.asdict(setting) | {
        "parameters": setting.model(setting.attentions[0]).parameters(),
        "cycles": {t: cycles(t, setting.base, setting.delay) for t in setting.tasks} if small else None,
        "results": {
            attention: {
                "loss": rounded(last.loss[attention], 6),
                "greedy": by_task(last.greedy[attention]),
                "given": by_task(last.given[attention]),
            }
            for attention in setting.attentions
        },
    }


def _plot(path, results):
    """Plots mean greedy accuracy over epochs, with a band from the worst to the best run; one panel per training."""
    figure, panels = figures.make(len(results), width=4.6 * len(results), height=3.6)
    for axes, result in zip(panels, results):
        setting = result.setting
        epochs = [progress.epoch for progress in result.progress]
        for attention, color in zip(setting.attentions, figures.COLORS):
            for number, (task, line) in enumerate(zip(setting.tasks, ("-", "--", ":"))):
                greedy = np.stack([progress.greedy[attention][:, number] for progress in result.progress])
                label = f"{attention}, {task}" if len(setting.tasks) > 1 else attention
                axes.plot(epochs, greedy.mean(1), color=color, linestyle=line, label=label)
                axes.fill_between(epochs, greedy.min(1), greedy.max(1), color=color, alpha=0.12, linewidth=0)
        if setting.drop_after is not None:
            figures.mark(axes, setting.drop_after, "a quarter of the rate")
        figures.style(axes, x_label="epochs", y_label=f"greedy accuracy over {GREEDY} symbols")
        name = " + ".join(f"N{setting.base}T{setting.delay}{task[2:]}" for task in setting.tasks)
        about = f"context {setting.context}\nweights: {setting.weights}, {setting.runs} runs"
        axes.set_title(f"{name}, {about}", fontsize=9, color=figures.INK, pad=18)
        axes.set_ylim(0, 1.02)
        axes.legend(fontsize=8, loc="lower right")
    figures.save(figure, path)


def print_table(results: Sequence[Result]) -> None:
    """Prints a table of the final accuracies by attention."""
    columns = ("task", "context", "weights", "attention", "parameters", "epochs", "runs", "diverged")
    accuracies = ("greedy_median", "greedy_mean", "greedy_min", "greedy_max", "given_mean")
    rows = []
    for result in results:
        setting, last = result.setting, result.progress[-1]
        for row in _rows(setting, last):
            parameters = setting.model(row["attention"]).parameters()
            cells = [f"N{setting.base}T{setting.delay} {row['task']}", setting.context, setting.weights]
            cells += [row["attention"], parameters, last.epoch, setting.runs, row["diverged"]]
            rows.append([*cells, *(row[name] for name in accuracies)])
    _shared.print_table(
        f"Greedy accuracy over {GREEDY} symbols at the end of training, over runs",
        (*columns, "median", "mean", "least", "most", "symbols given"),
        rows,
    )


def settings(arguments: Sequence[str]) -> tuple[list[Setting], pathlib.Path]:
    """Returns one setting for each context and choice of weights, and the folder to write to."""
    parser = command_line.Parser(
        prog="python -m experiments.nt_tasks",
        description="Trains one-layer transformers to continue series x(t) = x(t - delay) + x(t - delay - 1) modulo "
        "the base, and their variants; writes nt.csv, nt.json and nt.png, and prints a table.",
    )
    # Of each option: its metavar, its type, its default where no figure sets it, and its help.
    known: dict[str, tuple[str, type, Any, str]] = {
        "task": ("NT|NT-S|NT-R[,...]", str, "NT", "Tasks; several are an even mixture."),
        "base": ("N", int, 16, "Number of symbols, and width of the model."),
        "delay": ("TAU", int, 2, "Symbols between the next one and its sum."),
        "context": ("T[,...]", str, "32", "Symbols that the model sees."),
        "attention": ("A[,B]", str, ",".join(ATTENTIONS), "Kinds of attention."),
        "weights": ("|".join(WEIGHTS), str, "shared", "Whether positions share weights or have their own."),
        "initial": ("|".join(INITIALS), str, None, "Initial weights; by default, those that do not diverge."),
        "runs": ("R", int, 16, "Models of each attention, of other seeds."),
        "epochs": ("E", int, 14_000, f"Series, of {PREDICTIONS} predictions and updates each."),
        "drop_after": ("E", int, None, "Epochs after which the learning rate is a quarter."),
        "test_series": ("S", int, 10_000, "Series at the end."),
        "evaluations": ("E", int, 50, "Points of the curves."),
        "seed": ("SEED", int, 0, "Seed of parameters and series."),
    }
    for name, (metavar, kind, default, text) in known.items():
        shown = "" if default is None else f" Default: {default}."
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, help=f"{text}{shown}")
    parser.add_argument(
        "--figure", choices=tuple(FIGURES), help="The paper's settings; other options change them."
    )
    parser.add_argument(
        "--scale", choices=("toy", "paper"), help="Of a figure: minutes on two cores, or all of it."
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default="runs/nt", metavar="DIR", help="Folder to write to."
    )
    given = parser.parse_args(arguments)

    if given.scale is not None and given.figure is None:
        raise ValueError("scale is given without a figure; add --figure=3 to 7, or use --runs and --epochs")
    options = {name: default for name, (_, _, default, _) in known.items()} | FIGURES.get(given.figure, {})
    if given.scale == "toy":
        options |= TOY[given.figure] | {"test_series": 1000}
    options |= {name: value for name, value in vars(given).items() if name in known and value is not None}
    lists = {
        name: tuple(options.pop(name).split(",")) for name in ("task", "attention", "weights", "context")
    }
    for name, words in lists.items():
        if len(set(words)) < len(words):
            raise ValueError(f"{name} is {','.join(words)!r}; name each only once")
    if not all(context.isdecimal() for context in lists["context"]):
        raise ValueError(f"context is {','.join(lists['context'])!r}; use numbers such as 32 or 32,52,56")
    return [
        Setting(
            tasks=lists["task"],
            attentions=lists["attention"],
            weights=weights,
            context=int(context),
            **options,
        )
        for weights, context in itertools.product(lists["weights"], lists["context"])
    ], given.out


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        chosen, out = settings(arguments)
        out.mkdir(parents=True, exist_ok=True)
        results: list[Result] = []
        for setting in chosen:
            begun = time.monotonic()
            progress: list[Progress] = []
            try:
                for point in train(setting):
                    progress.append(point)
                    means = ", ".join(f"{name} {x.mean():.3f}" for name, x in point.greedy.items())
                    print(
                        f"context {setting.context}, {setting.weights} weights, epoch {point.epoch:,} of "
                        f"{setting.epochs:,}: {means}; {time.monotonic() - begun:,.0f} s",
                        flush=True,
                    )
            finally:
                # Interrupted runs are reported too.
                if progress:
                    results.append(Result(setting, progress))
                    write(out, results)
        print_table(results)
        print(f"wrote {out / 'nt.csv'}, nt.json and nt.png")
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
