"""Trains layers of the delta rule and of power attention to tell whether the number of ones so far is odd.

A state that only adds cannot: what a one means depends on all bits before it. The delta rule replaces what the state
holds. With `negative_eigenvalues` a one can change its sign, as parity needs ("Unlocking State-Tracking in Linear RNNs
Through Negative Eigenvalues", Grazzi et al. 2024).
"""

import jax
import optax
from flax import nnx

from sympow_jax import layers

WIDTH, HEADS, UPDATES = 32, 2, 300


class Model(nnx.Module):
    """One normalized layer of attention between an embedding of bits and the scores of even and odd."""

    def __init__(self, attention: type, rngs: nnx.Rngs, **options):
        self.embedding = nnx.Embed(2, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = attention(WIDTH, HEADS, decay="none", position="none", rngs=rngs, **options)
        self.scores = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, bits):
        x = self.embedding(bits)
        return self.scores(x + self.attention(self.norm(x)))


def accuracy(attention: type, **options) -> float:
    """Trains on rows of 32 bits; returns the accuracy at the last of 1,024."""
    model = Model(attention, nnx.Rngs(0), **options)
    rate = optax.cosine_decay_schedule(1e-2, UPDATES)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, key):
        bits = jax.random.bernoulli(key, shape=(64, 32)).astype(int)

        def loss(model):
            odd = bits.cumsum(1) % 2
            return optax.softmax_cross_entropy_with_integer_labels(model(bits), odd).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for index in range(UPDATES):
        update(model, optimizer, jax.random.key(index))
    bits = jax.random.bernoulli(jax.random.key(UPDATES), shape=(256, 1024)).astype(int)
    found = nnx.jit(Model.__call__)(model, bits).argmax(-1)[:, -1]
    return float((found == bits.sum(1) % 2).mean())


delta = layers.PowerDeltaAttention
print(f"delta rule, strengths to 2: {accuracy(delta, power=1, negative_eigenvalues=True):.0%}")
print(f"delta rule, strengths to 1: {accuracy(delta, power=1):.0%}")
print(f"power attention: {accuracy(layers.PowerAttention):.0%}")
