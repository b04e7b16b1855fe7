"""Learned absolute positions: a row of a table for each place of a document, and nothing beyond the table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, generation, models

LENGTH, WIDTH = 8, 16


def make(task="next_token", **changes):
    causal = task == "next_token"
    attention = config.preset("gpt2", max_document_length=LENGTH, causal=causal)
    shape = {"vocab_size": 32, "layers": 1, "width": WIDTH, "heads": 2, "dtype": "float32", **changes}
    settings = config.ModelConfig(attention=attention, **shape)
    of = config.TaskConfig(name=task, classes=2 if task == "classification" else None)
    return models.make(settings, of, rngs=nnx.Rngs(0))


def tokens(time=LENGTH):
    return jax.random.randint(jax.random.key(1), (2, time), 0, 32)


def stem(model, segment_ids):
    """What positions add to tokens, behind a norm or without one."""
    x = jax.random.normal(jax.random.key(2), (*segment_ids.shape, WIDTH))
    added, _ = models.block.stem(model, x, jnp.asarray(segment_ids))
    plain = dataclasses.replace(model.config.attention, position="none")
    bare = models.make(
        dataclasses.replace(model.config, attention=plain), config.TaskConfig(), rngs=nnx.Rngs(0)
    )
    return added - models.block.stem(bare, x, jnp.asarray(segment_ids))[0]


@pytest.mark.parametrize("embedding_norm", [False, True])
def test_rows_of_the_table_by_place(embedding_norm):
    model = make(embedding_norm=embedding_norm)
    ids = np.array([[0, 0, 0, -1, 0, 1, 1, 2], [-1, 4, 4, 4, 4, 4, 4, 4]])
    table = model.position_embedding[...]
    assert table.shape == (LENGTH, WIDTH)
    added = stem(model, ids)
    for row, places in enumerate(([0, 1, 2, None, 3, 0, 1, 0], [None, 0, 1, 2, 3, 4, 5, 6])):
        for time, place in enumerate(places):
            if place is not None:
                np.testing.assert_allclose(added[row, time], table[place], atol=1e-6)


def test_a_model_without_a_norm_behind_the_embedding_has_none():
    model = make(embedding_norm=False, biases=True)
    names = {
        models.parameter_name(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    }
    assert "position_embedding" in names
    assert not any(name.startswith("embedding_norm") for name in names)
    biased = {name for name in names if name.endswith(".bias") and "norm" not in name}
    parts = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.up", "mlp.down")
    assert biased == {f"blocks.0.{part}.bias" for part in parts}


def test_beyond_the_table():
    model = make()
    with pytest.raises(
        ValueError, match=r"there are 9 tokens, but learned positions end at .*max_document_length, 8"
    ):
        jax.eval_shape(model, tokens(9))
    with pytest.raises(
        ValueError, match="row 1 has 9 tokens behind 0 others, but the model's learned positions end at 8"
    ):
        generation.prefill(model, np.zeros((2, 9), np.int32), np.array([3, 9]), max_length=20)
    logits, state = generation.prefill(model, tokens(6), np.array([6, 5]), max_length=20)
    with pytest.raises(ValueError, match="row 0 has 3 tokens behind 6 others"):
        generation.prefill(model, tokens(3), np.array([3, 1]), state=state)
    for _ in range(3):
        assert np.isfinite(logits).all()
        logits, state = generation.decode(model, state, np.array([1, 2]))
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    with pytest.raises(
        ValueError, match="prompt has 6 tokens and max_tokens is 3, but the model's learned positions end"
    ):
        generation.generate(model, [[1] * 6], max_tokens=3, sampling=generation.Sampling(temperature=0))


@pytest.mark.parametrize("task", ["masked_token", "classification"])
def test_encoders_have_them_too(task):
    model = make(task)
    x = tokens() if task == "masked_token" else jnp.zeros((2, 8, 4, 1))
    if task == "classification":
        model = make(task, patch_size=2, channels=1, vocab_size=0)
        assert jax.eval_shape(model.classify, x).shape == (2, 2)
        with pytest.raises(ValueError, match="there are 16 tokens, but learned positions end"):
            jax.eval_shape(model.classify, jnp.zeros((2, 8, 8, 1)))
        return
    before = model.hidden(x)
    model.position_embedding[...] = model.position_embedding[...].at[3].add(1)
    assert np.abs(model.hidden(x) - before).max() > 1e-2
