"""Evaluation of encoders and image classifiers on held-out rows: loss and the metrics of the task."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
from flax import nnx
from jaxtyping import Array, Float, PyTree

from sympow_jax import config as config_lib
from sympow_jax import data, models, training
from sympow_jax.config import fields, serialize
from sympow_jax.evaluation import metrics, report, scores
from sympow_jax.evaluation import workdirs as workdirs_lib
from sympow_jax.process import hosts, workdir
from sympow_jax.training import checkpoint, loss, sharding

__all__ = ["evaluate_heldout", "heldout_metrics"]


def heldout_metrics(
    model: models.Model, task: config_lib.TaskConfig, batches: Iterable[Mapping[str, np.ndarray]]
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
            sums, outputs = _call(graph, variables, placed)
        total += float(sums.loss)
        answer = batch["targets" if outputs is None else "labels"]
        counts = ~np.isnan(answer) if answer.dtype.kind == "f" else answer >= 0
        answers.append(answer[counts])
        if outputs is not None:
            predictions.append(np.asarray(outputs)[counts])
    labels = np.concatenate(answers)
    mean = total / len(labels)
    if task.name == "masked_token":
        with np.errstate(over="ignore"):
            return {"loss": mean, "perplexity": float(np.exp(mean)), "count": len(labels)}
    return {"loss": mean, **_of_labels(task, labels, np.concatenate(predictions)), "count": len(labels)}


def _of_labels(
    task: config_lib.TaskConfig, labels: np.ndarray, outputs: Float[np.ndarray, "n outputs"]
) -> dict[str, float]:
    if task.name == "regression":
        values, finite = outputs[:, 0], bool(np.isfinite(outputs).all())
        return {
            "pearson": metrics.pearson(labels, values) if finite else math.nan,
            "spearman": metrics.spearman(labels, values) if finite else math.nan,
        }
    predicted = outputs.argmax(-1)
    scores = {
        "accuracy": metrics.accuracy(labels, predicted),
        "matthews": metrics.matthews(labels, predicted),
    }
    return scores | ({"f1": metrics.f1(labels, predicted)} if task.classes == 2 else {})


@functools.partial(jax.jit, static_argnames="graph")
def _call(
    graph: nnx.GraphDef, variables: nnx.State, batch: PyTree
) -> tuple[loss.Sums, Float[Array, "B outputs"] | None]:
    model = nnx.merge(graph, variables)
    if "targets" in batch:
        return loss.sums(model, batch), None
    outputs = loss.predict(model, batch)
    return loss.label_sums(outputs, batch["labels"]), outputs


def evaluate_heldout(
    workdirs: Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    heldout: data.HeldoutData | None = None,
    changes: Mapping[str, str] | None = None,
    console: rich.console.Console | None = None,
) -> dict[str, dict[str, float]]:
    """Evaluates the newest checkpoint of every run on the same held-out rows.

    Writes `heldout.json` into `out` and prints a table. With several processes, each evaluates on its own, and only the
    first writes and prints.

    Args:
        workdirs: workdirs of the runs.
        out: folder to write to.
        heldout: held-out data of the first run; None opens it.
        changes: settings of the data to replace in the runs' configs, such as {"data.heldout_paths": "a.bin,b.bin"}.
        console: console to print to.

    Returns:
        `heldout_metrics` by the name of the run. With `data.heldout_names`, each name is followed by the metrics on its
        path, such as `matched_accuracy`.

    Raises:
        ValueError: a workdir holds no run or no checkpoint, the runs' tasks or data differ, nothing is held out, or
            `out` cannot be written.
    """
    console = (console or report.make_console()) if hosts.is_first() else rich.console.Console(quiet=True)
    paths, configs = workdirs_lib.read_runs(workdirs, changes)
    workdirs_lib.require_comparable(paths, [_fixed(config) for config in configs])
    workdirs_lib.require_held_apart(configs[0].data, paths)
    for path in paths:
        checkpoint.require_checkpoint(path)
    folder = workdirs_lib.writable_folder(out)
    source = configs[0].data
    if heldout is None:
        heldout = workdirs_lib.open_heldout(console, paths[0], configs[0])
    if heldout.rows is None:
        raise ValueError(f"no example is held out of the data of {paths[0]}: {heldout.cause_of_absence}")
    if not changes:
        workdirs_lib.warn_of_changed_data(console, paths, configs[0])

    devices = jax.local_device_count()
    rows = min(scores.CALL_TOKENS // source.context_length, -(-source.batch_size // devices))
    batch_size = devices * max(1, rows)
    results: dict[str, dict[str, float]] = {}
    runs = []
    for name, path, config in zip(workdirs_lib.run_names(paths, configs), paths, configs):
        _, model, step = training.restore_model(path)
        results[name] = {}
        for part, examples in heldout.parts.items():
            values = heldout_metrics(model, config.task, examples.batches(batch_size))
            results[name] |= metrics.of_part(part, values)
        runs.append(
            {
                "run": name,
                "workdir": str(path),
                "step": step,
                "metrics": {
                    key: value if math.isfinite(value) else None for key, value in results[name].items()
                },
                "config": dataclasses.asdict(config),
            }
        )
    if not all(math.isfinite(value) for values in results.values() for value in values.values()):
        workdirs_lib.warn(console, "metrics are not finite; they are null in the JSON")
    if hosts.is_first():
        with workdirs_lib.writing(folder):
            workdir.write_json(folder / "heldout.json", {"task": configs[0].task.name, "runs": runs})
    _print(results, configs[0].task, console)
    return results


def _fixed(config: config_lib.Config) -> dict[str, Any]:
    values = {"task": config.task, "data": config.data, "model": {"vocab_size": config.model.vocab_size}}
    return serialize.flatten(values, fields.Occasion.HELDOUT_ROWS)


def _print(
    results: Mapping[str, Mapping[str, float]], task: config_lib.TaskConfig, console: rich.console.Console
) -> None:
    lines = [
        [run, *(f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in values.values())]
        for run, values in results.items()
    ]
    columns = ["run", *(name.replace("_", " ") for name in next(iter(results.values())))]
    report.print_cells(f"Held-out rows, task {task.name!r}", columns, lines, console)
