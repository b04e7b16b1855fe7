"""Gradients of keys and values through in-window queries, for any power.

A block has some warpgroups of 64 consecutive keys of one chunk. Queries come in blocks of 64 through a ring: for every
query head of the group, the blocks that attend to any of the keys. With s = k . q, gamma the decay from the key to the
query, and dout the gradient of its output, a warpgroup adds

    dv += sum p dout,    p = gamma s^power inverse,
    dk += sum x q,       x = gamma s^(power - 1) inverse (dout . v - delta).

dk is thus 1 / power of the gradient; the code that rounds it multiplies by power. Computed operands are split into two
bfloat16.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import results, ring, tensor_core
from pallas_kernels.power_state import configs

_BLOCK = configs.BLOCK
# Columns of an accumulator of which each thread has two next to each other.
_EIGHT = 8
# Blocks of 64 queries in flight.
STAGES = 2
# Copies that fill a slot of the ring.
COPIES = 3


class Columns(NamedTuple):
    """Vectors of queries, in the order in which the kernels take them."""

    inverse: jax.Array  # 1 / the sum of weights, 0 where that is 0
    delta: jax.Array  # product of dout and output
    # Running sums of base-2 logarithms of decays in the query's chunk.
    coarse: jax.Array
    fine: jax.Array
    # Decay from the first query of the block of 64, over the sum of weights.
    from_first: jax.Array

    @classmethod
    def of(cls, inverse, delta, coarse, fine):
        """Returns the vectors [..., X] of queries, given all but the last."""
        blocks = *inverse.shape[:-1], -1, _BLOCK
        from_first = (x.reshape(blocks) - x.reshape(blocks)[..., :1] for x in (coarse, fine))
        return cls(inverse, delta, coarse, fine, inverse * jnp.exp2(sum(from_first)).reshape(inverse.shape))


class Span(NamedTuple):
    """Range of blocks of 64 queries that attend to given keys, as indices among all blocks.

    begin: the first that attends to the keys of any warpgroup; own: the first for the keys of this warpgroup; inner:
    the first that attends to all its keys; chunk: the first of the keys' own chunk; end: after the last.
    """

    begin: jax.Array
    own: jax.Array
    inner: jax.Array
    chunk: jax.Array
    end: jax.Array

    @classmethod
    def of_keys(cls, index, block, warpgroup, chunks, call: configs.Call):
        """Returns the span of the keys from the padded block `block` of 64, in chunk `index`; `chunks` of queries."""
        blocks = call.chunk // _BLOCK
        end = jnp.minimum((index + 1) * blocks, chunks * blocks)
        first = block - call.exact_window // _BLOCK
        begin, own, inner = (jnp.clip(first + n, 0, end) for n in (0, warpgroup, warpgroup + 1))
        return cls(begin, own, inner, index * blocks, end)

    @property
    def count(self):
        """Number of blocks of one head that the block reads."""
        return self.end - self.begin


def scratch(head_dim, value_dim, dtype, count, slices=None):
    """Returns the shared memory of the ring by name, for `count` warpgroups.

    `slices` of queries as in `tensor_core.operand`.
    """
    return {
        "query_smem": tensor_core.operand((STAGES,), _BLOCK, head_dim, dtype, slices),
        "dout_smem": tensor_core.operand((STAGES,), _BLOCK, value_dim, dtype),
        "column_smem": plgpu.SMEM((STAGES, len(Columns._fields), _BLOCK), jnp.float32),
        "query_full": plgpu.Barrier(num_arrivals=COPIES, num_barriers=STAGES),
        "query_free": plgpu.Barrier(num_arrivals=count, num_barriers=STAGES),
    }


class Queries:
    """Ring of the blocks of 64 queries that attend to keys, for all heads of their group.

    smem: as `scratch` returns it. groups: number of query heads for the key head. first: number of other steps that
    precede the queries in their ring.
    """

    def __init__(self, smem, span: Span, groups: int, first=0):
        self._smem, self._span, self._groups, self._first = smem, span, groups, first

    def copy(self, gmem, key_head):
        """Fills the ring with the queries that attend to keys of any warpgroup; returns when all have been read.

        gmem: "query" bfloat16 [HN, at least T, D], zeros beyond its end, "dout" bfloat16 [B, T, N, E] and "columns"
        float32 [H groups, X / 64, 5, 64] in the order of Columns.
        """
        smem, span, first = self._smem, self._span, self._first

        def copy(step, slot):
            head = key_head * self._groups + lax.div(step - first, span.count)
            block = span.begin + lax.rem(step - first, span.count)
            full = smem["query_full"].at[slot]
            query = gmem["query"].at[head, pl.ds(block * _BLOCK, _BLOCK)]
            dout = results.block(gmem["dout"], head, block * _BLOCK)
            plgpu.copy_gmem_to_smem(query, smem["query_smem"].at[slot], full)
            plgpu.copy_gmem_to_smem(dout, smem["dout_smem"].at[slot], full)
            plgpu.copy_gmem_to_smem(gmem["columns"].at[head, block], smem["column_smem"].at[slot], full)

        ring.fill(first + self._groups * span.count, STAGES, smem["query_free"], copy, first)

    def read(self, core, dkey, dvalue, own, power):
        """Adds to the accumulators dkey [64, D] and dvalue [64, E]; returns sum p (dout . v - delta), float32 [64].

        Either accumulator may be None. Without dkey the sum is zero, and "value_smem" is not read.
        own: the warpgroup's "key_smem" and "value_smem", bfloat16 [64, D] and [64, E], and "decay_smem", float32
        [4, 64], the keys' decays as running sums of logarithms, coarse and fine, first in the frame of their own chunk
        and then of the previous chunk. `power` is 2 or 4.
        """
        smem, span = self._smem, self._span

        def head(index, total):
            before = self._first + index * span.count - span.begin

            @pl.loop(span.begin, span.own)
            def _pass(block):
                # Blocks that attend only to earlier keys are skipped: free their slot as soon as it is full.
                slot = ring.slot_of(before + block, STAGES)
                plgpu.barrier_wait(smem["query_full"].at[slot])
                plgpu.barrier_arrive(smem["query_free"].at[slot])

            # At most one diagonal block.
            step = functools.partial(add_block, before)
            total = lax.fori_loop(span.own, span.inner, functools.partial(step, diagonal=True), total)
            return lax.fori_loop(span.inner, span.end, functools.partial(step, diagonal=False), total)

        def add_block(before, block, total, diagonal):
            slot = ring.slot_of(before + block, STAGES)
            # Running sums of queries of the previous chunk start at another position.
            frame = jnp.where(block < span.chunk, 2, 0)
            decays = [
                plgpu.load(own["decay_smem"].at[frame + n], layout=tensor_core.PER_ROW) for n in range(2)
            ]
            # Always zero, but computed: with a constant the compiler would keep the mask's indices in registers
            # throughout.
            shift = (block - span.own) * _BLOCK if diagonal else None
            plgpu.barrier_wait(smem["query_full"].at[slot])
            if not diagonal:
                # Only the diagonal block needs an exponential for each pair: elsewhere, a decay is that from the key to
                # the first query of the block, times that from there to the query.
                indices = Columns._fields.index("coarse"), Columns._fields.index("fine")
                coarse, fine = (
                    smem["column_smem"][slot, n, 0] - x for n, x in zip(indices, decays, strict=True)
                )
                decays = jnp.exp2(coarse + fine)
            # With gradients as large as that of keys of 128, registers suffice for half a block at a time.
            width = _BLOCK // 2 if dkey is not None and dkey.shape[1] == 128 else _BLOCK
            for begin in range(0, _BLOCK, width):
                seen = pl.ds(begin, width)
                query, dout = (smem[name].at[slot, seen] for name in ("query_smem", "dout_smem"))
                columns = Columns(
                    *(smem["column_smem"].at[slot, n, seen] for n in range(len(Columns._fields)))
                )
                part = None if shift is None else shift - begin
                total = total + add_tile(query, dout, columns, decays, part)
            plgpu.barrier_arrive(smem["query_free"].at[slot])
            return total

        def add_tile(query, dout, columns, decays, shift):
            # Query j is visible to key row i when j >= i + shift, or always if shift is None. decays: of key rows, the
            # two parts of running sums, or, if shift is None, the decay to the first query of the block.
            shape = (_BLOCK, query.shape[0])
            scores = core.product(own["key_smem"], query)

            def along_rows(column):
                return lax.broadcast_in_dim(plgpu.load(column, layout=tensor_core.PER_COLUMN), shape, [1])

            if shift is None:
                lower = scores * (lax.broadcast_in_dim(decays, shape, [0]) * along_rows(columns.from_first))
            else:
                coarse, fine = (lax.broadcast_in_dim(decay, shape, [0]) for decay in decays)
                between = along_rows(columns.coarse) - coarse
                between += along_rows(columns.fine) - fine
                lower = scores * jnp.exp2(_masked(between, shift)) * along_rows(columns.inverse)
            if power > 2:
                lower = lower * lax.integer_pow(scores, power - 2)
            # If there are enough registers, products stay in flight; in straight-line code their operands keep their
            # registers.
            last = 0 if sum(x.shape[1] for x in (dkey, dvalue) if x is not None) > 128 else 1
            if dvalue is not None:
                for part in tensor_core.split(lower * scores):
                    core.add(dvalue, part, dout, wait=last)
            total = 0.0
            if dkey is not None:
                dweights = core.product(own["value_smem"], dout)
                lower = lower * (dweights - along_rows(columns.delta))
                total = (lower * scores).sum(1)
                for part in tensor_core.split(lower):
                    core.add(dkey, part, query, wait=1)
            core.wait()
            return total

        zeros = plgpu.layout_cast(jnp.zeros((_BLOCK,), jnp.float32), tensor_core.PER_ROW)
        return lax.fori_loop(jnp.int32(0), jnp.int32(self._groups), head, zeros)


def _masked(between, shift):
    """Returns between [64, N], set to -1e4 where a column's query is before its row's key plus `shift`."""
    whole = between.shape[1] == _BLOCK
    shape = between.shape if whole else (_BLOCK, _EIGHT)
    row, position = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    if whole:
        return jnp.where(position >= row + shift, between, -1e4)
    # To save registers, use only the distance: otherwise the positions of all columns would stay in registers.
    distance = row - position + shift
    tiles = [
        jnp.where(distance <= begin, between[:, begin : begin + _EIGHT], -1e4)
        for begin in range(0, between.shape[1], _EIGHT)
    ]
    return jnp.concatenate(tiles, 1)
