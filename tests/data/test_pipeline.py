"""Rows without end: resuming from an index, sharing between processes, held-out documents."""

import itertools

import grain
import numpy as np
import pytest

from sympow_jax import data
from tests.data import builders


@pytest.fixture(params=["windows", "documents"])
def config(request, tmp_path):
    """13 rows and a tail in training, batches of 4: no epoch ends on a batch."""
    documents = [[*range(1 + 10 * i, 10 + 10 * i), 0] for i in range(11)]
    path = builders.write_bin(tmp_path / "a.bin", documents)
    return builders.data_config(
        source="tokens",
        paths=(path,),
        document_separator=0,
        heldout_fraction=0.0,
        batch_tokens=32,
        packing=request.param,
    )


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


def stacked(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_a_row_is_a_function_of_its_index(config):
    one, other = (data.train_dataset(config, vocab_size=256) for _ in range(2))
    in_order = [one[i] for i in range(60)]
    for i in reversed(range(60)):
        assert_same(other[i], in_order[i])


def test_every_epoch_has_every_row_in_another_order(config):
    dataset = data.train_dataset(config, vocab_size=256)
    epochs = [[tuple(dataset[14 * epoch + i]["inputs"].tolist()) for i in range(14)] for epoch in range(3)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len(set(epochs[0])) == 14
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 17])
def test_an_iterator_resumes_from_one_integer(config, start):
    def iterator():
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
        return iter(data.batches(data.train_dataset(config, vocab_size=256), 4).to_iter_dataset(options))

    running = iterator()
    batches = [next(running) for _ in range(start)]
    state = running.get_state()
    assert state == {"next_index": start}
    batches += [next(running) for _ in range(25 - start)]
    resumed = iterator()
    resumed.set_state(state)
    for batch in batches[start:]:
        assert_same(next(resumed), batch)
    rows = data.train_dataset(config, vocab_size=256)
    for i, batch in enumerate(batches):
        assert_same(batch, stacked([rows[4 * i + k] for k in range(4)]))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_same_batches(config, processes):
    dataset = data.train_dataset(config, vocab_size=256)
    whole = data.batches(dataset, 4)
    parts = [data.batches(dataset, 4, share=p, shares=processes) for p in range(processes)]
    for i in range(10):
        shares = [part[i] for part in parts]
        assert all(len(share["inputs"]) == 4 // processes for share in shares)
        assert_same({name: np.concatenate([share[name] for share in shares]) for name in shares[0]}, whole[i])


def test_processes_that_cannot_share_a_batch(config):
    with pytest.raises(ValueError, match="a batch has 4 rows, which cannot be divided into 3 equal shares"):
        data.batches(data.train_dataset(config, vocab_size=256), 4, shares=3)


def test_seed_changes_the_order_only(tmp_path):
    path = builders.write_bin(tmp_path / "a.bin", builders.numbered([8] * 12))
    orders = []
    for seed in (0, 1):
        config = builders.data_config(
            source="tokens", paths=(path,), heldout_fraction=0.0, packing="documents", seed=seed
        )
        dataset = data.train_dataset(config, vocab_size=256)
        orders.append([tuple(dataset[i]["inputs"].tolist()) for i in range(12)])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_a_bad_id_reaches_the_reader_of_batches_as_one_line(config):
    batches = data.batches(data.train_dataset(config, vocab_size=100), 4).to_iter_dataset()
    with pytest.raises(
        ValueError, match=r"a\.bin \(document at 100\) holds id 109, but model\.vocab_size"
    ) as raised:
        list(itertools.islice(batches, 4))
    assert "\n" not in str(raised.value)


def test_heldout_documents(tmp_path):
    documents = [[*range(1, 2 + i % 7), 0] for i in range(300)]
    path = builders.write_bin(tmp_path / "a.bin", documents)
    config = builders.data_config(source="tokens", paths=(path,), document_separator=0)
    found = data.heldout_documents(config, vocab_size=256)
    assert len(found) == len(found.lengths)
    assert found.lengths.tolist() == [len(document) for document in found]
    assert all(document.dtype == np.int32 and document.tolist() in documents for document in found)
    assert found[-1].tolist() == found[len(found) - 1].tolist()
    with pytest.raises(IndexError):
        found[len(found)]
    with pytest.raises(ValueError, match=r"holds id \d, but model.vocab_size is 2"):
        list(data.heldout_documents(config, vocab_size=2))


def test_nothing_held_out(tmp_path):
    path = builders.write_bin(tmp_path / "a.bin", [[1, 2, 3]])
    for fraction in (0.0, 0.5):
        config = builders.data_config(source="tokens", paths=(path,), heldout_fraction=fraction)
        assert data.train_dataset(config, vocab_size=256)[0]["targets"].tolist() == [2, 3, *[-1] * 6]
        with pytest.raises(
            ValueError, match=f"no document is held out: .*heldout_fraction is {fraction}; name"
        ):
            data.heldout_documents(config, vocab_size=256)


def test_standard_library_trains_and_evaluates():
    config = builders.data_config(context_length=256)
    batch = data.batches(data.train_dataset(config, vocab_size=256), 16)[1000]
    assert batch["inputs"].shape == (16, 256)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    held = data.heldout_documents(config, vocab_size=256)
    # The quickstart evaluates up to 4,096 and wants 20 documents.
    assert (held.lengths > 4096).sum() >= 20
    assert all(len(held[i]) == held.lengths[i] for i in range(5))
