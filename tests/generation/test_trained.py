"""Tests of a model trained on text: equal logits and greedy text from every form and from single steps."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import generation, models, training
from sympow_jax.commands import launch
from tests.generation import small
from tests.ops import cases

ROOT = pathlib.Path(__file__).parents[2]
TIME = 4096
BOUND = 1e-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the model of `configs/quickstart.py` after 50 updates."""
    folder = tmp_path_factory.mktemp("run")
    arguments = [f"--config={ROOT}/configs/quickstart.py", f"--workdir={folder}"]
    arguments += ["--config.training.steps=50", "--config.evaluation.context_lengths=64"]
    assert launch.main(arguments) == 0
    return training.restore_model(folder)[1]


@pytest.fixture(scope="module")
def text():
    return np.frombuffer(pathlib.Path(dataclasses.__file__).read_bytes()[:TIME], np.uint8).astype(np.int32)


def in_form(model, form):
    graph = dataclasses.replace(
        model.config, attention=dataclasses.replace(model.config.attention, form=form)
    )
    other = models.DecoderLM(graph, rngs=nnx.Rngs(0))
    nnx.update(other, nnx.state(model, nnx.Param))
    return other


@nnx.jit
def by_steps(model, tokens):
    program = generation.Program(model)
    state = program.init_state(1)

    def step(state, token):
        logits, state = program.decode(state, token[None])
        return state, logits[0]

    return jax.lax.scan(step, state, tokens)[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_forms_steps_and_greedy_text_agree(trained, text):
    tokens = jnp.asarray(text)
    attention = in_form(trained, "attention")
    expected = small.whole(attention, tokens[None])[0]
    assert (expected.argmax(-1)[:-1] == text[1:]).mean() > 0.2  # it has learned something
    for actual in (small.whole(in_form(trained, "chunked"), tokens[None])[0], by_steps(trained, tokens)):
        assert cases.error(actual, expected) <= BOUND
    # A prompt in the recurrent state, one that stays in the KV cache until it is folded, and a short one.
    for length in (40, 380, 2000):
        prompts, greedy = [text[:length].tolist()], generation.Sampling(temperature=0)
        blocks = generation.generate(trained, prompts, max_tokens=96, sampling=greedy)
        actual = np.concatenate(list(blocks), axis=1)[0]
        # Each token is the likeliest after those before it. Padding is to one length for all.
        row = np.pad(np.concatenate([text[:length], actual]), (0, TIME - length - 96))
        logits = small.whole(attention, row[None])[0]
        np.testing.assert_array_equal(actual, logits[length - 1 : length + 95].argmax(-1))
