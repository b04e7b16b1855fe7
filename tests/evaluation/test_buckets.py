"""Tests of bucket arithmetic, the choice of documents and the parsing of lengths."""

import math

import numpy as np
import pytest

from sympow_jax.evaluation import buckets


def test_each_bucket_is_the_mean_of_its_own_positions():
    # Position t of document d costs 1000 d + t, so a bucket shifted by one position has another mean.
    positions = np.arange(1, 17)
    losses = 1000.0 * np.arange(3)[:, None] + positions
    means = buckets.bucket_means(losses, (1, 4, 16), first_position=1)
    expected = [(1, 1000 + 1, 3, 3), (4, 1000 + 3, 9, 3), (16, 1000 + np.mean(range(5, 17)), 36, 3)]
    assert [(x.context_length, x.loss, x.tokens, x.documents) for x in means] == expected
    # Without a token before the first, its bucket has one prediction less.
    means = buckets.bucket_means(np.arange(2, 9, dtype=np.float32)[None], (2, 4, 8), first_position=2)
    assert [(mean.loss, mean.tokens) for mean in means] == [(2, 1), (3.5, 2), (6.5, 4)]


def test_standard_error_is_that_of_the_document_means():
    losses = np.array([[1.0, 3.0], [2.0, 6.0], [0.0, 0.0]])
    (mean,) = buckets.bucket_means(losses, (2,), first_position=1)
    assert mean.standard_error == pytest.approx(np.std([2, 4, 0], ddof=1) / math.sqrt(3), rel=1e-12)
    (single,) = buckets.bucket_means(losses[:1], (2,), first_position=1)
    assert single.standard_error is None


def test_sums_are_float64_and_a_nonfinite_loss_affects_only_its_bucket():
    losses = np.full((2, 1 << 16), 0.1, np.float32)
    losses[0, -1] = np.inf
    first, last = buckets.bucket_means(losses, (1 << 15, 1 << 16), first_position=1)
    assert first.loss == pytest.approx(float(np.float32(0.1)), rel=1e-13)
    assert last.loss == math.inf


PARSED = {
    "64": (64,),
    "64, 128,4096": (64, 128, 4096),
    "64,...,1024": (64, 128, 256, 512, 1024),
    "100,...,800,900": (100, 200, 400, 800, 900),
    "32,64,...,256": (32, 64, 128, 256),
    "64,...,128": (64, 128),
    # The last length is rounded down to a doubling.
    "64,...,100": (64,),
    "64,...,1000": (64, 128, 256, 512),
    "3,...,13,100": (3, 6, 12, 100),
}


def test_lengths_of_a_text(capsys):
    for text, lengths in PARSED.items():
        assert buckets.parse_lengths(text) == lengths
        warning = capsys.readouterr().err
        rounded = text.replace(" ", "").rpartition("...,")[2].split(",")[0] not in map(str, lengths)
        assert warning.count("\n") == warning.count("is rounded down to") == rounded
    for text in ("", "64,,128", "a", "64,-128", "6.4", "64,...", "...,64", "64,...,64", "0,...,64"):
        with pytest.raises(ValueError, match="context lengths"):
            buckets.parse_lengths(text)


def test_chosen_lengths_are_those_that_documents_reach():
    for documents, longest, lengths in (
        ([5000] * 30, 4096, (64, 128, 256, 512, 1024, 2048, 4096)),
        ([5000] * 19 + [100] * 30, 4096, (2, 4, 8, 16, 32, 64)),  # twenty documents reach 100
        ([300, 5000], 4096, (4, 8, 16, 32, 64, 128, 256)),
        ([300], 100, (2, 4, 8, 16, 32, 64)),
        ([1], 100, ()),
    ):
        found = buckets.choose_lengths(np.array(documents), longest, few=20, first_position=2)
        assert found == lengths


def test_lengths_without_predictions_are_errors():
    buckets.check_lengths((1, 2, 64), first_position=1)
    for lengths, first_position, message in (
        ((), 1, "no context lengths"),
        ((64, 64), 1, "positive and increasing"),
        ((64, 32), 1, "positive and increasing"),
        ((0, 64), 1, "positive and increasing"),
        ((1, 2), 2, "context length 1 holds no prediction"),
    ):
        with pytest.raises(ValueError, match=message):
            buckets.check_lengths(lengths, first_position=first_position)


def test_documents_are_long_enough_distinct_and_spread_over_the_corpus():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    chosen = buckets.select_documents(lengths, 50, 64)
    assert len(set(chosen.tolist())) == 64
    assert (lengths[chosen] >= 50).all()
    assert chosen[0] < 50
    assert chosen[-1] > 950
    np.testing.assert_array_equal(buckets.select_documents(np.array([5, 9, 3, 7]), 5, 64), [0, 1, 3])
    # Those that storage groups are read together.
    lengths = np.full(1000, 50)
    chosen = buckets.select_documents(lengths, 50, 30, together=100)
    assert len(set(chosen.tolist())) == 30
    assert set((chosen // 100).tolist()) == {0}
    assert chosen[-1] > 90
    assert set((buckets.select_documents(lengths, 50, 130, together=100) // 100).tolist()) == {0, 1}


def test_a_selection_of_no_documents_is_an_error():
    for lengths, longest, count, message in (
        ([5], 5, 0, "number of documents is 0"),
        ([1, 63, 20], 64, 8, r"context length 64 .* the longest has 63 tokens"),
        ([], 64, 8, "the longest has 0 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            buckets.select_documents(np.array(lengths, np.int64), longest, count)
