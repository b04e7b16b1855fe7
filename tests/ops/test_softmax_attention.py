"""Tests of softmax attention against the formula in float64: every option, its gradients and its memory."""

import functools
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops._shared import target
from sympow_jax.ops.softmax_attention import alibi_slopes, softmax_attention

SEGMENTS = [0] * 5 + [1] * 9 + [-1] * 4 + [1] * 6 + [0] * 9


def inputs(batch=2, time=33, keys=33, heads=4, kv_heads=2, head_dim=8, value_dim=8, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(time, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim)]
    return [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def mixed_decays(shape):
    return np.random.default_rng(1).choice([0, -1e-4, -0.3, -20, -1e4], shape).astype(np.float32)


def documents_of(segment_ids):
    """Returns the document index of each position, -1 for padding; a loop, so that it can be checked by inspection."""
    documents = np.full(segment_ids.shape, -1)
    for row, ids in enumerate(segment_ids):
        current, index = None, -1
        for step, segment in enumerate(ids):
            if segment >= 0:
                index += segment != current
                current, documents[row, step] = segment, index
    return documents


def exact(query, key, value, log_decay=None, segment_ids=None, causal=True, window=None, xp=np):
    """Computes the formula in the dtype of its inputs."""
    groups, before = query.shape[2] // key.shape[2], key.shape[1] - query.shape[1]
    key, value = (xp.repeat(x, groups, axis=2) for x in (key, value))
    scores = xp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1])
    steps = np.arange(key.shape[1])
    seen = np.broadcast_to(
        (steps[before:, None] >= steps) | (not causal), (len(query), query.shape[1], len(steps))
    )
    valid = np.ones((len(query), len(steps)), int) if segment_ids is None else segment_ids >= 0
    if window is not None:
        count = valid.cumsum(1)
        seen = seen & (count[:, before:, None] - count[:, None] < window)
    if segment_ids is not None:
        document = documents_of(segment_ids)
        seen = seen & (document[:, before:, None] == document[:, None]) & (document >= 0)[:, None]
        if log_decay is not None:
            log_decay = log_decay * (document >= 0)[..., None]
    if log_decay is not None:
        # Summed between each pair, so that no large decay outside it costs digits.
        between = (steps[:, None, None] >= steps) & (steps[None, :, None] < steps)  # i, j, m: j < m <= i
        sums = xp.einsum("btk,ijt->bkij", log_decay, between.astype(np.float64))
        scores = scores + xp.repeat(sums, groups, axis=1)[:, :, before:]
    scores = xp.where(seen[:, None], scores, -1e30)
    weights = xp.where(seen[:, None], xp.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return xp.einsum("bnts,bsne->btne", weights / xp.where(total == 0, 1, total), value)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(((actual - expected) ** 2).mean() / (expected**2).mean())


attend = jax.jit(softmax_attention, static_argnames="block_size")

OPTIONS = {
    "plain": {},
    "alibi": {"decay": "alibi"},
    "decays and documents": {"decay": "mixed", "segments": True},
    "KV cache": {"decay": "mixed", "segments": True, "time": 7},
    "one query": {"decay": "mixed", "segments": True, "time": 1},
    "wide values": {"decay": "mixed", "value_dim": 12, "kv_heads": 1},
    "narrow values": {"segments": True, "value_dim": 3},
    "whole documents": {"segments": True, "causal": False},
    "all of the row": {"causal": False},
    "window": {"window": 5},
    "window of decays and documents": {"decay": "mixed", "segments": True, "window": 4},
    "window longer than a block": {"decay": "mixed", "segments": True, "window": 13},
    "window and KV cache": {"decay": "mixed", "segments": True, "time": 15, "window": 9},
    "window that begins after some keys": {"decay": "mixed", "time": 15, "window": 9},
    "window and one query": {"decay": "mixed", "segments": True, "time": 1, "window": 4},
    "window without slices": {"decay": "mixed", "segments": True, "window": 29},
    "window of all keys": {"decay": "mixed", "segments": True, "window": 33},
}


def options_of(name, kv_heads=2, decay=None, segments=False, causal=True, window=None, **sizes):
    arrays = [np.asarray(x) for x in inputs(kv_heads=kv_heads, **sizes)]
    options = {"causal": causal, "window": window}
    if decay == "alibi":
        slopes = -np.array(alibi_slopes(kv_heads), np.float32)
        options["log_decay"] = np.broadcast_to(slopes, (2, 33, kv_heads))
    if decay == "mixed":
        options["log_decay"] = mixed_decays((2, 33, kv_heads))
    if segments:
        options["segment_ids"] = np.array([SEGMENTS, SEGMENTS[::-1]], np.int32)
    return arrays, options


@pytest.mark.parametrize(
    ("name", "block_size"), [*((name, 6) for name in OPTIONS), ("decays and documents", 64)]
)
def test_values_and_gradients(name, block_size):
    arrays, options = options_of(name, **OPTIONS[name])
    weight = np.random.default_rng(2).standard_normal(exact(*arrays, **options).shape)
    segment_ids = options.pop("segment_ids", None)
    static = {"segment_ids": segment_ids} | {name: options.pop(name) for name in ("causal", "window")}
    names = ("query", "key", "value", *options)
    arrays += options.values()

    @jax.jit
    def run(*arrays):
        def loss(*arrays):
            out = softmax_attention(**dict(zip(names, arrays, strict=True)), **static, block_size=block_size)
            return (out * weight.astype(np.float32)).sum(), out

        return jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)

    gradients, out = run(*arrays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]

        def exact_loss(*arrays):
            out = exact(**dict(zip(names, arrays, strict=True)), **static, xp=jnp)
            return (out * weight).sum(), out

        exact_gradients = jax.grad(exact_loss, argnums=tuple(range(len(wide))), has_aux=True)
        expected, exact_out = exact_gradients(*wide)
        expected, exact_out = jax.tree.map(np.asarray, (expected, exact_out))
    assert relative_error(out, exact_out) < 2e-6
    for gradient, exact_gradient in zip(gradients, expected, strict=True):
        assert relative_error(gradient, exact_gradient) < 1e-5
    if segment_ids is not None:
        assert not np.asarray(out)[segment_ids[:, -out.shape[1] :] < 0].any()


