"""Tests of the results that a policy of `jax.checkpoint` can save, to avoid recomputing attention."""

import jax
import jax.numpy as jnp
import pytest

from sympow_jax import ops

NAMES = "power_attention_out", "power_attention_states"


def products(policy, form):
    """Returns the number of matrix products in the program of both passes; False means no checkpoint."""

    def loss(query, key, value):
        # Squared, so that the backward pass reads the output, as that of a layer does.
        return jnp.square(ops.power_attention(query, key, value, form=form)).sum()

    loss = loss if policy is False else jax.checkpoint(loss, policy=policy)
    x = jax.ShapeDtypeStruct((1, 512, 2, 16), jnp.float32)
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)
    return str(program).count("dot_general[")


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_named_results_are_not_computed_again(form):
    keep = jax.checkpoint_policies.save_only_these_names
    once = products(False, form)
    assert products(keep(*NAMES), form) == once
    # Without the final state, the state is updated with the tokens again, one product, but not queried.
    assert products(keep(NAMES[0]), form) == once + (form == "chunked")
    assert products(None, form) > once + 1
