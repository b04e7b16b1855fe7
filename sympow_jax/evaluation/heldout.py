"""Evaluation of encoders and image classifiers on held-out rows: loss and the metrics of the task."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax import data, models, tasks
from sympow_jax.config import fields, serialize
from sympow_jax.evaluation import over_runs, report, scores
from sympow_jax.process import workdir
from sympow_jax.tasks import metrics
from sympow_jax.training import sharding


def heldout_metrics(
    model: models.Model, task: tasks.Task, batches: Iterable[Mapping[str, np.ndarray]]
) -> dict[str, float]:
    """Returns the metrics of a model over all batches, by name.

    `count` is the number of targets or labels that count. The other metrics are:

    * `masked_token`: `loss` in nats and `perplexity`, exp(loss).
    * `classification`: `loss` in nats, `accuracy` and `matthews`; for two classes also `f1`.
    * `regression`: `loss`, the mean squared error, `pearson` and `spearman`.

    Batches are sharded over the local devices, whose number must divide the number of rows. Correlations with
    predictions that are not finite are NaN.
    """
    mesh = sharding.whole_mesh(jax.local_devices())
    graph, variables = nnx.split(model)
    total, predictions, answers = 0.0, [], []
    for batch in batches:
        placed = {name: jax.device_put(x, sharding.batch_sharding(mesh, x.ndim)) for name, x in batch.items()}
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            sums, outputs = _evaluate(graph, task, variables, placed)
        total += float(sums.loss)
        answer = batch["targets" if outputs is None else "labels"]
        counts = tasks.counts(answer)
        answers.append(answer[counts])
        if outputs is not None:
            predictions.append(np.asarray(outputs)[counts])
    labels = np.concatenate(answers)
    mean, predicted = total / len(labels), np.concatenate(predictions) if predictions else None
    return {"loss": mean, **task.scores(mean, labels, predicted), "count": len(labels)}


@functools.partial(jax.jit, static_argnames=("graph", "task"))
def _evaluate(graph, task, variables, batch):
    return task.evaluate(nnx.merge(graph, variables), batch)


def evaluate_heldout(
    workdirs: Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    heldout: data.HeldoutData | None = None,
    changes: Mapping[str, str] | None = None,
) -> dict[str, dict[str, float]]:
    """Evaluates the newest checkpoint of every run on the same held-out rows.

    Writes `heldout.json` into `out` and prints a table.

    Arguments are those of `evaluate_runs`.

    Returns:
        `heldout_metrics` by the name of the run. With `data.heldout_names`, each name is followed by the metrics on its
        path, such as `matched_accuracy`.

    Raises:
        ValueError: a workdir holds no run or no checkpoint, the runs' tasks or data differ, nothing is held out, or
            `out` cannot be written.
    """
    rows = over_runs.evaluate(_Heldout(), workdirs, out=out, heldout=heldout, changes=changes)
    return {row.run: row.metrics for row in rows}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row(report.Run):
    metrics: dict[str, float]


class _Heldout(over_runs.Evaluation[_Row]):
    def cause_of_refusal(self, config: config_lib.Config) -> str | None:
        stage = "is the first stage of a retrofit; evaluate the run that starts from it (docs/retrofit.md)"
        return stage if config.task.replaces_attention else None

    def compared(self, config: config_lib.Config) -> dict[str, Any]:
        vocab_size = config.model.vocab_size
        values = {"task": config.task, "model": {"vocab_size": vocab_size}, "data": config.data}
        return serialize.flatten(values, fields.Occasion.HELDOUT_ROWS)

    def prepare(self, runs: over_runs.Runs) -> int:
        source, heldout = runs.first.data, runs.heldout
        if heldout.rows is None:
            raise ValueError(
                f"no example is held out of the data of {runs.paths[0]}: {heldout.cause_of_absence}"
            )
        devices = jax.local_device_count()
        rows = min(scores.CALL_TOKENS // source.context_length, -(-source.batch_size // devices))
        self._task, self._parts = tasks.make(runs.first), heldout.parts
        self._batch_size = devices * max(1, rows)
        return sum(-(-len(part.rows or ()) // self._batch_size) for part in self._parts.values())

    def score(self, model: models.Model, run: report.Run, advance: Callable[[int], None]) -> list[_Row]:
        def batches(part: data.HeldoutData) -> Iterator[Mapping[str, np.ndarray]]:
            for batch in part.batches(self._batch_size):
                yield batch
                advance(1)

        values: dict[str, float] = {}
        for name, part in self._parts.items():
            values |= metrics.of_part(name, heldout_metrics(model, self._task, batches(part)))
        return [_Row(**dataclasses.asdict(run), metrics=values)]

    def write(self, folder: pathlib.Path, rows: list[_Row], runs: list[dict[str, Any]]) -> None:
        records = [run | {"metrics": row.metrics} for run, row in zip(runs, rows)]
        content = {"task": self._task.config.task.name, "runs": records}
        workdir.write_json(folder / "heldout.json", report.without_nan(content))

    def print(self, rows: list[_Row], console: rich.console.Console) -> None:
        lines = [
            [row.run, *(f"{x:,}" if isinstance(x, int) else f"{x:.4f}" for x in row.metrics.values())]
            for row in rows
        ]
        columns = ["run", *(name.replace("_", " ") for name in rows[0].metrics)]
        report.print_cells(f"Held-out rows, task {self._task.config.task.name!r}", columns, lines, console)
