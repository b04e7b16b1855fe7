"""Tests that a second call outside `jax.jit` traces nothing and is about as fast as a jitted one."""

import time

import jax
import pytest

from tests.ops import test_meshes

_events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **_: _events.append(name))


def seconds(f, arguments):
    """Returns the fastest of ten calls, since other programs may run at the same time."""

    def once():
        begin = time.perf_counter()
        jax.block_until_ready(f(**arguments))
        return time.perf_counter() - begin

    return min(once() for _ in range(10))


# Those that share most of their code with another of them.
RARE = {
    "attention",
    "recurrent",
    "bidirectional-documents",
    "kv_cache",
    "reference",
    "recurrent-reference",
    "plain-attention",
    "plain-chunked",
    "step",
    "channel-gated-step",
    "linear-step",
    "bidirectional",
    "softmax-window",
    "expressive-reference",
    "lrpe-complex",
    "lrpe-permutation",
    "positions",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in test_meshes.OPS]
)
def test_a_second_call_compiles_nothing(name):
    f, arguments, _, _ = test_meshes.OPS[name]()
    jax.block_until_ready(f(**arguments))
    _events.clear()
    jax.block_until_ready(f(**arguments))
    assert not [event for event in _events if "compile" in event]

    allowance = 5e-3
    if (own := seconds(f, arguments)) > allowance:
        # Compiled only for a call that is slow enough to be compared.
        jitted = jax.jit(f)
        jax.block_until_ready(jitted(**arguments))
        assert own <= 2 * seconds(jitted, arguments) + allowance
