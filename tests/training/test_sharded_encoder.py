"""Tests that a small encoder with batch normalization trains over several devices as on one."""

import dataclasses

import jax
import numpy as np
import pytest

from sympow_jax import config, training
from sympow_jax.training import sharding
from tests.ops import cases
from tests.training import sharded, small


def settings(task: str, arrangement: dict) -> config.Config:
    of = small.encoder(norm="batch")
    if task == "dual_encoder":
        of = small.changed(of, task={"dual_encoder": True}, data={"text_columns": ("one", "two")})
    if task == "masked_token":
        of = small.changed(
            of, task=config.TaskConfig(name=task), data={"source": "text"}, model={"norm": "layer"}
        )
    made = config.OptimizerConfig(name="sgd", learning_rate=0.1)
    return small.changed(of, sharding=config.ShardingConfig(**arrangement), optimizer=made)


def batch(task: str) -> dict[str, np.ndarray]:
    rows = small.labeled()
    if task == "dual_encoder":
        second = (np.arange(8) > np.arange(4)[:, None]) & (rows["segment_ids"] >= 0)
        return {**rows, "segment_ids": rows["segment_ids"] + second}
    if task == "masked_token":
        targets = np.where((np.arange(8) % 3 == 0) & (rows["segment_ids"] >= 0), rows["inputs"], -1)
        return {"inputs": rows["inputs"], "segment_ids": rows["segment_ids"], "targets": targets}
    return rows


def first_state(program: training.Program) -> training.TrainState:
    """Returns a state without means that are only rounding. Every norm shifts its input."""
    state = program.init_state()

    def shifted(path, leaf):
        if path[-1].key != "bias":
            return leaf
        values = np.linspace(-1, 1, leaf.shape[-1], dtype=np.float32)
        return jax.device_put(np.broadcast_to(values, leaf.shape), leaf.sharding)

    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(shifted, state.params))


def train(task: str, of: config.Config) -> tuple[list[float], list[np.ndarray]]:
    mesh = sharded.mesh_of(of)
    program = training.Program(of, mesh)
    state = first_state(program)
    rows, losses = sharding.place_batch(batch(task), mesh), []
    for _ in range(2):
        state, metrics = program.update(state, rows)
        losses.append(float(metrics["loss"]))
    return losses, [np.asarray(x) for x in jax.tree.leaves((state.params, state.statistics))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "arrangements"),
    [
        ("classification", [{"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}, {"fsdp": 4}]),
        ("masked_token", [{"fsdp": 2, "tensor": 2}, {"data": 4}]),
        ("dual_encoder", [{"data": 2, "tensor": 2}, {"fsdp": 4}]),
    ],
)
def test_encoders_over_devices_are_those_of_one(task, arrangements):
    wanted, expected = train(task, settings(task, {}))
    for arrangement in arrangements:
        losses, found = train(task, settings(task, arrangement))
        np.testing.assert_allclose(losses, wanted, rtol=sharded.LOSS_BOUND, err_msg=str(arrangement))
        assert max(map(cases.error, found, expected)) <= sharded.GRADIENT_BOUND, arrangement
        assert losses[1] < losses[0], arrangement
