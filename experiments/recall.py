"""Recall by a state of a chosen size: associative recall against the bytes of state, and a needle against distance.

Tasks ask for the value of a key that a sequence has had before, or for what has changed places.

pairs: multi-query associative recall, MQAR, of "Zoology: Measuring and Improving Recall in Efficient Language Models"
(Arora et al. 2023). Pairs of a new key and a random value alternate with queries of a random key among those so far.
Thus a sequence asks at every number of pairs. Keys of a sequence are unique.

overwritten: the same, but only every fourth pair on average has a new key. The others give a new value to a random key
among those so far, and a query asks for the newest.

parity, swaps of 3 and swaps of 5: instead of a pair, two of 2, 3 or 5 things change places, or none do, and a query
asks for the thing in a random place. Things begin at the place of their number. Of two, this is the parity of the
changes. All changes of places are as likely, none included.

needle: pairs among tokens of no use, and queries of a random pair so far. Models are tested with one pair and queries
at distances within the training context and beyond it.

As in the retrieval task of "Linear Transformers Are Secretly Fast Weight Programmers" (Schlag et al. 2021), a key and
its value are one token. Its embedding is the sum of theirs. One layer can then recall, and all that it knows of earlier
tokens is its state. With one token each, another layer would first have to copy keys to the tokens of their values.

Variants are presets and powers. `delta` is the delta rule without a decay, with strengths `to 2` in two variants, and
`gated delta` its preset, at p = 2. `p=2 qk_norm` has normalized queries and keys, as the delta rule, but adds values.

The model is the project's `DecoderLM` with one layer, in float32. Only in the task `needle` attention has the positions
of its preset; the others do not need any, and have none but the learned rotation of `conformal`. In the task `pairs`
the head size varies at the same width, and so the state: `models.state_bytes` at 4 bytes per element. The state of
softmax is its KV cache, which grows; it is that at the end of a test sequence.

In training, half of the sequences of pairs are packed documents of a few pairs. Accuracy is the fraction of queries
for which the right value has the highest logit of all values, over newly drawn sequences of one document. `recalled` is
the number of pairs at which accuracy falls below 90 %, interpolated over the logarithm of the number of pairs.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments import _shared
from sympow_jax import config, models
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers
from sympow_jax.process import compile_cache

# Titles of the tables of the tasks.
TASKS = {
    "pairs": "Accuracy against the number of pairs",
    "overwritten": "Accuracy against the number of pairs, of keys that have several values",
    "needle": "Accuracy against the distance of a needle",
    "parity": "Accuracy against the number of changes, two things",
    "swaps of 3": "Accuracy against the number of changes, three things",
    "swaps of 5": "Accuracy against the number of changes, five things",
}
ATTENTIONS: dict[str, config.AttentionConfig] = {
    "linear": config.preset("linear"),
    "p=2": config.preset("sympow", power=2),
    "p=2 qk_norm": config.preset("sympow", power=2, qk_norm=True),
    "p=4": config.preset("sympow", power=4),
    **{f"delta p={power}": config.preset("power_delta", power=power, decay="none") for power in (1, 2, 4)},
    **{
        f"delta p={power} to 2": config.preset(
            "power_delta", power=power, decay="none", negative_eigenvalues=True
        )
        for power in (1, 2)
    },
    "gated delta": config.preset("power_delta", power=2),
    "gated": config.preset("sympow_gated", power=2),
    "gated_paper": config.preset("sympow_gated_paper", power=2),
    "conformal": config.preset("conformal", power=2),
    "conformal_paper": config.preset("conformal_paper", power=2),
    "softmax": config.preset("softmax"),
}
RECALLED = 0.9  # accuracy at which pairs count as recalled
_MODEL = ("variant", "head_dim", "state_bytes")  # columns that name a model
_LEAST_SHOWN = 16  # smallest point in the tables
_HEAD_DIM = 16  # of models that have one head size
_PARTS = 4  # of a training; its state is saved after each
_TEST_BATCH = 8
# Fraction of pairs with a new key.
_NEW_KEYS = {"pairs": 1.0, "overwritten": 1 / 4}
# Number of things that change places.
_THINGS = {"parity": 2, "swaps of 3": 3, "swaps of 5": 5}
_RATE = 1 / 8  # fractions of pairs and of queries in training on needles

PLANS = {
    "toy": _shared.Plan(seeds=(0, 1, 2), steps=800, documents=512),
    "paper": _shared.Plan(seeds=(0, 1, 2), steps=50_000, documents=2048),
    "tiny": _shared.Plan(seeds=(0, 1), steps=8, documents=16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of tasks and models."""

    width: int = 32  # of the model
    keys: int = 256
    values: int = 64
    noise: int = 64  # number of different tokens around a needle
    # Numbers of pairs at which accuracy is reported; the last is that of a sequence.
    points: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    short: int = 8  # pairs of a document in half of the training sequences
    context: int = 128  # training context of `needle`, in tokens
    # From the needle to the queries of a test.
    distances: tuple[int, ...] = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
    head_dims: tuple[int, ...] = (8, 16, 32)  # of linear and power attention
    batch: int = 4  # training sequences of `pairs` per update; those of `needle` have as many tokens
    rate: float = 1e-2  # largest learning rate

    @property
    def pairs(self) -> int:
        """Pairs of a sequence."""
        return self.points[-1]

    @property
    def needle(self) -> int:
        """Place of the needle in test sequences."""
        return self.context // 4

    @property
    def vocab_size(self) -> int:
        """Keys, then values, then noise."""
        return self.keys + self.values + self.noise


