"""Products with parameters that are sharded over the mesh in scope, with explicit collectives, once per pass.

Parameters are gathered over `fsdp` where they are used, in the dtype of the product. The forward pass saves its
arguments only, so the backward pass gathers them again. Gradients of parameters are summed over rows and times in the
dtype of the parameters, and are scattered over `fsdp` like the parameters.

XLA's own partitioner sums more over `tensor`. With four layers of the 124M model compiled for 8 H100s (jax 0.11.2), the
results of an update's collectives take 750 MB on each device over fsdp 4 x tensor 2, and 1,459 MB with plain products
and lookups; over fsdp 4 x context 2 they take 808 and 886 MB, and over fsdp 8 302 and 211 MB.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import partitioning
from sympow_jax.ops import derivatives


@functools.partial(derivatives.custom_vjp, static=2)
def products(
    spec: jax.sharding.PartitionSpec,
    kinds: tuple[tuple[Any, Any], ...],
    x: Float[Array, "B T I"],
    matrices: tuple[Float[Array, "I _"], ...],
) -> tuple[Float[Array, "B T _"], ...]:
    """Returns x times each of the matrices.

    Args:
        spec: sharding of the matrices. With COLUMNS, results are sharded over `tensor`, and the gradient of x is
            summed over it, once for all matrices. With ROWS, x is sharded over `tensor`, and results are summed over
            it.
        kinds: dtype and precision of each product.
        x: left factor.
        matrices: right factors.
    """
    return _products_fwd(spec, kinds, x, matrices)[0]


def _products_fwd(spec, kinds, x, matrices):
    before, after, shapes = _around(x, matrices, spec)
    divided = [_axes_of(spec, matrix) for matrix in matrices]
    partial = partitioning.TENSOR in partitioning.dividing(before, x.shape)

    def local(x, matrices):
        results = []
        for matrix, axes, (dtype, precision) in zip(matrices, divided, kinds):
            whole = gather(matrix.astype(dtype), axes, partitioning.FSDP)
            result = jnp.matmul(x.astype(dtype), whole, precision=precision)
            results.append(jax.lax.psum(result, partitioning.TENSOR) if partial else result)
        return tuple(results)

    out = tuple(partitioning.fit(after, shape) for shape in shapes)
    return partitioning.over_devices(local, (x, matrices), (before, spec), out), (x, matrices)


def _products_bwd(spec, kinds, residuals, dresults):
    x, matrices = residuals
    before, after, _ = _around(x, matrices, spec)
    divided = [_axes_of(spec, matrix) for matrix in matrices]
    # If results are sharded over `tensor`, each device has a partial sum of the gradient of x.
    partial = [partitioning.TENSOR in partitioning.dividing(after, d.shape) for d in dresults]
    tokens = partitioning.dividing(partitioning.TOKENS, x.shape)

    def local(x, matrices, dresults):
        nothing = jnp.zeros((), np.promote_types(x.dtype, jnp.float32))
        dx, gradients = {True: nothing, False: nothing}, []
        for matrix, dresult, axes, kind, part in zip(matrices, dresults, divided, kinds, partial):
            dtype, precision = kind
            whole = gather(matrix.astype(dtype), axes, partitioning.FSDP)
            dx[part] += jnp.matmul(dresult, whole.T, precision=precision)
            gradient = jnp.einsum(
                "bti,bto->io",
                x.astype(dtype),
                dresult,
                precision=precision,
                preferred_element_type=matrix.dtype,
            )
            gradients.append(scatter(gradient, axes, tokens))
        if any(partial):
            dx[True] = jax.lax.psum(dx[True].astype(x.dtype), partitioning.TENSOR)
        return (dx[True] + dx[False]).astype(x.dtype), tuple(gradients)

    # Without a barrier, XLA would keep the gathered parameters of the forward pass in memory.
    matrices = jax.lax.optimization_barrier(matrices)
    out = (partitioning.fit(before, x.shape), tuple(partitioning.fit(spec, m.shape) for m in matrices))
    return partitioning.over_devices(local, (x, matrices, dresults), (before, spec, after), out)


products.defvjp(_products_fwd, _products_bwd)


def explicit_product(
    x: Float[Array, "B T I"],
    matrix: Float[Array, "I O"],
    *,
    dtype: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Float[Array, "B T O"]:
    """Returns x times a matrix, for arrays on a mesh with Explicit axes.

    Rows and times keep their sharding. The inner dimension gets the sharding of x: axes that shard only the matrix are
    gathered, and axes that shard x are summed over. Outputs keep the axes of the matrix that x does not use.
    """
    *rows, inner = partitioning.explicit_spec(x)
    used = {axis for entry in (*rows, inner) for axis in entry}
    outputs = tuple(axis for axis in partitioning.explicit_spec(matrix)[1] if axis not in used)
    # Cast first, so that the matrix is gathered in the dtype of the product.
    matrix = partitioning.reshard(matrix.astype(dtype), (inner, outputs), x)
    return jnp.einsum(
        "bti,io->bto",
        x.astype(dtype),
        matrix,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=partitioning.explicit_sharding((*rows, outputs), x, matrix),
    )


def lookup(table: Float[Array, "V M"], tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
    """Returns rows of a table.

    A sharded table is gathered, because it is smaller than the looked-up rows of a training step.
    """
    if partitioning.is_divided():
        return _divided_lookup(table, tokens)
    if partitioning.is_explicit(table, tokens):
        table = partitioning.reshard(table, ((), ()), tokens)
        spec = (*partitioning.explicit_spec(tokens), ())
        return table.at[tokens].get(out_sharding=partitioning.explicit_sharding(spec, tokens, table))
    return table[tokens]


@derivatives.custom_vjp
def _divided_lookup(table, tokens):
    """Implements `lookup` for a table that is sharded by ROWS over the Auto axes of the mesh in scope."""
    axes = _axes_of(partitioning.ROWS, table)

    def local(table, tokens):
        for name in (partitioning.TENSOR, partitioning.FSDP):
            table = gather(table, axes, name)
        return table[tokens]

    out = partitioning.fit(partitioning.TOKENS, tokens.shape)
    specs = partitioning.ROWS, partitioning.TOKENS
    return partitioning.over_devices(local, (table, tokens), specs, out)


def _lookup_bwd(arguments, drows):
    table, tokens = arguments
    axes, summed = (
        _axes_of(partitioning.ROWS, table),
        partitioning.dividing(partitioning.TOKENS, tokens.shape),
    )

    def local(table, tokens, drows):
        rows = len(table)
        if partitioning.TENSOR in axes:
            # Rows of other devices become out-of-range indices, which `mode="drop"` ignores.
            tokens = tokens - rows * jax.lax.axis_index(partitioning.TENSOR)
            tokens = jnp.where(tokens < 0, rows, tokens)
        gradient = jnp.zeros((rows, drows.shape[-1]), drows.dtype).at[tokens].add(drows, mode="drop")
        return scatter(gradient, axes, summed).astype(table.dtype)

    specs = partitioning.ROWS, partitioning.TOKENS, partitioning.TOKENS
    out = partitioning.fit(partitioning.ROWS, table.shape)
    return partitioning.over_devices(local, (table, tokens, drows), specs, out), None


_divided_lookup.defvjp(None, _lookup_bwd)


def gather(part: Float[Array, "_ _"], axes: tuple[str | None, ...], name: str) -> Float[Array, "_ _"]:
    """Gathers a parameter over the axis `name`, if this is one of the `axes` that shard its dimensions."""
    if name not in axes:
        return part
    return jax.lax.all_gather(part, name, axis=axes.index(name), tiled=True)


def scatter(
    gradient: Float[Array, "_ _"], axes: tuple[str | None, ...], summed: tuple[str, ...]
) -> Float[Array, "_ _"]:
    """Sums a gradient over the axes `summed`, and leaves it sharded over `fsdp` if the parameter is."""
    if partitioning.FSDP in axes and partitioning.FSDP in summed:
        summed = tuple(name for name in summed if name != partitioning.FSDP)
        where = axes.index(partitioning.FSDP)
        gradient = jax.lax.psum_scatter(gradient, partitioning.FSDP, scatter_dimension=where, tiled=True)
    return jax.lax.psum(gradient, summed) if summed else gradient


def _axes_of(spec, matrix) -> tuple[str | None, ...]:
    """Returns the axis that shards each dimension."""
    return tuple(partitioning.fit(spec, matrix.shape))


def _around(x, matrices, spec):
    """Returns the shardings of x and of the results, and the shapes of the results."""
    before, after = partitioning.TOKENS, partitioning.HEADS
    if spec == partitioning.ROWS:
        before, after = after, before
    return before, after, [(*x.shape[:-1], matrix.shape[-1]) for matrix in matrices]
