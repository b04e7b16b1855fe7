"""Tests that decoding steps in a compiled loop update the state in place."""

import functools
import re

import jax
import jax.numpy as jnp

from sympow_jax import ops

SIZES = {"kv_heads": 2, "head_dim": 16, "value_dim": 16}


def test_a_loop_of_steps_does_not_copy_the_state():
    state = ops.PowerState.zeros(1, *SIZES.values(), power=2, exact_window=4)
    token = jnp.ones((1, 2, 16))

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state):
        def step(state, _):
            out, state = ops.power_attention_step(token, token, token, state, power=2)
            return state, out

        return jax.lax.scan(step, state, length=32)

    program = loop.lower(state).compile().as_text()
    shape = re.escape(f"f32[{','.join(map(str, state.kv.shape))}]")
    assert re.search(shape, program)
    assert not re.findall(rf"= {shape}\S* copy\(", program)
