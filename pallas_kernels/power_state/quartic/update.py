"""The update at p = 4: states of plain monomials, carried along time in the accumulators of the tensor core.

A block has one unit of stacks (layouts.py) of one head and runs over the chunks of one segment of time. With Y
the unit's block of y, S of a stack, 64 rows (scalar s, value e) and 48 columns, grows by

    S <- S + (V~^T * s) Y,

a product over 64 tokens. Its first operand, the values repeated for each scalar, is multiplied in registers along the
tokens by the scalar of the row. Before each chunk the block stores the state that the chunk's queries read, times the
multiplicities of its features. Then the state decays over the chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, ring, tensor_core
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.quartic import layouts

_BLOCK = configs.BLOCK
# Warpgroups that compute.
_WARPGROUPS = 2
# Stacks in the accumulators of one warpgroup.
_STACKS = layouts.UNIT // _WARPGROUPS


class Operands(NamedTuple):
    """Arrays that the kernel reads."""

    vector: jax.Array  # float16 [H, layout.rows, X], y of the keys with zeros in front, time last
    scalars: jax.Array  # float16 [H, layout.scalar_rows, X], the same products in the order of the scalars
    # float16 [H, 64, X], E rows repeated for each scalar of a stack, times their decay up to the end of their chunk
    value: jax.Array
    carry: jax.Array  # float32 [H, n], the factor of the state over each of the n chunks
    weights: jax.Array  # float32 [U, 64, 48], the factors of states when they are stored


def update(operands: Operands, *, call: configs.Call):
    """Returns the states that the chunks read, times their weights, and the plain state after each segment.

    Each segment begins at zero.

    Returns states float16 [H, n, U, E, P], the scalars of a stack side by side, and final float32 [H, segments, U, 64,
    48]. Accumulates in float32; products of a scalar and a value are rounded to float16.
    """
    config, layout = call.config, layouts.Layout(call.config.head_dim, call.config.value_dim)
    (heads, chunks), time = operands.carry.shape, operands.value.shape[2]
    chunk, segments, stages = time // chunks, config.segments, config.update_stages
    chunks_of_segment, blocks = -(-chunks // segments), chunk // _BLOCK
    per_stack, scalars_of_unit = layout.per_stack, layouts.UNIT * layout.per_stack
    stack_shape = (_BLOCK, layouts.COLUMNS)

    def body(gmem, smem):
        head, segment, unit = (lax.axis_index(name) for name in ("head", "segment", "unit"))
        first_chunk = segment * chunks_of_segment
        count = jnp.minimum(chunks - first_chunk, chunks_of_segment)

        def copy():
            columns = pl.ds(gmem["units"][2 * unit] * layouts.COLUMNS, layouts.COLUMNS)
            rows = pl.ds(gmem["units"][2 * unit + 1], scalars_of_unit)

            def copy_tokens(step, slot):
                tokens = pl.ds(first_chunk * chunk + step * _BLOCK, _BLOCK)
                for name, source in (
                    ("vector", gmem["vector"].at[head, columns, tokens]),
                    ("scalar", gmem["scalars"].at[head, rows, tokens]),
                    ("value", gmem["value"].at[head, :, tokens]),
                ):
                    plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[slot], smem["full"].at[slot])

            ring.fill(count * blocks, stages, smem["free"], copy_tokens)

        def compute(warpgroup, core):
            store_smem = smem["store_smem"].at[warpgroup]
            first_stack = unit * layouts.UNIT + warpgroup * _STACKS
            stacks = [first_stack + n for n in range(_STACKS)]

            def load(ref):
                return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)

            def update_states(*accumulators):
                @pl.loop(jnp.int32(0), count)
                def _chunk(index):
                    # Store the state that the chunk's queries read.
                    for stack, acc in zip(stacks, accumulators):
                        weighted = acc[...] * load(gmem["weights"].at[stack])
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        store_smem[...] = weighted.astype(store_smem.dtype)
                        plgpu.commit_smem()
                        state = gmem["states"].at[head, first_chunk + index, stack]
                        for scalar in range(per_stack):
                            rows = store_smem.at[scalar * layout.value_dim : (scalar + 1) * layout.value_dim]
                            columns = pl.ds(scalar * layouts.COLUMNS, layouts.COLUMNS)
                            plgpu.copy_smem_to_gmem(rows, state.at[:, columns])

                    # Decay it over the chunk.
                    decay = gmem["carry"][head, first_chunk + index]
                    for acc in accumulators:
                        acc[...] = acc[...] * decay

                    # Add the chunk's tokens.
                    @pl.loop(jnp.int32(0), jnp.int32(blocks))
                    def _block(block):
                        slot = ring.slot_of(index * blocks + block, stages)
                        plgpu.barrier_wait(smem["full"].at[slot])
                        value = plgpu.load(smem["value_smem"].at[slot], layout=plgpu.Layout.WGMMA)
                        vector = smem["vector_smem"].at[slot].T
                        for n, acc in enumerate(accumulators):
                            first = (warpgroup * _STACKS + n) * per_stack
                            scalars = smem["scalar_smem"].at[slot, pl.ds(first, per_stack)]
                            scaled = value * core.load_row_per_warp(scalars, value.shape)
                            # One product in flight while the next operand is made: straight-line code, so each has its
                            # registers.
                            core.add(acc, scaled, vector, wait=1)
                        core.wait()
                        plgpu.barrier_arrive(smem["free"].at[slot])

                # The state after the segment.
                for stack, acc in zip(stacks, accumulators):
                    gmem["final"][head, segment, stack] = acc[...]
                plgpu.wait_smem_to_gmem(0)

            core.accumulators(update_states, *[layouts.COLUMNS] * _STACKS)

        return copy, compute

    output = launch.launch(
        body,
        operands._asdict() | {"units": jnp.asarray(layout.units.ravel())},
        {
            "states": jax.ShapeDtypeStruct(
                (heads, chunks, layout.stacks, layout.value_dim, layout.width), jnp.float16
            ),
            "final": jax.ShapeDtypeStruct((heads, segments, layout.stacks, *stack_shape), jnp.float32),
        },
        {
            "vector_smem": tensor_core.operand((stages,), layouts.COLUMNS, _BLOCK, jnp.float16),
            "value_smem": tensor_core.operand((stages,), _BLOCK, _BLOCK, jnp.float16),
            "scalar_smem": plgpu.SMEM((stages, scalars_of_unit, _BLOCK), jnp.float16),
            "store_smem": tensor_core.operand((_WARPGROUPS,), *stack_shape, jnp.float16),
            "full": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
        },
        grid={"head": heads, "segment": segments, "unit": len(layout.units)},
        warpgroups=_WARPGROUPS,
        name="power_state_quartic_update",
        interpret=call.interpret,
        approximate=False,
    )
    return output["states"], output["final"]
