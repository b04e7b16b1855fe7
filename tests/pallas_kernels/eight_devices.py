"""Shards arrays over eight CPU devices and prints JSON.

The number of devices is fixed when a process starts, so `python -m` runs this in one of its own.
"""

import json

import jax
import jax.numpy as jnp

from sympow_jax.ops._recurrent import mosaic


def division(kind: str, spec: list) -> dict:
    """Returns the shapes on a device, and the sharding of the result.

    The query is sharded as `spec` on a mesh of 4 x 2.
    """
    axis_type = jax.sharding.AxisType[kind]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    seen = []

    def share(arrays):
        seen.append(arrays["query"].shape)
        return {"out": arrays["query"] + arrays["key"]}

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 3, 4, 16)), sharding)
        out = jax.jit(lambda x: mosaic.per_device(share, {"query": x, "key": x}, ("out",))["out"])(x)
    kept = out.sharding.is_equivalent_to(sharding, out.ndim)
    return {"kind": kind, "spec": spec, "share": seen[0], "shape": out.shape, "kept": kept}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    specs = [], ["data"], ["data", None, "model"]
    print(json.dumps([division(kind, spec) for kind in ("Auto", "Explicit") for spec in specs]))
