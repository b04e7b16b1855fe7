"""Where arrays live: rows of a batch over the devices, everything else on each of them."""

from collections.abc import Mapping

import jax
import numpy as np

__all__ = ["DATA_AXIS", "batch_sharding", "batch_share", "make_mesh", "place_batch", "replicated"]

DATA_AXIS = "data"


def make_mesh(rows: int) -> jax.sharding.Mesh:
    """All devices along one axis, over which the `rows` of a (micro-)batch are divided.

    Raises:
      ValueError: the devices do not divide the rows.
    """
    count = jax.device_count()
    if rows % count:
        raise ValueError(
            f"a micro-batch has {rows} rows, which {count} devices do not divide; "
            f"change data.batch_tokens or optimizer.accumulate"
        )
    return jax.make_mesh((count,), (DATA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def batch_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """The leading axis, rows, over the devices."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(DATA_AXIS))


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """A copy on every device."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def batch_share(mesh: jax.sharding.Mesh, batch_size: int) -> tuple[int, int]:
    """Which of how many equal, contiguous parts of a batch's rows this process reads."""
    return jax.process_index(), jax.process_count()


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: jax.sharding.Mesh, batch_size: int
) -> dict[str, jax.Array]:
    """Global arrays from this process's rows of a batch."""
    return {
        name: jax.make_array_from_process_local_data(
            batch_sharding(mesh), rows, (batch_size, *rows.shape[1:])
        )
        for name, rows in batch.items()
    }
