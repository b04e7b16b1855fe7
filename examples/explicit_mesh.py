"""Uses the op on a mesh with Explicit axes, the default of `jax.make_mesh`: results are sharded like the inputs."""

import jax

from sympow_jax import ops

mesh = jax.make_mesh((jax.device_count(),), ("data",))
batch = 2 * mesh.size
query, key, value = (jax.random.normal(jax.random.key(i), (batch, 256, 4, 32)) for i in range(3))
alone = jax.jit(ops.power_attention)(query, key, value)

jax.set_mesh(mesh)
query, key, value = jax.device_put((query, key, value), jax.P("data"))
attend = jax.jit(ops.power_attention, static_argnames=("form", "return_state"))
out, state = attend(query, key, value, form="chunked", return_state=True)
print(f"output {jax.typeof(out)}, state {jax.typeof(state.kv)}")

gradient = jax.jit(jax.grad(lambda query: attend(query, key, value).sum()))(query)
print(f"gradient {jax.typeof(gradient)}")
difference = float(abs(jax.device_get(out) - jax.device_get(alone)).max())
print(f"it differs from one device by {difference:.1e}")
