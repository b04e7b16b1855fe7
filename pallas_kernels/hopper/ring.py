"""Ring of shared-memory slots that a copying warpgroup fills and the other warpgroups free."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def slot_of(step, stages):
    """Returns the slot of a step."""
    return lax.rem(step, jnp.int32(stages))


def fill(end, stages, free, copy, first=0):
    """Calls copy(step, slot) for each step from `first` to `end` - 1, once its slot is free.

    Steps before `first` have been put in the same ring. Returns when all slots are free.
    """
    pl.loop(jnp.int32(first), end)(lambda step: put(step, stages, free, copy))
    drain(end, stages, free)


def put(step, stages, free, copy):
    """Calls copy(step, slot) once the slot is free."""
    slot = slot_of(step, stages)
    pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
    copy(step, slot)


def drain(count, stages, free):
    """Waits until the slots of the last of `count` steps are free."""
    # So that every barrier is at rest when the block ends.
    pl.loop(jnp.maximum(count - stages, 0), count)(
        lambda step: plgpu.barrier_wait(free.at[slot_of(step, stages)])
    )
