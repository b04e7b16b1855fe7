"""Parts of names, sizes and units of time that the cases of the state kernels in `tools.compiled` share."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import power_state
from pallas_kernels.power_state import config as configs
from tools import h100

# Of the compiled shapes: key heads, query heads for each, chunks, and exact window.
HEADS, GROUP, CHUNKS, WINDOW = 2, 2, 4, 64
# Times are predicted for batch 1.
PREDICTED_HEADS, PREDICTED_TIME = 8, 65_536


class Case(NamedTuple):
    """A case such as "query-d64-e64-c768": kernel, head size, value size and chunk."""

    kernel: str
    head_dim: int
    value_dim: int
    chunk: int
    config: configs.Config

    @property
    def time(self) -> int:
        """Length of the compiled sequences."""
        return self.chunk * CHUNKS


def parse(case: str, *, power: int) -> Case:
    """Returns the parts of a case's name, and the kernels' config for the predicted shape."""
    found = re.fullmatch(r"(\w+)-d(\d+)-e(\d+)(?:-c(\d+))?", case)
    assert found is not None, case
    kernel, head_dim, value_dim, chunk = found.groups()
    config = power_state.choose(
        power=power,
        time=PREDICTED_TIME,
        heads=PREDICTED_HEADS,
        head_dim=int(head_dim),
        value_dim=int(value_dim),
        dtype=jnp.bfloat16,
        chunk=int(chunk or 1024),
        exact_window=WINDOW,
    )
    return Case(kernel, int(head_dim), int(value_dim), int(chunk or 1024), config)


def sizes(head_dims: tuple[int, ...], value_dims: tuple[int, ...]) -> list[str]:
    """Returns the part of a case's name that has the sizes, for each pair of them."""
    return [f"d{head_dim}-e{value_dim}" for head_dim in head_dims for value_dim in value_dims]


def with_and_without_remainder(query_states, options):
    """Returns a function that calls a query kernel twice, without the remainder of its output and with it."""
    return lambda *arrays: [query_states(*arrays, **options, with_remainder=x) for x in (False, True)]


def brief(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument in bfloat16."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def half(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument in float16."""
    return jax.ShapeDtypeStruct(shape, jnp.float16)


def exact(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument in float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def milliseconds(cycles: float) -> str:
    """Formats the time of the cycles of one multiprocessor."""
    return f"{1e3 * cycles / h100.SUSTAINED_HERTZ:.2f} ms"
