"""Tests of masked tokens: their number, inputs and targets, and a new draw in every epoch."""

import numpy as np
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.data import masking
from tests.data import builders

MASK = 999


def task(**changes) -> config_lib.TaskConfig:
    return config_lib.TaskConfig(name="masked_token", **changes)


def mask(tokens, rng, *, fraction=0.15, mask_token=MASK, vocab_size=1000):
    return masking.mask(tokens, rng, fraction=fraction, mask_token=mask_token, vocab_size=vocab_size)


def opened(folder, lengths, *, vocab_size=1000, of_task=None, **changes):
    """Writes documents of distinct nonzero tokens; returns their rows, with nothing held out."""
    for i, document in enumerate(builders.numbered(lengths)):
        builders.write_bin(folder / f"{i}.bin", [document])
    config = builders.whole("tokens", str(folder), **changes)
    return data.train_dataset(config, task=of_task or task(), vocab_size=vocab_size)


def unmasked(row):
    return np.where(row["targets"] != -1, row["targets"], row["inputs"])


def test_fractions_of_shown_tokens():
    tokens = np.arange(100_000, dtype=np.int32) % 900
    shown, targets = mask(tokens, np.random.default_rng(0))
    chosen = targets != -1
    assert chosen.sum() in (15_000, 15_001)
    np.testing.assert_array_equal(targets[chosen], tokens[chosen])
    np.testing.assert_array_equal(shown[~chosen], tokens[~chosen])
    masked = np.mean(shown[chosen] == MASK)
    kept = np.mean(shown[chosen] == tokens[chosen])
    # Four standard deviations of 15,000 draws; one random token in 999 is the token itself.
    assert abs(masked - 0.8) < 4 * np.sqrt(0.8 * 0.2 / 15_000)
    assert abs(kept - 0.1 - 0.1 / 999) < 4 * np.sqrt(0.1 * 0.9 / 15_000)
    random = shown[chosen & (shown != MASK) & (shown != tokens)]
    # Uniform over the vocabulary: the mean and the ends of 0 .. 998.
    assert abs(random.mean() - 499) < 4 * 288 / np.sqrt(len(random))
    assert random.min() < 10
    assert random.max() > 988


@pytest.mark.parametrize("mask_token", [0, 3, 7])
def test_random_tokens_are_never_the_mask(mask_token):
    rng, tokens = np.random.default_rng(0), np.full(4000, 5, np.int32)
    shown, targets = mask(tokens, rng, fraction=0.9, mask_token=mask_token, vocab_size=8)
    counts = np.bincount(shown[targets != -1], minlength=8)
    assert len(counts) == 8
    # 3,600 predicted, a tenth random over seven tokens: 51 of each.
    assert all(25 < count < 85 for count in np.delete(counts, [mask_token, 5]))
    assert counts[mask_token] > 2700


def test_the_number_of_masks_has_the_right_mean():
    tokens, rng = np.arange(10, dtype=np.int32), np.random.default_rng(0)
    counts = [(mask(tokens, rng)[1] != -1).sum() for _ in range(2000)]
    assert set(counts) == {1, 2}
    assert abs(np.mean(counts) - 1.5) < 4 * 0.5 / np.sqrt(2000)
    assert (mask(tokens[:1], rng, fraction=0.01)[1] == 0).all()


def test_windows_are_full_and_have_every_whole_row_once(tmp_path):
    dataset = opened(tmp_path, [30, 9, 5])
    masked = [dataset[i] for i in range(5)]
    assert all(set(row) == {"inputs", "targets"} for row in masked)
    assert all(value.shape == (8,) and value.dtype == np.int32 for row in masked for value in row.values())
    read = np.concatenate([unmasked(row) for row in masked])
    # 44 tokens make 5 rows; 4 are left out.
    assert len(set(read.tolist())) == 40
    assert set(read.tolist()) <= set(range(1, 45))


def test_documents_have_every_token_once_and_padding_is_not_predicted(tmp_path):
    dataset = opened(tmp_path, [5, 3, 11, 2], packing="documents")
    masked = [dataset[i] for i in range(3)]
    owner = {token: i for i, document in enumerate(builders.numbered([5, 3, 11, 2])) for token in document}
    read = []
    for row in masked:
        real = row["segment_ids"] != -1
        assert (row["targets"][~real] == -1).all()
        assert (row["inputs"][~real] == 0).all()
        tokens = unmasked(row)[real].tolist()
        np.testing.assert_array_equal(
            np.diff(row["segment_ids"][real]) != 0, np.diff([owner[token] for token in tokens]) != 0
        )
        read += tokens
    assert sorted(read) == list(range(1, 22))


def test_every_epoch_has_new_masks_that_depend_only_on_the_index(tmp_path):
    one, other = (opened(tmp_path, [64]) for _ in range(2))
    epochs = [[one[8 * epoch + i] for i in range(8)] for epoch in range(3)]
    # Rows by their first token, seen through the masks.
    chosen = [
        {tuple(unmasked(row)): (tuple(row["inputs"]), tuple(row["targets"])) for row in epoch}
        for epoch in epochs
    ]
    assert chosen[0].keys() == chosen[1].keys() == chosen[2].keys()
    assert sum(chosen[0][row] == chosen[1][row] for row in chosen[0]) < 4
    for i in reversed(range(24)):
        for name in ("inputs", "targets"):
            np.testing.assert_array_equal(other[i][name], epochs[i // 8][i % 8][name])
    reseeded = opened(tmp_path, [64], seed=1)
    assert any((reseeded[i]["targets"] != one[i]["targets"]).any() for i in range(8))


def test_the_mask_is_the_last_id_by_default(tmp_path):
    for changes, expected in (({}, 99), ({"mask_token": 70}, 70)):
        dataset = opened(tmp_path, [64], vocab_size=100, of_task=task(**changes))
        rows = [dataset[i] for i in range(80)]
        shown = np.concatenate([row["inputs"][row["targets"] != -1] for row in rows])
        assert np.mean(shown == expected) > 0.6
    for mask_token, vocab_size in ((100, 100), (-1, 100), (None, 1)):
        with builders.refused(r"task\.mask_token is .*, but model\.vocab_size is "):
            opened(tmp_path, [64], vocab_size=vocab_size, of_task=task(mask_token=mask_token))


def test_an_array_of_rows_is_read_without_the_lead_id(tmp_path):
    values = np.arange(1, 65).reshape(4, 16).astype("<u2")
    path = builders.write_zarr(tmp_path / "a.zarr", values)
    for packing in ("windows", "documents"):
        config = builders.whole("longcrawl64", path, packing=packing)
        dataset = data.train_dataset(config, task=task(), vocab_size=50_304)
        read = sorted(unmasked(dataset[i]).tolist() for i in range(8))
        assert read == values.reshape(8, 8).tolist()


def test_less_than_a_row(tmp_path):
    with builders.refused(r"have 7 tokens, less than one row of data\.context_length 8;"):
        opened(tmp_path, [4, 3])
    config = builders.data_config(
        source="tokens", paths=(f"{tmp_path}/0.bin",), heldout_paths=(str(tmp_path),)
    )
    with builders.refused("^held-out data: the documents have 7 tokens, less than one row"):
        data.HeldoutData(config, task(), vocab_size=1000)
    short = opened(tmp_path, [4, 3], packing="documents")
    assert (short[0]["segment_ids"][7:] == -1).all()
