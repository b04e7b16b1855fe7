"""The update: states of plain monomials, carried along time in the accumulators of the tensor core.

A block has one section of some groups of features of one head, and 64 values, and runs over the chunks of one segment
of time. For each scalar i of a group, with its window w of indices,

    S[:, w] <- S[:, w] + (V~^T * k_i) K_w,

a product over 64 tokens whose first operand is scaled in registers along the tokens. Before each chunk the block stores
the current state, which the chunk's queries read; then the state decays over the chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products, ring
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import layout as layouts

__all__ = ["update"]

_BLOCK = configs.BLOCK
_CONSUMERS = 2


def update(key, value, carry, initial, *, layout, config, chunk, terms=1, interpret=None):
    """Returns the states that the chunks read, and the state after each segment.

    key: 16-bit [H, D, X], time last.
    value: 16-bit [H, E, X], times its decay up to the end of its chunk; E a multiple of 64.
    carry: float32 [H, n], the factor of the state over each of the n = X / chunk chunks.
    initial: float32 [H, segments, 16, sections, E, P / sections], the state before the first chunk of each segment.

    terms: number of terms whose sum is a stored entry: 1, or 2, the rounded entry and the rounding error.

    Returns states [H, n, 16, terms E, P] in the dtype of keys, with the second terms after the first, and the final
    states like `initial`. Accumulates in float32; products of a key and a value are rounded to the 16 bits of the
    operands.
    """
    heads, _, time = key.shape
    dtype, value_dim, chunks = key.dtype, value.shape[1], time // chunk
    segments, scalars = initial.shape[1], config.update_scalars
    grid = (heads, segments, value_dim // _BLOCK, layout.sections, layouts.TILE // scalars)
    tiles = len(layout.section)
    lead = (config.update_stages,)
    copies = 1 + len(_key_pieces(layout)) + tiles
    mine = scalars // _CONSUMERS
    accumulators = [(_BLOCK, layout.section_width)] * mine
    scratch = {
        "key_smem": products.operand(lead, layout.section_rows, _BLOCK, dtype),
        "value_smem": products.operand(lead, _BLOCK, _BLOCK, dtype),
        "scalar_smem": plgpu.SMEM((*lead, tiles, scalars, _BLOCK), dtype),
        "store_smem": products.operand((_CONSUMERS, terms), _BLOCK, layout.section_width, dtype),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=config.update_stages),
        "free": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=config.update_stages),
    }
    if interpret is not None:
        scratch["interpreted"] = [plgpu.SMEM((_CONSUMERS, *shape), jnp.float32) for shape in accumulators]
    body = functools.partial(
        _body, layout=layout, config=config, chunk=chunk, chunks=chunks, segments=segments, terms=terms
    )
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((heads, chunks, layouts.TILE, terms * value_dim, layout.width), dtype),
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        ),
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "segment", "values", "section", "group"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="power_state_update",
        interpret=interpret,
    )(key, value, carry, initial)


class _Place(NamedTuple):
    """Part of the work of one block: groups from `group` on of a section of features, and 64 of the values, of a head.

    chunk, chunk_count: first chunk and number of chunks that the block processes.
    """

    head: jax.Array
    segment: jax.Array
    values: jax.Array
    section: jax.Array
    group: jax.Array
    chunk: jax.Array
    chunk_count: jax.Array

    @classmethod
    def of_block(cls, config, chunks, segments):
        """Returns the place of the block that runs this."""
        segment, each = lax.axis_index("segment"), -(-chunks // segments)
        return cls(
            head=lax.axis_index("head"),
            segment=segment,
            values=lax.axis_index("values"),
            section=lax.axis_index("section"),
            group=lax.axis_index("group") * config.update_scalars,
            chunk=segment * each,
            chunk_count=jnp.minimum(chunks - segment * each, each),
        )


def _body(
    key,
    value,
    carry,
    initial,
    states,
    final,
    *,
    layout,
    config,
    chunk,
    chunks,
    segments,
    terms,
    interpreted=None,
    **smem,
):
    place = _Place.of_block(config, chunks, segments)
    warpgroup, blocks = lax.axis_index("warpgroup"), chunk // _BLOCK

    @pl.when(warpgroup == _CONSUMERS)
    def _produce():
        # Each warpgroup has 168 registers per thread at launch; with fewer than 40 the copies of pieces would spill.
        plgpu.set_max_registers(40, action="decrease")
        copy = functools.partial(_copy_tokens, key, value, smem, place, place.chunk * chunk, layout, config)
        ring.fill(place.chunk_count * blocks, config.update_stages, smem["free"], copy)

    @pl.when(warpgroup < _CONSUMERS)
    def _consume():
        plgpu.set_max_registers(232, action="increase")
        mine = config.update_scalars // _CONSUMERS
        groups = [place.group + warpgroup * mine + n for n in range(mine)]
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        of_values = pl.ds(place.values * _BLOCK, _BLOCK)
        store = functools.partial(_store, smem["store_smem"].at[warpgroup], states, place, layout, terms)

        def walk(*accumulators):
            for group, acc in zip(groups, accumulators):
                start = initial.at[place.head, place.segment, group, place.section, of_values]
                acc[...] = plgpu.load(start, layout=plgpu.Layout.WGMMA, optimized=False)

            @pl.loop(jnp.int32(0), place.chunk_count)
            def _chunk(index):
                for group, acc in zip(groups, accumulators):
                    store(acc, place.chunk + index, group)

                decay = carry[place.head, place.chunk + index]
                for acc in accumulators:
                    acc[...] = acc[...] * decay

                @pl.loop(jnp.int32(0), jnp.int32(blocks))
                def _block(block):
                    slot = ring.slot_of(index * blocks + block, config.update_stages)
                    plgpu.barrier_wait(smem["full"].at[slot])
                    _accumulate_block(
                        accumulators,
                        smem["key_smem"].at[slot],
                        smem["value_smem"].at[slot],
                        smem["scalar_smem"].at[slot, :, pl.ds(warpgroup * mine, mine)],
                        layout,
                        held,
                    )
                    plgpu.barrier_arrive(smem["free"].at[slot])

            for group, acc in zip(groups, accumulators):
                final[place.head, place.segment, group, place.section, of_values] = acc[...]
            plgpu.wait_smem_to_gmem(0)

        products.with_accumulators(walk, [(_BLOCK, layout.section_width)] * mine, held)


def _key_pieces(layout):
    """Returns the (first, count) of the rows of keys in each copy.

    The windows of a section wrap around past the last index.
    """
    if layout.sections == 1:
        pieces = (0, layout.head_dim), (layout.head_dim, layout.section_rows - layout.head_dim)
        return tuple(piece for piece in pieces if piece[1])
    # A section wraps around at a position that depends on the section, but always between two tiles.
    return tuple((begin, layouts.TILE) for begin in range(0, layout.section_rows, layouts.TILE))


def _copy_tokens(key, value, smem, place, first_token, layout, config, step, slot):
    """Copies keys of the section, values, and the scalars of every tile, for 64 tokens."""
    tokens, full = pl.ds(first_token + step * _BLOCK, _BLOCK), smem["full"].at[slot]
    first_row = place.section * layouts.TILE
    for begin, count in _key_pieces(layout):
        rows = pl.ds(lax.rem(first_row + begin, layout.head_dim), count)
        piece = smem["key_smem"].at[slot, pl.ds(begin, count)]
        plgpu.copy_gmem_to_smem(key.at[place.head, rows, tokens], piece, full)
    rows = pl.ds(place.values * _BLOCK, _BLOCK)
    plgpu.copy_gmem_to_smem(value.at[place.head, rows, tokens], smem["value_smem"].at[slot], full)
    for tile, exact_window in enumerate(layout.section):
        rows = pl.ds(first_row + exact_window.begin + place.group, config.update_scalars)
        plgpu.copy_gmem_to_smem(key.at[place.head, rows, tokens], smem["scalar_smem"].at[slot, tile], full)


def _store(store_smem, states, place, layout, terms, acc, chunk, group):
    """Writes an accumulator where the queries of a chunk read it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _store_terms(acc, store_smem)
    plgpu.commit_smem()
    columns = pl.ds(place.section * layout.section_width, layout.section_width)
    value_blocks = states.shape[3] // (terms * _BLOCK)
    for term in range(terms):
        rows = pl.ds((term * value_blocks + place.values) * _BLOCK, _BLOCK)
        plgpu.copy_smem_to_gmem(store_smem.at[term], states.at[place.head, chunk, group, rows, columns])


