"""Tests of the token losses of a model of known loss, in one call and in many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, evaluation, models
from sympow_jax.evaluation import streaming
from tests.evaluation import fakes


@pytest.fixture(autouse=True)
def compile_anew():
    """Clears the compiled programs, since the tests change bounds that are read while tracing."""
    streaming._call_losses.clear_cache()


def test_every_token_is_predicted_from_those_before_it():
    losses = evaluation.token_losses(fakes.CountingModel(), fakes.counting_documents(3, 50))
    assert losses.shape == (3, 49)
    np.testing.assert_allclose(losses, np.tile(fakes.expected_loss(np.arange(1, 50)), (3, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("count", "length", "call"),
    [(1, 2, 16_384), (5, 98, 16), (5, 98, 200), (2, 129, 32), (7, 33, 64), (3, 34, 32), (2, 3, 1)],
)
def test_segments_batches_and_padding_change_nothing(monkeypatch, count, length, call):
    monkeypatch.setattr(streaming, "_CALL_TOKENS", call)
    losses = evaluation.token_losses(fakes.CountingModel(), fakes.counting_documents(count, length))
    expected = np.tile(fakes.expected_loss(np.arange(1, length)), (count, 1))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("documents", "length", "shape", "calls"),
    [
        (7, 90, (1, 45), 14),  # 89 predictions in two segments
        (7, 20, (2, 19), 4),  # 3 calls of 2 documents and one of 1, padded
        (5, 13, (3, 12), 2),  # as evenly as possible, not 4 and 1
    ],
)
def test_all_calls_share_one_shape_and_one_compilation(monkeypatch, documents, length, shape, calls):
    monkeypatch.setattr(streaming, "_CALL_TOKENS", 48)
    shapes, done = [], []

    class Traced(fakes.CountingModel):
        def hidden(self, tokens, **kwargs):
            shapes.append(tokens.shape)
            return super().hidden(tokens, **kwargs)

    evaluation.token_losses(Traced(), fakes.counting_documents(documents, length), on_call=done.append)
    assert shapes == [shape]
    assert done == [np.prod(shape)] * calls


def test_a_small_bound_on_the_logits_changes_nothing(monkeypatch):
    monkeypatch.setattr(streaming, "_LOGIT_BYTES", 4 * fakes.VOCABULARY * 10)  # ten tokens at once
    losses = evaluation.token_losses(fakes.CountingModel(), fakes.counting_documents(3, 50))
    np.testing.assert_allclose(losses, np.tile(fakes.expected_loss(np.arange(1, 50)), (3, 1)), rtol=1e-6)


def test_the_logits_of_a_large_vocabulary_are_never_held_for_a_whole_call():
    class WideModel(fakes.CountingModel):
        def unembed(self, hidden):
            return jnp.pad(hidden, ((0, 0), (0, 0), (0, 50_000 - hidden.shape[-1])))

    model = WideModel()
    graph, parameters = nnx.split(model)
    tokens = np.zeros((4, 2048), np.int32)
    state = model.init_state(4, max_length=2048)
    lowered = streaming._call_losses.lower(graph, parameters, state, tokens, tokens)
    # All logits would take 1.6 GB; a few copies of the 64 MiB at hand are what a loss needs.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * streaming._LOGIT_BYTES


@pytest.mark.parametrize("preset", ["conformal", "softmax", "linear"])
def test_streaming_a_decoder_equals_one_call(monkeypatch, preset):
    settings = config.ModelConfig(
        vocab_size=13,
        layers=1,
        width=16,
        heads=2,
        dtype="float32",
        attention=config.preset(preset, exact_window=4),
    )
    model = models.DecoderLM(settings, rngs=nnx.Rngs(0))
    # At initialization the outputs hardly depend on the context: make mistakes in it visible.
    for parameter in jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        parameter[...] = 5 * parameter[...]
    tokens = np.random.default_rng(0).integers(0, 13, (3, 45))
    logits = jax.jit(lambda inputs: model(inputs))(tokens[:, :-1])
    whole = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[:, 1:, None], axis=-1)[..., 0]
    monkeypatch.setattr(streaming, "_CALL_TOKENS", 10)
    losses = evaluation.token_losses(model, tokens)
    np.testing.assert_allclose(losses, whole, rtol=0, atol=2e-5)
