"""A layer in a model written by hand: parameters are a dictionary of arrays, the model a function of them.

`nnx.split` takes the layer apart into what is static and its arrays, which any library of models can hold.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config, layers

SETTINGS = config.ModelConfig(vocab_size=16, layers=1, width=32, heads=2, dtype="float32")
LEARNING_RATE = 0.5

graph, arrays = nnx.split(layers.Attention(SETTINGS, rngs=nnx.Rngs(0)))
params = {
    "embedding": jax.random.normal(jax.random.key(1), (SETTINGS.vocab_size, SETTINGS.width)) / 4,
    "attention": nnx.to_pure_dict(arrays),
}


def logits(params, tokens, state=None):
    """Logits of the next token and the layer's state behind the last one."""
    x = params["embedding"][tokens]
    mixed, state = nnx.merge(graph, params["attention"])(x, state=state, return_state=True)
    return (x + mixed) @ params["embedding"].T, state


def loss(params, tokens):
    found, _ = logits(params, tokens[:, :-1])
    return -jnp.take_along_axis(jax.nn.log_softmax(found), tokens[:, 1:, None], axis=-1).mean()


@jax.jit
def update(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda x, grad: x - LEARNING_RATE * grad, params, grads), value


def rows(key):
    """8 rows of 33 tokens, each a random pair again and again."""
    return jnp.tile(jax.random.randint(key, (8, 2), 0, SETTINGS.vocab_size), (1, 17))[:, :33]


losses = []
for step in range(200):
    params, value = update(params, rows(jax.random.key(step)))
    losses.append(float(value))
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")

# The likeliest continuation of a pair, a token at a time.
found, state = logits(params, jnp.array([[3, 5, 3]]))
continuation = []
for _ in range(6):
    token = found[:, -1:].argmax(-1)
    continuation.append(int(token[0, 0]))
    found, state = logits(params, token, state)
print(f"3 5 3 goes on as {continuation}")
