"""NT tasks learned by expressive and by softmax attention: learning curves, attention matrices and robustness.

Figures 3 to 7 of "Reorganizing attention-space geometry with expressive attention" (Gros 2024), and its claim that they
are robust. A task is to continue series in which each symbol, 0 to base - 1, is a sum of earlier ones. With base N,
delay tau and x(t) the symbol at t (equations 4, 8 and 9):

NT: x(t) = x(t - tau) + x(t - tau - 1) mod N; XOR for N = 2, tau = 1.
NT-S: x(t) = x(t - 1) + ... + x(t - tau - 1) mod N.
NT-R: NT-S where x(t - tau - 1) = 0, NT elsewhere.

The first tau + 1 symbols determine a series, so there are N^(tau + 1) of each task.

The model (section 4) is as wide as the base. It has one-hot symbols, no positions, LayerNorm before attention and
before the feed-forward layer, skip connections, and one matrix from all positions to the next symbol. The paper's 802
parameters for N = 2 and 16 positions imply weights of each position's own: 66 belong to the readout with its bias, and
each position has 12 in attention, 32 in the feed-forward layer, and a vector of 2 that the paper does not name. Here
that vector is the bias of both LayerNorms; the matrices after them absorb their gains. Without the bias the model could
not compute XOR: for N = 2 LayerNorm leaves only a sign, so z^2 would be the same for all symbols and the outputs would
be odd functions of them.

An epoch is one update on a batch of 40 predictions, the next 40 symbols of one fresh series. The loss is the squared
difference, summed over the outputs. The paper does not give the initial parameters. Matrices with n inputs begin at
0.1 / sqrt(n), except the readout at 1 / sqrt(n). With small matrices scores are small, so that softmax attention is
uniform and its gradient vanishes, while z^2 / sum z^2 does not depend on the scale of z. The model `readout` has no
layers, only the readout of the one-hot symbols.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import _shared
from sympow_jax import plotting
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.config import fields
from sympow_jax.process import compile_cache

MODELS = ("expressive", "softmax", "readout")
TASKS = ("NT", "NT-S", "NT-R")
INITIALS = {"small": 0.1, "normal": 1.0}  # times 1 / sqrt(number of inputs)
PREDICTIONS = 40  # per epoch
GREEDY, LONG_GREEDY = 50, 100  # symbols after the context that test series have; the second only at the end
_POINTS = 16  # of a learning curve
_POINT_SERIES = 25  # test series of each run at a point of its curve
_TEST_BATCH = 25  # series that a run continues at once
_MIXTURES = ["+".join(chosen) for n in (1, 2, 3) for chosen in itertools.combinations(TASKS, n)]

# `documents` is the number of test series at the end of each run; 16 runs of the toy scale have the paper's 10,000 in
# all. `steps` replaces the epochs of all figures unless it is 0.
PLANS = {
    "toy": _shared.Plan(seeds=tuple(range(16)), steps=0, documents=625),
    "paper": _shared.Plan(seeds=tuple(range(16)), steps=0, documents=10_000),
    "tiny": _shared.Plan(seeds=(0, 1), steps=4, documents=50),
}
# By default the toy scale trains fewer runs of longer contexts, whose epochs take 2 and 7 ms.
_TOY_CONTEXT, _TOY_SEEDS = 56, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of one training of several runs. Those with a help are flags, which change all figures.

    Their largest values are far beyond what trains here; they keep mistyped numbers from filling the memory.
    """

    task: str = fields.setting("NT", "Task, or an even mixture of several.", choices=_MIXTURES)
    base: int = fields.setting(16, "Number of symbols, and width of the model.", least=2, most=1024)
    delay: int = fields.setting(2, "Symbols between the next one and its sum.", least=1, most=1024)
    context: int = fields.setting(32, "Symbols that the model sees.", least=2, most=65_536)
    heads: int = fields.setting(1, "Heads, which divide the width.", least=1, most=1024)
    layers: int = fields.setting(1, "Layers of attention and feed-forward.", least=1, most=128)
    rate: float = fields.setting(0.02, "Learning rate.", least=0)
    momentum: float = fields.setting(0.8, "Momentum of SGD.", least=0, below=1)
    beta: float = fields.setting(1.0, "Factor of softmax attention's scores (equation 1).")
    initial: str = fields.setting("small", "Initial matrices, except the readout.", choices=tuple(INITIALS))
    attention: str = "expressive"
    epochs: int = 500
    drop_after: int = 0  # epochs after which the learning rate is a quarter; 0 if it stays

    def __post_init__(self):
        fields.validate(self)
        if self.context <= self.delay:
            raise ValueError(
                f"context is {self.context}; with delay {self.delay} the next symbol is determined by the last "
                f"{self.delay + 1}: use at least as many"
            )
        if self.base % self.heads:
            raise ValueError(
                f"heads is {self.heads}; it must divide the width, which is the base, {self.base}"
            )

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(self.task.split("+"))

    def name(self, task: str) -> str:
        """Returns the paper's name of a task with this base and delay."""
        return f"N{self.base}T{self.delay}{task[2:]}"

    @property
    def label(self) -> str:
        """Tasks and context, and the flags that are not the defaults."""
        listed = ("task", "base", "delay", "context")
        changed = [f for f in dataclasses.fields(self) if "help" in f.metadata and f.name not in listed]
        changes = [f"{f.name} {x}" for f in changed if (x := getattr(self, f.name)) != f.default]
        return ", ".join([" + ".join(map(self.name, self.tasks)), str(self.context), *changes])