SETTINGS = {
    "toy": Setting(),
    # The vocabulary and the smallest width of Zoology's MQAR.
    "paper": Setting(
        width=64, keys=4096, values=4032, points=(4, 8, 16, 32, 64, 128, 256, 512), batch=32, rate=3e-3
    ),
    "tiny": Setting(
        width=16, keys=8, values=5, noise=4, points=(1, 2, 4), short=2, context=8, distances=(2, 16), batch=2
    ),
}


class Series(NamedTuple):
    """Sequences of a task."""

    tokens: Int[Array, "B T"]  # keys or noise
    values: Int[Array, "B T"]  # token of the value that shares a pair's place; -1 elsewhere
    answers: Int[Array, "B T"]  # index of the value that a query asks for; -1 where there is no query
    segment_ids: Int[Array, "B T"]  # document of each token


def draw_pairs(
    setting: Setting, key: Array, batch: int, documents: Sequence[int], *, new_keys: float = 1.0
) -> Series:
    """Draws sequences in which each pair is followed by a query of a key so far in its document.

    `documents` are pairs per document, for the sequences in turn. A fraction `new_keys` of the pairs, and the first of
    each document, have a new key; the others have one of those so far. Queries ask for a key's last value.
    """
    key_key, value_key, query_key, new_key, old_key = jax.random.split(key, 5)
    pairs = setting.pairs
    keys = jnp.argsort(jax.random.bits(key_key, (batch, setting.keys)))[:, :pairs]
    values = jax.random.randint(value_key, (batch, pairs), 0, setting.values)
    length = jnp.resize(jnp.array(documents), (batch,))[:, None]
    document, place = jnp.divmod(jnp.arange(pairs), length)
    is_new = (place == 0) | (jax.random.uniform(new_key, (batch, pairs)) < new_keys)
    # Keys of a document so far. They are numbered from the document's first place, and so differ from those of others.
    first = document * length
    count = is_new.cumsum(1)
    count += 1 - jnp.take_along_axis(count, first, 1)
    written = first + jnp.where(is_new, count - 1, jax.random.randint(old_key, (batch, pairs), 0, count))
    asked = first + jax.random.randint(query_key, (batch, pairs), 0, count)
    earlier = jnp.tril(written[:, None] == asked[:, :, None])
    last = jnp.where(earlier, jnp.arange(pairs), -1).max(2)

    none = jnp.full_like(values, -1)
    return Series(
        tokens=_alternate(jnp.take_along_axis(keys, written, 1), jnp.take_along_axis(keys, asked, 1)),
        values=_alternate(values + setting.keys, none),
        answers=_alternate(none, jnp.take_along_axis(values, last, 1)),
        segment_ids=_alternate(document, document),
    )


