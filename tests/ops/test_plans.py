"""Tests of the plan of a call: its form by counted FLOPs, and the reasons against the others."""

import jax
import jax.numpy as jnp

from sympow_jax import ops
from sympow_jax.ops import cost, target
from tests import devices


def explain(time=4096, batch=1, heads=12, head_dim=64, value_dim=64, power=2, dtype=jnp.float32, **options):
    query, value = (jax.ShapeDtypeStruct((batch, time, heads, size), dtype) for size in (head_dim, value_dim))
    return ops.explain(query, query, value, power=power, **options)


def flops_of(plan):
    return {candidate.form: candidate.flops for candidate in plan.candidates}


def reasons(plan):
    return {str(candidate): candidate.reason for candidate in plan.candidates}


def crossover(**shape):
    times = (int(2 ** (n / 16)) for n in range(16 * 8, 16 * 21))
    return next(time for time in times if explain(time=time, **shape).form == "chunked")


def test_the_form_with_fewer_flops_is_chosen():
    # 2 (D + E) T / 2 and 4 F E + (D + E) (128 + 2 W).
    assert cost.default_chunk("chunked") == 128
    assert 4160 + 256 < crossover() < 1.05 * (4160 + 256)
    assert crossover() == crossover(batch=8)
    # At p = 4 and D = 64 the state is so large that pairs are cheaper up to a million tokens.
    assert explain(power=4, time=2**20).form == "attention"
    assert explain(time=65_536, implementation="reference").form == "attention"


def test_flops_count_shared_key_heads_and_all_keys():
    """A state is updated per key head and read per query head; one query attends to all S keys."""

    def flops(heads, kv_heads, time, key_time):
        query, key = (
            jax.ShapeDtypeStruct((1, length, count, 8), jnp.float32)
            for length, count in ((time, heads), (key_time, kv_heads))
        )
        return flops_of(ops.explain(query, key, key))

    full, shared = flops(8, 8, 64, 64), flops(8, 1, 64, 64)
    assert full["attention"] == shared["attention"]
    assert full["chunked"] - shared["chunked"] == 64 * 7 * 2 * 36 * 8
    assert flops(1, 1, 1, 4096) == {"attention": 2 * 16 * 4095.5}


def test_reasons_name_the_choices_not_taken():
    plan = explain(time=65_536)
    assert (plan.form, plan.implementation, plan.chunk) == ("chunked", "xla", 128)
    assert reasons(plan)["attention by xla"] == "it takes more FLOPs"
    assert reasons(plan)["chunked by xla"] is None
    assert "Hopper" in reasons(plan)["chunked by mosaic_gpu"]
    flops = flops_of(plan)
    assert flops["attention"] == 65_536 * 12 * 128 * 65_536
    assert flops["chunked"] < flops["attention"]
    first, *rows = str(plan).splitlines()
    assert first == "chunked form by xla, chunk 128, window 64"
    assert [row.split()[0] for row in rows] == ["attention", "attention", "chunked", "chunked"]
    assert rows[3].endswith("FLOPs  taken")


def test_a_large_state_is_a_reason(monkeypatch):
    monkeypatch.setattr(target, "memory_bytes", lambda: 2**20)
    assert "do not fit in memory" in reasons(explain(time=65_536))["chunked by xla"]
    # A device has its share of the state only.
    mesh = jax.sharding.AbstractMesh((64,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert explain(time=65_536).form == "chunked"


def test_a_program_is_for_the_default_device():
    with devices.seen(2):
        first, second = jax.devices()
        for default, expected in ((None, first), ("cpu", first), (second, second)):
            with jax.default_device(default):
                assert target.device() == expected


def test_kernels_need_a_number_of_rows(monkeypatch):
    monkeypatch.setattr(target, "is_hopper", lambda: True)
    (batch,) = jax.export.symbolic_shape("b")
    array = jax.ShapeDtypeStruct((batch, 4096, 2, 64), jnp.bfloat16)
    found = reasons(ops.explain(array, array, array))
    for form in ("attention", "chunked"):
        assert found[f"{form} by mosaic_gpu"].endswith("needs a number of rows, not a symbolic one")


def test_a_plan_describes_the_call():
    arrays = [jnp.ones((1, 300, 2, 8))] * 3
    plan = ops.explain(*arrays, form="chunked", chunk_size=32)
    program = jax.jit(lambda *arrays: ops.power_attention(*arrays, form="chunked", chunk_size=32))
    text = program.lower(*arrays).as_text(debug_info=True)
    assert f"{plan.form}_{plan.implementation}" in text
