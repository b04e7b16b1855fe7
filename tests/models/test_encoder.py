"""Tests of the encoder: tokens attend to their whole document, never to padding, and rows have classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models

TIME = 12


def small(method="type2", task="classification", dual_encoder=False, **changes):
    settings = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "dtype": "float32", **changes}
    model = config.ModelConfig(attention=config.lrpe_method(method, causal=False), **settings)
    classes = 5 if task == "classification" else None
    task_config = config.TaskConfig(name=task, classes=classes, dual_encoder=dual_encoder)
    result = models.make(model, task_config, rngs=nnx.Rngs(0))
    for block in result.blocks:  # so that attention matters at this size
        for name in ("query", "key", "value", "out"):
            getattr(block.attention, name).kernel[...] *= 10
    return result


def tokens(batch=2, time=TIME):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 32)


@nnx.jit
def run(model, tokens, segment_ids):
    """Returns hidden states and logits of classes."""
    hidden = model.hidden(tokens, segment_ids=segment_ids)
    return hidden, model.head(hidden, segment_ids)


def test_shapes_and_dtypes():
    model = small(dtype="bfloat16", activation="relu")
    hidden, classes = run(model, tokens(), jnp.zeros_like(tokens()))
    assert (hidden.shape, hidden.dtype) == ((2, TIME, 16), jnp.bfloat16)
    assert (classes.shape, classes.dtype) == ((2, 5), jnp.float32)
    logits = model.unembed(hidden)
    assert (logits.shape, logits.dtype) == ((2, TIME, 32), jnp.float32)
    number = jax.eval_shape(small(task="regression").classify, tokens())
    assert (number.shape, number.dtype) == ((2, 1), jnp.float32)
    assert not hasattr(small(task="masked_token"), "head")


@pytest.mark.parametrize("method", ["softmax", "type2", pytest.param("base", marks=pytest.mark.slow)])
def test_every_token_attends_to_its_whole_document_only(method):
    model = small(method)
    segment_ids = jnp.asarray([[0] * 7 + [1] * 5] * 2)
    before, _ = run(model, tokens(), segment_ids)
    after, _ = run(model, tokens().at[:, 5].add(1) % 32, segment_ids)
    assert np.abs(before - after)[:, :7].max(-1).min() > 1e-4
    np.testing.assert_array_equal(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("method", ["softmax", "type2", pytest.param("base", marks=pytest.mark.slow)])
def test_padding_does_not_matter(method):
    model, ids = small(method), jnp.zeros_like(tokens())
    _, bare = run(model, tokens(), ids)
    padded = jnp.pad(tokens(), ((0, 0), (0, 5)), constant_values=7)
    _, actual = run(model, padded, jnp.pad(ids, ((0, 0), (0, 5)), constant_values=-1))
    np.testing.assert_allclose(actual, bare, rtol=1e-5, atol=1e-6)
    _, seen = run(model, padded, jnp.pad(ids, ((0, 0), (0, 5))))
    assert np.abs(seen - bare).max() > 1e-5


def test_the_head_reads_the_mean_of_tokens():
    model = small()
    segment_ids = jnp.asarray([[0] * TIME, [0] * 4 + [-1] * (TIME - 4)])
    hidden, actual = run(model, tokens(), segment_ids)
    hidden = np.asarray(hidden, np.float64)
    means = np.stack([hidden[0].mean(0), hidden[1, :4].mean(0)])
    kernel, bias = (
        np.asarray(x[...], np.float64) for x in (model.head.linear.kernel, model.head.linear.bias)
    )
    np.testing.assert_allclose(actual, means @ kernel + bias, rtol=1e-5)


def pair_head_reference(head, one, two):
    """Computes the head's outputs in float64, from the hidden states [T, M] of two texts alone."""
    z1, z2 = (
        np.asarray(hidden, np.float64).mean(0) if len(hidden) else np.zeros(16) for hidden in (one, two)
    )
    x = np.concatenate([z1, z2, z1 * z2, z1 - z2])
    layers = [
        (np.asarray(y.kernel[...], np.float64), np.asarray(y.bias[...], np.float64))
        for y in (head.first, head.second, head.linear)
    ]
    for kernel, bias in layers[:-1]:
        x = np.maximum(x @ kernel + bias, 0)
    kernel, bias = layers[-1]
    return x @ kernel + bias


@pytest.mark.parametrize(
    ("method", "norm"),
    [
        ("type2", "batch"),
        ("softmax", "layer"),
        *(
            pytest.param(m, "layer", marks=pytest.mark.slow)
            for m in ("base", "rope", "spe", "permuteformer", "type1")
        ),
    ],
)
def test_two_texts_of_a_row_are_encoded_as_if_alone(method, norm):
    model = small(method, norm=norm, dual_encoder=True)
    for layer in (model.head.first, model.head.second, model.head.linear):
        layer.kernel[...] *= 10
        layer.bias[...] = jnp.linspace(-1, 1, layer.bias.size)
    assert model.head.first.kernel.shape == (64, 64)
    assert model.head.second.kernel.shape == (64, 32)
    lengths = [(7, 5), (3, 4), (0, 6)]
    ids = [[0] * n + [1] * m + [-1] * (TIME - n - m) for n, m in lengths]
    rows = tokens(3)
    _, found = run(model, rows, jnp.asarray(ids))
    for row, (n, m), logits in zip(rows, lengths, found, strict=True):
        alone = [
            model.hidden(text[None])[0] if len(text) else np.zeros((0, 16))
            for text in (row[:n], row[n : n + m])
        ]
        np.testing.assert_allclose(logits, pair_head_reference(model.head, *alone), rtol=1e-4, atol=1e-5)


def test_a_dual_encoder_has_the_parameters_of_an_encoder_but_for_its_head():
    def names(**changes):
        shapes = nnx.to_pure_dict(nnx.state(small(**changes), nnx.Param))
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        return {models.parameter_name(path): leaf.shape for path, leaf in leaves}

    both = names(dual_encoder=True), names()
    layers = {f"head.{layer}.{array}" for layer in ("first", "second") for array in ("kernel", "bias")}
    assert set(both[0]) - set(both[1]) == layers
    assert {name for name, size in both[1].items() if both[0][name] != size} == {"head.linear.kernel"}


def test_a_dual_encoder_needs_segment_ids():
    with pytest.raises(ValueError, match=r"segment_ids is None; it must tell two texts apart: pass 0 for"):
        small(dual_encoder=True).classify(tokens())


def test_a_row_depends_on_its_batch_only_in_training():
    model, ids = small(norm="batch"), jnp.zeros_like(tokens())
    model.embedding_norm.mean[...] += 0.01
    other = tokens().at[1].set(tokens()[1, ::-1] // 2)
    np.testing.assert_array_equal(run(model, tokens(), ids)[1][0], run(model, other, ids)[1][0])
    model.train()
    assert np.abs(run(model, tokens(), ids)[1][0] - run(model, other, ids)[1][0]).max() > 1e-3


def test_roberta_has_the_number_of_parameters_of_its_shape():
    attention = config.lrpe_method("base", causal=False)
    model = config.ModelConfig(vocab_size=50_265, layers=12, width=768, heads=12, attention=attention)
    task = config.TaskConfig(name="masked_token")
    shapes = nnx.eval_shape(lambda: models.make(model, task, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
    assert count == 12 * (12 * 768**2 + 4 * 768) + 50_265 * 768 + 4 * 768
