"""Slots of shared memory that a copying warpgroup fills and the others free."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["fill", "slot_of"]


def slot_of(step, stages):
    """The slot of a step."""
    return lax.rem(step, jnp.int32(stages))


def fill(count, stages, free, copy):
    """Calls copy(step, slot) for each step below `count` once its slot is free; returns when all slots are."""

    def wait(step):
        plgpu.barrier_wait(free.at[slot_of(step, stages)])

    @pl.loop(jnp.int32(0), count)
    def _step(step):
        pl.when(step >= stages)(lambda: wait(step))
        copy(step, slot_of(step, stages))

    # A barrier must have been waited for as often as it was completed when its memory is given back.
    pl.loop(jnp.maximum(count - stages, 0), count)(wait)
