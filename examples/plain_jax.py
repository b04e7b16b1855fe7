"""Uses power attention in plain JAX: a whole prompt first, then one token from the fixed-size state after it."""

import jax

from sympow_jax import ops

attend = jax.jit(ops.power_attention, static_argnames="return_state")
step = jax.jit(ops.power_attention_step)
query, key, value = (jax.random.normal(jax.random.key(i), (1, 1024, 4, 32)) for i in range(3))
log_decay = jax.nn.log_sigmoid(4 + jax.random.normal(jax.random.key(3), (1, 1024, 4)))

whole = attend(query, key, value, log_decay=log_decay)
prompt = [x[:, :-1] for x in (query, key, value)]
_, state = attend(*prompt, log_decay=log_decay[:, :-1], return_state=True)
last, state = step(query[:, -1], key[:, -1], value[:, -1], state, log_decay=log_decay[:, -1])
print(f"a step from the state differs from the whole by {abs(last - whole[:, -1]).max():.1e}")
