"""Runs kernels in GPU interpret mode on a CPU, in a process of its own.

A kernel of three Mosaic threads starves on XLA's default pool of two-core machines; eight host devices, which only a
new process can set, give it the threads it needs.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the detector's findings have no public name
from jax.experimental.pallas import mosaic_gpu as plgpu

from sympow_jax import ops
from sympow_jax.ops._power import mosaic, target
from tests.ops import cases

TIMEOUT = 220


def run(job: str, cases: list[dict]) -> list[dict]:
    """What `JOBS[job]` returns for each case."""
    lines = _python(["-m", "tests.pallas_kernels.interpreted", job], json.dumps(cases)).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def check(program: str) -> None:
    """Runs a program that fails where it finds something wrong."""
    _python(["-c", program], "")


def _python(arguments, text):
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def attention(settings: dict) -> dict:
    """Errors of the kernel and of the xla form against the reference in float64, and whether threads raced."""
    queries, dtype = settings.pop("queries", None), settings.pop("dtype", "bfloat16")
    batch, kv_heads = settings.pop("batch", 1), settings.pop("kv_heads", 1)
    case = cases.Case(**settings)
    drawn = cases.arrays(case, batch=batch, kv_heads=kv_heads, dtype="bfloat16")
    drawn["query"] = drawn["query"][:, -(queries or case.time) :]
    del drawn["dout"]
    attend = functools.partial(ops.power_attention, power=case.power, form="attention")
    with jax.enable_x64(True):
        expected = np.asarray(_jitted(attend, implementation="reference")(drawn))
    short = _short(drawn, dtype)
    plain = _jitted(attend, implementation="xla")(short)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    with target.interpreted(interpret):
        out = _jitted(attend, implementation="mosaic_gpu")(short)
    assert out.dtype == short["value"].dtype
    return {
        "case": str(case),
        "kernel": cases.error(out, expected),
        "xla": cases.error(plain, expected),
        "races": bool(gpu_callbacks.get_races().races_found),
    }


def division(settings: dict) -> dict:
    """Shapes that a device sees, and where the result lies, of a query put at `spec` on a mesh of 4 x 2."""
    kind = jax.sharding.AxisType[settings["kind"]]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*settings["spec"]))
    seen = []

    def share(arrays):
        seen.append(arrays["query"].shape)
        return {"out": arrays["query"] + arrays["key"]}

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 3, 4, 16)), sharding)
        out = jax.jit(lambda x: mosaic.per_device(share, {"query": x, "key": x}, ("out",))["out"])(x)
    return {"share": seen[0], "shape": out.shape, "kept": out.sharding.is_equivalent_to(sharding, out.ndim)}


def _jitted(f, **options):
    return jax.jit(lambda arrays: f(**arrays, **options))


def _short(drawn, dtype):
    return {
        name: x
        if x is None or name == "segment_ids"
        else jnp.asarray(x, jnp.float32 if name == "log_decay" else dtype)
        for name, x in drawn.items()
    }


JOBS = {"attention": attention, "division": division}


def main():
    """Reads cases from standard input and prints a line for each."""
    for case in json.load(sys.stdin):
        print(json.dumps(JOBS[sys.argv[1]](case)), flush=True)


if __name__ == "__main__":
    main()
