"""Tasks, which a model is trained for: a class for each has its loss, metrics and FLOPs.

A new task is a class, a row of `TASKS` here, and a row of `config.task.TASKS` with what settings and data must know.
"""

from sympow_jax import config as config_lib
from sympow_jax import extras

with extras.required("train", __name__):
    from sympow_jax.tasks.labels import Classification, Regression
    from sympow_jax.tasks.masked_token import MaskedToken
    from sympow_jax.tasks.match_attention import MatchAttention
    from sympow_jax.tasks.next_token import NextToken
    from sympow_jax.tasks.task import Batch, Sums, Task, count, counts

__all__ = [
    "TASKS",
    "Batch",
    "Classification",
    "MaskedToken",
    "MatchAttention",
    "NextToken",
    "Regression",
    "Sums",
    "Task",
    "count",
    "counts",
    "make",
]

TASKS: dict[str, type[Task]] = {
    "next_token": NextToken,
    "match_attention": MatchAttention,
    "masked_token": MaskedToken,
    "classification": Classification,
    "regression": Regression,
}
"""Class of each task by its name in `task.name`."""


def make(config: config_lib.Config) -> Task:
    """Returns the task of a run."""
    return TASKS[config.task.name](config)
