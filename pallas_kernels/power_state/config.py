"""Tile sizes of the kernels and the constraints on their arguments."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.power_state.quartic import layout as quartic_layout
from pallas_kernels.power_state.square import layout as layouts

__all__ = [
    "BLOCK",
    "MULTIPROCESSORS",
    "Config",
    "choose",
    "filled",
    "operands",
]

# Tokens, query rows or values that one warpgroup handles at a time: the height of a Hopper matrix product.
BLOCK = 64
# Multiprocessors of an H100. If the update has fewer blocks, time is cut into segments.
MULTIPROCESSORS = 132
# Sizes of heads and values that the kernels support; others are padded with zeros.
_HEAD_SIZES = (32, 64, 128)
_VALUE_SIZES = (64, 128)
# Maximum number of blocks of 64 in one TMA copy.
_COPIED = 256
# Shared memory of one thread block on Hopper, minus an allowance for barriers and alignment.
_SHARED_BYTES = 227 * 1024 - 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static options of a call, made by `choose`.

    chunk: positions between states. segments: stretches of time that the update processes in parallel.
    update_blocks: thread blocks of the update for one head and one segment.
    update_scalars: groups of features per block of the update, half of them for each of two warpgroups.
    update_stages: blocks of 64 tokens in flight in the update.
    query_blocks: blocks of 64 rows, one for each warpgroup, that share the states read by the query.
    parts: pieces of equal width in which the query reads a group.
    state_stages: number of such parts in flight in the query.
    key_stages: blocks of 64 keys in flight in the query.
    query_vjp_blocks, query_vjp_parts, query_vjp_stages: counterparts of query_blocks, parts and state_stages in the
    gradient of queries.
    query_vjp_groups: groups that one round of its loop reads, 1, 2 or 4.
    key_vjp_blocks: blocks of 64 keys, one for each warpgroup, that share the gradients of states in the gradient of
    keys.
    key_vjp_parts: pieces of equal width in which it reads a group.
    key_vjp_stages: number of such parts in flight.
    key_vjp_together: whether one launch computes both gradients, of keys and of values.
    """

    chunk: int
    segments: int = 1
    update_blocks: int
    update_scalars: int
    update_stages: int
    query_blocks: int
    state_stages: int
    key_stages: int
    parts: int = 1
    query_vjp_blocks: int = 1
    query_vjp_parts: int = 1
    query_vjp_stages: int = 2
    query_vjp_groups: int = 2
    key_vjp_blocks: int = 1
    key_vjp_parts: int = 1
    key_vjp_stages: int = 2
    key_vjp_together: bool = True

    def for_query_vjp(self) -> "Config":
        """Returns the config with the sizes of the gradient of queries in place of the query's."""
        return dataclasses.replace(
            self,
            query_blocks=self.query_vjp_blocks,
            parts=self.query_vjp_parts,
            state_stages=self.query_vjp_stages,
        )


