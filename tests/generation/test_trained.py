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
    """Returns bytes of the Python standard library."""
    return np.frombuffer(pathlib.Path(dataclasses.__file__).read_bytes()[:TIME], np.uint8).astype(np.int32)


def in_form(model, form):
    """Returns the model with another form of attention and the same parameters."""
    graph = dataclasses.replace(
        model.config, attention=dataclasses.replace(model.config.attention, form=form)
    )
    other = models.DecoderLM(graph, rngs=nnx.Rngs(0))
    nnx.update(other, nnx.state(model, nnx.Param))
    return other


@nnx.jit
def by_steps(model, tokens):
    """Returns the logits after each token, decoded one token at a time."""
    program = generation.Program(model)
    state = program.init_state(1)

    def step(state, token):
        logits, state = program.decode(state, token[None])
        return state, logits[0]

    return jax.lax.scan(step, state, tokens)[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_forms_and_steps_agree_over_4096_tokens(trained, text):
    tokens = jnp.asarray(text)
    expected = small.whole(in_form(trained, "attention"), tokens[None])[0]
    assert (expected.argmax(-1)[:-1] == text[1:]).mean() > 0.2  # it has learned something
    for actual in (small.whole(in_form(trained, "chunked"), tokens[None])[0], by_steps(trained, tokens)):
        assert cases.error(actual, expected) <= BOUND


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_greedy_text_is_identical(trained, text):
    """One prompt is in the recurrent state; the other stays in the KV cache until it is folded."""
    model = in_form(trained, "attention")
    lengths, count = (40, 380, 2000), 96
    longest = max(lengths)
    for length in lengths:
        prompt = text[:length]
        blocks = generation.generate(
            trained, [prompt.tolist()], max_tokens=count, sampling=generation.Sampling(temperature=0)
        )
        actual = np.concatenate(list(blocks), axis=1)[0]
        # Each token is the likeliest after those before it, so the other form's greedy text is the same.
        # Padding, which no token before it sees, spares compilations.
        tokens = np.pad(np.concatenate([prompt, actual]), (0, longest - length))
        logits = small.whole(model, tokens[None])[0]
        np.testing.assert_array_equal(actual, logits[length - 1 : length + count - 1].argmax(-1))