# The paper's series and contexts, and as many epochs as show what it describes.
FIGURES: dict[str, list[Setting]] = {
    "figure3": [Setting(context=context) for context in (32, 52, 56)],
    "figure4": [Setting(base=2, delay=5, context=16, epochs=10_000)],
    "figure5": [Setting(delay=5, context=128, epochs=2_000)],
    "figure6": [Setting(task="NT+NT-S", epochs=3_000, drop_after=2_500)],
    "figure7": [Setting(task="NT-R", context=context, epochs=2_000) for context in (64, 128)],
    "robustness": [
        dataclasses.replace(setting, epochs=300)
        for setting in (
            Setting(),
            Setting(heads=2),
            Setting(layers=2),
            *(Setting(rate=rate) for rate in (0.01, 0.04)),
            *(Setting(momentum=momentum) for momentum in (0.5, 0.9)),
            Setting(beta=0.25),
            Setting(initial="normal"),
        )
    ],
}

# What the paper says of each series.
_PAPER = {
    ("figure3", "N16T2, 16"): "expressive solves it in about 2,000 epochs",
    ("figure3", "N16T2, 32"): "both near 0.55, expressive leaves it slowly",
    ("figure3", "N16T2, 52"): "softmax near 0.55",
    ("figure3", "N16T2, 56"): "both solve it within 100 epochs",
    ("figure4", "N2T5, 16"): "expressive much sooner than softmax",
    ("figure5", "N16T5, 128"): "both near 0.2, expressive leaves it",
    ("figure5", "N16T5, 256"): "softmax near 0.44",
    ("figure5", "N16T5, 512"): "both unstable",
    ("figure6", "N16T2 of N16T2 + N16T2-S, 32"): "softmax near 0.34, expressive leaves it",
    ("figure6", "N16T2-S of N16T2 + N16T2-S, 32"): "both above 0.99",
    ("figure7", "N16T2-R, 64"): "0.988; softmax near 0.36",
    ("figure7", "N16T2-R, 128"): "0.999; softmax near 0.72",
}


def continue_series(
    first: Int[Array, "*batch W"], tasks: Sequence[str], task: Int[Array, "*batch"], base: int, length: int
) -> Int[Array, "*batch T"]:
    """Returns series of `length` symbols, of which `first` are the first delay + 1; `task` indexes `tasks`."""

    def step(last, _):
        delayed, summed = (last[..., 0] + last[..., 1]) % base, last.sum(-1) % base
        following = {"NT": delayed, "NT-S": summed, "NT-R": jnp.where(last[..., 0] == 0, summed, delayed)}
        chosen = jnp.select([task == index for index in range(len(tasks))], [following[x] for x in tasks])
        return jnp.concatenate([last[..., 1:], chosen[..., None]], -1), last[..., 0]

    _, symbols = jax.lax.scan(step, first, length=length)
    return jnp.moveaxis(symbols, 0, -1)


