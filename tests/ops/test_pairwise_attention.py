"""Tests of softmax and expressive attention against their formulas in float64, with scores of any size."""

import dataclasses
import functools
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops import alibi_slopes, expressive_attention, softmax_attention, target
from tests.ops import cases, linear_formula

CASE = cases.Case(head_dim=8, value_dim=8, time=40, decay="none", group=2)
BLOCK = 12


def means(weigh, query, key, value, log_decay=None, segment_ids=None, causal=True, window=None):
    """Computes means of values; `weigh` is a function of scores, logarithms of decays and a mask of pairs."""
    (batch, queries, heads, _), time = query.shape, key.shape[1]
    key, value = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, precision="highest")
    steps, before = np.arange(time), time - queries
    valid = jnp.ones((batch, time), int) if segment_ids is None else segment_ids >= 0
    seen = linear_formula.same_document(batch, time, segment_ids)
    if causal:
        seen &= steps[:, None] >= steps
    if window is not None:
        count = valid.cumsum(1)
        seen &= count[:, :, None] - count[:, None] < window
    log_decays = jnp.zeros_like(scores)
    if log_decay is not None:
        # Summed between each pair, so that no large decay outside it costs digits.
        between = (steps[:, None, None] >= steps) & (steps[None, :, None] < steps)  # i, j, m: j < m <= i
        sums = jnp.einsum("btk,ijt->bkij", log_decay * valid[..., None], between.astype(log_decay.dtype))
        log_decays = jnp.repeat(sums, heads // sums.shape[1], axis=1)[:, :, before:]
    seen = seen[:, None, before:]
    weights = jnp.where(seen, weigh(scores, log_decays, seen), 0)
    total = weights.sum(-1, keepdims=True)
    mean = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bnts,bsne->btne", mean, value, precision="highest")


def softmax(query, key, value, **options):
    def weigh(scores, log_decays, seen):
        scores = jnp.where(seen, scores / np.sqrt(query.shape[-1]) + log_decays, -1e30)
        return jnp.exp(scores - scores.max(-1, keepdims=True))

    return means(weigh, query, key, value, **options)


def expressive_means(query, key, value, **options):
    def weigh(scores, log_decays, seen):
        # z^2 / (1 + z^2) of scores z that are not zero, whose derivative does not cancel in this way of writing it.
        return jnp.exp(log_decays) / (1 + scores**-2)

    return means(weigh, query, key, value, **options)


FORMULAS = {softmax_attention: softmax, expressive_attention: expressive_means}


def formula(op, drawn, **options):
    return cases.outputs_and_gradients(FORMULAS[op], drawn, "float64", **options)


def draw(cached=0, dtype="float32", **options):
    """Draws arrays; queries and their cotangent belong to the last positions."""
    drawn = cases.arrays(dataclasses.replace(CASE, **options), kv_heads=2, seed=1, dtype=dtype)
    for name in ("query", "dout"):
        drawn[name] = drawn[name][:, cached:]
    return drawn


DOCUMENTS = {"decay": "mixed", "segments": "padded"}
OPTIONS = {
    "plain": ({}, {}),
    "gentle decays": ({"decay": "gentle", "value_dim": 7}, {}),
    "decays and documents": (DOCUMENTS | {"group": 3, "value_dim": 5}, {}),
    "KV cache": (DOCUMENTS | {"cached": 25}, {}),
    "one query": (DOCUMENTS | {"cached": 39}, {}),
    "not causal": ({}, {"causal": False}),
    "documents, not causal": ({"segments": "padded", "value_dim": 3}, {"causal": False}),
    "not causal, KV cache": ({"segments": "padded", "cached": 21}, {"causal": False}),
}
WINDOWS = {
    "window": ({}, {"window": 5}),
    "window of one token": ({"segments": "padded"}, {"window": 1}),
    "window of decays and documents": (DOCUMENTS, {"window": 4}),
    "window longer than a block": (DOCUMENTS, {"window": 17}),
    "window and KV cache": (DOCUMENTS | {"cached": 20}, {"window": 9}),
    "window that begins after some keys": ({"decay": "mixed", "cached": 20}, {"window": 9}),
    "window and one query": (DOCUMENTS | {"cached": 39}, {"window": 4}),
    "window without slices": (DOCUMENTS, {"window": 35}),
    "window of all keys": (DOCUMENTS, {"window": 40}),
}
OFTEN = [
    *(
        (softmax_attention, name, "float32", BLOCK)
        for name in ("KV cache", "one query", "documents, not causal")
    ),
    *(
        (softmax_attention, f"window {name}", "float32", BLOCK)
        for name in ("and KV cache", "of one token", "without slices")
    ),
    (expressive_attention, "KV cache", "float32", BLOCK),
    (expressive_attention, "decays and documents", "float64", BLOCK),
    (expressive_attention, "documents, not causal", "float64", BLOCK),
]
RARE = [
    *((softmax_attention, name, "float32", BLOCK) for name in OPTIONS | WINDOWS),
    (softmax_attention, "decays and documents", "float32", 64),
    *((expressive_attention, name, dtype, BLOCK) for name in OPTIONS for dtype in ("float64", "float32")),
    (expressive_attention, "decays and documents", "float32", 512),
    (softmax_attention, "plain", "bfloat16", BLOCK),
    (expressive_attention, "plain", "bfloat16", BLOCK),
]


@pytest.mark.parametrize(
    ("op", "name", "dtype", "block_size"),
    [*OFTEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in RARE if case not in OFTEN)],
)
def test_values_and_gradients(op, name, dtype, block_size):
    sizes, options = (OPTIONS | WINDOWS)[name]
    # Of one program; after strong gates, little is left of earlier blocks.
    for gates in ({}, {"decay": "gentle"}) if sizes.get("decay") == "mixed" else ({},):
        drawn = draw(**sizes | gates, dtype=dtype)
        actual = cases.outputs_and_gradients(op, drawn, dtype, block_size=block_size, **options)
        cases.check(actual, formula(op, drawn, **options), drawn, dtype)
        if drawn["segment_ids"] is not None:
            padding = drawn["segment_ids"][:, -actual["out"].shape[1] :] < 0
            assert padding.any() or "one query" in name
            assert not actual["out"][padding].any()


