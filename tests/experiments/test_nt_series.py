"""Tests of NT tasks: the series of equations 3 to 9."""

import collections

import jax
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
