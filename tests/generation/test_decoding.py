"""Prefill and decode against one call of the model, whatever the state keeps."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import generation, ops
from tests.generation import small
from tests.ops import cases

# RMS ratio: what float32 rounds over 200 tokens.
BOUND = 1e-5


@nnx.jit
def whole(model, tokens):
    return model(tokens)


def decoded(model, tokens, state, logits):
    """The logits before and behind each of `tokens`, [B, T + 1, V]."""
    found = [logits]
    for place in range(tokens.shape[1]):
        logits, state = generation.decode(model, state, tokens[:, place])
        found.append(logits)
    return jnp.stack(found, axis=1)


def lengths(*values):
    return np.array(values, np.int32)


def keeps(state):
    return isinstance(state.layers[0].memory, ops.KeyValueState)


@pytest.mark.parametrize(
    ("preset", "max_length"), [("conformal", None), ("softmax", 200), ("linear_lrpe", None)]
)
def test_step_by_step_equals_one_call(preset, max_length):
    """Over 200 tokens, the first 90 in one pass: the op chooses the attention form for a whole row of these sizes."""
    model, tokens = small.model(preset), small.tokens(1, 200)
    logits, state = generation.prefill(model, tokens[:, :90], lengths(90), max_length=max_length)
    assert keeps(state) == (preset == "softmax")
    found = decoded(model, tokens[:, 90:], state, logits)
    expected = whole(model, tokens)[:, 89:]
    assert cases.error(found, expected) < BOUND
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    assert np.std(expected) > 0.1


def test_forms_agree():
    """Steps are compared with the attention form above; here it is with the chunked one."""
    tokens = small.tokens(1, 200)
    attention = whole(small.model("conformal", form="attention"), tokens)
    chunked = whole(small.model("conformal", form="chunked"), tokens)
    assert cases.error(chunked, attention) < BOUND


@pytest.mark.parametrize(("preset", "max_length"), [("conformal", None), ("conformal", 28), ("softmax", 28)])
def test_ragged_rows_are_as_each_alone(preset, max_length):
    model, tokens = small.model(preset), small.tokens(3, 24)
    rows = lengths(24, 1, 13)
    logits, state = generation.prefill(model, tokens, rows, max_length=max_length)
    assert keeps(state) == (max_length is not None)
    following = small.tokens(3, 4, seed=2)
    found = decoded(model, following, state, logits)
    # Shorter rows have room for as many more, since padding takes none.
    for row, length in enumerate(rows):
        alone = jnp.concatenate([tokens[row, :length], following[row]])[None]
        expected = whole(model, jnp.pad(alone, ((0, 0), (0, 28 - alone.shape[1]))))
        assert cases.error(found[row], expected[0, length - 1 : length + 4]) < BOUND


def test_padding_takes_no_room():
    model, tokens = small.model("softmax"), small.tokens(2, 24)
    _, state = generation.prefill(model, tokens, lengths(24, 1), max_length=28)
    logits = [decoded(model, small.tokens(2, 10), state, jnp.zeros((2, small.VOCABULARY)))]
    outgrown = ~np.isfinite(logits[0]).all(-1)
    # Row 0 has room for 4 tokens; the fifth misses a key.
    np.testing.assert_array_equal(outgrown[0], [False] * 5 + [True] * 6)
    assert not outgrown[1].any()


def test_folding_changes_nothing():
    model, tokens = small.model("conformal"), small.tokens(2, 40)
    assert model.kept_length == 28  # 36 features of 9 numbers each against 16 a position, and a window of 8
    logits, state = generation.prefill(model, tokens[:, :20], lengths(20, 11), max_length=28)
    folded = generation.fold(model, state)
    assert keeps(state)
    assert not keeps(folded)
    found = decoded(model, tokens[:, 20:], folded, logits)
    _, recurrent = generation.prefill(model, tokens[:, :20], lengths(20, 11))
    expected = decoded(model, tokens[:, 20:], recurrent, logits)
    assert cases.error(found, expected) < BOUND
    np.testing.assert_array_equal(folded.layers[0].memory.segment, recurrent.layers[0].memory.segment)


def test_what_is_lost_is_not_folded():
    model, tokens = small.model("conformal"), small.tokens(2, 20)
    logits, state = generation.prefill(model, tokens, lengths(20, 11), max_length=16)
    found = decoded(model, tokens[:, :1], generation.fold(model, state), logits)
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[1]).all()


def test_a_context_is_continued():
    model, tokens = small.model("conformal"), small.tokens(1, 30)
    _, state = generation.prefill(model, tokens[:, :20], lengths(20))
    found, _ = generation.prefill(model, tokens[:, 20:], lengths(10), state=state)
    assert cases.error(found, whole(model, tokens)[:, -1]) < BOUND


def test_mistakes():
    model, tokens = small.model("conformal"), small.tokens(2, 8)
    softmax = small.model("softmax")
    _, state = generation.prefill(model, tokens, lengths(8, 8))
    for message, mistake in {
        "pass max_length": lambda: generation.prefill(softmax, tokens, lengths(8, 8)),
        "max_length is 0": lambda: generation.prefill(softmax, tokens, lengths(8, 8), max_length=0),
        "row 1 has length 0": lambda: generation.prefill(model, tokens, lengths(8, 0)),
        "row 0 has length 9": lambda: generation.prefill(model, tokens, lengths(9, 1)),
        "must be [B, T]": lambda: generation.prefill(model, tokens, lengths(8)),
        "token 64 at place 3 of row 0": lambda: generation.prefill(
            model, tokens.at[0, 3].set(64), lengths(8, 8)
        ),
        "2 rows and there are tokens for 1": lambda: generation.decode(model, state, tokens[:1, 0]),
        "another model: it is recurrent": lambda: generation.decode(softmax, state, tokens[:, 0]),
        "another model: it has 1 layers, this one 2": lambda: generation.decode(
            small.model("conformal", layers=2), state, tokens[:, 0]
        ),
        "another model: .layers[0].memory.keys": lambda: generation.decode(
            small.model("conformal", window=8), state, tokens[:, 0]
        ),
        "another model: .layers[0].position": lambda: generation.fold(small.model("sympow"), state),
        "no recurrent state to fold": lambda: generation.fold(
            softmax, generation.init_state(softmax, 1, max_length=8)
        ),
        "make it with generation.prefill": lambda: generation.decode(model, (), tokens[:, 0]),
    }.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            mistake()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
