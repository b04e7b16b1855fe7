"""Tests of generation from whole prompts.

Greedy tokens are compared with a new call of the model for each token, and sampled ones with the same prompts in a
batch.
"""

import functools

import numpy as np
import pytest
from flax import nnx

from sympow_jax import generation
from sympow_jax.models import decoder
from tests.generation import small

GREEDY, SAMPLED = generation.Sampling(temperature=0), generation.Sampling(temperature=0.9)


def prompts(*lengths):
    return [row[:length].tolist() for row, length in zip(small.tokens(len(lengths), 40), lengths)]


def generated(model, rows, *, max_tokens, sampling, block=8, **settings):
    blocks = list(
        generation.generate(model, rows, max_tokens=max_tokens, sampling=sampling, block=block, **settings)
    )
    continuations = len(rows) * settings.get("samples", 1)
    sizes = [1, *[block] * ((max_tokens - 1) // block), (max_tokens - 1) % block]
    assert [piece.shape for piece in blocks] == [(continuations, size) for size in sizes if size]
    return np.concatenate(blocks, axis=1)


@pytest.mark.parametrize(("preset", "block", "folds"), [("conformal_paper", 4, 1), ("sliding_window", 8, 0)])
def test_greedy_tokens_are_those_of_the_model_without_a_state(monkeypatch, preset, block, folds):
    """Positions of the first stay in the KV cache (`test_decoding`) until it is folded; a window bounds the other's."""
    folded = []
    fold = generation.Program.fold
    monkeypatch.setattr(generation.Program, "fold", lambda *arguments: folded.append(1) or fold(*arguments))
    # Shapes are those of `test_decoding`, whose programs these are.
    model, rows = small.model(preset), prompts(21, 3, 11)
    actual = generated(model, rows, max_tokens=30, sampling=GREEDY, block=block)
    assert (actual.shape, len(folded)) == ((3, 30), folds)
    tokens = np.zeros((3, 200), np.int32)
    for row, prompt in enumerate(rows):
        tokens[row, : len(prompt) + 30] = [*prompt, *actual[row]]
    expected = np.asarray(small.whole(model, tokens)).argmax(-1)
    for row, prompt in enumerate(rows):
        np.testing.assert_array_equal(expected[row, len(prompt) - 1 :][:30], actual[row])
    assert len(np.unique(actual)) > 5


def test_drawn_tokens_depend_on_the_prompt_and_the_seed_alone():
    """The last seed is followed by 0."""
    model, rows = small.model("softmax"), prompts(9, 4)
    draw = functools.partial(generated, model, sampling=SAMPLED, max_tokens=20)
    together = draw([*rows, rows[0]], samples=2, seed=2**32 - 1)
    assert together.shape == (6, 20)
    np.testing.assert_array_equal(together[:2], together[4:])
    for sample, seed in enumerate((2**32 - 1, 0)):
        for row, prompt in enumerate(rows):
            # Padding of the prompt changes nothing either.
            alone = draw([prompt], seed=seed, prompt_length=9)
            np.testing.assert_array_equal(alone[0], together[2 * row + sample])
    assert all((together[row] != together[row + 1]).any() for row in (0, 2))
    # They do not depend on where the prompt ends and the sampled tokens begin.
    longer = [*rows[1], *together[2, :5].tolist()]
    np.testing.assert_array_equal(draw([longer], seed=2**32 - 1)[0, :15], together[2, 5:])


def test_repeated_tokens_are_penalized():
    """The loop is compared with `sample` of the logits of whole rows, with a set of tokens for each row."""
    model, rows = small.model("softmax"), prompts(9, 4)
    sampling = generation.Sampling(temperature=0, repetition_penalty=3.0)
    actual = generated(model, rows, max_tokens=16, sampling=sampling)
    whole = [[*prompt, *tokens] for prompt, tokens in zip(rows, actual)]
    padded = np.array([np.pad(row, (0, 25 - len(row))) for row in whole])
    changed = False
    for prompt, tokens, logits in zip(rows, actual, np.asarray(small.whole(model, padded), np.float64)):
        for index, token in enumerate(tokens):
            row = logits[len(prompt) + index - 1]
            likeliest = row.argmax()
            for used in {*prompt, *tokens[:index]}:
                row[used] *= 1 / 3 if row[used] > 0 else 3
            assert row.argmax() == token
            changed |= likeliest != token
    assert changed


def test_the_first_token_compiles_two_kinds_of_blocks_once_each():
    model = small.model(
        "conformal_paper", layers=6, attention_pattern=("conformal_paper", "conformal_paper", "softmax")
    )
    before = decoder._compiled_in_place._cache_size()
    next(generation.generate(model, prompts(9), max_tokens=20, sampling=SAMPLED))
    assert decoder._compiled_in_place._cache_size() == before + 2


def test_the_first_token_is_that_of_a_longer_text():
    draw = functools.partial(generated, small.model("softmax"), prompts(9, 4, 9), sampling=SAMPLED, samples=2)
    np.testing.assert_array_equal(draw(max_tokens=1), draw(max_tokens=20)[:, :1])


def test_logits_that_are_not_finite():
    model = nnx.clone(small.model("softmax"))
    model.final_norm.bias[...] = np.nan
    with pytest.raises(ValueError, match="logits of prompt 1 are not finite"):
        generated(model, prompts(9), max_tokens=20, sampling=SAMPLED)


def test_mistakes():
    model = small.model("conformal_paper")
    for message, changes in {
        "there is no prompt": {"prompts": []},
        "seed is -1": {"seed": -1},
        "samples is 1.5": {"samples": 1.5},
        "a prompt is empty": {"prompts": [[1], []]},
        "max_tokens is 0": {"max_tokens": 0},
        "block is 0": {"block": 0},
        "max_tokens is 1000000000000000000000000000000; it must be": {"max_tokens": 10**30},
        "prompt_length is 1; it must be at least 2, the longest": {"prompts": [[1, 2]], "prompt_length": 1},
        "token 64 at position 1 of row 0": {"prompts": [[1, 64]]},
    }.items():
        with pytest.raises(ValueError, match=message):
            generation.generate(model, **{"prompts": [[1]], "max_tokens": 1, "sampling": GREEDY, **changes})
