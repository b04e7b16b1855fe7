"""Tests of the encoder: tokens attend to their whole document, never to padding, and rows have classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models
from tests import marked

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


TOKENS = np.random.default_rng(1).integers(0, 32, (3, TIME)).astype(np.int32)
WHOLE = np.zeros((3, TIME), np.int32)


@nnx.jit
def run(model, tokens, segment_ids):
    hidden = model.hidden(tokens, segment_ids=segment_ids)
    return hidden, model.head(hidden, segment_ids)


def test_shapes_and_dtypes():
    model = small(dtype="bfloat16", activation="relu")
    hidden, classes = nnx.eval_shape(run, model, TOKENS, WHOLE)
    assert (hidden.shape, hidden.dtype) == ((3, TIME, 16), jnp.bfloat16)
    assert (classes.shape, classes.dtype) == ((3, 5), jnp.float32)
    logits = jax.eval_shape(model.unembed, hidden)
    assert (logits.shape, logits.dtype) == ((3, TIME, 32), jnp.float32)
    number = jax.eval_shape(small(task="regression").classify, TOKENS)
    assert (number.shape, number.dtype) == ((3, 1), jnp.float32)
    assert not hasattr(small(task="masked_token"), "head")


@pytest.mark.parametrize("method", ["softmax", "type2", pytest.param("base", marks=pytest.mark.slow)])
def test_tokens_attend_to_their_whole_document_and_never_to_padding(method):
    model = small(method)
    segment_ids = np.repeat([[0] * 7 + [1] * 5], 3, axis=0).astype(np.int32)
    before, _ = run(model, TOKENS, segment_ids)
    changed = (TOKENS + (np.arange(TIME) == 5)) % 32
    after, _ = run(model, changed, segment_ids)
    before, after = np.asarray(before), np.asarray(after)
    assert np.abs(before - after)[:, :7].max(-1).min() > 1e-4
    np.testing.assert_array_equal(before[:, 7:], after[:, 7:])

    padding = np.where(np.arange(TIME) < 9, WHOLE, -1)
    (_, logits), (_, other) = (run(model, np.where(padding < 0, x, TOKENS), padding) for x in (7, 8))
    np.testing.assert_array_equal(logits, other)
    _, seen = run(model, TOKENS, WHOLE)
    assert np.abs(np.asarray(seen) - logits).max() > 1e-5

    # The head reads the mean of tokens.
    hidden, found = run(model, TOKENS, padding)
    kernel, bias = (
        np.asarray(x[...], np.float64) for x in (model.head.linear.kernel, model.head.linear.bias)
    )
    means = np.asarray(hidden, np.float64)[:, :9].mean(1)
    np.testing.assert_allclose(found, means @ kernel + bias, rtol=1e-5, atol=1e-7)


def pair_head_reference(head, one, two):
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


@marked.cases(
    ("method", "norm"),
    [("type2", "batch")],
    slow=[(name, "layer") for name in ("softmax", "base", "rope", "spe", "permuteformer", "type1")],
)
def test_two_texts_of_a_row_are_encoded_as_if_alone(method, norm):
    model = small(method, norm=norm, dual_encoder=True)
    for layer in (model.head.first, model.head.second, model.head.linear):
        layer.kernel[...] *= 10
        layer.bias[...] = jnp.linspace(-1, 1, layer.bias.size)
    assert model.head.first.kernel.shape == (64, 64)
    assert model.head.second.kernel.shape == (64, 32)
    lengths = [(7, 5), (3, 4), (0, 6)]

    def run_on(rows, pairs):
        segments = [[0] * n + [1] * m + [-1] * (TIME - n - m) for n, m in pairs]
        return run(model, rows, np.array(segments, np.int32))

    _, found = run_on(TOKENS, lengths)
    alone = []
    for index in range(2):
        begins = [0 if index == 0 else n for n, _ in lengths]
        rows = np.stack([np.roll(row, -begin) for row, begin in zip(TOKENS, begins)])
        hidden, _ = run_on(rows, [(pair[index], 0) for pair in lengths])
        alone.append([x[: pair[index]] for x, pair in zip(np.asarray(hidden), lengths)])
    for logits, one, two in zip(found, *alone, strict=True):
        np.testing.assert_allclose(logits, pair_head_reference(model.head, one, two), rtol=1e-4, atol=1e-5)


def test_a_dual_encoder_has_the_parameters_of_an_encoder_but_for_its_head():
    def names(**changes):
        shapes = nnx.to_pure_dict(nnx.state(small(**changes), nnx.Param))
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        return {models.parameter_name(path): leaf.shape for path, leaf in leaves}

    both = names(dual_encoder=True), names()
    layers = {f"head.{layer}.{array}" for layer in ("first", "second") for array in ("kernel", "bias")}
    assert set(both[0]) - set(both[1]) == layers
    assert {name for name, size in both[1].items() if both[0][name] != size} == {"head.linear.kernel"}
    with pytest.raises(ValueError, match=r"segment_ids is None; it must tell two texts apart: pass 0 for"):
        small(dual_encoder=True).classify(TOKENS)
    with pytest.raises(ValueError, match="the model has no head; make it for a task that has labels"):
        small(task="masked_token").classify(TOKENS)


def test_a_row_depends_on_its_batch_only_in_training():
    model = small(norm="batch")
    model.embedding_norm.mean[...] += 0.01
    other = np.concatenate([TOKENS[:1], TOKENS[1:, ::-1] // 2])

    def first():
        return [np.asarray(run(model, x, WHOLE)[1][0]) for x in (TOKENS, other)]

    np.testing.assert_array_equal(*first())
    model.train()
    assert np.abs(np.subtract(*first())).max() > 1e-3
