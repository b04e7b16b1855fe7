"""The fused attention kernel: interpreted on a CPU, compiled for an H100, and behind the op."""

import functools

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_attention as kernel
from sympow_jax import ops
from sympow_jax.ops._power import target
from tests.pallas_kernels import interpreted

# T and S around the edges of blocks of 128.
INTERPRETED = {
    "powers": [
        {"power": 2, "head_dim": 64, "value_dim": 64, "time": 300, "decay": "gentle"},
        {"power": 4, "head_dim": 64, "value_dim": 64, "time": 260, "decay": "none"},
        {"power": 6, "head_dim": 32, "value_dim": 32, "time": 260, "decay": "gentle"},
    ],
    "decays": [
        {"power": 2, "time": 257, "decay": "mixed"},
        {"power": 4, "time": 257, "decay": "mixed", "segments": "padded"},
        {"power": 2, "time": 384, "decay": "gentle", "segments": "edges"},
    ],
    "shapes": [
        {"time": 129, "head_dim": 48, "value_dim": 16, "group": 2, "kv_heads": 2, "decay": "gentle"},
        {"time": 300, "queries": 150, "decay": "gentle", "segments": "padded"},
        {"time": 100, "head_dim": 128, "value_dim": 40, "batch": 2, "decay": "none"},
    ],
    "scales": [
        {"power": 4, "time": 260, "scale": 1e3, "decay": "gentle"},
        {"power": 6, "time": 260, "scale": 1e-3, "decay": "gentle"},
        {"power": 4, "time": 260, "dtype": "float16", "decay": "gentle"},
    ],
}


@pytest.mark.interpret
@pytest.mark.parametrize("group", INTERPRETED)
def test_interpreted(group):
    """Without a race, and hardly less exact than the xla form, whose only rounding is that of its result.

    Weights are rounded to float16: little against a bfloat16 result, the same again against a float16 one.
    """
    results = interpreted.run("attention", INTERPRETED[group])
    for result, case in zip(results, INTERPRETED[group], strict=True):
        assert not result["races"], result
        bound = 1.5 if case.get("dtype") == "float16" else 1.2
        assert result["kernel"] <= bound * result["xla"], result


def test_constraints_are_named():
    choose = functools.partial(kernel.choose, head_dim=64, value_dim=64, power=2, dtype=jnp.bfloat16)
    for wrong, message in (
        ({"dtype": jnp.float32}, "float32"),
        ({"head_dim": 192}, "head size is 192"),
        ({"value_dim": 256}, "value size is 256"),
        ({"power": 3}, "power is 3"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            choose(**wrong)


def test_named_implementation_says_what_it_cannot_do():
    drawn = {name: jnp.zeros((1, 4, 1, 16), jnp.bfloat16) for name in ("query", "key", "value")}
    call = functools.partial(ops.power_attention, **drawn, implementation="mosaic_gpu")
    for options, message in (
        ({"form": "recurrent"}, "'attention' and 'chunked'"),
        ({"form": "chunked", "window": 10}, "window"),
        ({"form": "chunked", "chunk_size": 100}, "chunk"),
        ({"form": "attention", "return_state": True}, "chunked form"),
    ):
        with (
            pytest.raises(NotImplementedError, match=message),
            target.interpreted(plgpu.InterpretGPUParams()),
        ):
            call(**options)
    with pytest.raises(NotImplementedError, match="Hopper"):
        call(form="attention")


def test_pallas_is_imported_only_when_asked_for():
    interpreted.check("import sys, sympow_jax.ops; assert 'pallas_kernels' not in sys.modules")


def test_divided_over_the_mesh_in_scope():
    """Batch and heads, wherever the arguments lie; axes that are part of types come back as they were."""
    layouts = [[], ["data"], ["data", None, "model"]]
    wanted = [{"kind": kind, "spec": spec} for kind in ("Auto", "Explicit") for spec in layouts]
    for result, case in zip(interpreted.run("division", wanted), wanted, strict=True):
        assert result["share"] == [2, 3, 2, 16], (case, result)
        assert result["shape"] == [8, 3, 4, 16], (case, result)
        assert result["kept"] or case["kind"] == "Auto", (case, result)