def test_alibi_slopes():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12) == [2.0**-i for i in range(1, 9)] + [2.0 ** -(i - 0.5) for i in range(1, 5)]
    assert alibi_slopes(1) == [2.0**-8]


attend = jax.jit(softmax_attention)


def test_small_decays_count_after_large_ones():
    query, key, value = np.random.default_rng(0).standard_normal((3, 2048, 8)).astype("float32")
    query, steps = query[1792:], np.arange(1792, 2048)
    log_decay = np.full((1, 2048, 1), -0.003, np.float32)
    log_decay[:, :1793:3] = -9e3
    log_decay[:, 1792] = -9e3  # nothing before is seen
    scores = query.astype(np.float64) @ key[1792:].T.astype(np.float64) / np.sqrt(8)
    scores += np.float64(np.float32(-0.003)) * (steps[:, None] - steps)
    weights = np.exp(np.where(steps[:, None] >= steps, scores, -np.inf))
    expected = weights / weights.sum(-1, keepdims=True) @ value[1792:]
    out = attend(*(x[None, :, None] for x in (query, key, value)), log_decay=log_decay)
    assert cases.error(out[0, :, 0], expected) < 2e-6


def test_hard_gates_stay_finite():
    drawn = draw(decay="gentle")
    drawn["log_decay"][:, ::5] = -np.inf
    actual = cases.outputs_and_gradients(softmax_attention, drawn, "float32")
    assert all(np.isfinite(x).all() for x in actual.values())
    np.testing.assert_allclose(actual["out"][:, 5], np.repeat(drawn["value"][:, 5], 2, axis=1), rtol=1e-6)


def test_float16():
    drawn = draw(dtype="bfloat16")  # whose numbers float16 has too, but for the smallest
    actual = cases.outputs_and_gradients(softmax_attention, drawn, "float16", window=9)
    assert all(x.dtype == jnp.float16 and np.isfinite(x).all() for x in actual.values())
    assert cases.error(actual["out"], formula(softmax_attention, drawn, window=9)["out"]) < 1e-3


def products(jaxpr, times=1):
    """Counts the multiplications of all matrix products, those of a loop once for each of its steps."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += times * equation.outvars[0].aval.size * np.prod([left[axis] for axis in contracted])
        steps = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            total += products(inner, times * steps)
    return total


def test_with_a_window_work_and_memory_are_linear_in_time():
    """Includes the backward pass: four products after the forward pass's two, and the scores once more."""
    window, block_size, head_dim = 100, 64, 8

    def loss(query, key, value, log_decay, segment_ids):
        options = {"window": window, "block_size": block_size, "segment_ids": segment_ids}
        return softmax_attention(query, key, value, log_decay=log_decay, **options).sum()

    def cost(time):
        shapes = [jax.ShapeDtypeStruct((1, time, 1, head_dim), jnp.float32)] * 3
        shapes += [jax.ShapeDtypeStruct((1, time, 1), jnp.float32)]
        shapes += [jax.ShapeDtypeStruct((1, time), jnp.int32)]
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(*shapes)
        compiled = traced.lower().compile()
        return products(traced.jaxpr.jaxpr), compiled.memory_analysis().temp_size_in_bytes

    (short, small), (long, large) = cost(2048), cost(8192)
    assert short == 2048 * (window - 1 + block_size) * head_dim * 7
    assert long == 4 * short
    assert large < 4.1 * small


