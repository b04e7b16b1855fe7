"""Operands of the gradient kernels: one launch, after that of `vjp_sizes`.

With a query's and a key's length taken out, s = q . k, a pair's fraction of the mean is P_ij = s^p c_j f_i. c_j is the
key's factor, of its length and its decay to the end of its block. f_i is the query's factor, of the decay from the
start of its block over the denominator. Decays over the blocks between multiply both. The gradient with respect to s is
p s^(p-1) c_j f_i (dP_ij - delta_i), with delta_i = dO_i . o_i. Since s^p c_j f_i <= 1 and |c_j f_i| <= 1 / denominator,
which is (s^p c_j f_i)^(1-1/p) (c_j f_i)^(1/p), its magnitude is at most

    p denominator^(-1/p) 2 |dO_i| max_j |v_j|.

This bound gives every query a power-of-two scale that brings its pairs close to float16's largest number. g_i is f_i
with this scale. The pass over queries undoes the scale at the end. The pass over keys multiplies with queries Q', whose
own scale is replaced by the least of their head, which the keys' units undo.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, results, tensor_core
from pallas_kernels.power_attention import configs, pairs, sequence, vjp_sizes

# Fractions of the mean are scaled to 2^14, values, cotangents and gradients by scores to 2^15 at most: float16 ends
# below 2^16.
WEIGHT_BITS, _OPERAND_BITS = 14, 15
# Gradients by scores contain weights; one bit is for the difference dP - delta.
_GRADIENT_BITS = _OPERAND_BITS - WEIGHT_BITS - 1
# Largest exponent of g, so that it stays finite.
_LARGEST_EXPONENT = 120
# Least exponent of the length of a scaled row: smaller entries are zero in float16.
_SMALLEST_EXPONENT = -24


class QueryVector(enum.IntEnum):
    """Vectors of a block of queries, in the order of `rows`."""

    # f and g for keys of earlier blocks, and for keys of the same block.
    EARLIER_WEIGHT = 0
    EARLIER_GRADIENT = 1
    DIAGONAL_WEIGHT = 2
    DIAGONAL_GRADIENT = 3
    # The sum of log decays from the block's start, in two parts (`numerics.coarse`), and the decay over the
    # block, repeated.
    COARSE = 4
    FINE = 5
    BLOCK_DECAY = 6
    # Position in the block: comparing numbers takes fewer registers than comparing indices.
    POSITION = 7
    # Two factors, whose product turns the sum into the gradient, up to the factor p.
    UNIT = 8
    SECOND_UNIT = 9


class KeyVector(enum.IntEnum):
    """Vectors of a block of keys, in the order of `columns`."""

    # c for queries of later blocks, and for queries of the same block.
    LATER_FACTOR = 0
    DIAGONAL_FACTOR = 1
    # As for queries.
    COARSE = 2
    FINE = 3
    BLOCK_DECAY = 4
    POSITION = 5
    # Two factors each, whose product turns the sums into the gradients of the key, up to the factor p, of the value,
    # and of the logarithm of the key's weights.
    KEY_UNIT = 6
    SECOND_KEY_UNIT = 7
    VALUE_UNIT = 8
    SECOND_VALUE_UNIT = 9
    LOG_UNIT = 10
    SECOND_LOG_UNIT = 11


class VjpOperands(NamedTuple):
    """Inputs of the kernels; S is whole blocks of 128, n = S / 64, and queries are padded in front to S.

    query, key: of unit length, but queries are scaled up. rescaled_query: Q'. All matrix operands are float16.
    rows, columns: per block of queries and of keys, vectors in the order of QueryVector and KeyVector.
    first, last: for two blocks of 64 queries, the first visible pair of blocks of keys; for two blocks of keys, the
    last pair of blocks of queries that attends to them. None without documents: all earlier and all later ones.
    """

    query: jax.Array  # [B, S, N, D]
    rescaled_query: jax.Array  # [B, S, N, D]
    key: jax.Array  # [B, S, K, D]
    value: jax.Array  # [B, S, K, E]
    dout: jax.Array  # [B, S, N, E]
    rows: jax.Array  # [B, N, n, 10, 64]
    columns: jax.Array  # [B, K, n, 12, 64]
    delta: jax.Array  # [B, N, n, 64]
    first: jax.Array | None  # [B, K, n / 2]
    last: jax.Array | None  # [B, K, n / 2]


class _Arguments(NamedTuple):
    """Arrays that the kernel reads; queries are the last of S positions, in whole blocks of 128.

    Outputs and cotangents may have a block of 64 less: TMA reads zeros in its place.
    """

    query: jax.Array  # float16 [B, T, N, D], of unit length, scaled up as in the forward pass
    out: jax.Array  # [B, T, N, E]
    remainder: jax.Array  # bfloat16, what rounding took from `out`
    dout: jax.Array  # [B, T, N, E]
    value: jax.Array  # [B, S, K, E]
    log_decay: jax.Array  # float32 [B, K, S], at least `sequence.FORGET`
    key_exponent: jax.Array  # int32 [B, K, S], of the keys' lengths


class _HeadScales(NamedTuple):
    """Exponents of a head's scales, the same number in each of 64 entries."""

    dout: jax.Array  # cotangents times 2^this are below 2^15
    value: jax.Array  # the same for values
    value_length: jax.Array  # of the longest value, scaled
    least: jax.Array  # a lower bound on the gradients' scales of queries with a cotangent

    @classmethod
    def of(cls, sizes: vjp_sizes.Sizes, blocks, row, kv_head, power):
        """Reduces the sizes of all blocks of a key head and its query heads; `blocks` is their number by array."""
        together, kv_heads = vjp_sizes.TOGETHER, sizes.value.shape[1]
        layout = plgpu.Layout.WG_STRIDED((together,), 1)
        # Loads of each array: all parts of each head of the group, one after another.
        groups, parts = [x.shape[1] // kv_heads for x in sizes], [x.shape[2] // together for x in sizes]
        loads = [group * count for group, count in zip(groups, parts)]

        def load(step):
            found = []
            for array, number, group, count in zip(sizes, blocks, groups, parts):
                # The last one repeatedly, where another array has more: a maximum may have it twice.
                place = jnp.minimum(step, group * count - 1)
                head, part = (
                    kv_head * group + lax.div(place, jnp.int32(count)),
                    lax.rem(place, jnp.int32(count)),
                )
                numbers = array.at[row, head, pl.ds(part * together, together)]
                numbers = plgpu.load(numbers, layout=layout, optimized=False)
                # Nothing was written after the last block.
                exists = (
                    part * together + plgpu.broadcasted_iota(jnp.int32, (together,), 0, layout=layout)
                    < number
                )
                found.append(
                    jnp.where(exists, numbers, vjp_sizes.NOTHING if numbers.dtype == jnp.int32 else 0.0)
                )
            return tuple(found)

        def add(step, largest):
            return tuple(map(jnp.maximum, largest, load(step)))

        largest = lax.fori_loop(jnp.int32(1), jnp.int32(max(loads)), add, load(jnp.int32(0)))

        def unit(size):
            return _OPERAND_BITS - jnp.where(size > 0, numerics.normal_exponent(size), 0)

        dout_size, gradient, inverse, value_size, length = (
            plgpu.layout_cast(lax.broadcast(x.max(), (pairs.BLOCK,)), tensor_core.PER_ROW) for x in largest
        )
        dout, value = unit(dout_size), unit(value_size)
        length = jnp.maximum(length + value, _SMALLEST_EXPONENT)
        # `gradient_exponent` of a query that has the extremes of all in each term.
        least = jnp.minimum(-gradient - dout, vjp_sizes.root(-inverse, power) - _SMALLEST_EXPONENT)
        least = jnp.minimum(_GRADIENT_BITS + least - length, _LARGEST_EXPONENT - inverse)
        return cls(dout, value, length, least)

    def gradient_exponent(self, denominator, dout_length, power):
        """Returns exponents of scales that bring a query's gradients by scores close to, but not above, 2^15.

        denominator^(-1/p) is at most 2 to minus its root's exponent.
        """
        exponent = numerics.normal_exponent(denominator)
        length = jnp.maximum(dout_length + self.dout, _SMALLEST_EXPONENT)
        gradient = _GRADIENT_BITS + vjp_sizes.root(exponent, power) - length
        return jnp.minimum(gradient - self.value_length, _LARGEST_EXPONENT + exponent)


def prepare(tokens: sequence.Tokens, dout, saved, segment_ids, call: configs.Call) -> VjpOperands:
    """Returns the operands.

    tokens: in blocks of two times 64. Other arguments as in `power_attention_vjp`.
    """
    power, config = call.power, call.config
    # Queries and keys are those of the forward pass; from p = 8 on, queries are scaled up less. Those of `tokens` are
    # not used.
    query, key = saved["unit_query"], saved["unit_key"]
    out, remainder, dout = (
        results.whole(jnp.pad(x, [(0, 0)] * 3 + [(0, config.value_dim - x.shape[3])]))
        for x in (saved["out"], saved["remainder"], dout.astype(saved["out"].dtype))
    )
    longest = saved["key_exponent"].max(-1)
    weights = vjp_sizes.Weights(
        saved["weight_sum"], saved["weight_exponent"], saved["query_exponent"], longest
    )
    sizes = vjp_sizes.sizes(dout, tokens.value, weights, power=power, interpret=call.interpret)
    arguments = _Arguments(query, out, remainder, dout, tokens.value, tokens.log_decay, saved["key_exponent"])
    found = _operands(arguments, weights, sizes, call)
    if configs.scaled_by_row(power):
        query = numerics.scaled(query, vjp_sizes.bits(power) - configs.query_bits(power))
    query = jnp.pad(query, [(0, 0), (key.shape[1] - query.shape[1], 0), (0, 0), (0, 0)])
    first = last = None
    if segment_ids is not None:
        first, last = sequence.visible_blocks(tokens.log_decay)
    return VjpOperands(query=query, key=key, first=first, last=last, **found)


def _operands(
    arguments: _Arguments, weights: vjp_sizes.Weights, sizes: vjp_sizes.Sizes, call
) -> dict[str, jax.Array]:
    """Runs the kernel: a thread block has 64 queries of a head, or 64 keys."""
    power, block = call.power, pairs.BLOCK
    batch, time, heads, head_dim = arguments.query.shape
    _, length, kv_heads, value_dim = arguments.value.shape
    group, count = heads // kv_heads, length // block
    # Blocks of keys before the first query.
    offset = (length - time) // block
    bits, query_bits = vjp_sizes.bits(power), configs.query_bits(power)
    types = {
        "rescaled_query": jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.float16),
        "dout": jax.ShapeDtypeStruct((batch, length, heads, value_dim), jnp.float16),
        "value": jax.ShapeDtypeStruct((batch, length, kv_heads, value_dim), jnp.float16),
        "rows": jax.ShapeDtypeStruct((batch, heads, count, len(QueryVector), block), jnp.float32),
        "columns": jax.ShapeDtypeStruct((batch, kv_heads, count, len(KeyVector), block), jnp.float32),
        "delta": jax.ShapeDtypeStruct((batch, heads, count, block), jnp.float32),
    }

    def body(
        *refs,
        query_smem,
        out_smem,
        remainder_smem,
        dout_smem,
        rescaled_smem,
        scaled_smem,
        query_full,
        key_full,
    ):
        x, refs = _Arguments(*refs[: len(arguments)]), refs[len(arguments) :]
        of_weights, refs = vjp_sizes.Weights(*refs[: len(weights)]), refs[len(weights) :]
        of_blocks = vjp_sizes.Sizes(*refs[: len(sizes)])
        out = dict(zip(types, refs[len(sizes) :], strict=True))
        row, index, head = (lax.axis_index(name) for name in ("batch", "block", "head"))
        is_query = head < heads
        own = jnp.where(is_query, head, head - heads)
        kv_head = jnp.where(is_query, lax.div(head, jnp.int32(group)), own)
        tokens = pl.ds(index * block, block)

        def copy(source, target, begin, full):
            source = results.block(source, row * source.shape[2] + own, begin)
            plgpu.copy_gmem_to_smem(source, target, full)

        # Positions before the first query do not exist, so that TMA reads zeros.
        begin = (index - offset) * block

        @pl.when(is_query)
        def _copy_queries():
            for source, target in (
                (x.out, out_smem),
                (x.remainder, remainder_smem),
                (x.dout, dout_smem),
                (x.query, query_smem),
            ):
                copy(source, target, begin, query_full)

        pl.when(head >= heads)(lambda: copy(x.value, out_smem, index * block, key_full))
        scales = _HeadScales.of(of_blocks, (count - offset,) * 3 + (count,) * 2, row, kv_head, power)

        def load(tile):
            return plgpu.load(tile, layout=pairs.LAYOUT).astype(jnp.float32)

        def store_tile(name, target, tile):
            target[...] = tile.astype(jnp.float16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(target, out[name].at[row, tokens, own])

        def store_vectors(name, vectors):
            for vector, numbers in vectors.items():
                launch.store(out[name].at[row, own, index, vector], numbers)

        # Sums of log decays from the start of the block, in two parts, and the decay over it.
        decay = x.log_decay.at[row, kv_head, tokens]
        decay = pairs.by_column(plgpu.load(decay, layout=tensor_core.PER_COLUMN, optimized=False))
        token, column = (
            plgpu.broadcasted_iota(jnp.int32, (block, block), n, layout=pairs.LAYOUT) for n in (0, 1)
        )
        coarse = numerics.coarse(decay, block, -sequence.FORGET)
        coarse, fine = (jnp.where(column <= token, part, 0.0).sum(1) for part in (coarse, decay - coarse))
        block_decay = numerics.decay(decay.sum(1))
        position = token.astype(jnp.float32).max(1)
        pair_unit = scales.value + scales.dout + WEIGHT_BITS

        @pl.when(is_query)
        def _queries():
            # Positions before the first query have no weights to load.
            at = row, own, pl.ds(jnp.maximum(begin, 0), block)
            denominator = vjp_sizes.denominators(of_weights, at, kv_head, power)
            denominator = jnp.where(position + begin.astype(jnp.float32) < 0, 0.0, denominator)
            nothing = vjp_sizes.weighs_nothing(denominator)
            plgpu.barrier_wait(query_full)

            def or_zero(tile):
                chosen = lax.broadcast_in_dim(jnp.where(nothing, 0.0, 1.0), tile.shape, [0])
                return jnp.where(chosen > 0, tile, 0.0)

            mean = pairs.scaled(load(out_smem) + load(remainder_smem), scales.value)
            dout = load(dout_smem)
            length = vjp_sizes.length_exponent(dout, jnp.abs(dout).max(1))
            dout = or_zero(pairs.scaled(dout, scales.dout))
            store_tile("dout", scaled_smem, dout)
            launch.store(out["delta"].at[row, own, index], (dout * mean).sum(1))

            gradient_exponent = scales.gradient_exponent(denominator, length, power)
            # A query without a cotangent may have a smaller scale. Its dS is zero, so Q' need only be finite.
            undone = jnp.minimum(scales.least - gradient_exponent, 0) + _OPERAND_BITS - query_bits
            store_tile("rescaled_query", rescaled_smem, or_zero(pairs.scaled(load(query_smem), undone)))

            share = jnp.where(nothing, 0.0, 1 / jnp.where(nothing, 1.0, denominator))
            # f and g, without the decay from the start of the block.
            gradient = pairs.in_units(share, *numerics.factors(gradient_exponent))
            from_start = numerics.decay(coarse + fine)
            query_exponent = plgpu.load(
                of_weights.query_exponent.at[at], layout=tensor_core.PER_ROW, optimized=False
            )
            first, second = numerics.factors(-(gradient_exponent + pair_unit + query_exponent - bits))
            of_query = {
                QueryVector.EARLIER_WEIGHT: share * from_start,
                QueryVector.EARLIER_GRADIENT: gradient * from_start,
                QueryVector.DIAGONAL_WEIGHT: share,
                QueryVector.DIAGONAL_GRADIENT: gradient,
                QueryVector.COARSE: coarse,
                QueryVector.FINE: fine,
                QueryVector.BLOCK_DECAY: block_decay,
                QueryVector.POSITION: position,
                QueryVector.UNIT: first,
                QueryVector.SECOND_UNIT: second,
            }
            store_vectors("rows", of_query)

        @pl.when(head >= heads)
        def _keys():
            plgpu.barrier_wait(key_full)
            store_tile("value", scaled_smem, pairs.scaled(load(out_smem), scales.value))
            exponents = x.key_exponent.at[row, own, tokens]
            exponent = plgpu.load(exponents, layout=tensor_core.PER_ROW, optimized=False)
            shorter = power * (exponent - of_weights.longest[row, own])
            factor = pairs.length_factor(exponent, shorter) * 2.0**WEIGHT_BITS
            after = jnp.where(column > token, decay, 0.0).sum(1)
            units = (
                pair_unit + scales.least - bits + _OPERAND_BITS + exponent,
                scales.dout + WEIGHT_BITS,
                pair_unit,
            )
            key_unit, value_unit, log_unit = (numerics.factors(-unit) for unit in units)
            of_key = {
                KeyVector.LATER_FACTOR: factor * numerics.decay(after),
                KeyVector.DIAGONAL_FACTOR: factor,
                KeyVector.COARSE: coarse,
                KeyVector.FINE: fine,
                KeyVector.BLOCK_DECAY: block_decay,
                KeyVector.POSITION: position,
                KeyVector.KEY_UNIT: key_unit[0],
                KeyVector.SECOND_KEY_UNIT: key_unit[1],
                KeyVector.VALUE_UNIT: value_unit[0],
                KeyVector.SECOND_VALUE_UNIT: value_unit[1],
                KeyVector.LOG_UNIT: log_unit[0],
                KeyVector.SECOND_LOG_UNIT: log_unit[1],
            }
            store_vectors("columns", of_key)

        plgpu.wait_smem_to_gmem(0)

    dtype = arguments.value.dtype
    found = plgpu.kernel(
        body,
        out_type=tuple(types.values()),
        scratch_types={
            "query_smem": tensor_core.operand((), block, head_dim, jnp.float16),
            "out_smem": tensor_core.operand((), block, value_dim, dtype),
            "remainder_smem": tensor_core.operand((), block, value_dim, arguments.remainder.dtype),
            "dout_smem": tensor_core.operand((), block, value_dim, dtype),
            "rescaled_smem": tensor_core.operand((), block, head_dim, jnp.float16),
            "scaled_smem": tensor_core.operand((), block, value_dim, jnp.float16),
            "query_full": plgpu.Barrier(num_arrivals=4),
            "key_full": plgpu.Barrier(),
        },
        grid=(batch, count, heads + kv_heads),
        grid_names=("batch", "block", "head"),
        kernel_name="power_attention_vjp_operands",
        **launch.interpreted(call.interpret),
    )(*arguments, *weights, *sizes)
    return dict(zip(types, found))
