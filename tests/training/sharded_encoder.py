"""Trains a small encoder with batch normalization over simulated devices, for tests.

    python -m tests.training.sharded_encoder TASK '{"data": 2, "fsdp": 2}' ...

Prints a line of JSON for each sharding layout: the differences of losses, parameters and running means from those of
one device after two updates. Runs in a separate process, since it needs more devices than the other tests have.
"""

import dataclasses
import json
import sys

import jax
import numpy as np

from sympow_jax import config, training
from sympow_jax.training import sharding
from tests.ops import cases
from tests.training import test_tasks


def settings(task: str, arrangement: dict) -> config.Config:
    """Returns the config of `test_tasks`, with divisible head, vocabulary and width."""
    of = test_tasks.make("classification", norm="batch")
    if task == "dual_encoder":
        data = dataclasses.replace(of.data, text_columns=("one", "two"))
        of = dataclasses.replace(of, task=dataclasses.replace(of.task, dual_encoder=True), data=data)
    if task == "masked_token":
        of = dataclasses.replace(
            of,
            task=config.TaskConfig(name=task),
            data=dataclasses.replace(of.data, source="text"),
            model=dataclasses.replace(of.model, norm="layer"),
        )
    optimizer = config.OptimizerConfig(name="sgd", learning_rate=0.1)
    return dataclasses.replace(of, sharding=config.ShardingConfig(**arrangement), optimizer=optimizer)


def batch(task: str) -> dict[str, np.ndarray]:
    """Returns the batch of `test_tasks`, as pairs of texts, or with every third token to be predicted."""
    rows = test_tasks.batch()
    if task == "dual_encoder":
        second = (np.arange(8) > np.arange(4)[:, None]) & (rows["segment_ids"] >= 0)
        return {**rows, "segment_ids": rows["segment_ids"] + second}
    if task == "masked_token":
        targets = np.where((np.arange(8) % 3 == 0) & (rows["segment_ids"] >= 0), rows["inputs"], -1)
        return {"inputs": rows["inputs"], "segment_ids": rows["segment_ids"], "targets": targets}
    return rows


def first_state(program: training.Program) -> training.TrainState:
    """Returns a state without means that are only rounding.

    Every norm shifts its input.
    """
    state = program.init_state()

    def shifted(path, leaf):
        if path[-1].key != "bias":
            return leaf
        return jax.device_put(np.linspace(-1, 1, leaf.size, dtype=np.float32), leaf.sharding)

    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(shifted, state.params))


def train(task: str, of: config.Config, mesh: jax.sharding.Mesh) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses of two updates on `batch(task)`, and parameters and running means after them."""
    program = training.Program(of, mesh)
    state = first_state(program)
    rows, losses = sharding.place_batch(batch(task), mesh), []
    for _ in range(2):
        state, metrics = program.update(state, rows)
        losses.append(float(metrics["loss"]))
    return losses, [np.asarray(x) for x in jax.tree.leaves((state.params, state.statistics))]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    task, *arrangements = sys.argv[1:]
    wanted, expected = train(task, settings(task, {}), sharding.whole_mesh(jax.devices()[:1]))
    for text in arrangements:
        of = settings(task, json.loads(text))
        losses, found = train(task, of, sharding.make_mesh(of))
        print(
            json.dumps(
                {
                    "loss": max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True)),
                    "state": max(map(cases.error, found, expected)),
                    "falls": losses[1] < losses[0],
                }
            ),
            flush=True,
        )
