"""Tests of generation from whole prompts.

Greedy tokens are compared with a new call of the model for each token, and sampled ones with the same prompts in a
batch.
"""

import functools

import numpy as np
import pytest
from flax import nnx

from sympow_jax import generation
from tests.generation import small

GREEDY = generation.Sampling(temperature=0)


def prompts(*lengths):
    return [row[:length].tolist() for row, length in zip(small.tokens(len(lengths), 40), lengths)]


def generated(model, rows, *, max_tokens, sampling, block=8, **settings):
    blocks = list(
        generation.generate(model, rows, max_tokens=max_tokens, sampling=sampling, block=block, **settings)
    )
    assert all(piece.shape == (len(rows) * settings.get("samples", 1), block) for piece in blocks[:-1])
    return np.concatenate(blocks, axis=1)


def test_greedy_tokens_are_those_of_the_model_without_a_state(monkeypatch):
    """The first 25 positions stay in the KV cache (`test_decoding`); then the recurrent state is updated with them."""
    folds = []
    fold = generation.Program.fold
    monkeypatch.setattr(generation.Program, "fold", lambda *arguments: folds.append(1) or fold(*arguments))
    # Shapes are those of `test_decoding`, whose programs these are.
    model, rows = small.model("conformal"), prompts(21, 3, 11)
    actual = generated(model, rows, max_tokens=30, sampling=GREEDY, block=4)
    assert actual.shape == (3, 30)
    assert len(folds) == 1
    for index in range(30):
        tokens = np.zeros((3, 200), np.int32)
        for row, prompt in enumerate(rows):
            tokens[row, : len(prompt) + index] = [*prompt, *actual[row, :index]]
        logits = np.asarray(small.whole(model, tokens))
        for row, prompt in enumerate(rows):
            assert logits[row, len(prompt) + index - 1].argmax() == actual[row, index]
    assert len(np.unique(actual)) > 5


def test_padding_of_prompts_changes_nothing():
    model, rows = small.model("softmax"), prompts(9, 4)
    draw = functools.partial(generated, model, rows, max_tokens=20, sampling=GREEDY)
    np.testing.assert_array_equal(draw(prompt_length=16), draw())
    with pytest.raises(ValueError, match="prompt_length is 8; it must be at least 9, the longest prompt"):
        draw(prompt_length=8)


def test_a_window_bounds_the_cache_and_not_the_text():
    model, rows = small.model("sliding_window"), prompts(21, 3, 11)
    actual = generated(model, rows, max_tokens=40, sampling=GREEDY)
    tokens = np.zeros((3, 200), np.int32)
    for row, prompt in enumerate(rows):
        tokens[row, : len(prompt) + 40] = [*prompt, *actual[row]]
    expected = np.asarray(small.whole(model, tokens)).argmax(-1)
    for row, prompt in enumerate(rows):
        np.testing.assert_array_equal(expected[row, len(prompt) - 1 :][:40], actual[row])
    assert len(np.unique(actual)) > 5


def test_drawn_tokens_do_not_depend_on_the_batch():
    model, rows = small.model("softmax"), prompts(9, 4, 9)
    draw = functools.partial(generated, model, sampling=generation.Sampling(temperature=0.9), seed=3)
    together = draw([*rows, rows[0]], max_tokens=20)
    np.testing.assert_array_equal(together[0], together[3])
    for row in (0, 2):
        np.testing.assert_array_equal(draw([rows[row]], max_tokens=20)[0], together[row])
    # It does not depend on where the prompt ends and the sampled tokens begin either.
    longer = [*rows[1], *together[1, :5].tolist()]
    np.testing.assert_array_equal(draw([longer], max_tokens=20)[0, :15], together[1, 5:])
    assert (draw([rows[0]], max_tokens=20, seed=4)[0] != together[0]).any()


def test_samples_are_the_texts_of_successive_seeds():
    """The last seed is followed by 0."""
    model, rows = small.model("softmax"), prompts(9, 4)
    draw = functools.partial(
        generated, model, sampling=generation.Sampling(temperature=0.9), max_tokens=20, block=10
    )
    together = draw(rows, samples=3, seed=2**32 - 2)
    assert together.shape == (6, 20)
    for sample, seed in enumerate((2**32 - 2, 2**32 - 1, 0)):
        np.testing.assert_array_equal(together[sample::3], draw(rows, seed=seed))
    assert (together[0] != together[1]).any()
    assert (together[3] != together[4]).any()


def test_repeated_tokens_are_penalized():
    """The loop is compared with `sample` of the logits of whole rows, with a set of tokens for each row."""
    model, rows = small.model("softmax"), prompts(9, 4)
    sampling = generation.Sampling(temperature=0, repetition_penalty=3.0)
    actual = generated(model, rows, max_tokens=16, sampling=sampling)
    assert (actual != generated(model, rows, max_tokens=16, sampling=GREEDY)).any()
    for prompt, tokens in zip(rows, actual):
        logits = np.asarray(small.whole(model, np.array([[*prompt, *tokens]])), np.float64)[0]
        for index, token in enumerate(tokens):
            row = logits[len(prompt) + index - 1]
            for used in {*prompt, *tokens[:index]}:
                row[used] *= 1 / 3 if row[used] > 0 else 3
            assert row.argmax() == token
    # A text that is cut anywhere continues as before, and alone as in a batch.
    cut = [*rows[1], *actual[1, :5].tolist()]
    np.testing.assert_array_equal(generated(model, [cut], max_tokens=11, sampling=sampling)[0], actual[1, 5:])


def test_logits_that_are_not_finite():
    model = nnx.clone(small.model("softmax"))
    model.final_norm.bias[...] = np.nan
    with pytest.raises(ValueError, match="logits of prompt 1 are not finite"):
        generated(model, prompts(9), max_tokens=20, sampling=generation.Sampling(temperature=0.9))


def test_mistakes():
    model = small.model("conformal")
    for message, changes in {
        "there is no prompt": {"prompts": []},
        "a prompt is empty": {"prompts": [[1], []]},
        "max_tokens is 0": {"max_tokens": 0},
        "max_tokens is nan": {"max_tokens": float("nan")},
        "max_tokens is True": {"max_tokens": True},
        "samples is 1.5": {"samples": 1.5},
        "block is 0": {"block": 0},
        "max_tokens is 1000000000000000000000000000000; it must be": {"max_tokens": 10**30},
        "seed is -1": {"seed": -1},
        "samples is 0": {"samples": 0},
        "token 64 at position 1 of row 0": {"prompts": [[1, 64]]},
    }.items():
        with pytest.raises(ValueError, match=message):
            generation.generate(model, **{"prompts": [[1]], "max_tokens": 1, "sampling": GREEDY, **changes})
