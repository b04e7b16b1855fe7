"""The kernels of states of both passes, compiled for an H100, and the time predicted for them."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import power_state
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.quartic import layouts as quartic
from pallas_kernels.power_state.quartic import state_vjp
from pallas_kernels.power_state.square import layouts as square
from tools import h100

# Power, head size, value size and chunk. At p = 2, multiples of 192, 128 and 64 give a query three, two and one
# warpgroups.
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
# Of the compiled shapes, which are shorter than those of the predictions: key heads, query heads of each, and chunks.
_HEADS, _GROUP, _CHUNKS = 2, 2, 4
# Latency of the last wgmma of each product and of barriers, in cycles per step; a guess.
WAITING_CYCLES = 120


def build(case: str):
    """Returns both passes and the query of a forward pass alone, with GQA and decay, and the shapes of arguments."""
    power, head_dim, value_dim, chunk = h100.parsed(case).values()
    time, heads = _CHUNKS * chunk, _HEADS * _GROUP
    call = configs.Call(power=power, config=_config(case), exact_window=_WINDOW, interpret=None)

    def both_passes(query, key, value, log_decay, folds, dout):
        arguments = power_state.Arguments(query, key, value, log_decay, folds)
        (*means, _), saved = power_state.power_state_fwd(arguments, call=call)
        gradients = power_state.power_state_vjp(arguments, means, saved, dout, call=call)
        return power_state.attend(arguments, saved, call=call), gradients

    vectors = (heads, head_dim), (_HEADS, head_dim), (_HEADS, value_dim), (heads, value_dim)
    query, key, value, dout = (jax.ShapeDtypeStruct((1, time, *x), jnp.bfloat16) for x in vectors)
    log_decay = jax.ShapeDtypeStruct((1, time, _HEADS), jnp.float32)
    return both_passes, (query, key, value, log_decay, jax.ShapeDtypeStruct((1, time), bool), dout)


def _config(case: str) -> configs.Config:
    """Returns the tiles for the shape of the predictions."""
    power, head_dim, value_dim, chunk = h100.parsed(case).values()
    sizes: dict[str, Any] = {"power": power, "head_dim": head_dim, "value_dim": value_dim, "chunk": chunk}
    shape: dict[str, Any] = {"time": h100.TIME, "heads": h100.HEADS, "dtype": jnp.bfloat16}
    return power_state.choose(**sizes, **shape, exact_window=_WINDOW)


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str] | None:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads; None for kernels without products.

    Warpgroups share tensor cores and memory. m64nNk16 takes N / 2 cycles.
    """
    name = kernel.name.removeprefix("power_state_")
    loops = [loop for loop in kernel.loops if loop["HGMMA"]]
    if not loops:
        return None
    if name.startswith("quartic_"):
        found, cycles = _quartic(name.removeprefix("quartic_"), case, loops)
    elif name in ("update", "norms"):
        found, cycles = (_update if name == "update" else _norms)(case, loops[0])
    else:
        found, cycles = _square(name, case, loops)
    return found, f"{1e3 * cycles / h100.SUSTAINED_HERTZ:.2f} ms"


