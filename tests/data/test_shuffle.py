"""Tests that the arithmetic permutation is one, differs between epochs and favors no order."""

import collections

import pytest

from sympow_jax.data import shuffle


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000])
def test_is_a_permutation(size):
    assert sorted(shuffle.permuted(index, size, (7, 1)) for index in range(size)) == list(range(size))


def test_large_sizes_do_not_repeat():
    size = 2**40 + 3
    sequence = {shuffle.permuted(index, size, (0,)) for index in range(5000)}
    assert len(sequence) == 5000
    assert max(sequence) > 2**39


def test_every_order_is_equally_likely():
    trials, orders = 2400, 24
    counts = collections.Counter(
        tuple(shuffle.permuted(index, 4, (seed,)) for index in range(4)) for seed in range(trials)
    )
    expected = trials / orders
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == orders
    assert chi_squared < 49.7  # the 99.9 % quantile at 23 degrees of freedom


@pytest.mark.parametrize(("count", "block"), [(10, 10), (10, 3), (12, 4), (3, 5), (1, 1)])
def test_an_epoch_has_every_row_once(count, block):
    order = shuffle.Shuffle(count, block=block, seed=3)
    for epoch in range(4):
        assert sorted(order(epoch * count + draw) for draw in range(count)) == list(range(count))


def test_blocks_are_whole_and_in_shuffled_order():
    order = shuffle.Shuffle(80, block=10, seed=0)
    for epoch in range(2):
        sequence = [order(epoch * 80 + draw) for draw in range(80)]
        blocks = [{row // 10 for row in sequence[start : start + 10]} for start in range(0, 80, 10)]
        assert all(len(block) == 1 for block in blocks)
        assert blocks != [{block} for block in range(8)]
        inside = {tuple(row % 10 for row in sequence[start : start + 10]) for start in range(0, 80, 10)}
        assert len(inside) == 8
        assert tuple(range(10)) not in inside


def test_the_order_is_that_of_existing_runs():
    order = [shuffle.Shuffle(10, block=3, seed=7)(draw) for draw in range(20)]
    assert order == [1, 2, 0, 8, 7, 6, 4, 5, 3, 9, 5, 4, 3, 8, 6, 7, 2, 0, 1, 9]
