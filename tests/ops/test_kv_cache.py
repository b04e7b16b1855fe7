"""Tests of a KV cache against the formula in float64: one token at a time, pieces, documents, padding and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import cases, every_op

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 40, 4, 2, 8, 6
IDS = np.array([[0] * 13 + [-1] * 3 + [0] * 6 + [1] * 18, [2] * 17 + [-1] * 5 + [2] * 18], np.int32)


def drawn(decay_scale=0.3):
    random = np.random.default_rng(0)
    query, key, value = (
        random.normal(size=(BATCH, TIME, *sizes))
        for sizes in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    )
    return query, key, value, -random.exponential(decay_scale, (BATCH, TIME, KV_HEADS))


def formula(query, key, value, log_decay, segment_ids, reach=TIME):
    """Returns the mean of each query's last `reach` keys of its document by squared scores, in float64."""
    out = np.zeros((BATCH, TIME, HEADS, VALUE_DIM))
    for row in range(BATCH):
        valid = np.flatnonzero(segment_ids[row] >= 0)
        document = np.cumsum(np.diff(segment_ids[row, valid], prepend=-1) != 0)
        for place, i in enumerate(valid):
            seen = valid[: place + 1][document[: place + 1] == document[place]][-reach:]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                between = [log_decay[row, seen[seen > j], kv_head].sum() for j in seen]
                weights = (key[row, seen, kv_head] @ query[row, i, head]) ** 2 * np.exp(between)
                out[row, i, head] = weights @ value[row, seen, kv_head] / weights.sum()
    return out


@jax.jit
def stepped(cache, arrays, segment_ids):
    """Returns the outputs, the last cache and the masks of missing keys of one step per token."""

    def step(cache, token):
        *vectors, log_decay, ids = token
        out, cache, missing = cache.step(*vectors, log_decay, ids, weigh=every_op.squares)
        return cache, (out, missing)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), (*arrays, segment_ids))
    cache, (out, missing) = jax.lax.scan(step, cache, tokens)
    return jnp.moveaxis(out, 0, 1), cache, missing.T


def empty(capacity, dtype="float32"):
    return ops.KVCache.zeros(BATCH, capacity, KV_HEADS, HEAD_DIM, VALUE_DIM, dtype=dtype)


@pytest.mark.parametrize(
    ("capacity", "dtype", "bound"), [(7, "float64", 1e-7), (1, "float32", 2e-6), (TIME, "float32", 2e-6)]
)
def test_steps_around_the_ring_equal_the_formula(capacity, dtype, bound):
    arrays = drawn()
    expected = formula(*arrays, IDS, reach=capacity + 1)
    with jax.enable_x64(dtype == "float64"):
        out, _, missing = stepped(empty(capacity, dtype), [x.astype(dtype) for x in arrays], IDS)
    assert cases.error(out, expected) <= bound
    length = [[np.sum(IDS[row, : i + 1] == IDS[row, i]) for i in range(TIME)] for row in range(BATCH)]
    np.testing.assert_array_equal(missing, (np.array(length) > capacity + 1) & (IDS >= 0))


def test_decays_of_padding_that_was_appended_do_not_count():
    arrays, half = drawn(), TIME // 2
    ids = np.where(np.arange(TIME) % 5 == 2, -1, 0) + np.zeros_like(IDS)
    query, *others = (x.astype(np.float32) for x in arrays)
    cache, _ = empty(TIME).append(*(x[:, :half] for x in others), ids[:, :half])
    rest = [x[:, half:] for x in (query, *others)]
    out, _, _ = stepped(cache.newest(TIME), rest, ids[:, half:])
    assert cases.error(out, formula(*arrays, ids)[:, half:]) <= 2e-6


@pytest.mark.parametrize("decay_scale", [1e4, 1e-6])
def test_decays_of_any_size(decay_scale):
    """After a decay of -1e4, small ones still count; documents do not end, and the ring goes round many times."""
    query, key, value, log_decay = drawn(decay_scale)
    log_decay[:, ::3] = -1e-3
    ids = np.zeros((BATCH, TIME), np.int32)
    out, _, _ = stepped(empty(7), [query, key, value, log_decay], ids)
    assert cases.error(out, formula(query, key, value, log_decay, ids, reach=8)) <= 2e-6


def test_pieces_and_steps_in_turn():
    """Pieces bring slots into the order of time; padding keeps no slot, and earlier documents are gone."""
    arrays, cache = drawn(), empty(9)
    _, cache, _ = stepped(cache, [x[:, :20] for x in arrays], IDS[:, :20])
    joined, _ = cache.append(*(x[:, 20:30].astype("float32") for x in arrays[1:]), IDS[:, 20:30])
    _, expected, _ = stepped(cache, [x[:, 20:30] for x in arrays], IDS[:, 20:30])
    actual = joined.without_gaps().newest(9)
    assert actual.next.tolist() == [0, 0]
    kept = actual.segment_ids >= 0
    for name, x in actual.tokens().items():
        seen = np.asarray(kept).reshape(*kept.shape, *[1] * (x.ndim - 2))
        np.testing.assert_array_equal(np.where(seen, x, 0), np.where(seen, expected.tokens()[name], 0), name)
    np.testing.assert_array_equal(actual.complete, expected.complete)
    out, _, _ = stepped(actual, [x[:, 30:] for x in arrays], IDS[:, 30:])
    assert cases.error(out, formula(*arrays, IDS, reach=10)[:, 30:]) <= 2e-6


@pytest.mark.parametrize("array", [0, 1, 2, 3])
def test_a_nan_reaches_its_head_until_it_leaves_the_ring_or_the_document_ends(array):
    arrays = [x.astype("float32") for x in drawn()]
    ids = np.zeros((BATCH, TIME), np.int32)
    ids[1, 6:] = 1
    arrays[array][:, 3, 0] = np.nan
    out, _, _ = stepped(empty(7), arrays, ids)
    bad = np.zeros((BATCH, TIME, HEADS), bool)
    if array == 0:
        bad[:, 3, 0] = True
    else:
        bad[0, 3:11, :2] = bad[1, 3:6, :2] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), bad)
    assert not np.isnan(np.where(bad[..., None], 0, out)).any()


def test_gradients_equal_those_of_the_whole_op():
    arrays = [jnp.asarray(x, "float32") for x in drawn()]
    ids = np.zeros((BATCH, TIME), np.int32)

    def by_steps(arrays):
        return (stepped(empty(TIME), arrays, ids)[0] ** 2).sum()

    def whole(arrays):
        query, key, value, log_decay = arrays
        out = ops.power_attention(query, key, value, log_decay=log_decay, form="attention")
        return (out**2).sum()

    for actual, expected in zip(*(jax.grad(f)(arrays) for f in (by_steps, whole))):
        assert cases.error(actual, expected) <= 1e-5
