"""Arguments of the ops that compare all pairs of tokens and have no state: softmax and expressive attention."""

from typing import NamedTuple

import jax
import numpy as np

from sympow_jax.ops import arguments
from sympow_jax.ops.tokens import Tokens


class Plan(NamedTuple):
    """Options of a call; where `scale` is None, the op has a default.

    Only softmax attention has an `implementation` to choose, and a `window`, the number of last tokens of a document
    that a query attends to.
    """

    causal: bool
    scale: float | None
    block_size: int
    axis_name: str | None
    window: int | None
    implementation: str | None


def prepare(
    tokens: Tokens,
    *,
    causal,
    scale,
    block_size,
    axis_name: str | None,
    window: int | None = None,
    implementation: str | None = None,
) -> Plan:
    """Checks the arguments of an op; returns its plan.

    Raises:
        ValueError: for shapes or options that do not match each other.
    """
    causal = arguments.check_flag("causal", causal)
    arguments.check_attention(*tokens, causal=causal)
    block_size = arguments.check_integer("block_size", block_size, 1)
    if axis_name is not None:
        arguments.check_axis_name(axis_name)
    if window is not None:
        window = arguments.check_integer("window", window, 1)
        if not causal:
            raise ValueError(f"window is {window} and causal is False; only causal attention has a window")
    if isinstance(scale, jax.Array | np.ndarray):
        raise ValueError(
            "scale is an array; it must be a number: multiply the query by a factor that is learned"
        )
    if scale is not None:
        scale = arguments.check_number("scale", scale)
    return Plan(causal, scale, block_size, axis_name, window, implementation)
