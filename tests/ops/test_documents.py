"""Tests of document boundaries and of positions in documents."""

import itertools

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


positions = jax.jit(documents.positions)


def test_positions_do_not_depend_on_the_split():
    ids = jnp.array([SEGMENT_IDS, [4] * len(SEGMENT_IDS)])
    whole, end = positions(ids, documents.PositionState.zeros(2))
    # From 3 to 4 the first row has padding alone, within a document.
    for cuts in ((0, 1, 10), (0, 3, 4, 10), (0, 9, 10)):
        state, parts = documents.PositionState.zeros(2), []
        for begin, stop in itertools.pairwise(cuts):
            places, state = positions(ids[:, begin:stop], state)
            parts.append(places)
        np.testing.assert_array_equal(jnp.concatenate(parts, 1), whole)
        jax.tree.map(np.testing.assert_array_equal, state, end)


def test_sums_stay_within_documents():
    x = np.random.default_rng(0).standard_normal((1, 10, 2)).astype(np.float32)
    starts = np.array([STARTS], bool)
    document = np.cumsum(starts[0])
    onwards = np.triu(document[:, None] == document[None, :]).astype(np.float64)
    sums = documents.sums_to_end(jnp.asarray(x), jnp.asarray(starts))
    np.testing.assert_allclose(sums[0], onwards @ x[0], atol=1e-6)
