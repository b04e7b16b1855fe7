"""Uses a layer in a model written by hand, which is a function of a dictionary of arrays.

`nnx.split` splits the layer into a static part and its arrays, which any model library can hold. In an Equinox module,
for instance, they are a static field and an ordinary field.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import layers

VOCABULARY, WIDTH, HEADS = 16, 32, 2
LEARNING_RATE = 0.3

graph, arrays = nnx.split(layers.PowerAttention(WIDTH, HEADS, rngs=0))
params = {
    "embedding": jax.random.normal(jax.random.key(1), (VOCABULARY, WIDTH)) / 4,
    "attention": nnx.to_pure_dict(arrays),
}


def logits(params, tokens):
    """Computes the logits of the token after each of `tokens`."""
    x = params["embedding"][tokens]
    return (x + nnx.merge(graph, params["attention"])(x)) @ params["embedding"].T


@jax.jit
def step(params, token, state):
    """Returns the logits after one token per row, and the layer's state after it."""
    x = params["embedding"][token][:, None]
    mixed, state = nnx.merge(graph, params["attention"]).extend(x, state)
    return (x + mixed)[:, 0] @ params["embedding"].T, state


@jax.jit
def update(params, tokens):
    """Takes a step of gradient descent, with gradients clipped to a norm of 1."""

    def loss(params):
        log_probs = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in jax.tree.leaves(grads)))
    rate = LEARNING_RATE / jnp.maximum(1, norm)
    return jax.tree.map(lambda x, grad: x - rate * grad, params, grads), value


def rows(key):
    """Draws 8 rows of 33 tokens, each repeating a random pair."""
    return jnp.tile(jax.random.randint(key, (8, 2), 0, VOCABULARY), (1, 17))[:, :33]


losses = []
for index in range(800):
    params, value = update(params, rows(jax.random.key(index)))
    losses.append(float(value))
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")

# Start with a pair, then append the most likely token each time.
text = [3, 5]
state = nnx.merge(graph, params["attention"]).init_state(1, max_length=8)
for index in range(8):
    scores, state = step(params, jnp.array(text[index : index + 1]), state)
    if index >= 1:
        text.append(int(scores[0].argmax()))
print(f"3 5 continues as {text[2:]}")
