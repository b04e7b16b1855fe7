"""GPT-2's initialisation (Radford et al. 2019, section 2.3), and the projections that use it."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax.array_types import Array, Float
from sympow_jax.layers import parallel, partitioning

__all__ = ["STANDARD_DEVIATION", "Linear", "linear", "project"]

STANDARD_DEVIATION = 0.02


def linear(
    config: configs.ModelConfig,
    size_in: int,
    size_out: int,
    *,
    residual: bool = False,
    exact: bool = False,
    rngs: nnx.Rngs,
) -> "Linear":
    """A projection, with a bias if `config.biases`, float32 parameters used in the config's dtype.

    `residual`: its output is added to the residual stream, so its scale shrinks by 1 / sqrt(2 * layers), and over a
    mesh its input is divided. `exact`: computed in float32 whatever the dtype and without a bias, for decays and
    rotation rates.
    """
    shrink = 1 / math.sqrt(2 * config.layers) if residual else 1.0
    projection = Linear(
        size_in,
        size_out,
        use_bias=config.biases and not exact,
        dtype=jnp.float32 if exact else jnp.dtype(config.dtype),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        kernel_init=nnx.initializers.normal(STANDARD_DEVIATION * shrink),
        rngs=rngs,
    )
    projection.spec = partitioning.ROWS if residual else partitioning.COLUMNS
    return projection


class Linear(nnx.Linear):
    """`nnx.Linear` over one axis of rows, its matrix divided over a mesh as `spec` says, its bias as the results are.

    XLA's CPU backend takes the gradient of a product over [B, T, size] three times as long as over [B * T, size], for
    it writes transposed copies. `out_sharding` is that of the rows.
    """

    spec: jax.sharding.PartitionSpec

    @property
    def bias_spec(self) -> jax.sharding.PartitionSpec:
        """How the bias is divided over a mesh: where the results are, over `tensor`."""
        columns = self.spec == partitioning.COLUMNS
        return jax.sharding.PartitionSpec(partitioning.TENSOR) if columns else partitioning.REPLICATED

    def __call__(
        self, inputs: Float[Array, "B T size_in"], out_sharding=None
    ) -> Float[Array, "B T size_out"]:
        rows = inputs.reshape(-1, inputs.shape[-1])
        return super().__call__(rows, out_sharding).reshape(*inputs.shape[:-1], -1)


def project(x: Float[Array, "B T size_in"], *projections: Linear) -> tuple[Float[Array, "B T _"], ...]:
    """x by each of the projections, all divided in the same way over the mesh in scope."""
    if not partitioning.is_divided():
        return tuple(projection(x) for projection in projections)
    results = parallel.products(
        x,
        tuple(projection.kernel[...] for projection in projections),
        projections[0].spec,
        tuple((projection.dtype, projection.precision) for projection in projections),
    )
    return tuple(
        result if projection.bias is None else result + projection.bias[...].astype(result.dtype)
        for projection, result in zip(projections, results)
    )
