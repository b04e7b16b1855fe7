"""Tests of likelihoods and continuations against one pass over each request."""

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import data, generation
from sympow_jax.evaluation.lm_eval import requests
from tests.evaluation import fakes

BYTES = data.Codec(data.tokenizer.load("byte"), vocab_size=128)


@pytest.fixture(scope="module")
def free():
    return fakes.decoder(128)


@pytest.fixture(scope="module")
def limited():
    return fakes.decoder(128, position="learned_absolute", max_document_length=12)


def log_probabilities(model, row):
    """Returns the log-probabilities after each token of a row, which is padded to one length of all tests."""
    length = model.config.longest_document or 64
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(row)] = list(row)
    logits = np.asarray(_forward(nnx.graphdef(model), nnx.state(model), padded), np.float64)[0, : len(row)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


_forward = jax.jit(lambda graph, state, tokens: nnx.merge(graph, state)(tokens), static_argnums=0)


def expected(model, context, answer):
    """Returns the log-likelihood of bytes after a context, and whether they are the likeliest."""
    at = log_probabilities(model, [*context, *answer[:-1]])[-len(answer) :]
    return at[np.arange(len(answer)), list(answer)].sum(), bool((at.argmax(-1) == list(answer)).all())


def assert_pairs(found, wanted):
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-5)
    assert [right for _, right in found] == [right for _, right in wanted]


def test_continuations_of_shared_empty_and_spaced_contexts(free):
    likeliest = int(log_probabilities(free, b"cats")[-1].argmax())
    pairs = [
        ("cats", " sit"),
        ("", "dogs"),
        ("cats", chr(likeliest)),
        ("a context that is longer", " x"),
        ("cats ", "sit"),
        ("cats \n\n", "sit"),
        ("cats", ""),
    ]
    found = requests.TextModel(free, BYTES).continuation_log_likelihoods(pairs)
    wanted = [
        expected(free, b"cats", b" sit"),
        expected(free, b"\n", b"dogs"),
        expected(free, b"cats", bytes([likeliest])),
        expected(free, b"a context that is longer", b" x"),
        expected(free, b"cats", b" sit"),
        expected(free, b"cats", b" \n\nsit"),
        (0.0, True),
    ]
    assert_pairs(found, wanted)
    assert [right for _, right in found] == [False, False, True, False, False, False, True]


@pytest.mark.parametrize("lead", [None, 5])
def test_a_token_of_both_sides_is_scored(free, tmp_path, lead):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "\n": 4, "s": 5}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    built.save(str(tmp_path / "merges.json"))
    codec = data.Codec(data.tokenizer.load(str(tmp_path / "merges.json")), vocab_size=128, lead=lead)
    found = requests.TextModel(free, codec).continuation_log_likelihoods(
        [("a", "b"), ("ca", "b"), ("ca", "bc"), ("ca\n", "b")]
    )
    start = [] if lead is None else [lead]
    contexts = [start or [4], [*start, 2], [*start, 2, 0], [*start, 2, 0]]
    assert_pairs(found, [expected(free, *pair) for pair in zip(contexts, ([3], [3], [2], [4, 1]))])


def test_contexts_are_cut_from_the_left_at_learned_positions(limited):
    found = requests.TextModel(limited, BYTES).continuation_log_likelihoods([("0123456789abcdef", "xyz")])
    assert_pairs(found, [expected(limited, b"6789abcdef", b"xyz")])


def test_texts_are_scored_whole_or_in_windows(free, limited):
    text = "a text of thirty characters..."
    assert requests.TextModel(free, BYTES).text_log_likelihoods([text, "", "b"]) == pytest.approx(
        [expected(free, b"\n", text.encode())[0], 0.0, expected(free, b"\n", b"b")[0]], rel=1e-5
    )
    # Windows of 12 inputs: the last has as much context as there is room for.
    data = text.encode()
    parts = [(b"\n", data[:12]), (data[11:12], data[12:24]), (data[17:24], data[24:])]
    wanted = sum(expected(limited, context, answer)[0] for context, answer in parts)
    assert requests.TextModel(limited, BYTES).text_log_likelihoods([text]) == pytest.approx(
        [wanted], rel=1e-5
    )


def greedy(model, prompt, count):
    row = list(prompt)
    for _ in range(count):
        row.append(int(log_probabilities(model, row)[-1].argmax()))
    return row[len(prompt) :]


def test_continuations_end_before_a_stop_and_after_the_maximum(free):
    whole, other = (bytes(greedy(free, prompt, 6)).decode() for prompt in (b"cats", b"\n"))
    stop = whole[3:5]
    requested = (("cats", 6), ("cats", 6, (stop, "never")), ("cats", 2), ("", 5))
    found = requests.TextModel(free, BYTES).generate([requests.GenerateRequest(*x) for x in requested])
    assert found == [whole, whole[: whole.index(stop)], whole[:2], other[:5]]


def test_equal_requests_that_sample_have_seeds_of_their_own(free):
    one, other = (
        requests.GenerateRequest(text, 4, (), generation.Sampling(temperature=2)) for text in ("ab", "cd")
    )
    found = requests.TextModel(free, BYTES).generate([one, other, one, one._replace(max_tokens=3)])
    wanted = []
    for seed, prompts in ((0, [b"ab", b"cd"]), (1, [b"ab"])):
        options = {"max_tokens": 4, "sampling": one.sampling, "seed": seed, "prompt_length": 16}
        blocks = generation.stream(free, BYTES, [*map(list, prompts)], **options)
        wanted += ["".join(piece.text for piece in pieces) for pieces in zip(*blocks)]
    assert found == [*wanted, wanted[0][:3]]
    assert found[0] != found[2]


def test_prompts_are_cut_from_the_left_to_leave_room(limited):
    text_model = requests.TextModel(limited, BYTES)
    wanted = bytes(greedy(limited, b"89abcdef", 5)).decode()
    assert text_model.generate([requests.GenerateRequest("0123456789abcdef", 5)]) == [wanted]
    with pytest.raises(ValueError, match="max_gen_toks is 13, but the model's learned positions end at 12"):
        text_model.generate([requests.GenerateRequest("a", 13)])
