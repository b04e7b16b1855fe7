"""GPT-2's initialization (Radford et al. 2019, section 2.3), and projections that use it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax.array_types import Array, Float
from sympow_jax.layers import parallel, partitioning
from sympow_jax.ops import arguments

STANDARD_DEVIATION = 0.02


def as_rngs(rngs: nnx.Rngs | int) -> nnx.Rngs:
    """Returns `rngs`, converted to `nnx.Rngs` of threefry if it is a seed; raises ValueError if it is neither."""
    if isinstance(rngs, nnx.Rngs):
        return rngs
    if isinstance(rngs, jax.Array):
        return nnx.Rngs(rngs)
    return nnx.Rngs(jax.random.key(arguments.check_integer("rngs", rngs, 0), impl="threefry2x32"))


def table(rows: int, width: int, *, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Param:
    """Returns a float32 table [rows, width] with GPT-2's initialization and logical axis `names`."""
    init = partitioning.named(nnx.initializers.normal(STANDARD_DEVIATION), names)
    return nnx.Param(init(rngs.params(), (rows, width), jnp.float32))


replicated = functools.partial(nnx.Linear, kernel_init=nnx.initializers.normal(STANDARD_DEVIATION))
"""Makes a small `nnx.Linear` with a bias, which is whole on every device."""


class Linear(nnx.Linear):
    """Projection with float32 parameters and logical axis names, which flattens its inputs to [B * T, size].

    XLA's CPU backend needs three times as long for the gradient of a product over [B, T, size] as over [B * T, size],
    because it writes transposed copies.

    Args:
        size_in: size of the inputs.
        size_out: size of the outputs.
        names: logical names of the matrix axes, from `partitioning.RULES`.
        dtype: dtype of the product.
        use_bias: whether there is a bias.
        scale: factor of the initial standard deviation. GPT-2 has 1 / sqrt(2 * layers) for outputs that are added to
            the residual stream.
        exact: whether to compute in float32 if `dtype` is shorter. Used for decays, rates, strengths and gates.
        rngs: source of initial values.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        names: tuple[str, str],
        dtype: Any,
        use_bias: bool = False,
        scale: float = 1.0,
        exact: bool = False,
        rngs: nnx.Rngs,
    ):
        # A bias of the width of the residual stream is replicated on every device.
        bias_names = (None if names[1] == "embed" else names[1],)
        super().__init__(
            size_in,
            size_out,
            use_bias=use_bias,
            dtype=np.promote_types(dtype, jnp.float32) if exact else jnp.dtype(dtype),
            precision=jax.lax.Precision.HIGHEST if exact else None,
            kernel_init=partitioning.named(nnx.initializers.normal(STANDARD_DEVIATION * scale), names),
            bias_init=partitioning.named(nnx.initializers.zeros, bias_names),
            rngs=rngs,
        )
        self.names = names

    @property
    def spec(self) -> jax.sharding.PartitionSpec:
        """Partition spec of the matrix over the mesh axes of `partitioning`."""
        rules = dict(partitioning.RULES)
        return jax.sharding.PartitionSpec(*(name and rules[name] for name in self.names))

    def __call__(
        self, inputs: Float[Array, "B T size_in"], out_sharding=None
    ) -> Float[Array, "B T size_out"]:
        """Returns inputs times the matrix; `out_sharding` applies to the flattened rows."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        return super().__call__(rows, out_sharding).reshape(*inputs.shape[:-1], -1)


def project(x: Float[Array, "B T size_in"], *projections: Linear) -> tuple[Float[Array, "B T _"], ...]:
    """Returns x times each projection; all projections must be sharded in the same way."""
    kernels = tuple(projection.kernel[...] for projection in projections)
    if partitioning.is_divided():
        kinds = tuple((projection.dtype, projection.precision) for projection in projections)
        results = parallel.products(projections[0].spec, kinds, x, kernels)
    elif partitioning.is_explicit(x, *kernels):
        results = tuple(
            parallel.explicit_product(x, kernel, dtype=projection.dtype, precision=projection.precision)
            for kernel, projection in zip(kernels, projections)
        )
    else:
        return tuple(projection(x) for projection in projections)
    outputs = []
    for projection, result in zip(projections, results):
        if projection.bias is not None:
            bias = projection.bias[...].astype(result.dtype)
            if partitioning.is_explicit(result, bias):
                bias = partitioning.reshard(bias, partitioning.explicit_spec(result)[-1:], result)
            result += bias
        outputs.append(result)
    return tuple(outputs)
