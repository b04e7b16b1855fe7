"""Tests of verified drafts against decoding token by token, for every kind of state."""

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import generation
from tests import marked, mistakes
from tests.generation import small
from tests.generation.test_decoding import BOUND, decoded
from tests.ops import cases

HYBRID = {"layers": 2, "attention_pattern": ("conformal_paper", "softmax")}
DRAWS = generation.Sampling(temperature=0.8, top_p=0.95)


@marked.cases(
    ("preset", "max_length", "changes"),
    [("softmax", 66, {"layers": 2}), ("sympow", 80, HYBRID)],
    slow=[
        ("conformal_paper", None, {}),
        ("sliding_window", None, {"layers": 2}),
        ("sympow_gated_window", None, {"layers": 2}),
        ("power_delta", None, {}),
        ("linear_lrpe", None, {}),
        ("expressive", 66, {"layers": 2}),
    ],
)
def test_logits_and_states_are_those_after_the_accepted_tokens(preset, max_length, changes):
    """Rows accept some, none and all tokens; the first row's draft, with 12 tokens, exceeds a cache of 66."""
    model = small.model(preset, **changes)
    program = generation.Program(model)
    prompts, lengths = small.tokens(small.ROWS, 60), np.array([60, 37, 55])
    logits, state = program.prefill(prompts, lengths, max_length=max_length)
    before = jax.tree.map(np.asarray, state)
    after, steps = [state], [logits]
    for _ in range(6):
        new_logits, new_state = program.decode(after[-1], steps[-1].argmax(-1))
        after.append(new_state)
        steps.append(new_logits)
    likeliest = np.stack([np.asarray(step.argmax(-1)) for step in steps], axis=1)
    draft = np.concatenate([likeliest[:, :6], small.tokens(small.ROWS, 6, seed=3)], axis=1)
    draft[0, 6] = -1
    draft[1, 0] = (draft[1, 0] + 1) % small.VOCABULARY
    verify = jax.jit(generation.verify)  # the program is an argument
    accepted, actual, state = verify(program, state, logits, draft, np.array([12, 12, 6]))
    np.testing.assert_array_equal(accepted, [6, 0, 6])
    following = small.tokens(small.ROWS, 6, seed=2)
    continued = decoded(model, following, state, actual)
    for row, count in enumerate([6, 0, 6]):
        expected = decoded(model, following, after[count], steps[count])[row]
        outgrown = np.isnan(expected).all(-1)
        np.testing.assert_array_equal(np.isnan(continued[row]).all(-1), outgrown)
        assert outgrown.any() == (max_length == 66 and row == 0)
        assert cases.error(continued[row][~outgrown], expected[~outgrown]) < BOUND
    np.testing.assert_array_equal(actual[1], logits[1])
    jax.tree.map(np.testing.assert_array_equal, before, after[0])


@marked.cases(
    ("preset", "max_length", "sampling"),
    [("conformal_paper", None, generation.Sampling(temperature=0)), ("softmax", 200, DRAWS)],
    slow=[("conformal_paper", None, DRAWS), ("softmax", 200, generation.Sampling(temperature=0))],
)
def test_a_text_is_that_of_generate_without_drafts(preset, max_length, sampling):
    """The draft is the text itself with every fourth token replaced, so rows are accepted in different numbers."""
    program, count, seed = generation.Program(small.model(preset)), 40, 7
    rows = zip(small.tokens(small.ROWS, small.TIME).tolist(), small.LENGTHS)
    prompts = [row[:length] for row, length in rows]
    blocks = generation.generate(program.model, prompts, max_tokens=count, sampling=sampling, seed=seed)
    expected = np.concatenate(list(blocks), axis=1)
    replaced = np.random.default_rng(0).random(expected.shape) < 0.25
    guesses = np.pad(np.where(replaced, (expected + 1) % small.VOCABULARY, expected), ((0, 0), (0, 5)))
    logits, state = small.prefilled(preset, max_length)
    texts, numbers = [[] for _ in prompts], set()
    while (done := np.array([len(text) for text in texts])).min() < count:
        options = {"sampling": sampling, "seed": jnp.uint32(seed), "position": small.LENGTHS + done}
        draft = np.stack([guesses[row, start : start + 5] for row, start in enumerate(done)])
        draft[:, 0] = generation.sample(logits, **options)
        lengths = np.clip(count - done, 0, 5)
        accepted, logits, state = generation.verify(program, state, logits, draft, lengths, **options)
        assert (accepted >= np.minimum(lengths, 1)).all()
        for text, tokens, number in zip(texts, draft.tolist(), accepted.tolist()):
            text += tokens[:number]
        numbers |= {*accepted.tolist()}
    np.testing.assert_array_equal(texts, expected)
    assert numbers >= {0, 1, 5}


def test_mistakes():
    program = generation.Program(small.model("conformal_paper"))
    logits, state = small.prefilled("conformal_paper")
    tokens = small.tokens(small.ROWS, 4)
    valid = {"logits": logits, "tokens": tokens, "lengths": np.array([4, 0, 1])}
    two_rows = {name: x[:2] for name, x in valid.items()}
    penalty = generation.Sampling(temperature=0, repetition_penalty=2)
    for message, changes in {
        "must be [B, T] and [B]": {"tokens": tokens[0]},
        "tokens have dtype float64": {"tokens": tokens.astype(float)},
        "lengths are [4, 0, 5]; they must be from 0 to 4": {"lengths": np.array([4, 0, 5])},
        "lengths are [-1, 0, 1]": {"lengths": np.array([-1, 0, 1])},
        "logits have shape (2, 64); they must be [3, 64]": {"logits": logits[:2]},
        "the state has 3 rows and there are tokens for 2": two_rows,
        "pass position": {"sampling": DRAWS},
        "repetition_penalty is 2": {"sampling": penalty},
    }.items():
        with mistakes.refused(message):
            generation.verify(program, state, **valid | changes)
