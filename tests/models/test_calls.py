"""Tests that a second call of a layer or a model outside `jax.jit` traces and compiles nothing."""

import jax
import jax.numpy as jnp

from sympow_jax import config, models
from tests import marked

_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **_: _events.append(name))


def small(preset, *, remat="none", **changes):
    attention = config.preset(preset, **changes)
    model = config.ModelConfig(
        vocab_size=16, layers=1, width=16, heads=2, dtype="float32", remat=remat, attention=attention
    )
    return models.DecoderLM(model, rngs=0)


def events(call):
    names = []
    for _ in range(2):
        _events.clear()
        jax.block_until_ready(call())
        names.append([event for event in _events if "compile" in event])
    assert names[0]
    return names[1]


@marked.cases(
    ("preset", "changes"),
    [("softmax_alibi", {})],
    slow=[
        ("conformal_paper", {"form": "chunked"}),
        ("conformal_paper", {"remat": "full"}),
        ("gpt2", {}),
        ("sympow_gated_window", {}),
    ],
)
def test_a_second_call_compiles_nothing(preset, changes):
    model, tokens = small(preset, **changes), jnp.zeros((2, 23), jnp.int32)  # a length of no other test
    assert events(lambda: model(tokens)) == []
    state = model.init_state(2, max_length=32)
    assert events(lambda: model.extend(tokens, state)) == []
    assert events(lambda: model.extend(tokens[:, :1], state)) == []
