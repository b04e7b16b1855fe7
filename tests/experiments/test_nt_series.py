"""Tests of NT tasks: the series of equations 3 to 9 and their cycles, as the paper counts them."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import nt_tasks

pytestmark = pytest.mark.robust


def series(task, base, first, length):
    x, delay = list(first), len(first) - 1
    while len(x) < length:
        delayed, summed = x[-delay] + x[-delay - 1], sum(x[-delay - 1 :])
        rare = task == "NT-R" and x[-delay - 1] == 0
        x.append((summed if task == "NT-S" or rare else delayed) % base)
    return x


@pytest.mark.parametrize(("task", "base", "delay"), [("NT", 3, 4), ("NT-S", 16, 5), ("NT-R", 3, 4)])
def test_series(task, base, delay):
    setting = nt_tasks.Setting(base=base, delay=delay, context=30)
    rows = nt_tasks.draw(setting, jax.random.key(0), (4, 4), (task,), 10)
    for symbols in rows.reshape(-1, 40).tolist():
        assert symbols == series(task, base, symbols[: delay + 1], 40)


def test_mixtures_have_every_task():
    setting = nt_tasks.Setting(base=5, context=6)
    rows = nt_tasks.draw(setting, jax.random.key(1), (64,), nt_tasks.TASKS, 20)
    possible = [
        {task for task in nt_tasks.TASKS if symbols == series(task, 5, symbols[:3], 26)}
        for symbols in rows.tolist()
    ]
    assert all(possible)
    counts = collections.Counter(x for tasks in possible if len(tasks) == 1 for x in tasks)
    assert min(counts[task] for task in nt_tasks.TASKS) > 8


def test_xor():
    """Equation 5: three of four initial conditions give the cycle 011, the fourth zeros."""
    first = jnp.array([[1, 1], [0, 1], [1, 0], [0, 0]])
    result = nt_tasks.continue_series(first, ("NT",), jnp.zeros(4, int), base=2, length=12)
    lines = ["".join(map(str, row)) for row in result.tolist()]
    assert lines == ["110" * 4, "011" * 4, "101" * 4, "0" * 12]


def cycles(task, base, delay):
    """Counts the cycles of each length that the series of a task consist of."""
    states = np.array(list(itertools.product(range(base), repeat=delay + 1)))
    after = nt_tasks.continue_series(jnp.array(states), (task,), jnp.zeros(len(states), int), base, delay + 2)
    following = dict(zip(map(tuple, states.tolist()), map(tuple, after[:, 1:].tolist()), strict=True))
    lengths = collections.Counter()
    while following:
        start, state = next(iter(following.items()))
        length = 1
        while state != start:
            state, length = following.pop(state), length + 1
        del following[start]
        lengths[length] += 1
    return lengths


def test_cycles():
    """Equations 6 and 7, and the mean lengths of section 5, "Mixture of tasks"."""
    assert cycles("NT", 16, 3) == {120: 512, 60: 64, 30: 8, 15: 1, 1: 1}
    assert (found := cycles("NT", 16, 2)) == {56: 64, 28: 16, 14: 4, 7: 1, 1: 1}
    assert cycles("NT", 2, 5) == {63: 1, 1: 1}
    assert round(16**3 / found.total(), 1) == 47.6
    assert round(16**3 / cycles("NT-S", 16, 2).total(), 1) == 23.8
