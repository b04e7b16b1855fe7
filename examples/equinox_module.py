"""Trains an Equinox module with its own projections around the op, on rows that repeat a pair of tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from sympow_jax import ops

VOCABULARY, WIDTH, HEADS = 16, 32, 2


class Attention(eqx.Module):
    """Gated power attention over one sequence [T, width]."""

    projections: eqx.nn.Linear
    gates: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.projections = eqx.nn.Linear(WIDTH, 3 * WIDTH, use_bias=False, key=keys[0])
        self.gates = eqx.nn.Linear(WIDTH, HEADS, key=keys[1])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=keys[2])

    def __call__(self, x):
        heads = jax.vmap(self.projections)(x).reshape(1, len(x), 3 * HEADS, -1)
        query, key, value = jnp.split(heads, 3, axis=2)
        log_decay = jax.nn.log_sigmoid(jax.vmap(self.gates)(x))[None]
        mixed = ops.power_attention(query, key, value, log_decay=log_decay)
        return jax.vmap(self.out)(mixed.reshape(len(x), -1))


class Model(eqx.Module):
    """Logits of the next token, from an embedding, attention and a linear layer."""

    embedding: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    attention: Attention
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = Attention(keys[1])
        self.out = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        return jax.vmap(self.out)(x + self.attention(jax.vmap(self.norm)(x)))


def rows(key):
    """Draws 8 rows of 33 tokens, each repeating a random pair."""
    return jnp.tile(jax.random.randint(key, (8, 2), 0, VOCABULARY), (1, 17))[:, :33]


model, optimizer = Model(jax.random.key(0)), optax.adam(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def update(model, state, tokens):
    """Takes a step of the optimizer."""

    def loss(model):
        logits = jax.vmap(model)(tokens[:, :-1])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    changes, state = optimizer.update(grads, state)
    return eqx.apply_updates(model, changes), state, value


losses = []
for step in range(150):
    model, state, value = update(model, state, rows(jax.random.key(step)))
    losses.append(float(value))
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