def choose(
    *,
    power: int,
    head_dim: int,
    value_dim: int,
    time: int,
    heads: int,
    dtype,
    exact_window: int = BLOCK,
    chunk: int | None = None,
    state_dtype=jnp.float16,
) -> Config:
    """Returns chunk, segments and tiles for rows of `time` positions and `heads` key heads in total over all rows.

    All are chosen by predicted cost (pallas_kernels/README.md), none by measurement; `chunk` is used unchanged if
    given. Raises NotImplementedError naming the first constraint that the shapes violate.
    """
    if power not in (2, 4):
        raise NotImplementedError(f"the power_state kernels need power 2 or 4, not {power}")
    chunk = chunk or max(_chunk_for(power, head_dim, time), exact_window)
    tiles = _choose_quartic if power == 4 else _choose_square
    config = tiles(head_dim, value_dim, dtype, chunk, exact_window, state_dtype)
    return dataclasses.replace(config, segments=_segments(heads * config.update_blocks, -(-time // chunk)))


def _choose_square(head_dim, value_dim, dtype, chunk, exact_window, state_dtype):
    supported = {
        f"head_dim at most {_HEAD_SIZES[-1]}, not {head_dim}": head_dim <= _HEAD_SIZES[-1],
        f"value_dim at most {_VALUE_SIZES[-1]}, not {value_dim}": value_dim <= _VALUE_SIZES[-1],
        f"states of float16, bfloat16 or float32, not {jnp.dtype(state_dtype).name}": (
            state_dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
        ),
    }
    _require(supported | _needs_of_rows(dtype, chunk, exact_window))
    head_dim, value_dim = filled(head_dim, value_dim)
    layout = layouts.Layout(head_dim)
    # Three warpgroups have 160 registers per thread, too few for more than 64 values or for the features of D = 128.
    # Two have 232, too few for two terms at D = 128.
    two_terms = state_dtype == jnp.float32
    most = (3 if value_dim == BLOCK else 2) if head_dim < 128 else 1 if two_terms else 2
    # If a chunk is one block of rows, the compiler unrolls loops, and these cases lack the registers for that.
    tight = head_dim == 128 or two_terms
    blocks = next(
        count
        for count in (3, 2, 1)
        if count <= most
        and chunk % (count * BLOCK) == 0
        and not (tight and count > 1 and chunk == count * BLOCK)
    )
    parts = 1 if head_dim < 128 else 3 * value_dim // BLOCK
    rows = blocks * BLOCK * (2 * head_dim + (0 if head_dim == value_dim else value_dim))
    keys = 2 * BLOCK * (head_dim + value_dim)
    left = _SHARED_BYTES - 2 * (rows + keys) - 4 * (2 * (chunk + exact_window) + blocks * BLOCK)
    stages = _stages(left // (2 * value_dim * (layout.width // parts)), 6, chunk)
    # Two warpgroups hold at most 2 x 320 features, of 64 values, in their accumulators. Storing in two terms needs more
    # registers and leaves room for 2 x 288.
    scalars = {32: 8, 64: 2 if state_dtype == jnp.float32 else 4, 128: 4}[head_dim]
    return Config(
        chunk=chunk,
        update_blocks=value_dim // BLOCK * layout.sections * (layouts.TILE // scalars),
        update_scalars=scalars,
        update_stages=4,
        query_blocks=blocks,
        state_stages=stages,
        key_stages=2,
        parts=parts,
        **_choose_query_vjp(layout, value_dim, chunk, exact_window, 2 if two_terms else 1),
        **_key_vjp(layout, value_dim, chunk),
    )


def _choose_query_vjp(layout, value_dim, chunk, exact_window, terms):
    """Returns the fields of the gradient of queries."""
    head_dim = layout.head_dim
    # Three warpgroups have too few registers. At the largest sizes even two have too few for two terms, and for a chunk
    # of one block of rows, whose loop over keys the compiler unrolls.
    largest = head_dim == value_dim == 128
    most = 1 if largest and (terms == 2 or chunk == 2 * BLOCK) else 2
    blocks = next(count for count in (2, 1) if count <= most and chunk % (count * BLOCK) == 0)
    parts = layout.sections
    height = BLOCK if head_dim == 128 else value_dim
    rows = blocks * BLOCK * (2 * head_dim + value_dim)
    keys = 2 * BLOCK * (head_dim + value_dim)
    left = _SHARED_BYTES - 2 * (rows + keys) - 4 * (2 * (chunk + exact_window) + 4 * blocks * BLOCK)
    stages = _stages(left // (2 * height * (layout.width // parts)), 6, chunk)
    groups = 1 if head_dim == 128 else 4 // terms
    if head_dim < 128:
        # Use a number that divides the steps of a round, so that slots are known at compile time.
        stages = next(number for number in range(stages, 1, -1) if groups * terms % number == 0)
    return {
        "query_vjp_blocks": blocks,
        "query_vjp_parts": parts,
        "query_vjp_stages": stages,
        "query_vjp_groups": groups,
    }


def _key_vjp(layout, value_dim, chunk):
    """Returns the fields of the gradient of keys."""
    head_dim = layout.head_dim
    blocks = 2 if chunk % (2 * BLOCK) == 0 else 1
    # At D = 128 parts are narrow, to save registers and so that two fit next to a second copy of the keys.
    parts = 6 * value_dim // BLOCK if head_dim == 128 else 1
    tiles = blocks * BLOCK * ((3 if head_dim == 128 else 2) * head_dim + value_dim)
    # And two blocks of queries.
    tiles += 2 * BLOCK * (head_dim + value_dim)
    left = _SHARED_BYTES - 2 * tiles - 4 * BLOCK * (9 * blocks + 2 * 4)
    return {
        "key_vjp_blocks": blocks,
        "key_vjp_parts": parts,
        "key_vjp_stages": min(4, left // (2 * value_dim * (layout.width // parts))),
        # Two warpgroups have 232 registers per thread, too few for both if either gradient has 128 columns.
        "key_vjp_together": head_dim < 128 and value_dim == BLOCK,
    }


def _choose_quartic(head_dim, value_dim, dtype, chunk, exact_window, state_dtype):
    sizes = quartic_layout.SIZES
    _require(
        {
            f"head_dim at most {sizes[-1]} at power 4, not {head_dim}": head_dim <= sizes[-1],
            f"value_dim at most {sizes[-1]} at power 4, not {value_dim}": value_dim <= sizes[-1],
            f"states of float16 at power 4, not {jnp.dtype(state_dtype).name}": state_dtype == jnp.float16,
        }
        | _needs_of_rows(dtype, chunk, exact_window)
    )
    layout = quartic_layout.layout_for(head_dim, value_dim)
    blocks = next(count for count in (3, 2, 1) if chunk % (count * BLOCK) == 0)
    rows = blocks * BLOCK
    operands = (rows + 2 * BLOCK) * (layout.head_dim + layout.value_dim) + 2 * rows * quartic_layout.COLUMNS
    left = _SHARED_BYTES - 2 * operands - 4 * (2 * (chunk + exact_window) + 2 * rows)
    stage = 2 * quartic_layout.STEP * (BLOCK * quartic_layout.COLUMNS + layout.per_stack * rows)
    return Config(
        chunk=chunk,
        update_blocks=len(layout.units),
        update_scalars=quartic_layout.UNIT,
        update_stages=4,
        query_blocks=blocks,
        state_stages=_stages(left // stage, 3, chunk),
        key_stages=2,
        parts=1,
        **_quartic_vjp(layout, chunk, exact_window),
    )


def _quartic_vjp(layout, chunk, exact_window):
    """Returns the fields of the gradients at p = 4, whose kernels use about the same shared memory."""
    # Three warpgroups have 160 registers per thread, too few for sizes of 32, or for two gradients. Two have 240, too
    # few for heads of 16 with values of 32 in chunks of some lengths.
    pair = 1 if layout.head_dim < layout.value_dim else 2
    most = {"query": 3 if layout.head_dim == layout.value_dim == 16 else pair, "key": pair}
    decays = {"query": 2 * (chunk + exact_window), "key": 0}
    fields = {}
    for name in most:
        blocks = next(count for count in (3, 2, 1) if count <= most[name] and chunk % (count * BLOCK) == 0)
        rows = blocks * BLOCK
        # Both operands of the rows, the in-window tiles, and two blocks of y with the matrices that select its columns.
        operands = (rows + 2 * BLOCK) * (layout.head_dim + layout.value_dim)
        operands += 2 * quartic_layout.COLUMNS * (rows + 2 * layout.head_dim)
        left = _SHARED_BYTES - 2 * operands - 4 * (decays[name] + 7 * rows + 8 * BLOCK)
        stage = quartic_layout.SCALARS * (rows + layout.value_dim * quartic_layout.COLUMNS)
        stage += 2 * layout.head_dim * quartic_layout.SCALAR_COLUMNS
        fields |= {f"{name}_vjp_blocks": blocks, f"{name}_vjp_stages": min(left // (2 * stage), 3)}
    return fields


def _needs_of_rows(dtype, chunk, exact_window):
    return {
        f"bfloat16 inputs, not {jnp.dtype(dtype).name}": dtype == jnp.bfloat16,
        f"a chunk that is a positive multiple of {BLOCK}, not {chunk}": chunk > 0 and chunk % BLOCK == 0,
        f"an exact_window that is a multiple of {BLOCK}, not {exact_window}": exact_window >= 0
        and exact_window % BLOCK == 0,
        f"an exact_window no longer than the chunk of {chunk}, not {exact_window}": exact_window <= chunk,
        f"at most {_COPIED * BLOCK} positions in a chunk and its window, not {chunk + exact_window}": (
            chunk + exact_window <= _COPIED * BLOCK
        ),
    }


def _stages(fitting, most, chunk):
    if fitting < 2:
        raise NotImplementedError(
            f"the power_state kernels need a chunk shorter than {chunk}, for shared memory"
        )
    return min(fitting, most)


def _require(supported):
    for constraint, holds in supported.items():
        if not holds:
            raise NotImplementedError(f"the power_state kernels need {constraint}")


def filled(head_dim: int, value_dim: int, power: int = 2) -> tuple[int, int]:
    """Returns the padded sizes that the kernels use for these sizes."""
    if power == 4:
        layout = quartic_layout.layout_for(head_dim, value_dim)
        return layout.head_dim, layout.value_dim
    return (
        next(size for size in _HEAD_SIZES if size >= head_dim),
        next(size for size in _VALUE_SIZES if size >= value_dim),
    )


def operands(state_dtype) -> tuple[jnp.dtype, int]:
    """Returns the 16-bit dtype of products with states, and the number of such terms per entry of a state."""
    return (jnp.dtype(jnp.float16), 2) if state_dtype == jnp.float32 else (jnp.dtype(state_dtype), 1)


def _chunk_for(power, head_dim, time):
    """Returns a chunk for rows of that length.

    Its own rows divide among all warpgroups, unless they are very few. It is long enough for its exact part to cost
    about half of its state's. At p = 4, writing and reading the states takes about as long as the keys of the chunk do
    in the forward pass, and the chunk is also a multiple of the rows of two warpgroups.
    """
    if power == 4:
        longest = 1152 if head_dim <= 16 else 3072
    else:
        longest = next(chunk for size, chunk in ((32, 384), (64, 768), (128, 1024)) if head_dim <= size)
    warpgroups = 1 if time <= 6 * BLOCK else 2 if head_dim > 64 else 3
    step = warpgroups * BLOCK
    return min(longest, -(-time // step) * step)


def _segments(blocks, chunks):
    """Returns the number of segments that the update processes in parallel, with `blocks` blocks each."""
    # As many as run at once. More than one segment costs an additional pass over the states.
    return max(1, min(MULTIPROCESSORS // blocks, chunks))
