"""Training and greedy evaluation of many models of the NT tasks at once, in one compiled program.

"Reorganizing attention-space geometry with expressive attention" (Gros 2024), section 4.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _nt_model
from sympow_jax.data import nt_tasks

__all__ = ["Progress", "Setting", "train"]

_LEARNING_RATE, _MOMENTUM = 0.02, 0.8
_PREDICTIONS = 40  # of an epoch's series, one update each
_GREEDY = 50  # symbols of a test series that are predicted
_TEST_BATCH = 100  # test series at once, and all of them while training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One training: `runs` models of each attention. `drop_after`: the epochs after which the rate is a quarter."""

    tasks: tuple[str, ...]
    base: int
    delay: int
    context: int
    weights: str
    attentions: tuple[str, ...]
    runs: int
    epochs: int
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
        for name, choices in (("weights", (self.weights,)), ("attentions", self.attentions)):
            known = _nt_model.WEIGHTS if name == "weights" else _nt_model.ATTENTIONS
            for choice in choices:
                if choice not in known:
                    raise ValueError(
                        f"{name.rstrip('s')} is {choice!r}; it must be one of {', '.join(known)}"
                    )
        if self.test_series > _TEST_BATCH and self.test_series % _TEST_BATCH:
            raise ValueError(
                f"test_series is {self.test_series}; above {_TEST_BATCH} it must be a multiple of it"
            )
        for name in ("runs", "epochs", "evaluations", "test_series"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.drop_after is not None and self.drop_after < 0:
            raise ValueError(f"drop_after is {self.drop_after}; it must be at least 0")

    def model(self, attention: str) -> _nt_model.Model:
        """The model with that attention."""
        return _nt_model.Model(
            attention=attention, base=self.base, context=self.context, weights=self.weights
        )


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where runs stand after `epoch` epochs, for each attention.

    loss: [runs], the mean since the last one. greedy: [runs, tasks], the share of right symbols where predictions are
    fed back; given: the same where the true symbols are. test_series: how many of each task that was measured on.
    """

    epoch: int
    test_series: int
    loss: dict[str, np.ndarray]
    greedy: dict[str, np.ndarray]
    given: dict[str, np.ndarray]


def train(setting: Setting) -> Iterator[Progress]:
    """Trains all runs of all attentions; the last progress is on `test_series`, those before it on 100."""
    # A run's key is its own, so that it does not depend on how many there are.
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(setting.seed)))(
        jnp.arange(setting.runs)
    )
    state = jax.jit(lambda: {name: _initial(setting, name, keys) for name in setting.attentions})()
    advance = jax.jit(functools.partial(_advance, setting), donate_argnums=0)
    points = np.unique(np.linspace(0, setting.epochs, setting.evaluations + 1).round().astype(int))
    for start, stop in itertools.pairwise(points):
        state, *measured = advance(state, keys, start, stop)
        if stop == setting.epochs:
            break
        yield Progress(int(stop), _TEST_BATCH, *jax.device_get(measured))
    loss = jax.device_get(measured[0])
    test = jax.jit(functools.partial(_tested, setting, setting.test_series))
    greedy, given = jax.device_get(test({name: of[0] for name, of in state.items()}, keys, setting.epochs))
    yield Progress(setting.epochs, setting.test_series, loss, greedy, given)


def _initial(setting, attention, keys):
    parameters = jax.vmap(setting.model(attention).initial)(keys)
    return parameters, jax.tree.map(jnp.zeros_like, parameters)


def _advance(setting, state, keys, start, stop):
    """The epochs from `start` up to `stop` of all runs; the state, losses and accuracies."""
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
    parameters = {name: of[0] for name, of in state.items()}
    return state, losses, *_tested(setting, _TEST_BATCH, parameters, keys, start)


def _epoch(setting, model, key, state, epoch):
    """One fresh series: the next symbol is predicted 40 times, each with an update."""
    of_epoch = jax.random.fold_in(jax.random.fold_in(key, 0), epoch)
    series, _ = _series(setting, setting.tasks, of_epoch, (), _PREDICTIONS)
    rate = _LEARNING_RATE
    if setting.drop_after is not None:
        rate = jnp.where(epoch < setting.drop_after, rate, rate / 4)

    def update(state, step):
        parameters, velocity = state
        symbols = jax.lax.dynamic_slice_in_dim(series, step, setting.context)
        loss, gradient = jax.value_and_grad(model.loss)(parameters, symbols, series[step + setting.context])
        velocity = jax.tree.map(lambda v, g: _MOMENTUM * v + g, velocity, gradient)
        return (jax.tree.map(lambda p, v: p - rate * v, parameters, velocity), velocity), loss

    state, losses = jax.lax.scan(update, state, jnp.arange(_PREDICTIONS))
    return state, losses.mean()


def _tested(setting, count, parameters, keys, epoch):
    """Accuracies [runs, tasks] by attention, fed back and given, over `count` fresh series of each task."""
    greedy, given = {}, {}
    batches = -(-count // _TEST_BATCH)
    for name in setting.attentions:
        test = functools.partial(_tested_run, setting, setting.model(name), min(count, _TEST_BATCH), batches)
        of_epoch = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, 1), epoch))(keys)
        greedy[name], given[name] = jax.vmap(test)(parameters[name], of_epoch)
    return greedy, given


def _tested_run(setting, model, size, batches, parameters, key):
    predict: Callable = lambda symbols: jnp.argmax(model.outputs(parameters, symbols)).astype(jnp.int32)  # noqa: E731

    def right(series):
        def step(seen, place):
            truth = series[place]
            own = predict(seen)
            window = jax.lax.dynamic_slice_in_dim(series, place - setting.context, setting.context)
            return jnp.append(seen[1:], own), (own == truth, predict(window) == truth)

        places = setting.context + jnp.arange(_GREEDY)
        return jax.lax.scan(step, series[: setting.context], places)[1]

    def batch(index):
        of_batch = jax.random.fold_in(key, index)
        found = []
        for task in setting.tasks:
            series, _ = _series(setting, (task,), of_batch, (size,), _GREEDY)
            found.append(jax.tree.map(jnp.mean, jax.vmap(right)(series)))
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    return jax.tree.map(lambda x: x.mean(0), jax.lax.map(batch, jnp.arange(batches)))


def _series(setting, tasks, key, shape, behind):
    """Series of the context and `behind` symbols more."""
    return nt_tasks.drawn(
        key, shape, tasks=tasks, base=setting.base, delay=setting.delay, length=setting.context + behind
    )