def test_alibi_is_a_penalty_on_distance():
    """Appendix A.2 of Kumar et al. 2025: exp(q . k + m (j - i)) is a gate of exp(-m) at every step."""
    query, key, value = inputs(kv_heads=4)
    slopes = np.array(alibi_slopes(4))
    steps = np.arange(33)
    scores = np.einsum("btnd,bsnd->bnts", query, key, dtype=np.float64) / np.sqrt(8)
    scores += slopes[:, None, None] * (steps - steps[:, None])
    weights = np.where(steps <= steps[:, None], np.exp(scores), 0)
    expected = np.einsum("bnts,bsne->btne", weights / weights.sum(-1, keepdims=True), value)
    log_decay = np.broadcast_to(-slopes.astype(np.float32), (2, 33, 4))
    assert relative_error(attend(query, key, value, log_decay=log_decay), expected) < 2e-6


def test_alibi_slopes():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12) == [2.0**-i for i in range(1, 9)] + [2.0 ** -(i - 0.5) for i in range(1, 5)]
    assert alibi_slopes(1) == [2.0**-8]


def test_small_decays_count_after_large_ones():
    query, key, value = inputs(time=256, keys=2048, batch=1, heads=1, kv_heads=1)
    log_decay = np.full((1, 2048, 1), -0.003, np.float32)
    log_decay[:, :1792:3] = -9e3
    steps = np.arange(1792, 2048)
    scores = (query[0, :, 0].astype(np.float64) @ key[0, 1792:, 0].T.astype(np.float64)) / np.sqrt(8)
    scores += np.float64(np.float32(-0.003)) * (steps[:, None] - steps)
    weights = np.exp(np.where(steps[:, None] >= steps, scores, -np.inf))
    expected = weights / weights.sum(-1, keepdims=True) @ value[0, 1792:, 0]
    log_decay[:, 1792] = -9e3  # nothing before is seen
    out = attend(query, key, value, log_decay=log_decay)
    assert relative_error(out[0, :, 0], expected) < 2e-6


