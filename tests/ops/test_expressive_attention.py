"""Tests of expressive attention against equation 2 in float64: options, gradients, and scores of any size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops.expressive_attention import expressive_attention
from sympow_jax.ops.power_attention import power_attention
from tests.ops import cases

OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "documents": {"segments": "padded", "group": 3, "value_dim": 5},
    "documents, not causal": {"segments": "padded", "group": 2, "causal": False},
    "documents at edges, KV cache": {"segments": "edges", "cached": 70},
    "not causal, KV cache": {"segments": "padded", "causal": False, "cached": 31},
    "decays": {"decay": "mixed", "group": 2},
    "gentle decays": {"decay": "gentle", "value_dim": 7},
    "decays, documents, KV cache": {"decay": "mixed", "segments": "padded", "cached": 70, "group": 2},
    "fewer queries than a block": {"decay": "mixed", "segments": "padded", "cached": 110, "group": 2},
    "fewer queries, not causal": {"segments": "padded", "cached": 110, "causal": False},
    "one query": {"decay": "gentle", "segments": "edges", "time": 121, "cached": 120},
}
# All have one shape, so that it is compiled once.
SIZES = {"time": 70, "segments": "padded", "decay": "gentle"}
FIRST = "decays, documents, KV cache"


def draw(cached=0, causal=True, **options):
    """Draws arrays in float64 and static options; queries and their cotangent belong to the last positions."""
    arrays = cases.arrays(cases.Case(**({"decay": "none"} | options)), kv_heads=2)
    for name in ("query", "dout"):
        arrays[name] = arrays[name][:, cached:]
    return arrays, {"causal": causal}


@functools.partial(jax.jit, static_argnames="options")
def run(varied, dout, segment_ids, options):
    def attend(varied):
        return expressive_attention(**varied, segment_ids=segment_ids, **dict(options))

    out, pull_back = jax.vjp(attend, varied)
    return {"out": out} | pull_back(dout)[0]


def outputs_and_gradients(arrays, dtype, **options):
    """Returns the output and its gradients, as float64."""
    with jax.enable_x64(True):
        varied = {name: arrays[name] for name in cases.GRADIENTS if arrays[name] is not None}
        varied, dout = jax.tree.map(lambda x: jnp.asarray(x, dtype), (varied, arrays["dout"]))
        actual = run(varied, dout, arrays["segment_ids"], tuple(options.items()))
        return {name: np.asarray(x, np.float64) for name, x in actual.items()}


@functools.cache
def expected_of(name):
    arrays, options = draw(**OPTIONS[name])
    return outputs_and_gradients(arrays, "float64", implementation="reference", **options)


def check(actual, expected, value_bound, gradient_bound):
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        error = cases.error(x, expected[name])
        assert error <= (value_bound if name == "out" else gradient_bound), (name, error)


@pytest.mark.parametrize(
    ("name", "dtype", "block_size"),
    [
        ("decays, documents, KV cache", "float64", 24),
        ("documents, not causal", "float64", 24),
        *(
            pytest.param(name, "float32", 32, marks=[] if name == FIRST else pytest.mark.slow)
            for name in OPTIONS
        ),
        pytest.param("decays, documents, KV cache", "float32", 512, marks=pytest.mark.slow),
    ],
)
def test_blocks_are_the_formula(name, dtype, block_size):
    arrays, options = draw(**OPTIONS[name])
    actual = outputs_and_gradients(arrays, dtype, block_size=block_size, **options)
    check(actual, expected_of(name), *((1e-10, 1e-10) if dtype == "float64" else (2e-6, 1e-5)))
    if arrays["segment_ids"] is not None:
        padding = arrays["segment_ids"][:, -actual["out"].shape[1] :] < 0
        assert padding.any() == (OPTIONS[name]["segments"] == "padded")
        assert not actual["out"][padding].any()


def test_reference_is_equation_2():
    """Uses loops, so that it can be checked by inspection: decays, documents, grouped heads and a KV cache."""
    arrays, _ = draw(time=14, segments="padded", decay="gentle", group=2, cached=4)
    out = outputs_and_gradients(arrays, "float64", implementation="reference", scale=0.7)["out"]
    query, key, value, ids = (arrays[name] for name in ("query", "key", "value", "segment_ids"))
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
            decay += arrays["log_decay"][b, j, kv_head]
        expected[b, t, n] /= total
    assert cases.error(out, expected) <= 1e-13


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e-3])
def test_small_scores(size):
    """z^2 vanishes in float32 below 1e-19, but the rows are means of the same values."""
    arrays, _ = draw(**SIZES)
    check_sizes(arrays, np.sqrt(size), np.sqrt(size))


@pytest.mark.parametrize("size", [1e4, 1e8, 1e11])
def test_large_scores(size):
    """The gradient decreases as z^-3.

    Scores are one product of numbers from 1 to 2, so that rounding does not grow.
    """
    arrays, _ = draw(**SIZES)
    for name in ("query", "key"):
        arrays[name] = np.sign(arrays[name]) * (1 + np.abs(arrays[name]) % 1)
        arrays[name][..., 1:] = 0
    check_sizes(arrays, np.sqrt(size), np.sqrt(size))


def test_rows_of_many_sizes():
    """Mixes queries and keys of all sizes: larger scores come first, last and between."""
    arrays, _ = draw(**SIZES)
    rng = np.random.default_rng(0)
    lengths = 10.0 ** rng.integers(-30, 0, (2, 70, 1, 1))
    arrays["dout"] = arrays["dout"] * lengths  # so that gradients of queries are of one size
    check_sizes(arrays, lengths, 10.0 ** rng.integers(-2, 2, (2, 70, 1, 1)))


def check_sizes(arrays, query_size, key_size):
    arrays["query"], arrays["key"] = (
        np.float32(arrays["query"] * query_size),
        np.float32(arrays["key"] * key_size),
    )
    arrays["dout"] = np.float32(arrays["dout"])
    expected = outputs_and_gradients(arrays, "float64", implementation="reference")
    check(outputs_and_gradients(arrays, "float32", block_size=32), expected, 2e-6, 1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e20, 1e37])
def test_gradients_stay_finite(size):
    arrays, _ = draw(**SIZES)
    arrays["query"] = arrays["query"] * size
    actual = outputs_and_gradients(arrays, "float32", block_size=32)
    assert all(np.isfinite(x).all() for x in actual.values())
    if size < 1:
        assert not any(x.any() for x in actual.values())
    else:
        ones = arrays | {"query": np.ones_like(arrays["query"]), "key": np.full_like(arrays["key"], 1e3)}
        expected = outputs_and_gradients(ones, "float64", implementation="reference")
        assert cases.error(actual["out"], expected["out"]) <= 2e-6  # all keys count the same


def test_a_row_without_weights_is_zero():
    arrays, _ = draw(**SIZES)
    arrays["segment_ids"][:] = 0
    arrays["query"][:, 7] = arrays["key"][:, :3] = 0
    actual = outputs_and_gradients(arrays, "float32", block_size=32)
    assert all(np.isfinite(x).all() for x in actual.values())
    assert not actual["out"][:, [0, 1, 2, 7]].any()
    assert not actual["query"][:, [0, 1, 2, 7]].any()
    assert actual["out"][:, 8].all()


def test_distant_keys_count_if_close_ones_are_orthogonal():
    """Decays to them cancel in the division, across blocks and within one, up to 174 nats."""
    arrays, _ = draw(**SIZES)
    arrays["segment_ids"][:] = 0
    arrays["key"][:, 1:] = 0
    arrays["log_decay"][:] = -2.5
    actual = outputs_and_gradients(arrays, "float32", block_size=32)
    np.testing.assert_allclose(
        actual["out"], np.broadcast_to(arrays["value"][:, :1], actual["out"].shape), rtol=1e-5
    )


def test_small_scores_are_power_attention():
    """For small z the weights are z^2: power attention with p = 2."""
    arrays, _ = draw(**SIZES)
    actual = outputs_and_gradients(arrays | {"query": arrays["query"] * 1e-8}, "float32", block_size=32)[
        "out"
    ]
    arguments = {name: jnp.asarray(x) for name, x in arrays.items() if name != "dout"}
    expected = power_attention(**arguments, power=2, form="attention", implementation="reference")
    assert cases.error(actual, expected) <= 2e-6


@pytest.mark.slow
def test_bfloat16():
    arrays = cases.arrays(cases.Case(**SIZES | {"decay": "none"}), kv_heads=2, dtype="bfloat16")
    actual = outputs_and_gradients(arrays, "bfloat16", block_size=32)
    check(actual, outputs_and_gradients(arrays, "float64", implementation="reference"), 1e-2, 1e-2)


def test_memory_is_linear():
    """Includes the backward pass: one block's pairs are 1/4096 of all of them."""
    time = 4096
    shapes = [jax.ShapeDtypeStruct((1, time, 1, 8), jnp.float32)] * 3 + [
        jax.ShapeDtypeStruct((1, time, 1), jnp.float32)
    ]

    def loss(query, key, value, log_decay):
        return expressive_attention(query, key, value, log_decay=log_decay, block_size=64).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * time * time / 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": (2, 33)}, r"log_decay has shape \(2, 33\); it must be \(2, 33, 2\)"),
        ({"log_decay": (2, 33, 2), "causal": False}, "causal is False; decays run in one direction"),
        ({"implementation": "cudnn"}, "it must be one of None, 'reference', 'xla'"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    inputs = {"query": (2, 33, 4, 8), "key": (2, 33, 2, 8), "value": (2, 33, 2, 8)} | change
    inputs = {name: jnp.zeros(x) if isinstance(x, tuple) else x for name, x in inputs.items()}
    with pytest.raises(ValueError, match=message):
        expressive_attention(**inputs)
