"""Trains and greedily evaluates many models of the NT tasks at once, in one compiled program.

"Reorganizing attention-space geometry with expressive attention" (Gros 2024), section 4.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _nt_model
from sympow_jax.data import nt_tasks

__all__ = ["Progress", "Setting", "train"]

_LEARNING_RATE, _MOMENTUM = 0.02, 0.8
_PREDICTIONS = 40  # predictions per epoch, on one series, with one update each
_GREEDY = 50  # symbols predicted per test series
_TEST_BATCH = 100  # test series per batch; evaluations during training use one batch


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
        nt_tasks.check(self.tasks, self.base, self.delay)
        if self.context <= self.delay:
            raise ValueError(
                f"context is {self.context}; with delay {self.delay} the next symbol is determined by the last "
                f"{self.delay + 1}: use at least as many"
            )
        if self.initial is None:
            object.__setattr__(self, "initial", "normal" if self.weights == "shared" else "uniform")
        choices = {
            "weights": _nt_model.WEIGHTS,
            "initial": _nt_model.INITIALS,
            "attention": _nt_model.ATTENTIONS,
        }
        chosen = [("weights", self.weights), ("initial", self.initial)]
        for name, choice in [*chosen, *(("attention", x) for x in self.attentions)]:
            if choice not in choices[name]:
                raise ValueError(f"{name} is {choice!r}; it must be one of {', '.join(choices[name])}")
        for name in ("runs", "epochs", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.test_series < 1 or self.test_series % _TEST_BATCH:
            raise ValueError(
                f"test_series is {self.test_series}; it must be a multiple of the {_TEST_BATCH} that are continued at "
                f"once"
            )
        if self.drop_after is not None and self.drop_after < 0:
            raise ValueError(f"drop_after is {self.drop_after}; it must be at least 0")

    def model(self, attention: str) -> _nt_model.Model:
        """Returns the model with this attention."""
        assert self.initial is not None  # __post_init__ derives it
        return _nt_model.Model(
            attention=attention,
            base=self.base,
            context=self.context,
            weights=self.weights,
            initial_weights=self.initial,
        )


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
        batches = setting.test_series // _TEST_BATCH if stop == setting.epochs else 1
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
    series, _ = _series(setting, setting.tasks, of_epoch, (), _PREDICTIONS)
    rate = _rate(setting, epoch)

    def update(state, step):
        parameters, velocity = state
        symbols = jax.lax.dynamic_slice_in_dim(series, step, setting.context)
        loss, gradient = jax.value_and_grad(model.loss)(parameters, symbols, series[step + setting.context])
        velocity = jax.tree.map(lambda v, g: _MOMENTUM * v + g, velocity, gradient)
        return (jax.tree.map(lambda p, v: p - rate * v, parameters, velocity), velocity), loss

    state, losses = jax.lax.scan(update, state, jnp.arange(_PREDICTIONS))
    return state, losses.mean()


def _rate(setting, epoch):
    if setting.drop_after is None:
        return _LEARNING_RATE
    return jnp.where(epoch < setting.drop_after, _LEARNING_RATE, _LEARNING_RATE / 4)


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

        places = setting.context + jnp.arange(_GREEDY)
        return jax.lax.scan(step, series[: setting.context], places)[1]

    series = [_series(setting, (task,), key, (_TEST_BATCH,), _GREEDY)[0] for task in setting.tasks]
    greedy, given = jax.vmap(jax.vmap(right))(jnp.stack(series))
    return greedy.mean((1, 2)), given.mean((1, 2))


def _series(setting, tasks, key, shape, behind):
    """Draws series that have `behind` symbols after the context."""
    return nt_tasks.draw(
        key, shape, tasks=tasks, base=setting.base, delay=setting.delay, length=setting.context + behind
    )
