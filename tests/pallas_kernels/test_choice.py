"""Tests of how the op chooses its kernels: imports, rejected requests, and sharding."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from sympow_jax import ops
from sympow_jax.ops import sharding, target
from tests.pallas_kernels import traced


def test_a_named_implementation_says_what_it_cannot_do():
    drawn = {name: jnp.zeros((1, 128, 1, 16), jnp.bfloat16) for name in ("query", "key", "value")}
    call = functools.partial(ops.power_attention, **drawn, implementation="mosaic_gpu")
    for options, message in (
        ({"form": "recurrent"}, "'attention' and 'chunked'"),
        ({"form": "chunked", "exact_window": 10}, "exact_window"),
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


def test_a_gradient_has_the_dtype_of_its_argument():
    shape, gates = (jax.ShapeDtypeStruct((1, 64, 2, *rest), jnp.bfloat16) for rest in ((32,), ()))

    def total(form, query, gates):
        decay = jax.nn.log_sigmoid(gates)
        options = {"log_decay": decay, "form": form, "implementation": "mosaic_gpu"}
        return ops.power_attention(query, query, query, **options).astype(jnp.float32).sum()

    for form in ("attention", "chunked"):
        with target.interpreted(plgpu.InterpretGPUParams()):
            found = jax.eval_shape(jax.grad(functools.partial(total, form), (0, 1)), shape, gates)
        assert [x.dtype for x in found] == [jnp.bfloat16] * 2


def attend(time, dtype=jnp.bfloat16, **options):
    """Calls the op without a named form, with abstract arguments of a training batch of the papers' model."""
    shape = jax.ShapeDtypeStruct((65_536 // time, time, 12, 64), dtype)
    return jax.jit(functools.partial(ops.power_attention, **options)), shape, shape, shape


@pytest.mark.parametrize(
    ("time", "options", "form"),
    [
        (4096, {}, "attention_mosaic_gpu"),
        # 96 heads: with 8, the chunked form would take longer.
        (8192, {}, "chunked_mosaic_gpu"),
        (16_384, {}, "chunked_mosaic_gpu"),
        (65_536, {"power": 4}, "attention_mosaic_gpu"),
        # With a state the plain attention form would compute with features too.
        (1024, {"return_state": True}, "chunked_mosaic_gpu"),
        (32, {"form": "chunked"}, "chunked_mosaic_gpu"),  # shorter than the window
        (32, {"form": "chunked", "chunk_size": 20_000}, "chunked_mosaic_gpu"),
        (1024, {"return_state": True, "implementation": "mosaic_gpu"}, "chunked_mosaic_gpu"),
        # No kernel takes these: FLOPs decide, as on a CPU.
        (4096, {"dtype": jnp.float32}, "attention_xla"),
        (8192, {"dtype": jnp.float32}, "chunked_xla"),
        (8192, {"implementation": "xla"}, "chunked_xla"),
        # Only the kernel of the attention form supports this window. It needs more FLOPs, so it is used only if named.
        (8192, {"exact_window": 10}, "chunked_xla"),
        (65_536, {"exact_window": 10, "implementation": "mosaic_gpu"}, "attention_mosaic_gpu"),
    ],
)
def test_measurements_choose_the_form_with_kernels(time, options, form):
    assert traced.on_hopper(*attend(time, **options)).forms == {form}


@pytest.mark.robust
def test_pallas_is_imported_only_when_asked_for():
    program = (
        "import sys, jax.numpy as jnp; from sympow_jax import ops; x = jnp.ones((1, 4, 1, 16), jnp.bfloat16);"
        "ops.power_attention(x, x, x); names = 'jax.experimental.pallas', 'pallas_kernels.power_attention';"
        "print([name for name in sys.modules if name.startswith(names)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("spec", [(), ("data",), ("data", None, "model")], ids=str)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_divided_over_the_mesh_in_scope(kind, spec):
    """Batch and heads are sharded over a mesh of 4 x 2, whatever the sharding of the arguments.

    Explicit axes are unchanged in the results.
    """
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType[kind],) * 2)
    sharded = jax.NamedSharding(mesh, jax.P(*spec))
    seen = []

    def share(arrays):
        seen.append(arrays["query"].shape)
        return {"out": arrays["query"] + arrays["key"]}

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 3, 4, 16)), sharded)
        layouts = dict.fromkeys(("query", "key", "out"), "B T K")
        call = functools.partial(sharding.per_device, share, layouts=layouts, outputs=("out",))
        out = jax.jit(lambda x: call({"query": x, "key": x})["out"])(x)
    assert seen[0] == (2, 3, 2, 16)
    assert out.shape == (8, 3, 4, 16)
    assert kind == "Auto" or out.sharding.is_equivalent_to(sharded, out.ndim)