def test_hard_gates_stay_finite():
    query, key, value = inputs()
    log_decay = np.where(np.arange(33)[:, None] % 5 == 0, -np.inf, -0.1) * np.ones((2, 33, 2))
    loss = lambda *x: softmax_attention(*x[:3], log_decay=x[3]).sum()  # noqa: E731
    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(
        query, key, value, log_decay.astype(np.float32)
    ):
        assert np.isfinite(gradient).all()
    out = attend(query, key, value, log_decay=log_decay.astype(np.float32))
    np.testing.assert_allclose(out[:, 5], np.repeat(value[:, 5], 2, axis=1), rtol=1e-6)


def test_bfloat16():
    arrays = inputs()
    expected = exact(*(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in arrays))
    out = attend(*(jnp.asarray(x, jnp.bfloat16) for x in arrays))
    assert out.dtype == jnp.bfloat16
    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("window", [None, 9])
def test_float16(window):
    arrays = [jnp.asarray(x, jnp.float16) for x in inputs()]
    call = functools.partial(softmax_attention, window=window)
    expected = call(*(x.astype(jnp.float32) for x in arrays))
    out, pull = jax.vjp(call, *arrays)
    assert out.dtype == jnp.float16
    assert relative_error(out.astype(jnp.float32), expected) < 1e-3
    assert all(gradient.dtype == jnp.float16 and np.isfinite(gradient).all() for gradient in pull(out))


def test_no_array_is_as_large_as_all_scores():
    """Includes the backward pass; one block's scores are 1/64 of all."""
    time, block_size = 4096, 64
    shapes = [jax.ShapeDtypeStruct((1, time, 1, 8), jnp.float32)] * 3 + [
        jax.ShapeDtypeStruct((1, time, 1), jnp.float32)
    ]

    def loss(query, key, value, log_decay):
        return attend(query, key, value, log_decay=log_decay, block_size=block_size).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes).compile()
    scores = 4 * time * time
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 4


def products(jaxpr, times=1):
    """Counts the multiplications of all matrix products, those of a loop once for each of its steps."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += times * equation.outvars[0].aval.size * np.prod([left[axis] for axis in contracted])
        steps = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += sum(
            products(inner, times * steps) for inner in jax.extend.core.jaxprs_in_params(equation.params)
        )
    return total


@pytest.mark.parametrize("segments", [False, True])
def test_with_a_window_work_and_memory_are_linear_in_time(segments):
    """Includes the backward pass: four products after the forward pass's two, and the scores once more."""
    window, block_size, head_dim = 100, 64, 8

    def loss(query, key, value, log_decay, segment_ids):
        return softmax_attention(
            query,
            key,
            value,
            log_decay=log_decay,
            segment_ids=segment_ids,
            window=window,
            block_size=block_size,
        ).sum()

    def cost(time):
        shapes = [jax.ShapeDtypeStruct((1, time, 1, head_dim), jnp.float32)] * 3
        shapes += [jax.ShapeDtypeStruct((1, time, 1), jnp.float32)]
        shapes += [jax.ShapeDtypeStruct((1, time), jnp.int32) if segments else None]
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(*shapes)
        compiled = traced.lower().compile()
        return products(traced.jaxpr.jaxpr), compiled.memory_analysis().temp_size_in_bytes

    (short, small), (long, large) = cost(2048), cost(8192)
    assert short == 2048 * (window - 1 + block_size) * head_dim * 7
    assert long == 4 * short
    assert large < 4.1 * small


def test_a_window_of_one_token_is_the_value_of_the_token():
    query, key, value = inputs()
    segment_ids = np.array([SEGMENTS, SEGMENTS[::-1]], np.int32)
    expected = np.where(segment_ids[..., None, None] < 0, 0, np.repeat(value, 2, axis=2))
    out = softmax_attention(query, key, value, segment_ids=segment_ids, window=1, block_size=6)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_windows_require_causal_attention_and_a_token():
    query, key, value = inputs()
    with pytest.raises(
        ValueError, match="window is 4 and causal is False; only causal attention has a window"
    ):
        softmax_attention(query, key, value, causal=False, window=4)
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        softmax_attention(query, key, value, window=0)


def test_decays_require_causal_attention():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="decays run in one direction"):
        softmax_attention(query, key, value, log_decay=mixed_decays((2, 33, 2)), causal=False)


def test_decays_of_another_shape():
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"log_decay has shape \(2, 33\); it must be \(2, 33, 2\)"):
        softmax_attention(query, key, value, log_decay=jnp.zeros((2, 33)))