def _update(case, counts):
    """Predicts the update of p = 2. A step is 64 tokens."""
    config, layout = _config(case), square.Layout(h100.parsed(case)["d"])
    scalars = config.update_scalars * len(layout.section)
    tensor = config.update_scalars // 2 * 2 * layout.section_width
    # 64 tokens of 16 bits per row. Every warpgroup reads the values, and a vector per scalar in eight parts per warp.
    filled = 128 * (layout.section_rows + configs.BLOCK + scalars)
    shared = 2 * tensor * h100.PRODUCT_BYTES + filled + 256 * configs.BLOCK + scalars * 32 * h100.SHARED_BYTES
    step = max(
        2 * tensor,
        tensor + counts["instructions"] + WAITING_CYCLES,
        shared / h100.SHARED_BYTES,
        filled / h100.CACHE_BYTES,
    )
    rounds = -(-h100.HEADS * config.update_blocks * config.segments // h100.MULTIPROCESSORS)
    return [h100.Loop("tokens", counts, tensor)], rounds * h100.TIME / config.segments / configs.BLOCK * step


def _norms(case, counts):
    """Predicts the normalizers of p = 2. A step is 64 tokens, with a product for each term."""
    head_dim = h100.parsed(case)["d"]
    tensor = max(head_dim, configs.BLOCK) // configs.BLOCK * 4 * head_dim
    # Keys and weights fill the ring.
    filled = 2 * configs.BLOCK * head_dim + 4 * configs.BLOCK
    rounds = h100.HEADS * h100.TIME / configs.BLOCK / h100.MULTIPROCESSORS
    return [h100.Loop("tokens", counts, tensor)], rounds * max(tensor, filled / h100.CACHE_BYTES)


def _square(name, case, loops):
    """Predicts the query and the gradients of p = 2, for blocks of 64 rows that share the states they read.

    A step takes the longest of all tensor cycles; of the time that the cache needs; of all instructions, in the
    gradient of queries; and of one warpgroup's tensor cycles, instructions and waits in a row.
    """
    _, head_dim, value_dim, chunk = h100.parsed(case).values()
    config, layout = _config(case), square.Layout(head_dim)
    tensor, issued, busy = layout.width // 16 * value_dim // 2, 0, 0
    # `near`: scores, or scores and slopes, then products for each result.
    if name == "query":
        count, waits, near_waits, labels = config.query_blocks, config.parts, 3, ("states", "keys")
        far = next(loop for loop in loops if loop["HMUL2"] and not loop["MUFU"])
        instructions, near = far["instructions"], 2 * head_dim + 4 * value_dim
        inner = (loop for loop in loops if loop["MUFU"] and loop["HGMMA"] == head_dim // 16 + 8)
        keys = next(inner) if chunk > configs.BLOCK else None  # a single block has no loop of its own
    elif name == "query_vjp":
        count, waits, near_waits = config.query_vjp_blocks, config.query_vjp_parts, 2
        labels, rounds = ("states", "keys"), layout.sections / config.query_vjp_groups
        far = next(loop for loop in loops if loop["FFMA"] and not loop["MUFU"])
        keys = next(loop for loop in loops if loop["MUFU"])
        instructions, near = far["instructions"] * rounds, 2 * (head_dim + value_dim) + 4 * head_dim
        issued, busy = instructions, keys["instructions"]
    else:  # one kernel for both gradients, or one for each
        count, parts, near_waits = config.key_vjp_blocks, config.key_vjp_parts, 3
        labels = "dual states", "queries"
        key, value = name == "key_vjp", config.key_vjp_together or name == "value_vjp"
        read = [loop for loop in loops if loop["HMUL2" if value else "FFMA"] and not loop["MUFU"]][:parts]
        far = {kind: sum(loop[kind] for loop in read) for kind in read[0]}
        keys = next(loop for loop in loops if loop["MUFU"])
        tensor, waits, instructions = (key + value) * tensor, parts * (key + value), far["instructions"]
        near = 2 * (head_dim + key * value_dim) + 4 * (key * head_dim + value * value_dim)
    cached = 2 * value_dim * layout.width / h100.CACHE_BYTES
    alone = tensor + instructions + waits * WAITING_CYCLES
    row = square.TILE * max(count * tensor, count * issued, alone, cached)
    shown = tensor * config.query_vjp_groups // layout.sections if name == "query_vjp" else tensor
    found = [h100.Loop(labels[0], far, shown)]
    if keys is not None:
        blocks = (chunk // configs.BLOCK + count) / 2 + _WINDOW // configs.BLOCK
        alone = near + keys["instructions"] + near_waits * WAITING_CYCLES
        row += blocks * max(count * near, count * busy, alone)
        found.append(h100.Loop(labels[1], keys, near))
    return found, h100.HEADS * h100.TIME / (configs.BLOCK * count) / h100.MULTIPROCESSORS * row


def _quartic(name, case, loops):
    """Predicts the kernels of p = 4, from the steps of each loop for 64 tokens.

    A step of the update is 6 stacks and 64 tokens, one of the query 3 stacks and 64 rows, one of a gradient 12 scalars
    and 64 rows. A multiprocessor takes the longer of its tensor cycles and the instructions of one of its four
    schedulers, which have a warp of every warpgroup each. The same holds for blocks of 64 in-window queries or keys.
    """
    _, head_dim, value_dim, chunk = h100.parsed(case).values()
    layout = quartic.Layout(head_dim, value_dim)
    # A stack is 48 columns of 64 tokens, N / 2 cycles for each of four m64nNk16; 64 queries take the same time.
    stack = 2 * quartic.COLUMNS
    label, near = "keys", None
    steps: list[float]
    if name == "update":
        found = [h100.Loop("tokens", loops[0], quartic.UNIT // 2 * stack)]
        steps = [layout.stacks // (quartic.UNIT // 2)]
    else:
        states = next(loop for loop in loops if loop["HMUL2"])
        inner = [loop for loop in loops if loop["MUFU"]]
        if name == "query":
            found, steps = (
                [h100.Loop("states", states, quartic.STEP * stack)],
                [layout.steps(quartic.STEP)[:, 1].sum()],
            )
            inner = [loop for loop in inner if loop["HGMMA"] == head_dim // 16 + 8]
            # Scores, then two products with values.
            near = 2 * head_dim + 4 * value_dim
        else:
            # Slopes and means of a block of 48, then selections and their transposes.
            scalar = 2 * quartic.COLUMNS * value_dim // 32
            contracted = head_dim * quartic.SCALAR_COLUMNS * 3 // 16
            found = [h100.Loop("states", states, quartic.SCALARS * scalar + contracted)]
            steps, label = [layout.steps(state_vjp.stacks(layout))[:, 1].sum()], "rows"
            # Scores and slopes, then two products each for the gradients.
            near = 2 * (head_dim + value_dim) + 4 * head_dim + (4 * value_dim if name == "key_vjp" else 0)
        if chunk > configs.BLOCK:  # a single in-window block has no loop of its own
            found.append(h100.Loop(label, inner[0], near))
            steps.append(chunk / 128 + _WINDOW / 64 + 0.5)
    cycles = sum(
        count * max(loop.tensor, loop.counts["instructions"])
        for count, loop in zip(steps, found, strict=True)
    )
    return found, h100.HEADS * h100.TIME / 64 * cycles / h100.MULTIPROCESSORS
