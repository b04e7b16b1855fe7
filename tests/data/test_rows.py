"""Tests of packing: every token once, targets one ahead, no prediction across documents."""

import numpy as np
import pytest

from sympow_jax.data import documents, rows
from tests.data import builders


def spans(contents) -> documents.Spans:
    arrays = [np.asarray(content, np.uint16) for content in contents]
    lengths = [np.array([len(array)]) for array in arrays]
    return documents.Spans(arrays.__getitem__, [f"file{i}" for i in range(len(arrays))], lengths)


def led(contents) -> documents.Spans:
    """Returns documents with a leading 99, kept together in pairs."""
    plain = spans(contents)
    plain.lead, plain.together = 99, 2
    return plain


def all_rows(source, *, length, packing, vocab_size=1000):
    config = builders.data_config(context_length=length, packing=packing)
    packed = rows.Rows(source, config, vocab_size=vocab_size)
    return [packed.row(row) for row in range(len(packed))]


LENGTHS = ([1], [8], [9], [16], [1, 1, 1, 1, 1, 1, 1, 2], [8, 8, 8], [30], [5, 11, 1, 1, 40, 3], [7, 9])


@pytest.mark.parametrize("lengths", [case for case in LENGTHS if sum(case) > 1])
def test_windows_follow_each_other_through_the_data(lengths):
    packed = all_rows(spans(builders.numbered(lengths)), length=8, packing="windows")
    total = sum(lengths)
    inputs = np.concatenate([row["inputs"] for row in packed])
    targets = np.concatenate([row["targets"] for row in packed])
    assert set(packed[0]) == {"inputs", "targets"}
    assert all(value.shape == (8,) and value.dtype == np.int32 for row in packed for value in row.values())
    counted = targets != rows.NO_TARGET
    assert all((row["targets"] != rows.NO_TARGET).any() for row in packed)
    # All but the first token are predicted once; the positions that do not count come last.
    assert counted.tolist() == [True] * (total - 1) + [False] * (len(targets) - total + 1)
    np.testing.assert_array_equal(inputs[1 : total - 1], targets[: total - 2])
    assert sorted([inputs[0], *targets[counted]]) == list(range(1, total + 1))


@pytest.mark.parametrize("lengths", [case for case in LENGTHS if max(case) > 1])
def test_documents_use_every_token_once_and_are_not_mixed(lengths):
    contents = builders.numbered(lengths)
    owner = {token: i for i, content in enumerate(contents) for token in content}
    last = {content[-1] for content in contents}
    packed = all_rows(spans(contents), length=8, packing="documents")
    used = []
    for number, row in enumerate(packed):
        ids, inputs = row["segment_ids"], row["inputs"]
        real = ids != rows.PADDING
        assert real.all() or number == len(packed) - 1
        assert np.all(row["targets"][~real] == rows.NO_TARGET)
        used += inputs[real].tolist()
        owners = [owner[token] for token in inputs[real]]
        # Segments start at 0 and change exactly where the document does.
        np.testing.assert_array_equal(np.diff(ids[real]) != 0, np.diff(owners) != 0)
        assert ids[0] == 0
        expected = [rows.NO_TARGET if token in last else token + 1 for token in inputs[real]]
        assert row["targets"][real].tolist() == expected
    assert sorted(used) == list(range(1, sum(lengths) + 1))


def test_documents_are_shuffled_by_the_seed_and_not_split():
    contents = builders.numbered([8] * 20)
    orders = []
    for seed in (0, 0, 1):
        config = builders.data_config(packing="documents", seed=seed)
        packed = rows.Rows(spans(contents), config, vocab_size=1000)
        read = [packed.row(row)["inputs"].tolist() for row in range(20)]
        assert sorted(read) == contents
        orders.append(read)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != contents


def test_lead_shifts_the_row_right():
    contents = [list(range(10, 26)), list(range(30, 46))]
    packed = all_rows(led(contents), length=8, packing="windows")
    assert [row["targets"].tolist() for row in packed] == np.reshape(contents, (4, 8)).tolist()
    for row in packed:
        assert row["inputs"].tolist() == [99, *row["targets"][:-1]]


def test_lead_precedes_every_document_of_a_row():
    packed = all_rows(led([[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]), length=8, packing="documents")
    assert packed[0]["inputs"].tolist() == [99, 1, 2, 3, 4, 99, 11, 12]
    assert packed[0]["targets"].tolist() == [1, 2, 3, 4, 5, 11, 12, 13]
    assert packed[0]["segment_ids"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert packed[1]["inputs"].tolist() == [99, 14, 0, 0, 0, 0, 0, 0]
    assert packed[1]["targets"].tolist() == [14, 15, -1, -1, -1, -1, -1, -1]
    assert packed[1]["segment_ids"].tolist() == [0, 0, -1, -1, -1, -1, -1, -1]


def test_whole_rows_are_the_first_ones():
    for packing, count, whole in (
        ("windows", 24, 2),
        ("windows", 25, 3),
        ("documents", 24, 3),
        ("documents", 23, 2),
    ):
        source = spans([range(count)])
        packed = rows.Rows(source, builders.data_config(packing=packing), vocab_size=256)
        assert packed.whole == whole
        assert all((packed.row(i)["targets"][:-1] != -1).all() for i in range(whole))


def test_rows_that_storage_groups():
    contents = builders.numbered([16] * 6)
    config = builders.data_config()
    assert rows.Rows(led(contents), config, vocab_size=1000).together == 4
    everything = rows.Rows(spans(contents), config, vocab_size=1000)
    assert everything.together == len(everything) == 12


def test_what_cannot_be_packed():
    for packing in ("windows", "documents"):
        with builders.refused(r"file1 \(document at token 0\) holds id 40, but model.vocab_size"):
            all_rows(spans([[1, 2, 3], [4, 40, 5]]), length=8, packing=packing, vocab_size=40)
        all_rows(spans([[1, 2, 3], [4, 40, 5]]), length=8, packing=packing, vocab_size=41)
    for contents, packing in (([[1]], "windows"), ([[1], [2]], "documents"), ([], "windows")):
        with builders.refused(r"nothing to predict; name more data in data\.paths"):
            all_rows(spans(contents), length=8, packing=packing)