def half(**sizes):
    """Returns shapes in bfloat16 that cuDNN supports."""
    sizes = {"time": 64, "keys": 64, "head_dim": 64, "value_dim": 64} | sizes
    return [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in inputs(**sizes)]


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that a GPU with cuDNN exists; returns the implementations that are requested from JAX."""
    requested = []
    monkeypatch.setattr(target, "device", lambda: types.SimpleNamespace(platform="gpu", device_kind="GPU"))
    attention = jax.nn.dot_product_attention

    def record(*arguments, implementation=None, **options):
        requested.append(implementation)
        return attention(*arguments, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    return requested


CANNOT = {
    "bfloat16 or float16, not float32": ({}, {}, jnp.float32),
    "without log_decay": ({}, {"log_decay": jax.ShapeDtypeStruct((2, 64, 2), jnp.float32)}, None),
    "without segment_ids": ({}, {"segment_ids": jax.ShapeDtypeStruct((2, 64), jnp.int32)}, None),
    "equal numbers of keys and queries, not 64 and 8": ({"time": 8}, {}, None),
}


@pytest.mark.parametrize("message", CANNOT)
def test_cudnn_names_unsupported_requests_and_is_not_chosen_for_them(gpu, message):
    sizes, options, dtype = CANNOT[message]
    arrays = [jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for x in half(**sizes)]

    def attend(arrays, options, implementation=None):
        return softmax_attention(*arrays, **options, implementation=implementation)

    with pytest.raises(NotImplementedError, match=f"implementation 'cudnn' needs .*{message}"):
        jax.eval_shape(functools.partial(attend, implementation="cudnn"), arrays, options)
    jax.eval_shape(attend, arrays, options)
    assert set(gpu) == {None}


@pytest.mark.parametrize(("implementation", "expected"), [(None, "cudnn"), ("cudnn", "cudnn"), ("xla", None)])
def test_cudnn_is_chosen_on_a_gpu(gpu, implementation, expected):
    out = jax.eval_shape(
        functools.partial(softmax_attention, implementation=implementation), *half(value_dim=32)
    )
    assert out.shape == (2, 64, 4, 32)
    assert set(gpu) == {expected}


@pytest.mark.parametrize(("window", "requested"), [(None, None), (5, (4, 0)), (64, None)])
def test_cudnn_gets_the_window(gpu, monkeypatch, window, requested):
    """cuDNN's window has a number of tokens on the left, without the query's own."""
    windows = []
    recording = jax.nn.dot_product_attention

    def record(*arguments, local_window_size=None, **options):
        windows.append(local_window_size)
        return recording(*arguments, local_window_size=local_window_size, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in half(batch=1)]
    out = softmax_attention(*arrays, window=window, implementation="cudnn")
    assert set(windows) == {requested}
    assert set(gpu) == {"cudnn"}
    expected = exact(*(np.asarray(x, np.float64) for x in arrays), window=window)
    assert relative_error(out, expected) < 1e-2


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


def test_without_a_gpu_there_is_no_cudnn():
    with pytest.raises(NotImplementedError, match="'cudnn' needs a GPU, not cpu"):
        softmax_attention(*inputs(), implementation="cudnn")
    with pytest.raises(
        ValueError, match="implementation is 'mosaic_gpu'; it must be one of None, 'xla', 'cudnn'"
    ):
        softmax_attention(*inputs(), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100])
def test_cudnn(window):
    """Compares values and gradients with the formula in float64, within the bounds of bfloat16."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs(time=512, keys=512, head_dim=64, value_dim=64)]
    dout = jnp.asarray(inputs(time=512, head_dim=64, value_dim=64)[0], jnp.bfloat16)

    def both(attend, *arrays):
        out, pull_back = jax.vjp(attend, *arrays)
        return out, *pull_back(dout.astype(out.dtype))

    cudnn = functools.partial(softmax_attention, implementation="cudnn", window=window)
    gradients = jax.jit(functools.partial(both, cudnn))(*arrays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        expected = jax.tree.map(np.asarray, both(functools.partial(exact, xp=jnp, window=window), *wide))
    for actual, right, bound in zip(gradients, expected, (1e-2, 2e-2, 2e-2, 2e-2), strict=True):
        assert relative_error(actual, right) < bound
