"""From-state contributions to the gradients of 64 vectors at p = 4, from a state of degree-4 monomials.

With x a query, or a key, y its products of two entries, u its cotangent, or value, and S [E, 48] the state of one
scalar s and one block b of y (layouts.py), f = sum of y_s y_b S^T u, and

    T = S y_b                        one product for several scalars, S of each below the other,
    dy_b += sum_s (y_s u) S          a product whose depth is scalars times values,
    dy_s += u . T                    elementwise,
    du += y_s T                      elementwise: y_s y_b S^T is what the forward pass computes from the state.

As y_c = x_i x_j of two selections of entries, dx += (dy_c x_j) P_i^T + (dy_c x_i) P_j^T, by 16 scalars or a block of 48
at a time; P is the matrix of ones that selects entries. The selections of x are exact, and dy_c x_j is split into two
bfloat16. Neither dy nor any other array of the size of y is therefore written.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import ring, tensor_core
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.quartic import layouts

_BLOCK = configs.BLOCK
# Blocks of y in flight: each is used until all its scalars are processed.
_VECTOR_STAGES = 2
_SCALARS, _COLUMNS = layouts.SCALARS, layouts.SCALAR_COLUMNS


def stacks(layout):
    """Returns the number of stacks per step."""
    return _SCALARS // layout.per_stack


def tables(layout):
    """Returns the constants of the kernels, by name.

    steps: int32 [3 blocks]. block_pairs: bfloat16 [blocks, 2 D, 48], and scalar_pairs: bfloat16 [scalar_rows / 12, 2 D,
    16], the matrices that select the first and the second index of each product.
    """
    low, high = layouts.pairs(layout.head_dim)
    before = layout.rows - layout.products
    block = _selections(low, high, before, 0, layout).reshape(-1, layout.blocks, layouts.COLUMNS)
    after = layout.scalar_rows - layout.products
    scalar = _selections(*layout.scalars.T, 0, after, layout).reshape(
        -1, layout.scalar_rows // _SCALARS, _SCALARS
    )
    scalar = np.pad(scalar, [(0, 0), (0, 0), (0, _COLUMNS - _SCALARS)])
    return {
        "steps": jnp.asarray(layout.steps(stacks(layout)).ravel()),
        "block_pairs": jnp.asarray(np.swapaxes(block, 0, 1), jnp.bfloat16),
        "scalar_pairs": jnp.asarray(np.swapaxes(scalar, 0, 1), jnp.bfloat16),
    }


def _selections(low, high, before, after, layout):
    """Returns two stacked matrices, [2 D, products], that select the first and second index of each product.

    Each column of a matrix has a single one.
    """
    both = np.concatenate([np.arange(layout.head_dim)[:, None] == index for index in (low, high)])
    return np.pad(both, [(0, 0), (before, after)]).astype(np.float32)


def scratch(layout, count, stages):
    """Returns the shared memory by name, for `count` warpgroups and `stages` steps in flight."""
    return {
        "vector_smem": tensor_core.operand((_VECTOR_STAGES, count), _BLOCK, layouts.COLUMNS, jnp.float16),
        "block_pairs_smem": tensor_core.operand(
            (_VECTOR_STAGES,), 2 * layout.head_dim, layouts.COLUMNS, jnp.bfloat16
        ),
        "scalar_smem": plgpu.SMEM((stages, _SCALARS, count * _BLOCK), jnp.float16),
        "scalar_pairs_smem": tensor_core.operand((stages,), 2 * layout.head_dim, _COLUMNS, jnp.bfloat16),
        "state_smem": tensor_core.operand(
            (stages, layout.per_stack), stacks(layout) * layout.value_dim, layouts.COLUMNS, jnp.float16
        ),
        "vector_full": plgpu.Barrier(num_arrivals=count + 1, num_barriers=_VECTOR_STAGES),
        "vector_free": plgpu.Barrier(num_arrivals=count, num_barriers=_VECTOR_STAGES),
        "state_full": plgpu.Barrier(num_arrivals=layout.per_stack + 2, num_barriers=stages),
        "state_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
    }


class Vectors(NamedTuple):
    """Position of a thread block's vectors and of the state that they read."""

    head: jax.Array
    token: jax.Array  # of the first vector
    state_head: jax.Array
    state: jax.Array
    blocks: jax.Array  # number of blocks of y to read

    def tokens_of(self, warpgroup):
        """Returns the tokens of a warpgroup."""
        return pl.ds(self.token + warpgroup * _BLOCK, _BLOCK)


