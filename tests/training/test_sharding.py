"""A batch over several devices is the same batch."""

import json
import os
import subprocess
import sys

import pytest

from sympow_jax.training import sharding

PROGRAM = """
import json
import jax, numpy as np
from sympow_jax import config
from sympow_jax.training import sharding, step

settings = config.Config(
    model=config.ModelConfig(
        vocab_size=256, layers=1, width=16, heads=2, dtype="float32", attention=config.preset("softmax")
    ),
    data=config.DataConfig(context_length=16, batch_tokens=64),
    optimizer=config.OptimizerConfig(accumulate=2),
)
mesh = sharding.make_mesh(settings)
tokens = np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.int32)
batch = sharding.place_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
state, metrics = step.make_update(settings, mesh)(step.init_state(settings, mesh), batch)
print(json.dumps({
    "devices": len(batch["inputs"].sharding.device_set),
    "rows": batch["inputs"].addressable_shards[0].data.shape[0],
    "replicated": all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state)),
    **{name: float(value) for name, value in metrics.items()},
}))
"""


def test_two_devices_equal_one(capsys):
    exec(PROGRAM, {})
    one = json.loads(capsys.readouterr().out)
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    two = json.loads(done.stdout)
    assert (one.pop("devices"), one.pop("rows")) == (1, 4)
    assert (two.pop("devices"), two.pop("rows")) == (2, 2)
    assert two == pytest.approx(one, rel=1e-5)
    assert two["replicated"]


def test_devices_that_do_not_divide_the_rows(monkeypatch, settings):
    monkeypatch.setattr(sharding.jax, "device_count", lambda: 3)
    with pytest.raises(
        ValueError, match=r"4 rows, which sharding.data 3 x sharding.fsdp 1 do not divide; change"
    ):
        sharding.make_mesh(settings)
