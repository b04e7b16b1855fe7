"""The update: states of plain monomials, carried along time in the accumulators of the tensor core.

A block has one section of some groups of features of one head, and 64 values, and runs over the chunks of one segment
of time. For each scalar i of a group, with its window w of indices,

    S[:, w] <- S[:, w] + (V~^T * k_i) K_w,

a product over 64 tokens whose first operand is scaled in registers along the tokens. Before each chunk the block stores
the current state, which the chunk's queries read; then the state decays over the chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, ring, tensor_core
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.square import layouts

_BLOCK = configs.BLOCK
# Warpgroups that compute.
_WARPGROUPS = 2


class Order(NamedTuple):
    """Order in which a kernel walks over the tokens of `group` heads in `chunks` chunks of `blocks` blocks of 64.

    A step of the walk is a chunk of all heads of a group. In reverse, the last chunk is the first.
    """

    group: int
    chunks: int
    blocks: int
    reverse: bool

    def place(self, head, chunk, block):
        """Returns the head and the tokens of a block, counted over all heads of a group, of a chunk of the walk."""
        chunk = self.chunks - 1 - chunk if self.reverse else chunk
        member = lax.div(block, jnp.int32(self.blocks))
        begin = (chunk * self.blocks + block - member * self.blocks) * _BLOCK
        return head * self.group + member, pl.ds(begin, _BLOCK)


class Operands(NamedTuple):
    """Arrays that the kernel reads, of n chunks of C, X = n C tokens."""

    key: jax.Array  # float16 [HN, D, any length], time last, zeros beyond its end; HN a multiple of H
    value: (
        jax.Array
    )  # float16 [HN, E, any length], times its decay up to the end of its chunk; E a multiple of 64
    carry: jax.Array  # float32 [H, n], the factor of the state over each chunk


def update(operands: Operands, *, call: configs.Call, reverse: bool = False):
    """Returns the states that the chunks read, and the state after each segment. Each segment begins at zero.

    reverse: whether the walk goes from the last chunk to the first. Keys and values are in the order of time, all else
        in that of the walk.

    Returns states float16 [H, n, 16, E, P], and the state after each segment, float32 [H, segments, 16, sections, E,
    P / sections]. Accumulates in float32; products of a key and a value are rounded to float16.
    """
    key, value, carry = operands
    (heads, chunks), head_dim = carry.shape, key.shape[1]
    config, layout, dtype, value_dim = call.config, layouts.Layout(head_dim), key.dtype, value.shape[1]
    order = Order(len(key) // heads, chunks, call.chunk // _BLOCK, reverse)
    segments, scalars, stages = config.segments, config.update_scalars, config.update_stages
    blocks, chunks_of_segment = order.group * order.blocks, -(-chunks // segments)
    groups_of_warpgroup = scalars // _WARPGROUPS
    pieces = _key_pieces(layout)

    def body(gmem, smem):
        head, segment = lax.axis_index("head"), lax.axis_index("segment")
        section, first_group = lax.axis_index("section"), lax.axis_index("group") * scalars
        first_row = section * layouts.TILE
        values = pl.ds(lax.axis_index("values") * _BLOCK, _BLOCK)
        columns = pl.ds(section * layout.section_width, layout.section_width)
        first_chunk = segment * chunks_of_segment
        count = jnp.minimum(chunks - first_chunk, chunks_of_segment)

        def copy():
            def copy_tokens(step, slot):
                # Keys of the section, values, and the scalars of every tile, for 64 tokens.
                index, block = lax.div(step, jnp.int32(blocks)), lax.rem(step, jnp.int32(blocks))
                row, tokens = order.place(head, first_chunk + index, block)
                full = smem["full"].at[slot]
                for begin, size in pieces:
                    rows = pl.ds(lax.rem(first_row + begin, head_dim), size)
                    piece = smem["key_smem"].at[slot, pl.ds(begin, size)]
                    plgpu.copy_gmem_to_smem(gmem["key"].at[row, rows, tokens], piece, full)
                plgpu.copy_gmem_to_smem(
                    gmem["value"].at[row, values, tokens], smem["value_smem"].at[slot], full
                )
                for n, tile in enumerate(layout.section):
                    rows = pl.ds(first_row + tile.begin + first_group, scalars)
                    scalar_smem = smem["scalar_smem"].at[slot, n]
                    plgpu.copy_gmem_to_smem(gmem["key"].at[row, rows, tokens], scalar_smem, full)

            ring.fill(count * blocks, stages, smem["free"], copy_tokens)

        def compute(warpgroup, core):
            first = warpgroup * groups_of_warpgroup
            groups = [first_group + first + n for n in range(groups_of_warpgroup)]
            store_smem = smem["store_smem"].at[warpgroup]

            def update_states(*accumulators):
                @pl.loop(jnp.int32(0), count)
                def _chunk(index):
                    # Store the state that the chunk's queries read.
                    for group, acc in zip(groups, accumulators):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        store_smem[...] = acc[...].astype(dtype)
                        plgpu.commit_smem()
                        state = gmem["states"].at[head, first_chunk + index, group, values, columns]
                        plgpu.copy_smem_to_gmem(store_smem, state)

                    # Decay it over the chunk.
                    decay = gmem["carry"][head, first_chunk + index]
                    for acc in accumulators:
                        acc[...] = acc[...] * decay

                    # Add the chunk's tokens.
                    @pl.loop(jnp.int32(0), jnp.int32(blocks))
                    def _block(block):
                        slot = ring.slot_of(index * blocks + block, stages)
                        plgpu.barrier_wait(smem["full"].at[slot])
                        key_smem = smem["key_smem"].at[slot]
                        scalar_smem = smem["scalar_smem"].at[slot, :, pl.ds(first, groups_of_warpgroup)]
                        value = plgpu.load(smem["value_smem"].at[slot], layout=plgpu.Layout.WGMMA)
                        for n, acc in enumerate(accumulators):
                            for m, tile in enumerate(layout.section):
                                scalar = plgpu.load(scalar_smem.at[m, n], layout=tensor_core.PER_COLUMN)
                                scaled = value * lax.broadcast_in_dim(scalar, value.shape, [1])
                                columns_of = acc.at[:, tile.offset : tile.offset + tile.width]
                                keys = key_smem.at[tile.begin : tile.begin + tile.width].T
                                # One product in flight while the next operand is made: straight-line code, so each
                                # has its own registers.
                                core.add(columns_of, scaled, keys, wait=1)
                        core.wait()
                        plgpu.barrier_arrive(smem["free"].at[slot])

                # The state after the segment.
                for group, acc in zip(groups, accumulators):
                    gmem["final"][head, segment, group, section, values] = acc[...]
                plgpu.wait_smem_to_gmem(0)

            core.accumulators(update_states, *[layout.section_width] * groups_of_warpgroup)

        return copy, compute

    tiles = len(layout.section)
    output = launch.launch(
        body,
        operands._asdict(),
        {
            "states": jax.ShapeDtypeStruct((heads, chunks, layouts.TILE, value_dim, layout.width), dtype),
            "final": jax.ShapeDtypeStruct(
                (heads, segments, layouts.TILE, layout.sections, value_dim, layout.section_width), jnp.float32
            ),
        },
        {
            "key_smem": tensor_core.operand((stages,), layout.section_rows, _BLOCK, dtype),
            "value_smem": tensor_core.operand((stages,), _BLOCK, _BLOCK, dtype),
            "scalar_smem": plgpu.SMEM((stages, tiles, scalars, _BLOCK), dtype),
            "store_smem": tensor_core.operand((_WARPGROUPS,), _BLOCK, layout.section_width, dtype),
            "full": plgpu.Barrier(num_arrivals=1 + len(pieces) + tiles, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
        },
        grid={
            "head": heads,
            "segment": segments,
            "values": value_dim // _BLOCK,
            "section": layout.sections,
            "group": layouts.TILE // scalars,
        },
        warpgroups=_WARPGROUPS,
        name="power_state_update",
        interpret=call.interpret,
        approximate=False,
    )
    return output["states"], output["final"]


def _key_pieces(layout):
    """Returns the (first, count) of the rows of keys in each copy.

    The windows of a section wrap around past the last index.
    """
    if layout.sections == 1:
        pieces = (0, layout.head_dim), (layout.head_dim, layout.section_rows - layout.head_dim)
        return tuple(piece for piece in pieces if piece[1])
    # A section wraps around at a position that depends on the section, but always between two tiles.
    return tuple((begin, layouts.TILE) for begin in range(0, layout.section_rows, layouts.TILE))