class States:
    """Rings of blocks of y, and of the steps that need each: stacks of states, scalars, and selections of entries.

    gmem: "vector" [.., X, rows], "scalars" [.., scalar_rows, X], "states" [.., .., U E, P], and `tables`. smem: as
    `scratch` returns it.
    """

    def __init__(self, gmem, smem, vectors: Vectors, layout):
        self._gmem, self._smem, self._vectors, self._layout = gmem, smem, vectors, layout
        self._stages = smem["state_smem"].shape[0]

    def copy(self, count):
        """Copies each block of y, then its steps, for `count` warpgroups.

        The last steps may not have been read yet when it returns; `drain` waits for them.
        """
        gmem, smem, vectors, layout = self._gmem, self._smem, self._vectors, self._layout
        tall = stacks(layout) * layout.value_dim

        def copy_block(block, slot):
            full = smem["vector_full"].at[slot]
            columns = pl.ds(block * layouts.COLUMNS, layouts.COLUMNS)
            for n in range(count):
                source = gmem["vector"].at[vectors.head, vectors.tokens_of(n), columns]
                plgpu.copy_gmem_to_smem(source, smem["vector_smem"].at[slot, n], full)
            plgpu.copy_gmem_to_smem(gmem["block_pairs"].at[block], smem["block_pairs_smem"].at[slot], full)
            stack, steps, before = (gmem["steps"][3 * block + n] for n in range(3))

            def copy_step(step, slot):
                index, full = step - before, smem["state_full"].at[slot]
                rows = pl.ds(stack * layout.value_dim + index * tall, tall)
                states = gmem["states"].at[vectors.state_head, vectors.state, rows]
                for n in range(layout.per_stack):
                    source = states.at[:, pl.ds(n * layouts.COLUMNS, layouts.COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, smem["state_smem"].at[slot, n], full)
                tokens = pl.ds(vectors.token, count * _BLOCK)
                source = gmem["scalars"].at[vectors.head, pl.ds(index * _SCALARS, _SCALARS), tokens]
                plgpu.copy_gmem_to_smem(source, smem["scalar_smem"].at[slot], full)
                source = gmem["scalar_pairs"].at[index]
                plgpu.copy_gmem_to_smem(source, smem["scalar_pairs_smem"].at[slot], full)

            @pl.loop(before, before + steps)
            def _step(step):
                ring.put(step, self._stages, smem["state_free"], copy_step)

        @pl.loop(jnp.int32(0), vectors.blocks)
        def _block(block):
            ring.put(block, _VECTOR_STAGES, smem["vector_free"], copy_block)

    def drain(self):
        """Waits until everything that `copy` copied has been read."""
        smem, blocks = self._smem, self._vectors.blocks
        total = int(self._layout.steps(stacks(self._layout))[:, 1].sum())
        ring.drain(blocks, _VECTOR_STAGES, smem["vector_free"])
        ring.drain(jnp.where(blocks > 0, total, 0), self._stages, smem["state_free"])

    def read(self, core, warpgroup, x_smem, value, gradients, together):
        """Adds dx [64, D] and du [64, E] to the two `gradients`, of which the latter may be None.

        x_smem: bfloat16 [64, D], an operand; dx is proportional to it. value: float32 [64, E], u, scaled to fit the 16
        bits of states. together: number of scalars whose T is in registers at a time, each from another stack.
        """
        smem, layout, table = self._smem, self._layout, self._gmem["steps"]
        gradient, value_gradient = gradients
        own_rows = pl.ds(warpgroup * _BLOCK, _BLOCK)

        def read_step(dy, vector, scalars, states):
            # Adds the contribution of a step's scalars to dy [64, 48]; returns their own gradients, [64, 16].
            width, shape = layout.value_dim, (_BLOCK, _COLUMNS)
            narrow = value.astype(vector.dtype)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            dscalars = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            for position in range(layout.per_stack):
                for first in range(0, stacks(layout), together):
                    state = states.at[position, first * width : (first + together) * width]
                    indices = [(first + n) * layout.per_stack + position for n in range(together)]
                    factors = [plgpu.load(scalars.at[index], layout=tensor_core.PER_ROW) for index in indices]
                    operands = [
                        narrow * lax.broadcast_in_dim(factor, narrow.shape, [0]) for factor in factors
                    ]
                    # Straight-line code: the operand of the product in flight keeps its registers.
                    core.add(dy, jnp.concatenate(operands, 1), state, wait=1)
                    means = core.product(vector, state)
                    for n, (index, factor) in enumerate(zip(indices, factors, strict=True)):
                        mean = means[:, n * width : (n + 1) * width]
                        total = lax.broadcast_in_dim((mean * value).sum(1), shape, [0])
                        dscalars = jnp.where(column == index, total, dscalars)
                        if value_gradient is not None:
                            factor = lax.broadcast_in_dim(factor.astype(jnp.float32), mean.shape, [0])
                            value_gradient[...] = value_gradient[...] + factor * mean
            return dscalars

        def contract(dy, pairs_smem):
            # Adds the gradient of x, given that of its products of two entries, float32 [64, columns].
            head_dim = x_smem.shape[1]
            # In registers, since the two operands differ in swizzle.
            x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
            low, high = (pairs_smem.at[n * head_dim : (n + 1) * head_dim] for n in range(2))

            def select(first, second):
                core.add(first, x, low, wait=1)
                core.add(second, x, high)
                return first[...], second[...]

            first, second = core.accumulators(select, dy.shape[1], dy.shape[1])
            for factor, selection in ((second, low), (first, high)):
                for part in tensor_core.split(dy * factor):
                    core.add(gradient, part, selection.T)

        @pl.loop(jnp.int32(0), self._vectors.blocks)
        def _block(block):
            block_slot = ring.slot_of(block, _VECTOR_STAGES)
            plgpu.barrier_wait(smem["vector_full"].at[block_slot])
            before = table[3 * block + 2]

            def read_block(dy):
                vector = smem["vector_smem"].at[block_slot, warpgroup]
                if layout.value_dim == 16 or (layout.head_dim == 32 and together < 3):
                    # With few values, products are too short to read it from shared memory each time. If two scalars at
                    # a time leave registers for it, reading it there would need more registers for addresses.
                    vector = plgpu.load(vector, layout=plgpu.Layout.WGMMA)

                @pl.loop(before, before + table[3 * block + 1])
                def _step(step):
                    slot = ring.slot_of(step, self._stages)
                    plgpu.barrier_wait(smem["state_full"].at[slot])
                    scalars = smem["scalar_smem"].at[slot, :, own_rows]
                    dscalars = read_step(dy, vector, scalars, smem["state_smem"].at[slot])
                    contract(dscalars, smem["scalar_pairs_smem"].at[slot])
                    plgpu.barrier_arrive(smem["state_free"].at[slot])

                return dy[...]

            dy = core.accumulators(read_block, layouts.COLUMNS)
            contract(dy, smem["block_pairs_smem"].at[block_slot])
            plgpu.barrier_arrive(smem["vector_free"].at[block_slot])


def load(x_smem):
    """Returns the rows of a warpgroup, float32 [64, columns]."""
    return plgpu.load(x_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
