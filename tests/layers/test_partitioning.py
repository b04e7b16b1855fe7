"""Tests that a mesh in scope does not change a layer, even if it does not divide all sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers
from sympow_jax.layers import partitioning


@pytest.mark.slow
def test_a_mesh_that_does_not_divide_every_size():
    # Three heads of keys, which tensor = 2 does not divide.
    sizes = {"vocab_size": 64, "layers": 1, "width": 48, "heads": 6, "kv_heads": 3, "head_dim": 8}
    attention = config.preset("conformal_paper", exact_window=4, form="chunked")
    settings = config.ModelConfig(**sizes, dtype="float32", attention=attention)
    graph, params = nnx.split(layers.make_attention(settings, rngs=nnx.Rngs(0)))
    auto = (jax.sharding.AxisType.Auto,) * 4
    mesh = jax.make_mesh((2, 1, 2, 2), partitioning.AXES, axis_types=auto)

    @jax.jit
    def run(params, x, counts):
        def loss(params, x):
            out = nnx.merge(graph, params)(x)
            return (counts * out * jnp.cos(out)).sum(), out

        (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return gradients[0], (out, gradients[1])

    # Rows and times that the mesh divides, and some that it does not. Alone, these are the first of all rows and times,
    # which are one program.
    whole = jax.random.normal(jax.random.key(1), (4, 32, 48))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    for rows, times in ((4, 32), (3, 31)):
        part = np.s_[:rows, :times]
        gradients, arrays = run(params, whole, jnp.zeros((4, 32, 1)).at[part].set(1))
        alone = gradients, tuple(x[part] for x in arrays)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            x, counts = whole[part], jnp.ones((rows, times, 1))
            actual = run(*(jax.device_put(x, everywhere) for x in (params, x, counts)))
        for a, b in zip(*map(jax.tree.leaves, map(jax.device_get, (actual, alone))), strict=True):
            assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()
