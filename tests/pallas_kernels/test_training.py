"""Tests that the papers' configuration trains through the kernels: traced for a Hopper GPU, without running."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from sympow_jax import config
from sympow_jax.training import Program
from tests.pallas_kernels import traced

ATTENTION, CHUNKED = "attention_mosaic_gpu", "chunked_mosaic_gpu"
# Kernels of both passes.
KERNELS = {
    ATTENTION: {
        f"power_attention_{name}"
        for passes in ("units blocks forward", "vjp_sizes vjp_operands query_vjp key_vjp decays_vjp")
        for name in passes.split()
    },
    CHUNKED: {
        f"power_state_{name}"
        for passes in ("units decays scales update norms recurrence", "query query_vjp key_vjp decays_vjp")
        for name in passes.split()
    },
}


OFTEN = [("sympow_gated,context=2048", ATTENTION), ("conformal,context=65536", CHUNKED)]
RARE = [
    ("sympow,context=1024", ATTENTION),
    ("sympow,context=4096", ATTENTION),
    ("sympow,context=16384", CHUNKED),
    ("sympow_gated,context=32768", CHUNKED),
    ("conformal,context=1024", ATTENTION),
    ("conformal,p=4,context=65536", ATTENTION),
    ("even_power,context=1024", ATTENTION),
    ("even_power,context=65536", ATTENTION),
    ("even_power,p=4,context=8192", ATTENTION),
    ("even_power,p=4,context=65536", ATTENTION),
]


@pytest.mark.parametrize(
    ("choice", "form"), OFTEN + [pytest.param(*case, marks=pytest.mark.slow) for case in RARE]
)
def test_a_training_step_takes_kernels(choice, form):
    settings = config.load(f"gpt2_124m:{choice}")
    # Layers are alike.
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, layers=1))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens = jax.ShapeDtypeStruct((settings.data.batch_size, settings.data.context_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    program = Program(settings, mesh)
    found = traced.on_hopper(program.update, program.abstract, batch)
    assert found.forms == {form}
    without_gates = choice.partition(",")[0] in ("sympow", "even_power")
    assert found.kernels == KERNELS[form] - ({"power_attention_decays_vjp"} if without_gates else set())
