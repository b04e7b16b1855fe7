"""The kernels of states of both passes, compiled for an H100."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import power_state
from pallas_kernels.power_state import configs
from tools import h100

# Power, head size, value size and chunk. At p = 2, D < 128 and E = 64, multiples of 192, 128 and 64 give a query three,
# two and one warpgroups.
CASES = [
    *("p2-d32-e64-c384", "p2-d32-e128-c384", "p2-d64-e64-c64", "p2-d64-e64-c128", "p2-d64-e64-c768"),
    *("p2-d64-e128-c768", "p2-d128-e64-c1024", "p2-d128-e128-c64", "p2-d128-e128-c1024"),
    *("p4-d16-e16-c64", "p4-d16-e16-c960", "p4-d16-e16-c1024", "p4-d16-e16-c1152", "p4-d16-e32-c960"),
    *("p4-d32-e16-c3072", "p4-d32-e32-c64", "p4-d32-e32-c3072", "p4-d32-e32-c4096"),
]
# Every supported size and number of warpgroups.
_SIZES = {
    2: ((32, 64, 128), (64, 128), (64, 128, 192, 384)),
    4: ((16, 32), (16, 32), (64, 128, 192, 256, 960)),
}
RARE = [
    case
    for power, (head_dims, value_dims, chunks) in _SIZES.items()
    for head_dim in head_dims
    for value_dim in value_dims
    for chunk in chunks
    if (case := f"p{power}-d{head_dim}-e{value_dim}-c{chunk}") not in CASES
]
_WINDOW = 64
# Key heads, query heads of each, and chunks of the compiled shapes: recurrences take 16 chunks a round, and the rest.
_HEADS, _GROUP, _CHUNKS = 2, 2, 32
# Key heads and tokens of the larger shape whose tiles are compiled.
_TILED_HEADS, _TILED_TIME = 8, 65_536


def build(case: str):
    """Returns both passes and the query of a forward pass alone, with GQA and decay, and the shapes of arguments."""
    power, head_dim, value_dim, chunk = h100.parsed(case).values()
    sizes: dict[str, Any] = {"power": power, "head_dim": head_dim, "value_dim": value_dim, "chunk": chunk}
    # The tiles are those of a long sequence.
    shape: dict[str, Any] = {"time": _TILED_TIME, "heads": _TILED_HEADS, "dtype": jnp.bfloat16}
    tiles = power_state.choose(**sizes, **shape, exact_window=_WINDOW)
    call = configs.Call(power=power, config=tiles, exact_window=_WINDOW, interpret=None)
    time, heads = _CHUNKS * chunk, _HEADS * _GROUP

    def both_passes(query, key, value, log_decay, folds, dout):
        arguments = power_state.Arguments(query, key, value, log_decay, folds)
        (*means, _), saved = power_state.power_state_fwd(arguments, call=call)
        gradients = power_state.power_state_vjp(arguments, means, saved, dout, call=call)
        return power_state.attend(arguments, saved, call=call), gradients

    vectors = (heads, head_dim), (_HEADS, head_dim), (_HEADS, value_dim), (heads, value_dim)
    query, key, value, dout = (jax.ShapeDtypeStruct((1, time, *x), jnp.bfloat16) for x in vectors)
    log_decay = jax.ShapeDtypeStruct((1, time, _HEADS), jnp.float32)
    return both_passes, (query, key, value, log_decay, jax.ShapeDtypeStruct((1, time), bool), dout)
