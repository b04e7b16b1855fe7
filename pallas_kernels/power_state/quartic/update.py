"""The update at p = 4: states of plain monomials, carried along time in the accumulators of the tensor core.

A block has one unit of stacks (layout.py) of one head and runs over the chunks of one segment of time. With Y
the unit's block of y, S of a stack, 64 rows (scalar s, value e) and 48 columns, grows by

    S <- S + (V~^T * s) Y,

a product over 64 tokens. Its first operand, the values repeated for each scalar, is multiplied in registers along the
tokens by the scalar of the row. Before each chunk the block stores the state that the chunk's queries read, times the
multiplicities of its features. Then the state decays over the chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products, ring, warps
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.quartic import layout as layouts

__all__ = ["update"]

_BLOCK = configs.BLOCK
_CONSUMERS = 2
# Stacks in the accumulators of one warpgroup.
_MINE = layouts.UNIT // _CONSUMERS


def update(vector, scalars, value, carry, initial, weights, *, layout, config, chunk, dtype, interpret=None):
    """Returns the states that the chunks read, times their weights, and the plain state after each segment.

    vector: 16-bit [H, layout.rows, X], y of the keys with zeros in front, time last.
    scalars: 16-bit [H, layout.scalar_rows, X], the same products in the order of the scalars.
    value: 16-bit [H, 64, X], E rows repeated for each scalar of a stack, times their decay up to the end of their
    chunk.
    carry: float32 [H, n], the factor of the state over each of the n = X / chunk chunks.
    initial: float32 [H, segments, U, 64, 48], the state before the first chunk of each segment.
    weights: float32 [U, 64, 48], the factors of states when they are stored.

    Returns states [H, n, U, E, P] in `dtype`, the scalars of a stack side by side, and final float32 [H, segments, U,
    64, 48]. Accumulates in float32; products of a scalar and a value are rounded to the 16 bits of the operands.
    """
    heads, _, time = vector.shape
    chunks, segments, stages = time // chunk, initial.shape[1], config.update_stages
    lead = (stages,)
    stack = (_BLOCK, layouts.COLUMNS)
    rows = layouts.UNIT * layout.per_stack
    scratch = {
        "vector_smem": products.operand(lead, layouts.COLUMNS, _BLOCK, vector.dtype),
        "value_smem": products.operand(lead, _BLOCK, _BLOCK, value.dtype),
        "scalar_smem": plgpu.SMEM((*lead, rows, _BLOCK), scalars.dtype),
        "store_smem": products.operand((_CONSUMERS,), *stack, dtype),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
    }
    if interpret is not None:
        scratch["interpreted"] = [plgpu.SMEM((_CONSUMERS, *stack), jnp.float32)] * _MINE
    body = functools.partial(
        _body, layout=layout, segments=segments, stages=stages, chunk=chunk, chunks=chunks
    )
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((heads, chunks, layout.stacks, layout.value_dim, layout.width), dtype),
            jax.ShapeDtypeStruct((heads, segments, layout.stacks, *stack), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(heads, segments, len(layout.units)),
        grid_names=("head", "segment", "unit"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="power_state_quartic_update",
        interpret=interpret,
    )(vector, scalars, value, carry, initial, weights, jnp.asarray(layout.units.ravel()))


def _body(*refs, layout, segments, stages, chunk, chunks, interpreted=None, **smem):
    names = ("vector", "scalars", "value", "carry", "initial", "weights", "units", "states", "final")
    gmem = dict(zip(names, refs, strict=True))
    warpgroup = lax.axis_index("warpgroup")
    segment, unit = lax.axis_index("segment"), lax.axis_index("unit")
    per_segment = -(-chunks // segments)
    first_chunk = segment * per_segment
    place = {
        "head": lax.axis_index("head"),
        "segment": segment,
        "first_chunk": first_chunk,
        "count": jnp.minimum(chunks - first_chunk, per_segment),
        "stack": unit * layouts.UNIT + warpgroup * _MINE,
        "blocks": chunk // _BLOCK,
        "stages": stages,
    }

    @pl.when(warpgroup == _CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")
        head, full = place["head"], smem["full"]
        columns = pl.ds(gmem["units"][2 * unit] * layouts.COLUMNS, layouts.COLUMNS)
        rows = pl.ds(gmem["units"][2 * unit + 1], layouts.UNIT * layout.per_stack)

        def copy(step, slot):
            tokens = pl.ds(first_chunk * chunk + step * _BLOCK, _BLOCK)
            for name, source in (
                ("vector", gmem["vector"].at[head, columns, tokens]),
                ("scalar", gmem["scalars"].at[head, rows, tokens]),
                ("value", gmem["value"].at[head, :, tokens]),
            ):
                plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[slot], full.at[slot])

        ring.fill(place["count"] * place["blocks"], stages, smem["free"], copy)

    @pl.when(warpgroup < _CONSUMERS)
    def _consume():
        plgpu.set_max_registers(232, action="increase")
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        walk = functools.partial(_walk, gmem, smem, place, layout, warpgroup, held)
        products.with_accumulators(walk, [(_BLOCK, layouts.COLUMNS)] * _MINE, held)


def _walk(gmem, smem, place, layout, warpgroup, interpreted, *accumulators):
    """Updates one warpgroup's stacks over the chunks of a segment."""
    head, segment = place["head"], place["segment"]
    store_smem = smem["store_smem"].at[warpgroup]
    stacks = [place["stack"] + n for n in range(_MINE)]
    read = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
    for stack, acc in zip(stacks, accumulators):
        acc[...] = read(gmem["initial"].at[head, segment, stack])

    @pl.loop(jnp.int32(0), place["count"])
    def _chunk(index):
        for stack, acc in zip(stacks, accumulators):
            weighted = acc[...] * read(gmem["weights"].at[stack])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store_smem[...] = weighted.astype(store_smem.dtype)
            plgpu.commit_smem()
            state = gmem["states"].at[head, place["first_chunk"] + index, stack]
            for scalar in range(layout.per_stack):
                rows = store_smem.at[scalar * layout.value_dim : (scalar + 1) * layout.value_dim]
                columns = pl.ds(scalar * layouts.COLUMNS, layouts.COLUMNS)
                plgpu.copy_smem_to_gmem(rows, state.at[:, columns])

        decay = gmem["carry"][head, place["first_chunk"] + index]
        for acc in accumulators:
            acc[...] = acc[...] * decay

        @pl.loop(jnp.int32(0), jnp.int32(place["blocks"]))
        def _block(block):
            slot = ring.slot_of(index * place["blocks"] + block, place["stages"])
            plgpu.barrier_wait(smem["full"].at[slot])
            value = plgpu.load(smem["value_smem"].at[slot], layout=plgpu.Layout.WGMMA)
            vector = smem["vector_smem"].at[slot].T
            for n, acc in enumerate(accumulators):
                first = (warpgroup * _MINE + n) * layout.per_stack
                scalars = smem["scalar_smem"].at[slot, pl.ds(first, layout.per_stack)]
                scaled = value * warps.rows_of_warps(scalars, value.shape, interpreted is not None)
                # One product in flight while the next operand is made: straight-line code, so each has its registers.
                products.accumulate(acc, scaled, vector, interpreted, wait=1)
            if interpreted is None:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(smem["free"].at[slot])

    for stack, acc in zip(stacks, accumulators):
        gmem["final"][head, segment, stack] = acc[...]
    plgpu.wait_smem_to_gmem(0)