def draw(
    setting: Setting, key: Array, shape: tuple[int, ...], tasks: Sequence[str], after: int
) -> Int[Array, "*batch T"]:
    """Draws series that have `after` symbols after the context.

    All tasks are equally likely, and so are all series of a task.
    """
    task_key, first_key = jax.random.split(key)
    task = jax.random.randint(task_key, shape, 0, len(tasks))
    first = jax.random.randint(first_key, (*shape, setting.delay + 1), 0, setting.base)
    return continue_series(first, tasks, task, setting.base, setting.context + after)


def initial(setting: Setting, key: Array) -> dict[str, Array]:
    """Draws the parameters of a model. Biases are zero."""
    width, small = setting.base, INITIALS[setting.initial]
    shapes: dict[str, tuple[int, ...]] = {"readout": (setting.context * width, width)}
    biases = {"readout_bias": jnp.zeros(width)}
    if setting.attention != "readout":
        layers = setting.layers, setting.context
        shapes |= {"attention": (*layers, width, 3 * width), "hidden": (*layers, width, 4 * width)}
        shapes |= {"output": (*layers, 4 * width, width)}
        biases["norm_bias"] = jnp.zeros((*layers, width))
    drawn = {
        name: jax.random.normal(key, shape) / np.sqrt(shape[-2])
        for key, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items())
    }
    return biases | {name: x if name == "readout" else small * x for name, x in drawn.items()}


