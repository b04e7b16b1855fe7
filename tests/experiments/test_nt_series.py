"""Tests of NT tasks: the series of equations 3 to 9 and their cycles, as the paper counts them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import nt_tasks


def series(task, base, first, length):
    """Computes the series by the equations, with loops."""
    x, delay = list(first), len(first) - 1
    while len(x) < length:
        delayed, summed = x[-delay] + x[-delay - 1], sum(x[-delay - 1 :])
        rare = task == "NT-R" and x[-delay - 1] == 0
        x.append((summed if task == "NT-S" or rare else delayed) % base)
    return x


@pytest.mark.parametrize(("base", "delay"), [(2, 1), (3, 4), (16, 5)])
def test_series(base, delay):
    rows, task = nt_tasks.draw(
        jax.random.key(0), (4, 16), tasks=nt_tasks.TASKS, base=base, delay=delay, length=40
    )
    assert rows.shape == (4, 16, 40)
    assert set(np.unique(task)) == {0, 1, 2}
    for symbols, index in zip(np.reshape(rows, (-1, 40)), np.ravel(task), strict=True):
        assert symbols.tolist() == series(nt_tasks.TASKS[index], base, symbols[: delay + 1].tolist(), 40)


def test_xor():
    """Equation 5: three of four initial conditions give the cycle 011, the fourth zeros."""
    first = jnp.array([[1, 1], [0, 1], [1, 0], [0, 0]])
    result = nt_tasks.continue_series(first, ("NT",), jnp.zeros(4, int), base=2, length=12)
    lines = ["".join(map(str, row)) for row in result.tolist()]
    assert lines == ["110" * 4, "011" * 4, "101" * 4, "0" * 12]
    assert (nt_tasks.continue_series(first, ("NT-S",), jnp.zeros(4, int), base=2, length=12) == result).all()


def test_series_are_drawn_under_jit():
    def draw(key):
        return nt_tasks.draw(key, (), tasks=("NT", "NT-R"), base=5, delay=2, length=9)[0]

    batch = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 8))
    assert len({tuple(row) for row in batch.tolist()}) > 6
    assert set(np.unique(batch)) == set(range(5))


CYCLES = {
    ("NT", 16, 3): {120: 512, 60: 64, 30: 8, 15: 1, 1: 1},  # equation 6
    ("NT", 16, 2): {56: 64, 28: 16, 14: 4, 7: 1, 1: 1},  # equation 7
    ("NT", 2, 5): {63: 1, 1: 1},
    ("NT", 2, 1): {3: 1, 1: 1},
}


@pytest.mark.parametrize(("task", "base", "delay"), CYCLES)
def test_cycles(task, base, delay):
    result = nt_tasks.cycles(task, base, delay)
    assert result == CYCLES[task, base, delay]
    assert sum(length * count for length, count in result.items()) == base ** (delay + 1)


@pytest.mark.parametrize(("task", "mean"), [("NT", 47.6), ("NT-S", 23.8)])
def test_mean_length_of_cycles(task, mean):
    """Section 5, "Mixture of tasks"."""
    cycles = nt_tasks.cycles(task, 16, 2)
    assert round(16**3 / sum(cycles.values()), 1) == mean


def test_states_outside_the_cycles():
    """NT-R is not invertible: every series ends in a cycle, but not every state is part of one."""
    result = nt_tasks.cycles("NT-R", 3, 2)
    on_cycles = set()
    for state in np.ndindex(3, 3, 3):
        end = series("NT-R", 3, state, 90)
        on_cycles |= {tuple(end[i : i + 3]) for i in range(60, 87)}
    assert sum(length * count for length, count in result.items()) == len(on_cycles) < 27
