"""Tests of the fused attention kernel, interpreted, against the formula in float64 and the plain JAX form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_attention as kernel
from pallas_kernels.hopper import launch
from sympow_jax import ops
from sympow_jax.ops import target
from tests.ops import cases

# T and S around the edges of blocks of 128; each case also has the changes to its arguments.
INTERPRETED = [
    (cases.Case(power=2, head_dim=64, value_dim=64, time=300, decay="gentle"), {}),
    (cases.Case(power=4, head_dim=64, value_dim=64, time=260, decay="none"), {}),
    (cases.Case(power=6, head_dim=32, value_dim=32, time=260, decay="gentle"), {}),
    (cases.Case(power=2, time=257), {}),
    (cases.Case(power=4, time=257, segments="padded"), {}),
    (cases.Case(power=2, time=384, decay="gentle", segments="edges"), {}),
    (cases.Case(time=129, head_dim=48, value_dim=16, group=2, decay="gentle"), {"kv_heads": 2}),
    (cases.Case(time=300, decay="gentle", segments="padded"), {"queries": 150}),
    (cases.Case(time=100, head_dim=128, value_dim=40, decay="none"), {"batch": 2}),
    (cases.Case(power=4, time=260, scale=1e3, decay="gentle"), {}),
    (cases.Case(power=6, time=260, scale=1e-3, decay="gentle"), {}),
    (cases.Case(power=4, time=260, decay="gentle"), {"dtype": "float16"}),
    (cases.Case(power=6, head_dim=64, time=300, decay="none"), {"octaves": 2}),
    (cases.Case(power=8, time=300, decay="gentle"), {"octaves": 2}),
    (cases.Case(power=8, head_dim=64, time=300, decay="none"), {}),
    (cases.Case(power=8, head_dim=64, time=300, decay="mixed", segments="padded"), {"octaves": 2}),
    (cases.Case(power=16, time=300, decay="none"), {"octaves": 2}),
    (cases.Case(power=16, head_dim=64, time=420, decay="gentle", group=2), {"octaves": 2}),
    (cases.Case(power=16, head_dim=128, time=300, decay="none"), {}),
    (cases.Case(power=16, head_dim=64, time=300, scale=1e-2, decay="gentle"), {"dtype": "float16"}),
]


def attend(arrays, implementation, power):
    options = {"power": power, "form": "attention", "implementation": implementation}
    return jax.jit(lambda arrays: ops.power_attention(**arrays, **options))(arrays)  # traced anew


@pytest.mark.interpret
@pytest.mark.parametrize(("case", "more"), INTERPRETED, ids=str)
def test_hardly_less_exact_than_the_plain_form(case, more):
    """The plain form rounds only its result; the kernel also rounds weights to float16.

    The additional error is small next to that of a bfloat16 result, and equal to that of a float16 one.
    """
    dtype, queries = more.get("dtype", "bfloat16"), more.get("queries", case.time)
    sizes = {"batch": more.get("batch", 1), "kv_heads": more.get("kv_heads", 1)}
    drawn = cases.arrays(case, **sizes, dtype="bfloat16")
    del drawn["dout"]
    drawn["query"] = drawn["query"][:, -queries:]
    drawn["key"] *= cases.lengths(drawn["key"].shape[:-1], more.get("octaves", 0))[..., None]

    with jax.enable_x64(True):
        expected = jax.device_get(attend(cases.cast(drawn, "float64"), "reference", case.power))
    short = cases.cast(drawn, "bfloat16") | {
        name: jnp.asarray(drawn[name], dtype) for name in ("query", "key", "value")
    }
    plain = attend(short, "xla", case.power)
    with target.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        out = attend(short, "mosaic_gpu", case.power)
    assert out.dtype == dtype
    ratio = 1.5 if dtype == "float16" else 1.2
    assert cases.error(out, expected) <= ratio * cases.error(plain, expected)


@pytest.mark.interpret
@pytest.mark.parametrize("power", [2, 8])
@pytest.mark.parametrize("empty", ["key", "value", "segment_ids"])
def test_blocks_that_weigh_nothing(power, empty):
    """Sums keep their size over four blocks of zeros or padding, and over blocks with ever smaller values."""
    case = cases.Case(power=power, head_dim=64, value_dim=64, time=900, decay="gentle")
    drawn = cases.arrays(case, batch=1, kv_heads=1, dtype="bfloat16")
    del drawn["dout"]
    drawn["value"] *= 2.0 ** -(39.0 * (np.arange(900) // 128 % 2))[:, None, None]
    if empty == "segment_ids":
        drawn["segment_ids"] = np.where(np.arange(900) // 128 % 6 > 1, -1, 0)[None].astype(np.int32)
    else:
        drawn[empty] = np.where((np.arange(900) // 128 % 6 > 1)[:, None, None], 0, drawn[empty])

    with jax.enable_x64(True):
        expected = jax.device_get(attend(cases.cast(drawn, "float64"), "reference", case.power))
    short = cases.cast(drawn, "bfloat16")
    with target.interpreted(plgpu.InterpretGPUParams()):
        assert cases.error(attend(short, "mosaic_gpu", case.power), expected) < 2.0**-9


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_nan_does_not_outweigh_its_block(name):
    """Earlier outputs stay right if it is in a key, and other channels if it is in a value."""
    case = cases.Case(head_dim=64, value_dim=64, time=200, decay="gentle")
    drawn = cases.arrays(case, batch=1, kv_heads=1, dtype="bfloat16")
    del drawn["dout"]
    whole = cases.cast(drawn, "bfloat16")
    broken = whole | {name: whole[name].at[0, 120, 0, 3].set(jnp.nan)}
    with target.interpreted(plgpu.InterpretGPUParams()):
        found, expected = (attend(arrays, "mosaic_gpu", 2) for arrays in (broken, whole))
    right = (slice(None), slice(120)) if name == "key" else (..., slice(4, None))
    assert cases.error(found[right], expected[right]) < 2.0**-9
    assert np.isnan(np.asarray(found[0, 120:, 0, 3], np.float32)).all()


def test_heads_whose_keys_fit_in_the_cache_start_together():
    def grid(heads, time):
        return launch.heads_grid(16, heads, time // 128, head_bytes=2 * time * (64 + 64))

    assert grid(12, 4096) == {"batch": 16, "section": 1, "block": 32, "head": 12}
    assert grid(8, 16_384) == {"batch": 16, "section": 1, "block": 128, "head": 8}
    # Sections are equal: 7 of 8 heads would leave a section with one.
    assert grid(8, 20_480) == {"batch": 16, "section": 2, "block": 160, "head": 4}
    assert grid(8, 2**20) == {"batch": 16, "section": 8, "block": 8192, "head": 1}


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
