"""Tests that layers and models on a caller's mesh equal those on one device.

The mesh has Explicit or Auto axes; calls are compiled, inside `shard_map`, or eager.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from flax import nnx

from tests.layers import meshes

VALUE_BOUND, GRADIENT_BOUND = 1e-5, 2e-5
OFTEN = [
    "power/decoder/explicit/jit",
    "power/stream/shard_map/jit",
    "table/decoder/time/jit",
]
CAUSAL_ONLY = ("power", "power by pairs", "channels", "alibi")
RARE = [
    case
    for kind in meshes.KINDS
    for how in ("jit", "eager")
    for model in meshes.MODELS
    for name in meshes.ATTENTION
    if (case := f"{name}/{model}/{kind}/{how}") not in OFTEN
    and not (model in ("encoder", "images") and name in CAUSAL_ONLY)
    # Slices of a sharded time axis are not separate arrays, and pixels have no time axis.
    and not (kind == "time" and model in ("stream", "images"))
]


def check(cases):
    """Runs in a separate process with four devices."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.meshes", *cases],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["case"] for result in results] == list(cases)
    for result in results:
        assert "raised" not in result, result
        assert result["value"] <= VALUE_BOUND, result
        assert result.get("gradient", 0) <= GRADIENT_BOUND, result


def test_on_a_mesh():
    check(OFTEN)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", list(itertools.batched(RARE, 8)), ids=",".join)
def test_everything_on_a_mesh(cases):
    check(cases)


def test_names_of_axes_are_those_that_nnx_reads():
    """Checks every matrix of a model; names without a rule are unchanged."""
    model = meshes.make("power", "decoder")
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(nnx.state(model))))
    named = {".".join(map(str, path)): tuple(spec.get_value()) for path, spec in specs.items()}
    assert {name: spec for name, spec in named.items() if any(spec)} == {
        "embedding": ("vocab", "embed"),
        "blocks.0.attention.query.kernel": ("embed", "heads"),
        "blocks.0.attention.key.kernel": ("embed", "kv_heads"),
        "blocks.0.attention.value.kernel": ("embed", "kv_heads"),
        "blocks.0.attention.decay.kernel": ("embed", "gates"),
        "blocks.0.attention.rate.kernel": ("embed", "gates"),
        "blocks.0.attention.out.kernel": ("heads", "embed"),
        "blocks.0.mlp.up.kernel": ("embed", "mlp"),
        "blocks.0.mlp.down.kernel": ("mlp", "embed"),
    }


def test_names_of_axes_of_a_gated_layer_and_an_untied_head():
    model = meshes.make("qwen3", "decoder")
    assert model.unembedding.get_metadata("out_sharding") == ("vocab", "embed")
    assert model.blocks[0].mlp.gate.kernel.get_metadata("out_sharding") == ("embed", "mlp")
