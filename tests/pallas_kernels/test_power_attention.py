"""The fused attention kernel: interpreted on a CPU, compiled for an H100, and behind the op."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import power_attention as kernel
from sympow_jax import ops
from tests.ops import cases
from tests.pallas_kernels import h100, interpreted

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
        ({"form": "chunked"}, "attention form only"),
        ({"form": "attention", "return_state": True}, "no state"),
        ({"form": "attention"}, "Hopper"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call(**options)


def test_pallas_is_imported_only_when_asked_for():
    interpreted.check("import sys, sympow_jax.ops; assert 'pallas_kernels' not in sys.modules")


@pytest.mark.interpret
def test_gradients_are_those_of_the_xla_form():
    """The forward is replaced, the backward runs from the same arguments."""
    results = interpreted.run(
        "gradients", [{"time": 40, "decay": "gentle", "segments": "padded", "group": 2}]
    )
    assert max(results[0].values()) <= 1e-6, results


def test_divided_over_the_mesh_in_scope():
    """Batch and heads, wherever the arguments lie; axes that are part of types come back as they were."""
    layouts = [[], ["data"], ["data", None, "model"]]
    wanted = [{"kind": kind, "spec": spec} for kind in ("Auto", "Explicit") for spec in layouts]
    for result, case in zip(interpreted.run("division", wanted), wanted, strict=True):
        assert result["share"] == [2, 3, 2, 16], (case, result)
        assert result["shape"] == [8, 3, 4, 16], (case, result)
        assert result["kept"] or case["kind"] == "Auto", (case, result)


needs_h100_packages = pytest.mark.skipif(
    bool(h100.missing()), reason=f"needs {', '.join(h100.missing())}: uv sync --group h100"
)


@pytest.mark.h100
@needs_h100_packages
@pytest.mark.parametrize("case", h100.CASES)
def test_compiled_for_h100(case):
    """One kernel on wgmma and TMA that spills nothing and runs its products asynchronously."""
    (built,) = h100.report(case)
    assert built.spill_bytes == 0, built
    assert not built.serialised, built
    assert built.hgmma > 0, built
    assert built.tma_loads >= 3, built
    assert built.short_dots == 0, built
    assert built.tf32 == 0, built
    assert built.registers <= 168, built


@pytest.mark.h100
@needs_h100_packages
def test_no_gather_around_the_kernel_on_eight_devices():
    text = h100.run("sharded")
    assert "mosaic_gpu" in text
    assert "all-gather" not in text
    assert "all-reduce" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("power", "head_dim", "time"), [(2, 64, 4096), (4, 64, 2000), (2, 128, 1025)])
def test_on_a_gpu(power, head_dim, time, seed):
    """At real sizes: close to the xla form in float32, and the same to the bit in ten runs."""
    case = cases.Case(
        power=power,
        head_dim=head_dim,
        value_dim=head_dim,
        time=time,
        segments="padded",
        decay="gentle",
        group=2,
    )
    drawn = cases.arrays(case, kv_heads=2, seed=seed, dtype="bfloat16")
    del drawn["dout"]
    as_type = {
        dtype: {
            name: jnp.asarray(x, dtype if name in ("query", "key", "value") else None)
            for name, x in drawn.items()
        }
        for dtype in ("float32", "bfloat16")
    }
    attend = functools.partial(ops.power_attention, power=power, form="attention")
    expected = attend(**as_type["float32"], implementation="xla")
    kernel_form = jax.jit(functools.partial(attend, implementation="mosaic_gpu"))
    first = kernel_form(**as_type["bfloat16"])
    # The result is rounded to bfloat16, which costs 1.6e-3.
    assert cases.error(first, expected) <= 1.2 * cases.error(expected.astype(jnp.bfloat16), expected)
    for _ in range(10):
        assert (kernel_form(**as_type["bfloat16"]) == first).all()