def _alternate(pair: Int[Array, "B n"], query: Int[Array, "B n"]) -> Int[Array, "B 2*n"]:
    """Returns each of the first followed by each of the second, row by row."""
    return jnp.stack([pair, query], 2).reshape(len(pair), -1)


def draw_swaps(setting: Setting, key: Array, batch: int, documents: Sequence[int], *, things: int) -> Series:
    """Draws sequences of changes of places, each followed by a query of a random place; arguments as in `draw_pairs`.

    The tokens of changes come first, that of none before those of pairs of places; then those of places.
    """
    change_key, place_key = jax.random.split(key)
    swaps = [(0, 0), *itertools.combinations(range(things), 2)]
    shape = batch, setting.pairs
    changes = jax.random.randint(change_key, shape, 0, len(swaps))
    places = jax.random.randint(place_key, shape, 0, things)
    length = jnp.resize(jnp.array(documents), (batch,))[:, None]
    document, turn = jnp.divmod(jnp.arange(setting.pairs), length)

    def swap(order, inputs):
        pair, begins = inputs
        order = jnp.where(begins, jnp.arange(things), order)
        order = order.at[pair].set(order[pair[::-1]])
        return order, order

    def of_row(changes, begins):
        return jax.lax.scan(swap, jnp.arange(things), (jnp.array(swaps)[changes], begins))[1]

    orders = jax.vmap(of_row)(changes, turn == 0)
    answers = jnp.take_along_axis(orders, places[..., None], 2)[..., 0]
    none = jnp.full_like(answers, -1)
    return Series(
        tokens=_alternate(changes, places + len(swaps)),
        values=_alternate(none, none),
        answers=_alternate(none, answers),
        segment_ids=_alternate(document, document),
    )


def draw_needles(setting: Setting, key: Array, batch: int, distances: Sequence[int] | None = None) -> Series:
    """Draws sequences of noise with pairs of new keys, and queries of a pair so far.

    If `distances` are given, there is one pair, at `setting.needle`, and queries are at these distances from it.
    Otherwise an eighth of the tokens of a training context are pairs, and an eighth queries.
    """
    noise_key, pair_key, value_key, kind_key, query_key = jax.random.split(key, 5)
    length = setting.context if distances is None else setting.needle + max(distances) + 1
    shape, time = (batch, length), jnp.arange(length)
    if distances is None:
        kind = jax.random.uniform(kind_key, shape)
        pair = kind < _RATE
        # Pairs so far, of which a query asks for a random one.
        count = jnp.cumsum(pair, axis=1)
        query = (kind > 1 - _RATE) & (count > 0)
        asked = (jax.random.uniform(query_key, shape) * count).astype(int)
        source = jnp.take_along_axis(jnp.argsort(~pair, axis=1, stable=True), asked, 1)
    else:
        pair = jnp.broadcast_to(time == setting.needle, shape)
        query = jnp.broadcast_to(jnp.isin(time - setting.needle, jnp.array(distances)), shape)
        source = jnp.full(shape, setting.needle)
    source = jnp.where(pair, time, source)
    keys = jnp.argsort(jax.random.bits(pair_key, (batch, setting.keys)))[:, time % setting.keys]
    value = jax.random.randint(value_key, shape, 0, setting.values)
    noise = jax.random.randint(noise_key, shape, setting.keys + setting.values, setting.vocab_size)
    return Series(
        tokens=jnp.where(pair | query, jnp.take_along_axis(keys, source, 1), noise),
        values=jnp.where(pair, value + setting.keys, -1),
        answers=jnp.where(query, jnp.take_along_axis(value, source, 1), -1),
        segment_ids=jnp.zeros(shape, int),
    )


