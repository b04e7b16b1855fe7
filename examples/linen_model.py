"""Trains a Flax Linen model with one of our layers through `nnx.bridge`, on rows that repeat a token pair."""

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from sympow_jax import layers

VOCABULARY, WIDTH, HEADS = 16, 32, 2


class Model(linen.Module):
    """Logits of the next token, from an embedding, our attention and a dense layer."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, WIDTH)(tokens)
        attention = nnx.bridge.to_linen(layers.PowerAttention, WIDTH, HEADS, name="attention")
        x = x + attention(linen.LayerNorm()(x))
        return linen.Dense(VOCABULARY)(linen.LayerNorm()(x))


def rows(key):
    """Draws 8 rows of 33 tokens, each repeating a random pair."""
    return jnp.tile(jax.random.randint(key, (8, 2), 0, VOCABULARY), (1, 17))[:, :33]


model, optimizer = Model(), optax.adam(1e-2)
params = jax.jit(model.init)(jax.random.key(0), rows(jax.random.key(1))[:, :-1])
state = optimizer.init(params)


@jax.jit
def update(params, state, tokens):
    def loss(params):
        logits = model.apply(params, tokens[:, :-1])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    changes, state = optimizer.update(grads, state)
    return optax.apply_updates(params, changes), state, value


losses = []
for step in range(150):
    params, state, value = update(params, state, rows(jax.random.key(step)))
    losses.append(float(value))
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