def attention_weights(
    attention: str, scores: Float[Array, "*batch T T"], beta: float = 1.0
) -> Float[Array, "*batch T T"]:
    """Computes causal attention weights by equation 2, or for softmax by equation 1.

    It does not call `ops.expressive_attention`, which returns no weights.
    """
    seen = np.tri(scores.shape[-1], dtype=bool)
    if attention == "softmax":
        return jax.nn.softmax(jnp.where(seen, beta * scores, -jnp.inf), axis=-1)
    weights = jnp.where(seen, 1 - 1 / (1 + jnp.square(scores)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def forward(
    setting: Setting, parameters: Mapping[str, Array], symbols: Int[Array, " T"]
) -> tuple[Float[Array, " base"], list[Float[Array, "N T T"]]]:
    """Computes the outputs, which are trained to be the one-hot next symbol, and each layer's attention weights."""
    x, weights = jax.nn.one_hot(symbols, setting.base, dtype=parameters["readout"].dtype), []
    for layer in range(setting.layers if setting.attention != "readout" else 0):
        own = {name: x[layer] for name, x in parameters.items() if not name.startswith("readout")}
        entry = _normalized(x) + own["norm_bias"]
        projected = jnp.einsum("ti,tij->tj", entry, own["attention"])
        query, key, value = jnp.moveaxis(projected.reshape(len(x), 3, setting.heads, -1), 1, 0)
        scores = jnp.einsum("tnd,snd->nts", query, key)
        weights.append(attention_weights(setting.attention, scores, setting.beta))
        x = x + jnp.einsum("nts,snd->tnd", weights[-1], value).reshape(x.shape)
        hidden = jnp.tanh(jnp.einsum("ti,tij->tj", _normalized(x) + own["norm_bias"], own["hidden"]))
        x = x + jnp.einsum("ti,tij->tj", hidden, own["output"])
    return x.reshape(-1) @ parameters["readout"] + parameters["readout_bias"], weights


def _normalized(x):
    # Not `jax.nn.standardize`, whose E[x^2] - E[x]^2 cancels if the entries of x are nearly equal.
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)


def loss(setting: Setting, parameters: Mapping[str, Array], series: Int[Array, " T"]) -> Float[Array, ""]:
    """Computes the squared difference of predicting each symbol after the context, summed over the outputs.

    It is the mean over the predictions.
    """
    starts = np.arange(len(series) - setting.context)
    windows = series[starts[:, None] + np.arange(setting.context)]
    outputs, _ = jax.vmap(functools.partial(forward, setting, parameters))(windows)
    targets = jax.nn.one_hot(series[setting.context :], setting.base)
    return jnp.square(outputs - targets).sum(-1).mean()


def train(
    setting: Setting, seeds: Sequence[int], path: pathlib.Path, *, points: int, series: int
) -> dict[str, Any]:
    """Trains a run for each seed, all in one program, and returns their learning curves.

    They are saved to `path` at each of their points, and resumed from there. Their lists are [seeds] or [seeds, tasks].
    The last point is of `series` series and has also `long_greedy`.
    """
    # Each run has keys of its own seed, so that its result does not depend on the other runs.
    keys = jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32))
    parameters = jax.vmap(functools.partial(initial, setting))(keys)
    drops = {setting.drop_after: 0.25} if setting.drop_after else {}
    rate = optax.piecewise_constant_schedule(setting.rate, drops)
    optimizer = optax.sgd(rate, momentum=setting.momentum)
    state = parameters, optimizer.init(parameters)
    progress: dict[str, Any] = {"setting": dataclasses.asdict(setting), "seeds": list(seeds)}
    progress |= {"points": points, "series": series}
    progress["parameters"] = sum(x.size for x in parameters.values()) // len(seeds)
    before, state = _shared.restore_arrays(path, state, progress)
    curve: list[dict[str, Any]] = before.get("curve", [])

    def gradient(parameters, key, index):
        drawn = draw(setting, jax.random.fold_in(key, index), (), setting.tasks, PREDICTIONS)
        return jax.value_and_grad(functools.partial(loss, setting))(parameters, drawn)

    def epoch(index, carry):
        (parameters, momentum), total = carry
        losses, gradients = jax.vmap(gradient, (0, 0, None))(parameters, keys, index)
        updates, momentum = optimizer.update(gradients, momentum)
        return (optax.apply_updates(parameters, updates), momentum), total + losses

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state, start, stop):
        """Trains all runs from epoch `start` to `stop`; returns the state and each run's mean loss."""
        state, total = jax.lax.fori_loop(start, stop, epoch, (state, jnp.zeros(len(keys))))
        return state, total / (stop - start)

    stops = np.unique(np.linspace(0, setting.epochs, points + 1).round().astype(int)).tolist()
    for start, stop in itertools.pairwise(stops):
        if start < (curve[-1]["epoch"] if curve else 0):
            continue
        state, losses = advance(state, start, stop)
        last = stop == setting.epochs
        length, number = (LONG_GREEDY, series) if last else (GREEDY, _POINT_SERIES)
        right = np.asarray(_test(setting, length, number, state[0], keys, stop))
        curve.append(
            {"epoch": stop, "loss": losses.tolist(), "greedy": right[..., :GREEDY].mean(-1).tolist()}
        )
        if last:
            curve[-1]["long_greedy"] = right.mean(-1).tolist()
        _shared.save_arrays(path, state, progress | {"curve": curve})
        print(f"  epoch {stop:,} of {setting.epochs:,}: {np.mean(curve[-1]['greedy']):.3f}", flush=True)
    decades = _decades(setting, state[0], keys).tolist()
    return progress | {"curve": curve, "decades": decades, "weights": jax.tree.map(np.asarray, state[0])}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _test(setting, length, number, parameters, keys, epoch) -> Float[Array, "runs tasks length"]:
    """Computes the fraction of series of which each symbol after the context is right, when predictions are fed back.

    The `number` of series per run and task is rounded up to whole batches.
    """

    def right(parameters, series):
        def step(seen, truth):
            predicted = jnp.argmax(forward(setting, parameters, seen)[0]).astype(seen.dtype)
            return jnp.append(seen[1:], predicted), predicted == truth

        return jax.lax.scan(step, series[: setting.context], series[setting.context :])[1]

    def run(parameters, key):
        def batch(key):
            series = [draw(setting, key, (_TEST_BATCH,), (task,), length) for task in setting.tasks]
            return jax.vmap(jax.vmap(functools.partial(right, parameters)))(jnp.stack(series)).mean(1)

        # A key that is no epoch's.
        batches = jax.random.split(
            jax.random.fold_in(jax.random.fold_in(key, 2**31), epoch), -(-number // _TEST_BATCH)
        )
        return jax.lax.map(batch, batches).mean(0)

    return jax.vmap(run)(parameters, keys)


def _decades(setting, parameters, keys):
    """Returns the decades between the 5th and the 95th percentile of each run's weights of visible symbols.

    Smaller weights count as 1e-6, because float32 rounds those of expressive attention to multiples of 6e-8.
    """

    def run(parameters, key):
        series = draw(setting, key, (_POINT_SERIES,), setting.tasks, 0)
        weights = jax.vmap(lambda symbols: forward(setting, parameters, symbols)[1])(series)
        visible = jnp.concatenate([x[..., *np.tril_indices(setting.context)].ravel() for x in weights])
        low, high = jnp.percentile(jnp.log10(jnp.maximum(visible, 1e-6)), jnp.array([5, 95]))
        return high - low

    if setting.attention == "readout":
        return np.zeros(len(keys))
    return jax.vmap(run)(parameters, keys)


def _experiment(options: _shared.Options) -> None:
    compile_cache.cache_programs()
    plan = options.plan
    changes = {name: value for name, value in options.more.items() if value is not None}
    if plan.steps:
        changes["epochs"] = plan.steps
    folder = options.runs / "nt_tasks"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: [dataclasses.replace(x, **changes) for x in FIGURES[name]] for name in options.variants}
    rows: list[dict[str, Any]] = []
    weights = {}
    for figure, settings in wanted.items():
        # Flags may make two settings equal.
        for setting, attention in itertools.product(dict.fromkeys(settings), MODELS):
            seeds, points, series = plan.seeds, _POINTS, plan.documents
            if figure == "robustness":
                if attention == "readout":
                    continue  # it has no layers to change
                points, series = 1, series // 5
            if options.scale == "toy" and seeds == PLANS["toy"].seeds and setting.context > _TOY_CONTEXT:
                seeds = seeds[:_TOY_SEEDS]
            about = f"{setting.label}, {attention}, {setting.epochs} epochs, "
            about += f"seeds {'-'.join(map(str, seeds))}, {series} series"
            print(f"{figure}: {about}", flush=True)
            path = folder / f"{about.replace(', ', '_').replace(' ', '_')}.npz"
            one = dataclasses.replace(setting, attention=attention)
            result = train(one, seeds, path, points=points, series=series)
            rows += _rows(figure, one, result)
            if figure == "figure4" and attention != "readout":
                weights[one] = {name: x[0] for name, x in result["weights"].items()}
    listed = {figure: [dataclasses.asdict(x) for x in settings] for figure, settings in wanted.items()}
    path = options.write(rows, settings=listed)
    if curves := [row for row in rows if row["figure"] != "robustness"]:
        _draw_curves(path, curves)
    if weights:
        _draw_attention(path.with_stem(f"{path.stem}_attention"), weights)


