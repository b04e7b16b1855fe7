"""Tests of GPT-2's published files: the formula's logits under all file layouts, and unsupported requests."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from sympow_jax import config, generation, weights
from tests.ops import cases
from tests.weights import published

BOUND = 1e-6


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def tokens(batch=2, time=published.LENGTH):
    return np.random.default_rng(1).integers(0, published.VOCABULARY, (batch, time))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Returns the model of the published files."""
    path = published.write(tmp_path_factory.mktemp("gpt2"))
    return weights.load(path, weights.read_settings(weights.settings_path(path)))


def test_logits_are_those_of_the_formula(loaded):
    expected = published.forward(published.weights(), tokens())
    assert cases.error(logits(loaded, tokens()), expected) <= BOUND
    assert np.std(expected) > 1


def test_tokens_one_at_a_time(loaded):
    """Decodes a prompt, then steps, up to the last position."""
    program = generation.Program(loaded)
    expected = published.forward(published.weights(), tokens())
    lengths = np.array([9, 5])
    actual, state = program.prefill(tokens(), lengths, max_length=published.LENGTH)
    for _ in range(11):
        assert cases.error(actual, expected[[0, 1], lengths - 1]) <= BOUND
        actual, state = program.decode(state, tokens()[[0, 1], lengths])
        lengths = lengths + 1
    actual, _ = program.decode(state, np.array([0, 0]))
    assert np.isnan(actual[0]).all()
    assert np.isfinite(actual[1]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_names_with_a_prefix_and_a_copy_of_the_output(tmp_path, loaded, dtype):
    plain = {name: value.astype(dtype) for name, value in published.weights().items()}
    tensors = {f"transformer.{name}": value for name, value in plain.items()}
    path = published.write(tmp_path, tensors | {"lm_head.weight": plain["wte.weight"]})
    model = weights.load(path, weights.read_settings(tmp_path / "config.json"))
    actual, expected = (jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (model, loaded))
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, np.asarray(other).astype(dtype))


def test_the_output_must_be_the_embedding(tmp_path):
    other = published.weights()
    other["lm_head.weight"] = other["wte.weight"] + 1
    path = published.write(tmp_path, other)
    with pytest.raises(ValueError, match=r"lm_head\.weight of .* is not the embedding"):
        weights.load(path, weights.read_settings(tmp_path / "config.json"))


def test_settings(tmp_path):
    published.write(tmp_path, n_inner=50, activation_function="relu", layer_norm_epsilon=1e-6)
    settings = weights.read_settings(tmp_path / "config.json")
    model = settings.model
    assert (model.layers, model.width, model.heads, model.vocab_size) == (2, 24, 3, 40)
    assert (model.hidden_width, model.activation, model.biases, model.embedding_norm) == (
        50,
        "relu",
        True,
        False,
    )
    assert model.norm_epsilon == 1e-6
    assert model.attention == config.preset("gpt2", max_document_length=published.LENGTH)
    assert (settings.data.document_separator, settings.data.context_length) == (39, published.LENGTH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_embd": None, "n_layer": "2", "activation_function": "gelu"},
            "n_layer is '2', not a positive integer; n_embd is None, not a positive integer; activation_function is "
            "'gelu', not one of gelu_new",
        ),
        ({"layer_norm_epsilon": 0}, "model.norm_epsilon is 0; it must be at least 1e-30"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, not False"),
        ({"n_inner": 0}, "n_inner is 0, not a positive integer"),
        ({"n_head": 5}, "model.heads is 5 and does not divide model.width 24"),
    ],
)
def test_unsupported_settings(tmp_path, changes, message):
    published.write(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        weights.read_settings(tmp_path / "config.json")
    assert str(raised.value).startswith(f"{tmp_path}/config.json: ")
    assert "\n" not in str(raised.value)


def test_all_mismatches_are_listed(tmp_path):
    tensors = published.weights()
    del tensors["h.1.ln_2.bias"], tensors["wpe.weight"]
    tensors["h.0.attn.c_attn.weight"] = tensors["h.0.attn.c_attn.weight"].T.copy()
    tensors["ln_f.weight"] = tensors["ln_f.weight"].astype(np.float64)
    tensors["h.2.ln_1.weight"] = tensors["ln_f.bias"]
    path = published.write(tmp_path, tensors, prefix="transformer.")
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        weights.load(path, weights.read_settings(tmp_path / "config.json"))
    assert str(raised.value) == (
        f"{path} does not fit the model of these settings: "
        "it lacks transformer.h.1.ln_2.bias, transformer.wpe.weight; "
        "the model has no transformer.h.2.ln_1.weight; "
        "transformer.h.0.attn.c_attn.weight is [72, 24] and not [24, 72]; "
        "transformer.ln_f.weight is of dtype F64 and not F32, F16, BF16"
    )


def test_parameters_that_gpt2_lacks_are_listed_by_name(tmp_path):
    path = published.write(tmp_path)
    settings = weights.read_settings(tmp_path / "config.json")
    attention = dataclasses.replace(settings.model.attention, kernel="power", decay="learned")
    model = dataclasses.replace(settings.model, attention=attention, biases=False)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        weights.load(path, dataclasses.replace(settings, model=model))
    lacking = "it lacks blocks.0.attention.decay.kernel, blocks.1.attention.decay.kernel; "
    assert f"{lacking}the model has no h.0.attn.c_attn.bias, h.0.attn.c_proj.b" in str(raised.value)


def test_a_power_kernel_takes_the_weights_as_they_are(tmp_path):
    """With the positions of GPT-2 and without gates it has the same parameters."""
    path = published.write(tmp_path)
    settings = weights.read_settings(tmp_path / "config.json")
    attention = dataclasses.replace(settings.model.attention, kernel="power")
    swapped = dataclasses.replace(settings, model=dataclasses.replace(settings.model, attention=attention))
    model = weights.load(path, swapped)
    tensors = safetensors.numpy.load_file(path)
    query = np.split(tensors["h.1.attn.c_attn.weight"], 3, axis=1)[0]
    np.testing.assert_array_equal(model.blocks[1].attention.query.kernel[...], query)
    assert model.config.attention.kernel == "power"