def draw(setting: Setting, task: str, key: Array, *, test: bool) -> Series:
    """Draws a batch of a task for an update or for a test."""
    documents = (setting.pairs,) if test else (setting.pairs, setting.short)
    batch = _TEST_BATCH if test else setting.batch
    if task in _NEW_KEYS:
        return draw_pairs(setting, key, batch, documents, new_keys=_NEW_KEYS[task])
    if task in _THINGS:
        return draw_swaps(setting, key, batch, documents, things=_THINGS[task])
    if test:
        return draw_needles(setting, key, batch, setting.distances)
    return draw_needles(setting, key, setting.batch * 2 * setting.pairs // setting.context)


def value_logits(setting: Setting, model: models.DecoderLM, series: Series) -> Float[Array, "B T values"]:
    """Returns a model's logits of the values after each token."""
    own = model.embed(series.tokens)
    values = model.embed(jnp.maximum(series.values, 0))
    hidden = model.encode(own + jnp.where(series.values[..., None] < 0, 0, values), series.segment_ids)
    return model.unembed(hidden)[..., setting.keys : setting.keys + setting.values]


def loss(setting: Setting, model: models.DecoderLM, series: Series) -> Float[Array, ""]:
    """Computes the mean cross-entropy of the values over the queries, in nats."""
    logits = value_logits(setting, model, series)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(series.answers, 0))
    return nats.mean(where=series.answers >= 0)


def places(setting: Setting, task: str) -> dict[int, int]:
    """Returns the place in test sequences of the query of each point: number of pairs, or distance."""
    if task != "needle":
        return {pairs: 2 * pairs - 1 for pairs in setting.points}
    return {distance: setting.needle + distance for distance in setting.distances}


def accuracy(
    setting: Setting, task: str, logits: Float[Array, "B T values"], answers: Int[Array, "B T"]
) -> Float[Array, " points"]:
    """Computes the fraction of test sequences in which each point's query has its value."""
    right = (logits.argmax(-1) == answers).mean(0)
    return right[np.array(list(places(setting, task).values()))]


def model_config(
    setting: Setting, task: str, attention: config.AttentionConfig, head_dim: int
) -> config.ModelConfig:
    """Returns the config of a model with this attention, in all tasks but `needle` with learned positions or none."""
    if task != "needle" and attention.position != "learned_rope":
        attention = dataclasses.replace(attention, position="none")
    return config.ModelConfig(
        vocab_size=setting.vocab_size,
        layers=1,
        width=setting.width,
        heads=setting.width // head_dim,
        dtype="float32",
        attention=attention,
    )


def state_bytes(setting: Setting, task: str, shape: config.ModelConfig) -> int:
    """Returns the bytes of a model's state, for softmax those of its keys and values at the end of a test sequence."""
    return _shared.state_bytes(shape, max(places(setting, task).values()) + 1)


def initial(shape: config.ModelConfig, key: Array) -> nnx.State:
    """Draws the parameters of a model.

    The projections of its attention begin larger than a language model's, at 1 / sqrt(width), because Adam's first
    updates would overwrite small ones. Keys begin with the matrix of the queries, so that a pair's own query finds it
    from the start. Otherwise power attention stays at chance for hundreds of updates, depending on the seed, and models
    would be compared by when they leave it.
    """
    model = models.DecoderLM(shape, rngs=nnx.Rngs(key))
    scale = 1 / (initializers.STANDARD_DEVIATION * math.sqrt(shape.width))
    for block in model.blocks:
        attention = block.attention
        for projection in (attention.query, attention.value, attention.out):
            projection.kernel[...] = scale * projection.kernel[...]
        attention.key.kernel[...] = attention.query.kernel[...]
    return nnx.state(model, nnx.Param)


