"""Device meshes of runs, and batches sharded over them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from sympow_jax import config
from sympow_jax.layers import partitioning


def make_mesh(settings: config.Config) -> jax.sharding.Mesh:
    """Returns a mesh of all devices with the axes of `settings.sharding`.

    The first axis varies slowest, so that `data` is the first to cross hosts.

    Raises:
        ValueError: the sizes do not multiply to the number of devices, or do not divide the rows of a micro-batch.
    """
    mesh = mesh_of(settings.sharding, jax.devices())
    rows = settings.data.batch_size // settings.optimizer.accumulate
    if rows % math.prod(mesh.shape[axis] for axis in partitioning.BATCH):
        raise ValueError(
            f"a micro-batch has {rows} rows, which sharding.data {mesh.shape['data']} x sharding.fsdp "
            f"{mesh.shape['fsdp']} do not divide; change data.batch_tokens or optimizer.accumulate, or move devices to "
            f"sharding.context or sharding.tensor"
        )
    return mesh


def mesh_of(sizes: config.ShardingConfig, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Returns a mesh of `devices` with these sizes of its axes.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    count = len(devices)
    named = dataclasses.asdict(sizes)
    others = math.prod(size for size in named.values() if size is not None)
    if count % others or (named["data"] is not None and others != count):
        arrangement = " x ".join(f"{name} {size or '?'}" for name, size in named.items())
        raise ValueError(
            f"sharding {arrangement} does not multiply to the {count} devices there are; change a size, or leave "
            f"sharding.data unset to take what the others leave"
        )
    named["data"] = named["data"] or count // others
    shape = tuple(named[axis] for axis in partitioning.AXES)
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, partitioning.AXES, axis_types=auto, devices=devices)


def whole_mesh(devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns a mesh of `devices`, or of all, along `data`, on which parameters are replicated."""
    return mesh_of(config.ShardingConfig(), jax.devices() if devices is None else devices)


def batch_sharding(mesh: jax.sharding.Mesh, rank: int = 2) -> jax.sharding.NamedSharding:
    """Returns a batch array's sharding: rows over `data` and `fsdp` and, for [B, T], time over `context`."""
    rows = jax.sharding.PartitionSpec(partitioning.BATCH)
    return jax.sharding.NamedSharding(mesh, partitioning.TOKENS if rank == 2 else rows)


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Returns the sharding with a copy on every device."""
    return jax.sharding.NamedSharding(mesh, partitioning.REPLICATED)


def batch_share(mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """Returns (share, shares): this process reads range `share` of `shares` equal ranges of a batch's rows.

    Processes whose devices hold other times or model shards of the same rows read the same rows.

    Raises:
        ValueError: the rows of this process's devices are not such a range.
    """
    # The axes that shard a batch come first in the mesh.
    parts = mesh.devices.reshape(math.prod(mesh.shape[axis] for axis in partitioning.BATCH), -1)
    here = jax.process_index()
    held = [number for number, part in enumerate(parts) if any(x.process_index == here for x in part)]
    shards = len(parts)
    first, count = held[0], len(held)
    if held[-1] - first != count - 1 or shards % count or first % count:
        raise ValueError(
            f"the devices of a process hold parts {held} of the {shards} that sharding.data x sharding.fsdp make of a "
            f"batch, which is no equal range; choose a multiple or a divisor of the {jax.process_count()} processes"
        )
    return first // count, shards // count


def place_batch(batch: Mapping[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Returns a batch sharded over all processes, from the rows of this process's `batch_share`."""
    placed = {name: batch_sharding(mesh, x.ndim) for name, x in batch.items()}
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), placed)
    _, shares = batch_share(mesh)
    return {
        name: jax.make_array_from_process_local_data(placed[name], x, (len(x) * shares, *x.shape[1:]))
        for name, x in batch.items()
    }


def describe(mesh: jax.sharding.Mesh) -> str:
    """Returns the number and kind of the devices, the number of processes, and the mesh shape."""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} x {kind}{processes}{f': {axes}' if axes else ''}"
