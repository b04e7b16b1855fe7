"""Tests of document boundaries and of positions in documents."""

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.ops import documents

#  id          0  0  1 -1  1  0  0 -1 -1  2
SEGMENT_IDS = [0, 0, 1, -1, 1, 0, 0, -1, -1, 2]
STARTS = [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]
PLACES = [1, 2, 1, 1, 2, 1, 2, 2, 2, 1]


def test_a_document_starts_where_the_id_changes_and_padding_passes_through():
    ids = jnp.array([SEGMENT_IDS])
    starts, valid, last = documents.boundaries(ids, jnp.array([-1]))
    np.testing.assert_array_equal(starts[0], np.array(STARTS, bool))
    np.testing.assert_array_equal(valid[0], np.array(SEGMENT_IDS) >= 0)
    assert last[0] == 2
    places, state = documents.positions(ids, documents.PositionState.zeros(1))
    np.testing.assert_array_equal(places[0], PLACES)
    assert (state.position[0], state.segment[0]) == (1, 2)


def test_a_row_of_padding_passes_the_document_through():
    state = documents.PositionState(position=jnp.array([7]), segment=jnp.array([3]))
    places, after = documents.positions(jnp.array([[-1, -1]]), state)
    np.testing.assert_array_equal(places, [[7, 7]])
    assert (after.position[0], after.segment[0]) == (7, 3)


positions = jax.jit(documents.positions)


def test_positions_do_not_depend_on_the_split():
    ids = jnp.array([SEGMENT_IDS, [4] * len(SEGMENT_IDS)])
    whole, end = positions(ids, documents.PositionState.zeros(2))
    for split in (1, 4, 9):
        first, state = positions(ids[:, :split], documents.PositionState.zeros(2))
        second, state = positions(ids[:, split:], state)
        np.testing.assert_array_equal(jnp.concatenate([first, second], 1), whole)
        np.testing.assert_array_equal(state.position, end.position)


def test_sums_stay_within_documents():
    x = np.random.default_rng(0).standard_normal((1, 10, 2)).astype(np.float32)
    starts = np.array([STARTS], bool)
    document = np.cumsum(starts[0])
    onwards = np.triu(document[:, None] == document[None, :]).astype(np.float64)
    sums = documents.sums_to_end(jnp.asarray(x), jnp.asarray(starts))
    np.testing.assert_allclose(sums[0], onwards @ x[0], atol=1e-6)
