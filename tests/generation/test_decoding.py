"""Tests of prefill and decoding against one call of the model, for every kind of state."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import generation, ops
from tests import marked, mistakes
from tests.generation import small
from tests.ops import cases

# RMS ratio: what float32 rounds over 200 tokens.
BOUND = 1e-5


def decoded(model, tokens, state, logits):
    program = generation.Program(model)
    actual = [logits]
    for index in range(tokens.shape[1]):
        logits, state = program.decode(state, tokens[:, index])
        actual.append(logits)
    return jnp.stack(actual, axis=1)


def keeps(state):
    return isinstance(state.layers[0].memory, ops.KVCache)


@marked.cases(
    ("preset", "max_length"),
    [("conformal_paper", None), ("softmax", 200)],
    slow=[
        ("linear_lrpe", None),
        ("expressive", 200),
        ("sliding_window", 150),
        ("power_delta", None),
        ("sympow_gated_window", None),
    ],
)
def test_ragged_prompts_and_steps_equal_one_call_of_each_row(preset, max_length):
    """The longest row has 200 tokens, more than the window's cache is asked for.

    The op chooses the attention form for whole rows of these sizes.
    """
    model, following = small.model(preset), small.tokens(small.ROWS, 100, seed=2)
    logits, state = small.prefilled(preset, max_length)
    assert keeps(state) == (max_length is not None)
    actual = decoded(model, following, state, logits)
    rows = zip(small.tokens(small.ROWS, small.TIME), small.LENGTHS, following)
    alone = [np.concatenate([prompt[:length], more]) for prompt, length, more in rows]
    expected = small.whole(model, np.stack([np.pad(row, (0, 200 - len(row))) for row in alone]))
    assert np.std(expected) > 0.1
    for row, length in enumerate(small.LENGTHS):
        wanted = expected[row, length - 1 : length + 100]
        assert cases.error(actual[row], wanted) < BOUND
        np.testing.assert_array_equal(actual[row].argmax(-1), wanted.argmax(-1))


def test_padding_takes_no_cache_slots():
    logits, state = small.prefilled("softmax", 200)
    actual = decoded(small.model("softmax"), small.tokens(small.ROWS, 105), state, logits)
    outgrown = ~np.isfinite(actual).all(-1)
    # Row 0 has room for 100 more tokens. The next token still attends to all of them; the one after it misses a key.
    np.testing.assert_array_equal(outgrown[0], [False] * 102 + [True] * 4)
    assert not outgrown[1:].any()


def test_a_kv_cache_is_folded():
    model = small.model("conformal_paper")
    program = generation.Program(model)
    # Two key heads, each with 36 features of 9 elements and 8 slots of 17, against 17 elements per position and its id.
    assert set(model.kv_cache_lengths) == {4 * 2 * (36 * 9 + 8 * 17) // (4 * 2 * 17 + 4)}
    lengths = np.array([20, 11, 21])
    tokens = small.tokens(small.ROWS, small.TIME)
    logits, state = program.prefill(tokens[:, :21], lengths, max_length=25)
    assert keeps(state)
    folded = program.fold(state)
    assert not keeps(folded)
    expected_logits, expected = program.prefill(tokens, lengths)
    assert cases.error(logits, expected_logits) < BOUND
    following = small.tokens(small.ROWS, 4, seed=2)
    wanted = decoded(model, following, expected, logits)
    assert cases.error(decoded(model, following, state, logits), wanted) < BOUND
    assert cases.error(decoded(model, following, folded, logits), wanted) < BOUND
    np.testing.assert_array_equal(folded.layers[0].memory.segment, expected.layers[0].memory.segment)


def test_a_cache_that_lost_tokens_is_not_folded():
    model = small.model("conformal_paper")
    program = generation.Program(model)
    logits, state = program.prefill(small.tokens(small.ROWS, 21), np.array([21, 11, 21]), max_length=25)
    for token in small.tokens(5, small.ROWS):  # rows 0 and 2 have room for 4
        _, state = program.decode(state, token)
    actual = decoded(model, small.tokens(small.ROWS, 1), program.fold(state), logits)
    np.testing.assert_array_equal(np.isnan(actual[:, 1]).all(-1), [True, False, True])


def test_a_context_is_continued():
    model, following = small.model("conformal_paper"), small.tokens(small.ROWS, small.TIME, seed=2)
    _, state = small.prefilled("conformal_paper")
    actual, _ = generation.Program(model).prefill(
        following, np.full(small.ROWS, small.TIME), initial_state=state
    )
    row = np.concatenate([small.tokens(small.ROWS, small.TIME)[0], following[0]])
    expected = small.whole(model, np.tile(row, (small.ROWS, 1)))[0, -1]
    assert cases.error(actual[0], expected) < BOUND


def test_a_token_outside_the_vocabulary_on_the_device():
    program, (_, state) = (
        generation.Program(small.model("conformal_paper")),
        small.prefilled("conformal_paper"),
    )
    logits, _ = program.decode(state, jnp.array([3, 64, -1]))
    np.testing.assert_array_equal(np.isnan(logits).all(-1), [False, True, True])


def test_a_program_is_an_argument_of_a_jitted_function():
    """It has the parameters that the model had when it was made."""
    model = nnx.clone(small.model("conformal_paper"))
    program, token = generation.Program(model), small.tokens(small.ROWS, 1)[:, 0]
    model.final_norm.scale[...] *= 2
    (_, state), step = (
        small.prefilled("conformal_paper"),
        jax.jit(lambda program, *inputs: program.decode(*inputs)[0]),
    )
    expected, _ = generation.Program(small.model("conformal_paper")).decode(state, token)
    assert cases.error(step(program, state, token), expected) < BOUND
    assert cases.error(step(generation.Program(model), state, token), expected) > 0.1


def test_mistakes():
    model, softmax = small.model("conformal_paper"), small.model("softmax")
    program, of_softmax = generation.Program(model), generation.Program(softmax)
    deeper = generation.Program(small.model("conformal_paper", layers=2))
    longer = generation.Program(small.model("conformal_paper", exact_window=8))
    tokens = small.tokens(2, 8)
    beyond, token = tokens.copy(), tokens[:, 0]
    beyond[0, 3] = 64
    rows = np.array([8, 8])
    state = program.init_state(2)
    for message, mistake in {
        "pass max_length": lambda: of_softmax.prefill(tokens, rows),
        "row 1 has length 0": lambda: program.prefill(tokens, np.array([8, 0])),
        "must be [B, T]": lambda: program.prefill(tokens, rows[:1]),
        "lengths have dtype float64": lambda: program.prefill(tokens, rows.astype(float)),
        "token 64 at position 3 of row 0": lambda: program.prefill(beyond, rows),
        "2 rows and there are tokens for 1": lambda: program.decode(state, token[:1]),
        "a PowerState, which kernel 'softmax' does not support": lambda: of_softmax.decode(state, token),
        "the state has 1 layers and the model 2": lambda: deeper.decode(state, token),
        "not one of this layer: .memory.keys": lambda: longer.decode(state, token),
        "not one of this layer: .position": lambda: generation.Program(small.model("sympow")).fold(state),
        "no recurrent state for its KV cache; keep the cache, with a larger max_length": lambda: (
            of_softmax.fold(softmax.init_state(1, max_length=8))
        ),
        "the state is a tuple; make it": lambda: program.decode((), token),
        "tokens is a list; it must be an array": lambda: program.prefill(tokens.tolist(), rows),
        "token is int32 [2, 8]": lambda: program.decode(state, tokens),
        "token 64 at position 0 of row 0": lambda: program.decode(state, beyond[:, 3]),
        "model is a Linear; it must be": lambda: generation.Program(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    }.items():
        with mistakes.refused(message):
            mistake()
