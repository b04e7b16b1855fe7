"""Trains our layer in another codebase's trainer on an Explicit mesh.

Parameters are sharded by their axis names. Rows are sharded over `data`, and so are parameters along the width (FSDP).
Heads are sharded over `model` (tensor parallelism).
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sympow_jax import layers

VOCABULARY, WIDTH, HEADS = 16, 32, 4
# Maps the logical axis names of our layers' parameters to axes of this mesh.
RULES = (("embed", "data"), ("heads", "model"), ("kv_heads", "model"), ("gates", None))

data = 2 if jax.device_count() % 2 == 0 else 1
mesh = jax.make_mesh((data, jax.device_count() // data), ("data", "model"))


class Model(nnx.Module):
    """Logits of the next token, from a linear layer of one-hot tokens, our attention and a linear layer."""

    def __init__(self, rngs):
        self.embedding = nnx.Linear(VOCABULARY, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = layers.PowerAttention(WIDTH, HEADS, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(jax.nn.one_hot(tokens, VOCABULARY))
        return self.out(x + self.attention(self.norm(x)))


def rows(key):
    """Draws 8 rows of 33 tokens, each repeating a random pair, sharded over `data`."""
    tokens = jnp.tile(jax.random.randint(key, (8, 2), 0, VOCABULARY), (1, 17))[:, :33]
    return jax.device_put(tokens, jax.P("data"))


@nnx.jit
def update(model, optimizer, tokens):
    """Takes a step of the optimizer."""

    def loss(model):
        logits = model(tokens[:, :-1])
        targets = jax.nn.one_hot(tokens[:, 1:], VOCABULARY)
        return optax.losses.softmax_cross_entropy(logits, targets).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


jax.set_mesh(mesh)
with nnx.logical_axis_rules(RULES):
    model = Model(nnx.Rngs(0))
    # Parameters created under the rules are already sharded; a checkpoint from elsewhere would be placed like this.
    shardings = nnx.get_named_sharding(nnx.state(model), mesh)
    nnx.update(model, jax.device_put(nnx.state(model), shardings))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
print(f"query {jax.typeof(model.attention.query.kernel[...])}")

losses = []
for step in range(20):
    losses.append(float(update(model, optimizer, rows(jax.random.key(step)))))
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
