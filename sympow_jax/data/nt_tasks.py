"""NT tasks: series of symbols 0 to base - 1 in which each is a sum, modulo the base, of delayed earlier ones.

"Reorganizing attention-space geometry with expressive attention" (Gros 2024), equations 4, 8 and 9. With base N, delay
tau and x(t) the symbol at t:

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

__all__ = ["TASKS", "check", "continued", "cycles", "drawn"]

TASKS = ("NT", "NT-S", "NT-R")


def check(tasks: tuple[str, ...], base: int, delay: int) -> None:
    """Raises ValueError for tasks that there are not, and for a base or a delay below the least one."""
    if not tasks:
        raise ValueError(f"no task is given; name some of {', '.join(TASKS)}")
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASKS)}")
    if base < 2:
        raise ValueError(f"base is {base}; it must be at least 2, the number of symbols of a binary series")
    if delay < 1:
        raise ValueError(f"delay is {delay}; it must be at least 1, the delay of XOR")


def continued(
    first: Int[Array, "*batch W"], tasks: tuple[str, ...], task: Int[Array, "*batch"], base: int, length: int
) -> Int[Array, "*batch T"]:
    """The series of `length` symbols that begin with `first`, delay + 1 symbols each; `task` is an index of `tasks`.

    Raises ValueError as `check` does.
    """
    check(tasks, base, first.shape[-1] - 1)

    def step(last, _):
        return jnp.concatenate([last[..., 1:], _next(last, tasks, task, base)[..., None]], -1), last[..., 0]

    _, symbols = jax.lax.scan(step, first, length=length)
    return jnp.moveaxis(symbols, 0, -1)


def drawn(
    key: Array, shape: tuple[int, ...], *, tasks: tuple[str, ...], base: int, delay: int, length: int
) -> tuple[Int[Array, "*batch T"], Int[Array, "*batch"]]:
    """Random series and the index of each one's task: all tasks, and of a task all series, are equally likely.

    Raises ValueError as `check` does.
    """
    check(tasks, base, delay)
    of_task, of_first = jax.random.split(key)
    task = jax.random.randint(of_task, shape, 0, len(tasks))
    first = jax.random.randint(of_first, (*shape, delay + 1), 0, base)
    return continued(first, tasks, task, base, length), task


def cycles(task: str, base: int, delay: int) -> dict[int, int]:
    """How many cycles of each length the series of a task end in (equations 6 and 7), the longest first.

    Takes base^(delay + 1) steps and integers. Raises ValueError as `check` does.
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
    """The symbol behind the last delay + 1 ones, the oldest of which is last[..., 0]."""
    delayed, summed = (last[..., 0] + last[..., 1]) % base, last.sum(-1) % base
    symbols = {"NT": delayed, "NT-S": summed, "NT-R": jnp.where(last[..., 0] == 0, summed, delayed)}
    return jnp.select(
        [jnp.asarray(task) == index for index in range(len(tasks))], [symbols[name] for name in tasks]
    )
