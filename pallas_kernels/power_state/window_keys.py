"""In-window keys of a block of query rows: those of the window, and those of its chunk up to each row.

Sums over their values, and the gradient of the queries through them.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import results, ring, tensor_core
from pallas_kernels.power_state import configs

_BLOCK = configs.BLOCK
# Keys whose gradients of weights are computed at a time.
_SLICE = 16


def scratch(operands, count, call: configs.Call):
    """Returns the shared memory of the ring of keys by name, for `count` warpgroups.

    operands: with `key` and `value` of `preparation.Chunks` and, as `decay`, `decays.Decays.of_keys`.
    """
    key, value, stages = operands.key, operands.value, call.config.key_stages
    # Decays are factored (`_Factors`) except at D = 128, where products take longer than exponentials, and where a
    # chunk is the rows of one thread block: its loop is unrolled, and registers would spill.
    factored = key.shape[-1] <= _BLOCK and call.chunk > count * _BLOCK
    to_last = {"to_last_smem": plgpu.SMEM((stages, _BLOCK), jnp.float32)} if factored else {}
    return to_last | {
        "decay_smem": plgpu.SMEM((2, *operands.decay.shape[3:]), jnp.float32),
        "key_smem": tensor_core.operand((stages,), _BLOCK, key.shape[-1], key.dtype),
        "value_smem": tensor_core.operand((stages,), _BLOCK, value.shape[-1], value.dtype),
        "key_full": plgpu.Barrier(num_arrivals=2 + factored, num_barriers=stages),
        "key_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
    }


class Keys:
    """Ring of the blocks of 64 keys that are visible to the rows of a thread block.

    gmem: "key", "value" and "decay", as in `scratch`, which returns smem.
    first: number of other steps that precede the keys in their ring.
    """

    def __init__(self, gmem, smem, tile, count, call: configs.Call, first=0):
        self._gmem, self._smem, self._tile = gmem, smem, tile
        self._count, self._chunk, self._window, self._first = count, call.chunk, call.exact_window, first
        self._stages = smem["key_smem"].shape[0]
        self._to_last = smem.get("to_last_smem")

    @property
    def copies(self):
        """Number of copies that fill a slot of the ring."""
        return 2 if self._to_last is None else 3

    def copy_decays(self, ready):
        """Copies the running sums of decays."""
        decays = self._gmem["decay"].at[self._tile.key_head, self._tile.chunk, pl.ds(0, 2)]
        plgpu.copy_gmem_to_smem(decays, self._smem["decay_smem"], ready)

    def copy(self):
        """Copies the keys and values that are visible to any row; returns when all have been read."""
        tile, smem = self._tile, self._smem

        def copy(step, slot):
            block, full = step - self._first, smem["key_full"].at[slot]
            begin = tile.chunk * self._chunk + block * _BLOCK - self._window
            for name in ("key", "value"):
                source = results.block(self._gmem[name], tile.key_head, begin)
                plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[slot], full)
            if self._to_last is not None:
                source = self._gmem["decay"].at[tile.key_head, tile.chunk, 2, block]
                plgpu.copy_gmem_to_smem(source, self._to_last.at[slot], full)

        count = self._visible(self._count - 1) + self._first
        ring.fill(count, self._stages, smem["key_free"], copy, self._first)

    def add_values(self, core, acc, query_smem, denominator, warpgroup, power):
        """Adds the weighted values of the keys to acc; returns the denominator with the keys' weights added.

        `power` is a power of two.
        """

        def step(total, key_smem, value_smem, decays):
            scores = core.product(query_smem, key_smem)
            for _ in range(power.bit_length() - 1):
                scores = scores * scores
            weights = decays.of_rows(scores) * decays.of_pairs(0, scores.shape[1])
            for part in tensor_core.split(weights):
                core.add(acc, part, value_smem)
            return total + weights.sum(1)

        return self._fold(step, denominator, warpgroup)

    def add_gradient(self, core, acc, rows, warpgroup, power):
        """Adds sum_j x_ij k_j to acc [64, D]; returns sum_j x_ij s_ij, float32 [64].

        With s_ij = q_i . k_j, gamma_ij the decay from key to row, and for each row its cotangent dO_i and delta_i =
        dO_i . o_i, the gradient is

            dq_i den_i = power sum_j x_ij k_j,   x_ij = gamma_ij s_ij^(power-1) (dO_i . v_j - delta_i).

        acc is thus dq den / power, and the result is the sum over j of the gradient with respect to the logarithm of
        gamma_ij, times den. x is computed in float32 and split into two bfloat16 operands, like weights.

        rows: query() [64, D] and dout [64, E], bfloat16 operands, in shared memory or registers, and delta, float32
        [64], in the layout of sums over columns. `power` is at least 2.
        """
        query, dout, delta = rows

        def step(total, key_smem, value_smem, decays):
            scores, dweights = core.products((query(), key_smem), (dout, value_smem))
            shift = decays.of_rows(delta)
            # A few columns at a time, to save registers.
            highs, lows, sums = [], [], 0.0
            for begin in range(0, key_smem.shape[0], _SLICE):
                s, dweight = (x[:, begin : begin + _SLICE] for x in (scores, dweights))
                factor = decays.of_pairs(begin, _SLICE) * s
                for _ in range(power - 2):
                    factor = factor * s
                factor = factor * (decays.of_rows(dweight) - lax.broadcast_in_dim(shift, s.shape, [0]))
                high, low = tensor_core.split(factor)
                highs.append(high)
                lows.append(low)
                sums += factor * s
            # Straight-line code, so that each operand has its own registers until both products are done.
            core.add(acc, jnp.concatenate(highs, 1), key_smem, wait=1)
            core.add(acc, jnp.concatenate(lows, 1), key_smem)
            return total + sums.sum(1)

        zeros = plgpu.layout_cast(jnp.zeros(delta.shape, jnp.float32), tensor_core.PER_ROW)
        return self._fold(step, zeros, warpgroup)

    def _fold(self, step, carry, warpgroup):
        """Runs carry = step(carry, key_smem, value_smem, decays) for each block that is visible to a warpgroup's rows.

        decays: those from the 64 keys of the block to the 64 rows, as a factor of each row times one of each pair.
        decays.of_rows(x) multiplies x float32 [64], or [64, n], by the former; decays.of_pairs(begin, width) returns
        the latter for `width` keys from `begin` on, float32 [64, width].
        """
        smem, last = self._smem, self._visible(warpgroup) - 1
        rows = [
            plgpu.load(smem["decay_smem"].at[part, last], layout=tensor_core.PER_ROW) for part in range(2)
        ]

        def step_of(index, carry, diagonal):
            slot = ring.slot_of(index + self._first, self._stages)
            plgpu.barrier_wait(smem["key_full"].at[slot])
            sums = smem["decay_smem"].at[:, index]
            if diagonal or self._to_last is None:
                decays = _Exponentials(rows, sums, diagonal)
            else:
                decays = _Factors(rows, sums, self._to_last.at[slot])
            carry = step(carry, smem["key_smem"].at[slot], smem["value_smem"].at[slot], decays)
            plgpu.barrier_arrive(smem["key_free"].at[slot])
            return carry

        carry = lax.fori_loop(jnp.int32(0), last, functools.partial(step_of, diagonal=False), carry)
        carry = step_of(last, carry, diagonal=True)

        @pl.loop(last + 1, self._visible(self._count - 1))
        def _pass(index):
            # Blocks that are visible only to later rows are skipped: free their slot as soon as it is full.
            slot = ring.slot_of(index + self._first, self._stages)
            plgpu.barrier_wait(smem["key_full"].at[slot])
            plgpu.barrier_arrive(smem["key_free"].at[slot])

        return carry

    def _visible(self, warpgroup):
        """Returns the number of blocks visible to a warpgroup: of the window, of earlier rows, and its own."""
        return self._tile.block + warpgroup + self._window // _BLOCK + 1


class _Exponentials:
    """Decays with an exponential for each pair; in the diagonal block, zero where a key is later than the row."""

    def __init__(self, rows, sums, diagonal):
        self._rows, self._sums, self._diagonal = rows, sums, diagonal

    def of_rows(self, x):
        return x

    def of_pairs(self, begin, width):
        shape, columns = (_BLOCK, width), pl.ds(begin, width)
        coarse, fine = (
            lax.broadcast_in_dim(row, shape, [0])
            - lax.broadcast_in_dim(
                plgpu.load(self._sums.at[part, columns], layout=tensor_core.PER_COLUMN), shape, [1]
            )
            for part, row in enumerate(self._rows)
        )
        if not self._diagonal:
            return jnp.exp2(coarse + fine)
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
        )
        return jnp.exp2(jnp.where(row >= column + begin, coarse + fine, -1e4))


class _Factors:
    """Decays from an earlier block, without an exponential for each pair.

    A decay is that from the key to the last one of its block, times that from there to the row.
    """

    def __init__(self, rows, sums, to_last):
        coarse, fine = (row - sums[part, _BLOCK - 1] for part, row in enumerate(rows))
        self._from_last, self._to_last = jnp.exp2(coarse + fine), to_last

    def of_rows(self, x):
        return x * lax.broadcast_in_dim(self._from_last, x.shape, [0])

    def of_pairs(self, begin, width):
        to_last = plgpu.load(self._to_last.at[pl.ds(begin, width)], layout=tensor_core.PER_COLUMN)
        return lax.broadcast_in_dim(to_last, (_BLOCK, width), [1])
