"""Tests of learned absolute positions: one table row per position of a document, and errors beyond the table."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, generation, models
from sympow_jax.ops import documents

LENGTH, WIDTH = 8, 16


def make(task="next_token", **changes):
    causal = task == "next_token"
    attention = config.preset("gpt2", max_document_length=LENGTH, causal=causal)
    shape = {"vocab_size": 32, "layers": 1, "width": WIDTH, "heads": 2, "dtype": "float32", **changes}
    settings = config.ModelConfig(attention=attention, **shape)
    task_config = config.TaskConfig(name=task, classes=2 if task == "classification" else None)
    return models.make(settings, task_config, rngs=nnx.Rngs(0))


def tokens(time=LENGTH):
    return np.random.default_rng(1).integers(0, 32, (2, time)).astype(np.int32)


@nnx.jit
def stem(model, x, segment_ids):
    return model._stem(x, segment_ids)[0]


@pytest.mark.parametrize("embedding_norm", [False, True])
def test_rows_of_the_table_by_position(embedding_norm):
    """Added after the norm, if there is one."""
    model = make(embedding_norm=embedding_norm)
    ids = np.array([[0, 0, 0, -1, 0, 1, 1, 2], [-1, 4, 4, 4, 4, 4, 4, 4]])
    table = np.asarray(model.position_embedding[...])
    assert table.shape == (LENGTH, WIDTH)
    x = np.random.default_rng(2).normal(size=(*ids.shape, WIDTH)).astype(np.float32)
    added = np.asarray(stem(model, x, ids))
    if embedding_norm:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    for row, places in enumerate(([0, 1, 2, None, 3, 0, 1, 0], [None, 0, 1, 2, 3, 4, 5, 6])):
        for time, index in enumerate(places):
            if index is not None:
                np.testing.assert_allclose(added[row, time] - x[row, time], table[index], atol=2e-6)


def test_beyond_the_table():
    model = make()
    program = generation.Program(model)
    with pytest.raises(ValueError, match=r"a document has 9 tokens, but learned positions end at"):
        jax.eval_shape(model, tokens(9))
    with pytest.raises(ValueError, match="row 1 has 9 tokens after 0 others, but the model's learned"):
        program.prefill(np.zeros((2, 9), np.int32), np.array([3, 9]), max_length=20)
    state = program.init_state(2, max_length=20)
    state = dataclasses.replace(state, position=documents.PositionState(jnp.array([6, 5]), jnp.zeros(2, int)))
    with pytest.raises(ValueError, match="row 0 has 3 tokens after 6 others"):
        program.prefill(tokens(3), np.array([3, 1]), initial_state=state)
    generate = functools.partial(
        generation.generate, model, [[1] * 6], sampling=generation.Sampling(temperature=0)
    )
    assert sum(x.shape[1] for x in generate(max_tokens=3)) == 3  # the last token is not read
    with pytest.raises(ValueError, match="prompt and 4 tokens take 9 learned positions, and the model has 8"):
        generate(max_tokens=4)


def test_rows_may_be_longer_than_the_table():
    """Documents may not; where ids are traced, those that are end in NaN."""
    model, x = make(), tokens(16)
    ids = np.array([[0] * 8 + [1] * 8, [-1] + [3] * 6 + [-1] * 2 + [3] * 2 + [4] * 5], np.int32)
    traced = nnx.jit(lambda model, x, ids: model(x, segment_ids=ids))
    packed = np.asarray(traced(model, x, ids))
    assert np.isfinite(packed).all()
    turned = traced(model, np.roll(x, 8, axis=1), np.stack([ids[0], ids[0]]))
    np.testing.assert_allclose(packed[0], np.roll(turned[0], 8, axis=0), atol=1e-5)
    ids[1, 11] = 3
    with pytest.raises(ValueError, match="a document has 9 tokens, but learned positions end"):
        model(x, segment_ids=ids)
    outputs = np.asarray(traced(model, x, ids))
    np.testing.assert_array_equal(np.isnan(outputs).any((0, 2)), np.arange(16) == 11)


def test_encoders_have_learned_positions():
    images = make("classification", patch_size=2, vocab_size=0)
    assert jax.eval_shape(images.classify, jnp.zeros((2, 8, 4, 3))).shape == (2, 2)
    with pytest.raises(ValueError, match="a document has 16 tokens, but learned positions end"):
        jax.eval_shape(images.classify, jnp.zeros((2, 8, 8, 3)))
    encoder = make("masked_token")
    assert jax.eval_shape(encoder.hidden, tokens()).shape == (2, LENGTH, WIDTH)
    with pytest.raises(ValueError, match="a document has 9 tokens, but learned positions end"):
        jax.eval_shape(encoder.hidden, tokens(9))