def half(time=64, value_dim=64):
    """Returns shapes in bfloat16 that cuDNN supports."""
    sizes = ((time, 4, 64), (64, 2, 64), (64, 2, value_dim))
    return [jax.ShapeDtypeStruct((2, *size), jnp.bfloat16) for size in sizes]


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that a GPU with cuDNN exists; returns the implementations and windows that are requested from JAX."""
    requested = []
    monkeypatch.setattr(target, "device", lambda: types.SimpleNamespace(platform="gpu", device_kind="GPU"))
    attention = jax.nn.dot_product_attention

    def record(*arguments, implementation=None, local_window_size=None, **options):
        requested.append((implementation, local_window_size))
        return attention(*arguments, local_window_size=local_window_size, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    return requested


CANNOT = {
    "bfloat16 or float16, not float32": ([jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in half()], {}),
    "without log_decay": (half(), {"log_decay": jax.ShapeDtypeStruct((2, 64, 2), jnp.float32)}),
    "without segment_ids": (half(), {"segment_ids": jax.ShapeDtypeStruct((2, 64), jnp.int32)}),
    "equal numbers of keys and queries, not 64 and 8": (half(time=8), {}),
}


@pytest.mark.parametrize("message", CANNOT)
def test_cudnn_names_unsupported_requests_and_is_not_chosen_for_them(gpu, message):
    arrays, options = CANNOT[message]

    def attend(arrays, options, implementation=None):
        return softmax_attention(*arrays, **options, implementation=implementation)

    with pytest.raises(NotImplementedError, match=f"implementation 'cudnn' needs .*{message}"):
        jax.eval_shape(functools.partial(attend, implementation="cudnn"), arrays, options)
    jax.eval_shape(attend, arrays, options)
    assert {implementation for implementation, _ in gpu} == {None}


@pytest.mark.parametrize(("implementation", "expected"), [(None, "cudnn"), ("cudnn", "cudnn"), ("xla", None)])
def test_cudnn_is_chosen_on_a_gpu(gpu, implementation, expected):
    call = functools.partial(softmax_attention, implementation=implementation)
    assert jax.eval_shape(call, *half(value_dim=32)).shape == (2, 64, 4, 32)
    assert {implementation for implementation, _ in gpu} == {expected}


@pytest.mark.parametrize(("window", "requested"), [(None, None), (5, (4, 0)), (64, None)])
def test_cudnn_gets_the_window(gpu, window, requested):
    """cuDNN's window has a number of tokens on the left, without the query's own."""
    random = np.random.default_rng(0)
    # Sizes of no other test, which would have traced the call before.
    arrays = [jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in half(value_dim=16)]
    out = softmax_attention(*arrays, window=window, implementation="cudnn")
    assert set(gpu) == {("cudnn", requested)}
    expected = softmax(*(x.astype(jnp.float32) for x in arrays), window=window)
    assert cases.error(out, expected) < 1e-2


def test_without_cudnn_it_is_not_chosen(gpu, monkeypatch):
    recording = jax.nn.dot_product_attention

    def absent(*arguments, implementation=None, **options):
        if implementation == "cudnn":
            raise RuntimeError("cuDNN is not detected.")
        return recording(*arguments, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", absent)
    jax.eval_shape(softmax_attention, *half())
    with pytest.raises(NotImplementedError, match="'cudnn': cuDNN is not detected"):
        jax.eval_shape(functools.partial(softmax_attention, implementation="cudnn"), *half())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100])
def test_cudnn(window):
    drawn = draw(time=512, head_dim=64, value_dim=64, dtype="bfloat16")
    actual = cases.outputs_and_gradients(
        softmax_attention, drawn, "bfloat16", implementation="cudnn", window=window
    )
    cases.check(actual, formula(softmax_attention, drawn, window=window), drawn, "bfloat16")


def test_expressive_attention_is_equation_2():
    """Uses loops, so that it can be checked by inspection: decays, documents, grouped heads and a KV cache."""
    drawn = draw(time=14, segments="padded", decay="gentle", cached=4)
    options = {"scale": 0.7, "block_size": 4}
    out = cases.outputs_and_gradients(expressive_attention, drawn, "float64", **options)["out"]
    query, key, value, ids = (drawn[name] for name in ("query", "key", "value", "segment_ids"))
    expected = np.zeros_like(out)
    for b, t, n in np.ndindex(out.shape[:3]):
        i, kv_head, decay, total = t + 4, n // 2, 0.0, 0.0
        if ids[b, i] < 0:
            continue
        for j in range(i, -1, -1):
            if ids[b, j] < 0:
                continue
            if ids[b, j] != ids[b, i]:
                break
            z = 0.7 * query[b, t, n] @ key[b, j, kv_head]
            weight = np.exp(decay) * z**2 / (1 + z**2)
            expected[b, t, n] += weight * value[b, j, kv_head]
            total += weight
            decay += drawn["log_decay"][b, j, kv_head]
        expected[b, t, n] /= total
    assert cases.error(out, expected) <= 1e-13


def expressive(drawn):
    """Returns outputs and gradients in float32, by one program for all that follows."""
    return cases.outputs_and_gradients(expressive_attention, drawn, "float32", block_size=BLOCK)


def check_sizes(drawn, query_size, key_size):
    sizes = {"query": query_size, "key": key_size, "dout": 1}
    drawn |= {name: np.float32(drawn[name] * size) for name, size in sizes.items()}
    cases.check(expressive(drawn), formula(expressive_attention, drawn), drawn, "float32")


SIZES = {"segments": "padded", "decay": "gentle"}


def test_scores_of_all_sizes():
    # z^2 vanishes in float32 below 1e-19, but the rows are means of the same values.
    for size in (1e-25, 1e-12, 1e-3):
        check_sizes(draw(**SIZES), np.sqrt(size), np.sqrt(size))
    # The gradient decreases as z^-3. Scores are one product of numbers from 1 to 2, so that rounding does not grow.
    for size in (1e4, 1e8, 1e11):
        drawn = draw(**SIZES)
        for name in ("query", "key"):
            drawn[name] = np.sign(drawn[name]) * (1 + np.abs(drawn[name]) % 1)
            drawn[name][..., 1:] = 0
        check_sizes(drawn, np.sqrt(size), np.sqrt(size))
    # Queries and keys of all sizes: larger scores come first, last and between.
    drawn, random = draw(**SIZES), np.random.default_rng(0)
    lengths = 10.0 ** random.integers(-30, 0, (2, 40, 1, 1))
    drawn["dout"] = drawn["dout"] * lengths  # so that gradients of queries are of one size
    check_sizes(drawn, lengths, 10.0 ** random.integers(-2, 2, (2, 40, 1, 1)))


def test_gradients_of_expressive_attention_stay_finite():
    drawn = draw(**SIZES)
    ones = drawn | {"query": np.ones_like(drawn["query"]), "key": np.full_like(drawn["key"], 1e3)}
    expected = formula(expressive_attention, ones)["out"]  # all keys count the same
    for size in (0.0, 1e-45, 1e20, 1e37):
        actual = expressive(drawn | {"query": drawn["query"] * size})
        assert all(np.isfinite(x).all() for x in actual.values())
        if size < 1:
            assert not any(x.any() for x in actual.values())
        else:
            assert cases.error(actual["out"], expected) <= 2e-6


def test_a_row_without_weights_is_zero():
    drawn = draw(**SIZES)
    drawn["segment_ids"][:] = 0
    drawn["query"][:, 7] = drawn["key"][:, :3] = 0
    actual = expressive(drawn)
    assert all(np.isfinite(x).all() for x in actual.values())
    assert not actual["out"][:, [0, 1, 2, 7]].any()
    assert not actual["query"][:, [0, 1, 2, 7]].any()
    assert actual["out"][:, 8].all()


def test_distant_keys_count_if_close_ones_are_orthogonal():
    """Decays to them cancel in the division, across blocks and within one, up to 174 nats."""
    drawn = draw(**SIZES)
    drawn["segment_ids"][:] = 0
    drawn["key"][:, 1:] = 0
    drawn["log_decay"][:] = -4.46
    expected = np.broadcast_to(np.repeat(drawn["value"][:, :1], 2, 2), (2, 40, 4, 8))
    np.testing.assert_allclose(expressive(drawn)["out"], expected, rtol=1e-5)
