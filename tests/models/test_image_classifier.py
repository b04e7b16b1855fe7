"""Tests of the image classifier: its patches, its positions, its size."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models


def make(attention, *, classes=5, **changes):
    settings = {"patch_size": 4, "layers": 1, "width": 16, "heads": 2, "dtype": "float32"}
    model = config.ModelConfig(attention=attention, **settings | changes)
    task = config.TaskConfig(name="classification", classes=classes)
    return models.make(model, task, rngs=nnx.Rngs(0))


def images():
    return np.random.default_rng(1).normal(size=(3, 8, 12, 3)).astype(np.float32)


def swapped():
    return np.roll(images(), 4, axis=1)


classify = nnx.jit(models.ImageClassifier.classify)


def test_patches_are_squares_row_by_row_and_their_order_matters():
    """Compares with patches that are cut out one by one, in a column in the same order, and with the halves swapped."""
    model = make(config.lrpe_method("base", causal=False))
    for name in ("query", "key", "value", "out"):
        getattr(model.blocks[0].attention, name).kernel[...] *= 10
    x = images()
    cut = [x[:, top : top + 4, left : left + 4] for top, left in itertools.product((0, 4), (0, 4, 8))]
    logits = np.asarray(classify(model, x))
    assert logits.shape == (3, 5)
    np.testing.assert_allclose(classify(model, np.concatenate(cut, axis=1)), logits, rtol=1e-5, atol=1e-6)
    assert np.abs(logits - classify(model, swapped())).max() > 1e-5


def test_without_positions_the_order_of_patches_does_not_matter():
    model = make(config.AttentionConfig(kernel="linear", decay="none", position="none", causal=False))
    np.testing.assert_allclose(classify(model, images()), classify(model, swapped()), rtol=1e-5, atol=1e-6)


def test_images_that_do_not_fit():
    model = make(config.lrpe_method("base", causal=False))
    for shape, message in (
        ((1, 8, 10, 3), r"images are 8 x 10 pixels, which model\.patch_size 4 does not divide"),
        ((1, 8, 8, 1), r"images has shape \(1, 8, 8, 1\); it must be \[B, H, W, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model.classify(jnp.zeros(shape))