def train(
    setting: Setting,
    task: str,
    shape: config.ModelConfig,
    seeds: Sequence[int],
    path: pathlib.Path,
    *,
    steps: int,
    series: int,
) -> Float[np.ndarray, "seeds points"]:
    """Trains a model for each seed, all in one program, and returns their accuracies on `series` sequences each.

    The models are saved to `path` four times, and training resumes from there.
    """
    # Each model has keys of its own seed, so that its result does not depend on the others.
    keys = jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32))
    graph = nnx.graphdef(nnx.eval_shape(lambda: models.DecoderLM(shape, rngs=nnx.Rngs(0))))
    parameters = jax.jit(jax.vmap(functools.partial(initial, shape)))(keys)
    warmup = min(max(1, steps // 20), steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, setting.rate, warmup, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state = parameters, jax.vmap(optimizer.init)(parameters)
    training = {"setting": dataclasses.asdict(setting), "task": task, "model": dataclasses.asdict(shape)}
    about = {"training": training | {"seeds": list(seeds), "steps": steps}}
    before, state = _shared.restore_arrays(path, state, about)
    done = before.get("step", 0)

    def update(parameters, optimizer_state, key, step):
        batch = draw(setting, task, jax.random.fold_in(key, step), test=False)
        gradient = jax.grad(lambda x: loss(setting, nnx.merge(graph, x), batch))(parameters)
        changes, optimizer_state = optimizer.update(gradient, optimizer_state, parameters)
        return optax.apply_updates(parameters, changes), optimizer_state

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state, start, stop):
        # In turn: on a CPU, the products of small matrices are slower in batches.
        return jax.lax.fori_loop(
            start,
            stop,
            lambda step, state: jax.lax.map(lambda model: update(*model, step), (*state, keys)),
            state,
        )

    @jax.jit
    def test(parameters):
        def run(parameters, key):
            def batch(key):
                drawn = draw(setting, task, key, test=True)
                logits = value_logits(setting, nnx.merge(graph, parameters), drawn)
                return accuracy(setting, task, logits, drawn.answers)

            # A key that is no update's.
            return jax.lax.map(
                batch, jax.random.split(jax.random.fold_in(key, 2**31), -(-series // _TEST_BATCH))
            ).mean(0)

        return jax.lax.map(lambda model: run(*model), (parameters, keys))

    stops = np.linspace(0, steps, _PARTS + 1).round().astype(int).tolist()
    for start, stop in itertools.pairwise(stops):
        if start < done:
            continue
        state = advance(state, start, stop)
        if not all(jnp.isfinite(x).all() for x in jax.tree.leaves(state[0])):
            raise ValueError(f"{path.stem}: training diverged by update {stop:,}; choose other --seeds")
        _shared.save_arrays(path, state, about | {"step": stop})
        print(f"  update {stop:,} of {steps:,}", flush=True)
    return np.asarray(test(state[0]))


def recalled(points: Sequence[int], accuracies: Sequence[float]) -> float:
    """Returns the number of pairs at which accuracy first falls below 90 %.

    It is interpolated over the logarithm of the number of pairs. It is 0 if accuracy is below at the first point, and
    the last point if accuracy never falls.
    """
    low = next((index for index, right in enumerate(accuracies) if not right >= RECALLED), None)
    if low is None:
        return float(points[-1])
    if low == 0:
        return 0.0
    share = (accuracies[low - 1] - RECALLED) / (accuracies[low - 1] - accuracies[low])
    return float(points[low - 1] * (points[low] / points[low - 1]) ** share)


def _experiment(options: _shared.Options) -> None:
    compile_cache.cache_programs()
    plan, setting = options.plan, SETTINGS[options.scale]
    folder = options.runs / "recall"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for task, variant in itertools.product(options.more["tasks"], options.variants):
        for head_dim in head_dims(setting, task, variant):
            seeds = "-".join(map(str, plan.seeds))
            name = f"{task}, {variant}, heads of {head_dim}, {plan.steps} updates, seeds {seeds}"
            print(name, flush=True)
            shape = model_config(setting, task, ATTENTIONS[variant], head_dim)
            path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.npz"
            found = train(setting, task, shape, plan.seeds, path, steps=plan.steps, series=plan.documents)
            print(f"  accuracy at {list(places(setting, task))[-1]}: {found[:, -1].mean():.3f}", flush=True)
            about = {"task": task, "variant": variant, "head_dim": head_dim}
            about["state_bytes"] = state_bytes(setting, task, shape)
            rows += [
                about | {"seed": seed, "point": point, "accuracy": float(right)}
                for seed, accuracies in zip(plan.seeds, found)
                for point, right in zip(places(setting, task), accuracies)
            ]
    path = options.write(rows, setting=dataclasses.asdict(setting))
    _draw(path, setting, rows, plan.average)


def head_dims(setting: Setting, task: str, variant: str) -> tuple[int, ...]:
    """Returns the head sizes of a variant in a task."""
    if task == "pairs" and variant in ("linear", "p=2", "p=4"):
        return tuple(size for size in setting.head_dims if size <= setting.width)
    return (_HEAD_DIM,)


def capacities(rows: Iterable[_shared.Row]) -> dict[tuple[str, int, int], _shared.Mean]:
    """Returns `recalled` of each model of the task `pairs`, by (variant, head size, bytes of state)."""
    curves: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        if row["task"] == "pairs":
            model = tuple(row[name] for name in (*_MODEL, "seed"))
            curves.setdefault(model, {})[row["point"]] = row["accuracy"]
    found = [
        dict(zip(_MODEL, model)) | {"recalled": recalled(list(curve), list(curve.values()))}
        for model, curve in curves.items()
    ]
    return _shared.means(found, _MODEL, "recalled")


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    found = []
    for task, title in TASKS.items():
        rows = [row for row in content["rows"] if row["task"] == task]
        if not rows:
            continue
        accuracies, capacity = _shared.means(rows, (*_MODEL, "point"), "accuracy"), capacities(rows)
        points = list(dict.fromkeys(row["point"] for row in rows))
        # Powers of two, without the smallest, where accuracies hardly differ.
        shown = [x for x in points if x >= _LEAST_SHOWN and not x & (x - 1)]
        cells = []
        for model in dict.fromkeys(tuple(row[name] for name in _MODEL) for row in rows):
            variant, head_dim, size = model
            line = [variant, f"{head_dim:,}", f"{size:,}"]
            if mean := capacity.get(model):
                at_least = mean.value == max(points)
                line.append(
                    f"at least {max(points)}" if at_least else f"{mean.value:.1f}{mean.error_text(1)}"
                )
            cells.append([*line, *(str(accuracies[*model, x]) for x in shown)])
        columns = "", "head size", "bytes of state", *(["pairs at 90 %"] if capacity else ())
        found.append(_shared.Table(title, (*columns, *(f"{x:,}" for x in shown)), cells))
    return found


def _draw(path, setting, rows, average):
    """Draws the pairs recalled against the bytes of state, and accuracy against the points of each task."""
    states = {(variant, size / 1024): mean for (variant, _, size), mean in capacities(rows).items()}
    panels = []
    if states:
        panels.append(
            _shared.Panel(
                lines=_shared.lines(states),
                x_label="KiB of state",
                y_label="pairs recalled at 90 %",
                title="What a state buys",
                ticks=(1, 8, 64, 512, 4096),
                log_y=True,
            )
        )
    labels = {"needle": "distance of a needle, tokens"} | dict.fromkeys(_NEW_KEYS, "pairs")
    for task in dict.fromkeys(row["task"] for row in rows):
        equal = [row for row in rows if row["head_dim"] == _HEAD_DIM and row["task"] == task]
        panels.append(
            _shared.Panel(
                lines=_shared.lines(_shared.means(equal, ("variant", "point"), "accuracy")),
                x_label=labels.get(task, "changes"),
                y_label="accuracy",
                title=task,
                # Powers of four.
                ticks=[x for x in places(setting, task) if x & (x - 1) == 0 and x.bit_length() % 2],
                mark=(setting.context, "training context") if task == "needle" else None,
            )
        )
    _shared.draw_lines(
        path,
        panels,
        title="Recall by a state",
        subtitle=f"{average}; heads of {_HEAD_DIM} except where states are compared",
        columns=3,
    )


main = _shared.Experiment(
    name="recall",
    description=__doc__,
    plans=PLANS,
    variants=tuple(ATTENTIONS),
    trains=False,
    more={
        "tasks": {
            "type": functools.partial(_shared.names_among, TASKS),
            "default": tuple(TASKS),
            "metavar": "A,B",
            "help": "Tasks to learn.",
        }
    },
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
