"""NT tasks: series of symbols in which each is a sum of earlier ones, modulo a base.

"Reorganizing attention-space geometry with expressive attention" (Gros 2024), equations 4, 8 and 9. Symbols are
0 to base - 1. With base N, delay tau and x(t) the symbol at t:

NT: x(t) = x(t - tau) + x(t - tau - 1) mod N; XOR for N = 2, tau = 1.
NT-S: x(t) = x(t - 1) + ... + x(t - tau - 1) mod N.
NT-R: NT-S where x(t - tau - 1) = 0, NT elsewhere.

The first tau + 1 symbols determine a series, so there are N^(tau + 1) of each task.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Int

__all__ = ["TASKS", "check", "continue_series", "cycles", "draw"]

TASKS = ("NT", "NT-S", "NT-R")


def check(tasks: tuple[str, ...], base: int, delay: int) -> None:
    """Raises ValueError for an unknown task, no task, a base below 2 or a delay below 1."""
    if not tasks:
        raise ValueError(f"no task is given; name some of {', '.join(TASKS)}")
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASKS)}")
    if base < 2:
        raise ValueError(f"base is {base}; it must be at least 2, the number of symbols of a binary series")
    if delay < 1:
        raise ValueError(f"delay is {delay}; it must be at least 1, the delay of XOR")


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

    Raises:
        ValueError: as `check`.
    """
    check(tasks, base, first.shape[-1] - 1)

    def step(last, _):
        return jnp.concatenate([last[..., 1:], _next(last, tasks, task, base)[..., None]], -1), last[..., 0]

    _, symbols = jax.lax.scan(step, first, length=length)
    return jnp.moveaxis(symbols, 0, -1)


def draw(
    key: Array, shape: tuple[int, ...], *, tasks: tuple[str, ...], base: int, delay: int, length: int
) -> tuple[Int[Array, "*batch T"], Int[Array, "*batch"]]:
    """Returns random series and the index of each one's task.

    All tasks are equally likely, and so are all series of a task.

    Raises:
        ValueError: as `check`.
    """
    check(tasks, base, delay)
    of_task, of_first = jax.random.split(key)
    task = jax.random.randint(of_task, shape, 0, len(tasks))
    first = jax.random.randint(of_first, (*shape, delay + 1), 0, base)
    return continue_series(first, tasks, task, base, length), task


def cycles(task: str, base: int, delay: int) -> dict[int, int]:
    """Returns {length: number of cycles} of the cycles that a task's series end in, longest first.

    These are equations 6 and 7 of the paper. Takes base^(delay + 1) steps and integers of memory.

    Raises:
        ValueError: as `check`.
    """
    check((task,), base, delay)
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