def _rows(figure: str, setting: Setting, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row for each task and point of a learning curve: means and standard errors over runs."""

    def mean_error(name, values):
        mean = _shared.mean(values)
        return {name: mean.value, f"{name}_error": mean.error}

    for (place, task), point in itertools.product(enumerate(setting.tasks), result["curve"]):
        greedy, long = ([run[place] for run in point.get(name, [])] for name in ("greedy", "long_greedy"))
        about: dict[str, Any] = {"figure": figure, "setting": setting.label, "task": setting.name(task)}
        about |= {"attention": setting.attention, "runs": len(greedy), "parameters": result["parameters"]}
        about |= {"epoch": point["epoch"], "loss": float(np.mean(point["loss"]))} | mean_error(
            "greedy", greedy
        )
        about |= {"least": min(greedy), "most": max(greedy)}
        # Only at the end:
        about |= dict.fromkeys(("long_greedy", "long_greedy_error", "solved", "decades", "decades_error"))
        if long:
            about |= mean_error("long_greedy", long) | mean_error("decades", result["decades"])
            about["solved"] = sum(x == 1 for x in long)
        yield about


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON: the ends of training, and the robustness of the results.

    An accuracy is a mean over runs with its standard error; a run is solved if it makes no mistake in any test series.
    """
    ends: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for row in content["rows"]:
        if row["solved"] is not None:
            ends.setdefault((row["figure"], row["setting"], row["task"]), {})[row["attention"]] = row

    def cells(row: Mapping[str, Any], *names: str) -> list[str]:
        means = [_shared.Mean(row[name], _shared.from_json(row[f"{name}_error"])) for name in names]
        return [*map(str, means), f"{row['solved']} of {row['runs']}"]

    learned, robust = [], []
    for (figure, setting, task), by in ends.items():
        first, second = (by[name] for name in MODELS[:2])
        if figure == "robustness":
            robust.append([setting, *cells(first, "greedy"), *cells(second, "greedy")])
            continue
        name, lengths = _name(setting, task), ("greedy", "long_greedy")
        readout, paper = cells(by["readout"], "greedy")[0], _PAPER.get((figure, name), "")
        about = [name, str(first["runs"]), f"{first['epoch']:,}"]
        learned.append([*about, *cells(first, *lengths), *cells(second, *lengths), readout, paper])
    columns = [(f"{name}, {GREEDY}", f"{LONG_GREEDY}", "solved") for name in MODELS[:2]]
    about = ["series, context", "runs", "epochs"]
    found = [
        _shared.Table("Accuracy", [*about, *sum(columns, ()), f"readout, {GREEDY}", "the paper"], learned),
        _shared.Table("Robustness", ["setting", *(x for of in columns for x in of[::2])], robust),
    ]
    return [table for table in found if table.rows]


def _name(setting: str, task: str) -> str:
    """Returns the name of a task of a setting, whose label has all of its tasks."""
    return setting if setting.startswith(f"{task},") else f"{task} of {setting}"


def _draw_curves(path, rows):
    """Draws the learning curves of each task: the mean over runs, and a band of two standard errors around it."""
    curves: dict[tuple[str, str], dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        panel, mean, band = (
            (row["figure"], _name(row["setting"], row["task"])),
            row["greedy"],
            2 * row["greedy_error"],
        )
        point = row["epoch"], mean, max(mean - band, 0), min(mean + band, 1)
        curves.setdefault(panel, {}).setdefault(row["attention"], []).append(point)
    panels = [
        _shared.Panel(
            lines={attention: tuple(zip(*points)) for attention, points in by.items()},
            x_label="epochs",
            y_label="greedy accuracy",
            title=f"Figure {figure.removeprefix('figure')}: {name}",
        )
        for (figure, name), by in curves.items()
    ]
    _shared.draw_lines(
        path,
        panels,
        title=f"NT tasks: accuracy over {GREEDY} symbols",
        subtitle="mean over runs, with a band of two standard errors",
        columns=2,
    )


def _draw_attention(path, weights):
    """Draws the attention matrices of the first run of each variant, for one series, on a logarithmic scale."""
    figure, panels = plotting.make(len(weights), width=8.0, height=4.2)
    for axes, (setting, parameters) in zip(panels, weights.items()):
        series = draw(setting, jax.random.key(0), (), setting.tasks[:1], 0)
        (attention,), *_ = forward(setting, parameters, series)[1]
        seen = np.where(np.tri(setting.context), np.log10(np.maximum(attention, 1e-30)), np.nan)
        picture = axes.imshow(seen, vmin=-4, vmax=0, cmap="viridis")
        plotting.style(axes, x_label="key", y_label="query", title=setting.attention)
        axes.grid(visible=False)
    figure.colorbar(picture, ax=panels, label="log10 of the weight", shrink=0.8)
    plotting.save(figure, path)


_FLAGS = {
    field.name: {
        "type": field.type,
        "choices": field.metadata["choices"] or None,
        "help": f"{field.metadata['help']} Most figures have {field.default}.",
    }
    for field in dataclasses.fields(Setting)
    if "help" in field.metadata
}
main = _shared.Experiment(
    name="nt_tasks",
    description=__doc__,
    plans=PLANS,
    variants=tuple(FIGURES),
    trains=False,
    more=_FLAGS,
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