def _store_terms(acc, store_smem):
    """Stores the accumulator in 16 bits, followed by its rounding error if there is room."""
    whole = acc[...]
    if store_smem.shape[0] == 1:
        store_smem[0] = whole.astype(store_smem.dtype)
        return
    # If accumulators leave few registers, a few columns at a time: all rounded columns would not fit.
    step = 48 if whole.shape[1] % 48 == 0 else whole.shape[1]
    for begin in range(0, whole.shape[1], step):
        part = whole[:, begin : begin + step]
        rounded = part.astype(store_smem.dtype)
        store_smem[0, :, begin : begin + step] = rounded
        store_smem[1, :, begin : begin + step] = (part - rounded.astype(jnp.float32)).astype(store_smem.dtype)


def _accumulate_block(accumulators, key_smem, value_smem, scalar_smem, layout, interpreted):
    """Adds 64 tokens to the groups of one warpgroup."""
    value = plgpu.load(value_smem, layout=plgpu.Layout.WGMMA)
    for n, acc in enumerate(accumulators):
        for tile, exact_window in enumerate(layout.section):
            scalar = plgpu.load(scalar_smem.at[tile, n], layout=plgpu.Layout.WGMMA.reduce(0))
            scaled = value * lax.broadcast_in_dim(scalar, value.shape, [1])
            columns = acc.at[:, exact_window.offset : exact_window.offset + exact_window.width]
            keys = key_smem.at[exact_window.begin : exact_window.begin + exact_window.width].T
            # One product in flight while the next operand is made: straight-line code, so each has its own registers.
            products.accumulate(columns, scaled, keys, interpreted, wait=1)
    if interpreted is None:
        plgpu.wgmma_wait(0)
