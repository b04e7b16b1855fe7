"""Tests that mistakes in arguments of any function give one clear line, raised before anything is traced."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import documents, feature_maps, lrpe, rotary, spe, target

X = jnp.ones((1, 4, 1, 4))
TOKEN, POSITIONS = X[:, 0], jnp.zeros((1, 4), jnp.int32)
STATE = ops.PowerState.zeros(1, 1, 4, 4, power=2, exact_window=3)
PER_CHANNEL = ops.PowerState.zeros(1, 1, 4, 4, power=2, exact_window=3, per_channel=True)
LINEAR_STATE = ops.LinearState.zeros(1, 1, 4, 4, rotated_dim=8)
WHOLE = {
    "power": ops.power_attention,
    "linear": ops.linear_attention,
    "softmax": ops.softmax_attention,
    "expressive": ops.expressive_attention,
}


def raises_one_line(message, call, *arrays, error=ValueError, **options):
    with pytest.raises(error, match=re.escape(message)) as raised:
        call(*arrays, **options)
    assert "\n" not in str(raised.value)


def three(x):
    return dict.fromkeys(("query", "key", "value"), x)


EVERY_OP = {
    "query is a list; it must be an array; pass jnp.asarray(query)": {"query": np.asarray(X).tolist()},
    "query is a NoneType; it must be an array": {"query": None},
    "query has shape (4, 1, 4); it must be [B, T, N, D]; add the batch axis with": {"query": X[0]},
    "value has shape (1, 1, 4, 1, 4); it must be [B, S, K, E]": {"value": X[None]},
    "shapes do not fit: query (1, 4, 1, 4), key (1, 4, 1, 3), value (1, 4, 1, 4);": {"key": X[..., :3]},
    "shapes are query (1, 0, 1, 4), key (1, 4, 1, 4)": {"query": X[:, :0]},
    "there must be a key for each query (if axes 1 and 2 are heads and time, as in [1, 4, T, 4], swap them)": {
        "key": X[:, 1:],
        "value": X[:, 1:],
    },
    "query has 3 heads and key 2; N must be": three(jnp.repeat(X, 2, 2)) | {"query": jnp.repeat(X, 3, 2)},
    "dtypes are query float32, key bfloat16, value float32; they must be": {"key": X.astype("bfloat16")},
    "dtypes are query int32, key int32, value int32": three(X.astype("int32")),
    "dtypes are query float8_e4m3fn": three(X.astype("float8_e4m3fn")),
    "segment_ids is a list; it must be an array": {"segment_ids": [[0] * 4]},
    "segment_ids has shape (4,); it must be (1, 4), one per token": {"segment_ids": jnp.zeros(4, int)},
    "segment_ids has dtype uint32; it must be": {"segment_ids": X[..., 0, 0].astype("uint32")},
    "segment_ids holds 4294967296; it must fit in": {"segment_ids": np.array([[0, 0, 2**32, 2**32]])},
    "log_decay is a float; it must be an array": {"log_decay": -0.1},
    "axis_name is 'nope', which is not a manual mesh axis here; it must name an": {"axis_name": "nope"},
    "axis_name is 3; it must name an axis of the jax.shard_map in which the op is": {"axis_name": 3},
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_op_refuses(name):
    for message, wrong in EVERY_OP.items():
        raises_one_line(message, WHOLE[name], **three(X) | wrong)


POWER = {
    "power is 3; it must be positive and even, so that no weight is negative": {"power": 3},
    "power is 0; it must be positive and even": {"power": 0},
    "exact_window is -1; it must be at least 0": {"exact_window": -1},
    "chunk_size is 0; it must be at least 1": {"chunk_size": 0},
    "chunk_size is 64 and form 'recurrent', which": {"chunk_size": 64, "form": "recurrent"},
    "form is 'chunk'; it must be one of None, 'attention', 'chunked', 'recurrent'": {"form": "chunk"},
    "form is an array of shape () and dtype int32; it must be one of None": {"form": jnp.int32(1)},
    "return_state is 2; it must be True or False": {"return_state": 2},
    "implementation is 'cuda'; it must be one of None, ": {"implementation": "cuda"},
    "log_decay has shape (1, 4); it must be (1, 4, 1), one per token and key": {"log_decay": X[..., 0, 0]},
    "log_decay has shape (1, 4, 1, 3); it must be": {"log_decay": X[..., :3]},
    "log_decay has dtype int32; it must be one of float16": {"log_decay": X[..., 0].astype("int32")},
    "the state is a LinearState; make it with PowerState.zeros(1, 1, 4,": {"initial_state": LINEAR_STATE},
    "exact_window is 64 and the state has 3; pass exact_window=3": {"initial_state": STATE},
    "the shape of the state's kv is (1, 1, 10, 4); these inputs need (1, 1, 35, 4); make it with": {
        "initial_state": STATE,
        "power": 4,
    },
    # Both have 15 features.
    "the shape of the state's keys is (1, 6, 1, 2); these inputs need (1, 6, 1, 5)": {
        "query": jnp.ones((1, 4, 1, 5)),
        "key": jnp.ones((1, 4, 1, 5)),
        "initial_state": ops.PowerState.zeros(1, 1, 2, 4, power=14, exact_window=3),
        "exact_window": 3,
    },
    "the state has dtype float16; it must be float32, in": {"initial_state": STATE.astype("float16")},
    "zeros(..., per_channel=True)": {"initial_state": STATE, "exact_window": 3, "log_decay": X},
    "the state has 3; pass exact_window=3": {"initial_state": PER_CHANNEL, "log_decay": X},
}


@pytest.mark.parametrize("call", [ops.power_attention, ops.explain])
def test_power_attention_refuses(call):
    for message, wrong in POWER.items():
        raises_one_line(message, call, **three(X) | wrong)


CHANNELS = {"log_decay": X}
BIDIRECTIONAL = functools.partial(ops.linear_attention, causal=False)
UNSUPPORTED = {
    "form 'attention' has one decay per key head": (ops.explain, CHANNELS | {"form": "attention"}),
    "form 'recurrent' has one decay per key head": (ops.explain, CHANNELS | {"form": "recurrent"}),
    "'mosaic_gpu' has one decay per key head": (ops.explain, CHANNELS | {"implementation": "mosaic_gpu"}),
    "'context', which needs one decay per key head": (ops.explain, CHANNELS | {"axis_name": "context"}),
    "only implementation='reference' supports both": (ops.power_attention, CHANNELS | {"query": X[:, 1:]}),
    "which does not support log_decay": (BIDIRECTIONAL, {"log_decay": X[..., 0]}),
    "does not support initial_state": (BIDIRECTIONAL, {"initial_state": LINEAR_STATE}),
    "which does not support return_state": (BIDIRECTIONAL, {"return_state": True}),
    "which does not support axis_name": (BIDIRECTIONAL, {"axis_name": "context"}),
    "False, which does not support form": (BIDIRECTIONAL, {"form": "chunked"}),
    "not 'mosaic_gpu'": (BIDIRECTIONAL, {"implementation": "mosaic_gpu"}),
    "'cudnn' needs a GPU, not cpu": (ops.softmax_attention, {"implementation": "cudnn"}),
}


def test_unsupported_requests_are_named():
    for message, (call, wrong) in UNSUPPORTED.items():
        error = (NotImplementedError, ValueError) if call is BIDIRECTIONAL else NotImplementedError
        raises_one_line(message, call, error=error, **three(X) | wrong)
    out = ops.power_attention(X[:, 1:], X, X, log_decay=X, implementation="reference")
    assert out.shape == (1, 3, 1, 4)


DELTA = functools.partial(ops.delta_attention, delta=X[..., 0])
OTHERS = [
    (ops.linear_attention, {"feature_map": "cosine"}, "it must be one of 'elu', 'relu', 'identity',"),
    (ops.linear_attention, {"feature_map": "tensor", "power": 0}, "power is 0; it must be at least 1"),
    (ops.linear_attention, {"implementation": "cuda"}, "it must be one of None, 'reference', 'xla',"),
    (ops.linear_attention, {"normalizer": "none"}, "it must be one of 'unrotated', 'rotated'"),
    (ops.linear_attention, {"rotate": lambda x: x[:, 1:]}, "only their length may change"),
    (
        ops.linear_attention,
        {"rotate": lambda x: x[..., : 5 - x.shape[2]], "query": jnp.ones((1, 4, 2, 4))},
        "rotate returns 3 features for queries and 4 for keys",
    ),
    (ops.linear_attention, {"rotate": 3}, "rotate is 3; it must be a function"),
    (ops.linear_attention, {"rotate": lambda x: None}, "result of rotate is a NoneType; it must be an array"),
    (ops.linear_attention, {"initial_state": STATE}, "is a PowerState; make it with LinearState.zeros"),
    (ops.linear_attention, {"initial_state": LINEAR_STATE}, "the state has a denominator of its own,"),
    (
        ops.linear_attention,
        {"initial_state": LINEAR_STATE, "rotate": lambda x: x},
        "these inputs need (1, 1, 4, 4)",
    ),
    (
        ops.linear_attention,
        {"causal": False, "query": X[:, 1:]},
        "key has 4 tokens and query 3; they must be equal if causal is False; pass a query for each key",
    ),
    *(
        (op, {"log_decay": decay, "causal": causal}, message)
        for op in (ops.softmax_attention, ops.expressive_attention)
        for decay, causal, message in (
            (X[..., 0, 0], True, "log_decay has shape (1, 4); it must be (1, 4, 1)"),
            (X[..., 0], False, "decays run in one direction"),
        )
    ),
    *(
        (op, {"scale": scale}, message)
        for op in (ops.softmax_attention, ops.expressive_attention)
        for scale, message in (
            (np.nan, "scale is nan; it must be a finite number"),
            ("1", "scale is '1'; it must be a finite number"),
            (np.True_, "scale is np.True_; it must be a finite number"),
            (jnp.ones(3), "scale is an array; it must be a number: multiply the query"),
        )
    ),
    (ops.delta_attention, {"delta": X}, "delta has shape (1, 4, 1, 4); it must be (1, 4, 1)"),
    (ops.delta_attention, {"delta": X[..., 0].astype(int)}, "delta has dtype int32"),
    (DELTA, {"initial_state": STATE}, "the state is a PowerState; make it with DeltaState.zeros(1, 1, 4, 4,"),
    (DELTA, {"initial_state": ops.DeltaState.zeros(1, 1, 4, 4, power=4)}, "inputs need (1, 1, 10, 4)"),
    (DELTA, {"form": "attention", "return_state": True}, "form is 'attention', which has no state"),
    (DELTA, {"form": "recurrent", "chunk_size": 4}, "chunk_size is 4, but form 'recurrent'"),
    (ops.expressive_attention, {"block_size": 0}, "block_size is 0; it must be at least 1"),
    (ops.expressive_attention, {"scale": None}, "scale is None; it must be a number"),
    (ops.softmax_attention, {"window": 0}, "window is 0; it must be at least 1"),
    (ops.softmax_attention, {"window": 4, "causal": False}, "only causal attention has a window"),
    (ops.softmax_attention, {"implementation": "mosaic_gpu"}, "it must be one of None, 'xla', 'cudnn'"),
]


def test_other_attention_refuses():
    for op, wrong, message in OTHERS:
        raises_one_line(message, op, **three(X) | wrong)


def test_states_refuse_sizes_that_are_none():
    for zeros in (
        functools.partial(ops.PowerState.zeros, power=2),
        ops.LinearState.zeros,
        lambda *sizes: ops.KVCache.zeros(sizes[0], 4, *sizes[1:]),
    ):
        raises_one_line("batch is -1; it must be at least 0", zeros, -1, 1, 4, 4)
        raises_one_line("head_dim is 4.0; it must be an integer of at least 0", zeros, 1, 1, 4.0, 4)
    raises_one_line("capacity is -1; it must be at least 0", ops.KVCache.zeros, 1, -1, 1, 4, 4)
    raises_one_line("kv_heads is -1; it must be at least 0", rotary.RotaryState.zeros, 1, -1)
    raises_one_line("pairs is 2.0; it must be an integer of at least 0", rotary.RotaryState.zeros, 1, 1, 2.0)
    raises_one_line("per_channel is 2; it must be", ops.PowerState.zeros, 1, 1, 4, 4, power=2, per_channel=2)
    raises_one_line("power is 3; it must be positive and even", ops.PowerState.zeros, 1, 1, 4, 4, power=3)
    for state in (functools.partial(ops.PowerState.zeros, power=2), ops.LinearState.zeros):
        raises_one_line("exact_window is -1; it must be at least 0", state, 1, 1, 4, 4, exact_window=-1)

    for make in (
        functools.partial(ops.PowerState.zeros, 64, 12, 64, 64, power=6),
        functools.partial(ops.PowerState.zeros, 1, 1, 4, 4, power=2, exact_window=2**40),
        functools.partial(ops.LinearState.zeros, 1, 1, 4, 4, exact_window=2**40),
        functools.partial(ops.KVCache.zeros, 1, 2**40, 1, 4, 4),
        functools.partial(ops.power_attention, X, X, X, exact_window=2**40, return_state=True),
    ):
        with pytest.raises(ValueError, match=r"the state takes [\d,]+ bytes .* the device has [\d,]+"):
            make()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(ops.PowerState, {}), (ops.PowerState, {"per_channel": True}), (ops.DeltaState, {})],
)
def test_the_memory_of_a_state_is_that_of_its_arrays(kind, options, monkeypatch):
    make = functools.partial(kind.zeros, 3, 2, 8, 5, power=2, **options)
    size = sum(x.nbytes for x in jax.tree.leaves(make()) if x.ndim > 1)
    monkeypatch.setattr(target, "memory_bytes", lambda: size)
    make()
    monkeypatch.setattr(target, "memory_bytes", lambda: size - 1)
    raises_one_line(f"the state takes {size:,} bytes", make)


def test_a_dtype_that_is_not_floating():
    for make in (
        functools.partial(ops.PowerState.zeros, 1, 1, 4, 4, power=2),
        functools.partial(ops.LinearState.zeros, 1, 1, 4, 4),
        functools.partial(ops.KVCache.zeros, 1, 4, 1, 4, 4),
        functools.partial(rotary.RotaryState.zeros, 1, 1),
        STATE.astype,
    ):
        for dtype in ("float3", "int32", bool, None, 3):
            raises_one_line(f"dtype is {dtype!r}; it must be one of float16", make, dtype=dtype)
    for dtype in ("float3", "float16", bool, None, 3):
        message = f"dtype is {dtype!r}; it must be one of float32, float64"
        raises_one_line(message, rotary.rope_angles, np.zeros((1, 4), np.int32), 4, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("power", lambda size: ops.power_attention(X, X, X, power=size)),
        ("exact_window", lambda size: ops.power_attention(X, X, X, exact_window=size)),
        ("chunk_size", lambda size: ops.power_attention(X, X, X, chunk_size=size)),
        ("heads", ops.alibi_slopes),
        ("head_dim", lambda size: ops.symmetric_power_dim(size, 2)),
        ("head_dim", lrpe.permutation),
        ("heads", lambda heads: lrpe.permutation(4, heads=heads)),
        ("head_dim", lrpe.householder),
        ("head_dim", lambda size: lrpe.rates("orthogonal", size, kind="rope")),
        ("identity_dim", lambda size: lrpe.rates("orthogonal", 4, kind="rope", identity_dim=size)),
        ("head size", rotary.rope_rates),
        ("max_document_length", lambda size: rotary.rope_rates(4, max_document_length=size)),
        ("width", lambda size: rotary.sinusoidal(jnp.zeros((1, 4), jnp.int32), size)),
        ("capacity", ops.KVCache.zeros(1, 4, 1, 4, 4).newest),
        ("chunk_size", lambda size: ops.linear_attention(X, X, X, causal=False, chunk_size=size)),
        ("block_size", lambda size: ops.softmax_attention(X, X, X, block_size=size)),
        ("window", lambda size: ops.softmax_attention(X, X, X, window=size)),
    ],
)
def test_a_count_is_an_integer(name, call):
    for wrong in (True, np.True_, 2.0, np.float32(2), "2", [2], jnp.ones(2), -2):
        raises_one_line(f"{name} is", call, wrong)
    for number in (np.int64(2), np.int8(2), jnp.int32(2)):
        np.testing.assert_array_equal(
            *(jax.tree.leaves(call(size))[0] for size in (number, 2)), err_msg=repr(number)
        )


def test_a_traced_option_is_one_line():
    for name in ("power", "form", "exact_window", "chunk_size", "return_state", "implementation"):
        call = jax.jit(lambda option, name=name: ops.power_attention(X, X, X, **{name: option}))
        raises_one_line(f"{name} is traced; it must be", call, jnp.int32(2))


def test_a_step_names_its_own_axes():
    step, token = ops.power_attention_step, [TOKEN] * 3
    raises_one_line("query has shape (1, 4, 1, 4); it must be [B, N, D]", step, X, X, X, STATE)
    raises_one_line("(1, 4); it must be (1, 1)", step, *token, STATE, log_decay=TOKEN[:, 0])
    raises_one_line("per_channel=True", step, *token, STATE, log_decay=TOKEN)


def test_explain_converts_arguments_as_the_op_does():
    arrays = (np.asarray(X, "float64"),) * 3
    options = {"segment_ids": np.zeros((1, 4), "int64"), "initial_state": STATE, "exact_window": 3}
    assert ops.power_attention(*arrays, **options).dtype == jnp.float32
    plan = ops.explain(*arrays, **options)
    assert plan.dtype == jnp.float32
    abstract = (jax.ShapeDtypeStruct(X.shape, "float64"),) * 3
    assert plan == ops.explain(*abstract, initial_state=STATE, exact_window=3)
    raises_one_line("query is a list; it must be an array", ops.explain, [[1.0]], X, X)
    raises_one_line("unexpected keyword argument 'windows'", ops.explain, X, X, X, windows=3, error=TypeError)


# Equal and padding, once wrapped to int32.
LARGE_IDS = np.repeat(np.array([[5, 5 + 2**32, 2**33]]), 8, axis=1)


@pytest.mark.parametrize(
    "call", [functools.partial(ops.power_attention, form="chunked"), ops.softmax_attention]
)
def test_traced_ids_of_64_bits_are_right_or_refused(call):
    """Arrays whose values are not known keep their own dtype; `EVERY_OP` covers the others."""
    small = np.repeat(np.array([[0, 1, 2]], np.int32), 8, axis=1)
    with jax.enable_x64(True):
        arrays = np.random.default_rng(0).normal(size=(3, 1, 24, 2, 4)).astype("float32")
        traced = jax.jit(lambda ids: call(*arrays, segment_ids=ids))
        np.testing.assert_array_equal(traced(LARGE_IDS), traced(small))
        raises_one_line("segment_ids holds 4294967301", call, *arrays, segment_ids=jnp.asarray(LARGE_IDS))


def test_a_state_of_32_bits_refuses_ids_of_64():
    cache, rotation, ids = (
        ops.KVCache.zeros(1, 2, 1, 4, 4),
        rotary.RotaryState.zeros(1, 1),
        LARGE_IDS[:, 6:10],
    )
    step = functools.partial(ops.power_attention_step, TOKEN, TOKEN, TOKEN, STATE)
    with jax.enable_x64(True):
        for call, given in (
            (lambda ids: step(segment_ids=ids), np.zeros(1, np.int64)),
            (lambda ids: cache.append(X, X, None, ids), ids),
            (lambda ids: learned(segment_ids=ids, initial_state=rotation), ids),
        ):
            raises_one_line("segment_ids has dtype int64 and the state int32", jax.jit(call), given)
    raises_one_line("segment_ids holds 4294967301", cache.append, X, X, None, ids)


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_state_keeps_its_dtypes_with_float64_inputs(implementation, form):
    form = None if implementation == "reference" else form
    with jax.enable_x64(True):
        x, state = X.astype("float64"), STATE.astype("bfloat16")
        options = {"form": form, "implementation": implementation, "exact_window": 3, "return_state": True}
        call = functools.partial(ops.power_attention, x, x, x, **options)
        out, after = jax.eval_shape(lambda state: call(initial_state=state), state)
        assert out.dtype == jnp.float64
        assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


def test_a_window_longer_than_the_sequence_changes_nothing():
    arrays = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 40, 2, 4)), jnp.float32)
    segments = jnp.asarray(np.repeat([[0, 0, -1, 1]], 10, axis=1))

    def run(exact_window, state=None):
        options = {"exact_window": exact_window, "form": "chunked", "chunk_size": 8, "return_state": True}
        return ops.power_attention(*arrays, segment_ids=segments, initial_state=state, **options)

    (far, far_state), (near, near_state) = run(300), run(40)
    np.testing.assert_allclose(far, near, rtol=1e-6)
    assert far_state.keys.shape == (1, 600, 2, 4)
    np.testing.assert_array_equal(far_state.keys[:, :40], near_state.keys[:, :40])
    # Both states lead to the same result.
    np.testing.assert_allclose(run(300, far_state)[0], run(40, near_state)[0], rtol=2e-5, atol=2e-6)


def llama3(**wrong):
    right = {"factor": 8, "low_frequency_factor": 1, "high_frequency_factor": 4, "original_length": 64}
    return rotary.llama3_rates(**{"theta": rotary.rope_rates(4)} | right | wrong)


def encode(**wrong):
    right = {"core": "orthogonal", "basis": "householder", "rates": np.ones(2)}
    return lrpe.encode(**{"x": jnp.ones((1, 4, 2, 4)), "positions": POSITIONS} | right | wrong)


def permuted(permutation, **wrong):
    rates = {"core": "permutation", "basis": "identity", "rates": None}
    return encode(**rates, permutation=permutation, **wrong)


def spectral(**wrong):
    sines = jnp.ones((1, 4, 2))
    right = {"frequencies": sines, "phases": sines, "gains": sines, "noise": jnp.ones((1, 4, 4, 3))}
    return spe.encode(**{"query": X, "key": X, "positions": POSITIONS} | right | wrong)


def learned(rate=X[..., 0], **wrong):
    return rotary.learned_angles(rate, **{"head_dim": 4} | wrong)


def cache_step(**wrong):
    arrays = three(TOKEN) | dict.fromkeys(("log_decay", "segment_ids"))
    return CACHE.step(**arrays | wrong, weigh=lambda scores, decay: scores)


CACHE, PLACE = ops.KVCache.zeros(1, 4, 1, 4, 4), documents.PositionState.zeros(1)
ROTATION = rotary.RotaryState.zeros(1, 3)
RATES = "it must be 2 rates from 0 to 2 pi; make it with rope_rates(4)"
FUNCTIONS = [
    (lambda: feature_maps.symmetric_power(X, 0), "power is 0; it must be at least 1"),
    (lambda: feature_maps.tensor_power(X, 0), "power is 0; it must be at least 1"),
    (lambda: feature_maps.symmetric_power(X.astype("int32"), 2), "x has dtype int32"),
    (lambda: ops.elu_plus_one(np.array(["a"])), "x has dtype <U1; it must be an array of numbers"),
    *(
        (functools.partial(f, jnp.ones(size), power), message)
        for f in (
            ops.tensor_power,
            ops.symmetric_power,
            feature_maps.monomials,
            lambda x, p: feature_maps.multiplicities(len(x), p),
        )
        for size, power, message in (
            (4, 10**6, "power is 1000000 and the vectors have 4 elements; the factors of"),
            (64, 12, "the features of power 12 of vectors of 64 elements take "),
        )
    ),
    (lambda: documents.positions(POSITIONS, PLACE, axis_name="nope"), "not a manual mesh"),
    (lambda: learned(axis_name="nope"), "axis_name is 'nope', which is not a manual mesh axis here"),
    (lambda: learned(initial_state=STATE), "the state is a PowerState"),
    (lambda: learned(None), "rate is a NoneType; it must be an array"),
    (lambda: learned(jnp.ones((1, 2, 3, 5))), "(1, 2, 3, 5); it must be [B, T, K]"),
    (lambda: learned(jnp.ones((1, 2, 3, 2)), initial_state=ROTATION), "positions (1, 3); make"),
    *((lambda theta=theta: learned(theta=np.array(theta)), RATES) for theta in ([1, 7.0], [1, np.nan])),
    (lambda: rotary.rope(X[0], POSITIONS), "x has shape (4, 1, 4); it must be [B, T, N, D]"),
    (lambda: rotary.rope(X[..., :3], POSITIONS), "head size is 3; it must be even"),
    (lambda: rotary.rope(X, POSITIONS.astype("float32")), "positions has dtype float32"),
    (lambda: rotary.rope(X, POSITIONS[:, :3]), "angles has shape (1, 3, 1, 2) and x (1, 4, 1, 4)"),
    (lambda: rotary.rotate(X, jnp.ones((1, 4, 1, 3))), "angles has shape (1, 4, 1, 3) and x (1, 4, 1, 4)"),
    (lambda: rotary.rotate(X[..., :3], X[..., :1]), "the head size of x is 3; it must be even"),
    (lambda: rotary.rotate(X, X[..., :2], layout="thirds"), "layout is 'thirds'; it must be one of"),
    (lambda: rotary.rope_rates(64, base=1), "base is 1; it must be a finite number above 1"),
    (lambda: rotary.rope_rates(4, base="10"), "base is '10'; it must be a finite number"),
    (lambda: llama3(factor=0), "factor is 0; it must be a finite number above 0"),
    (lambda: llama3(high_frequency_factor=1), "high_frequency_factor is 1; it must be a finite"),
    (lambda: spectral(gains=jnp.ones((1, 4, 1))), "gains has shape (1, 4, 1); it must be [1, 4, 2]"),
    (lambda: spectral(noise=jnp.ones((1, 4, 2, 3))), "noise has shape (1, 4, 2, 3); it must be [1, 4, 4,"),
    (lambda: spectral(positions=POSITIONS[:, 1:]), "positions has shape (1, 3); it must be (1, 4)"),
    (lambda: spectral(key=X[:, 1:]), "key has 3 tokens and query 4; they must be equal"),
    (lambda: spectral(query=X[..., :2]), "query has 1 heads of size 2 and key 1 of size 4"),
    (lambda: spectral(query=jnp.ones((1, 4, 3, 4)), key=jnp.ones((1, 4, 2, 4))), "query has 3 heads"),
    (lambda: CACHE.append(X[..., :3], X, None, None), "and the cache 1 heads of 4 and 4 in 1 rows"),
    (lambda: CACHE.append(X, X, X, None), "log_decay has shape (1, 4, 1, 4)"),
    (lambda: CACHE.append(X, X, None, X[..., 0, 0]), "segment_ids has dtype float32"),
    (lambda: CACHE.newest(5), "capacity is 5; the cache has 4 slots; append tokens to it first"),
    (lambda: cache_step(value=X), "value has shape (1, 4, 1, 4); it must be [B, K, E]"),
    (lambda: encode(positions=POSITIONS[..., None]), "positions has shape (1, 4, 1); it must be [B, T]"),
    (lambda: encode(core="orthogonl"), "it must be one of 'orthogonal', 'unitary', 'permutation', 'mixed'"),
    (lambda: encode(basis="dct"), "it must be one of 'identity', 'householder', 'odd_even', 'fourier'"),
    (lambda: encode(identity_dim=12), "identity_dim is 12; it must be between 0 and the head size 4"),
    (lambda: encode(identity_dim=3), "head size is 4 and identity_dim 3"),
    (lambda: encode(core="unitary", identity_dim=2), "only core 'orthogonal' has an identity part, not"),
    (lambda: encode(rates=np.ones(3)), "rates has shape (3,); it must be [2], or [K, 2]"),
    (lambda: encode(rates=None), "rates is None, but core 'orthogonal' needs rates; make them with"),
    (lambda: encode(rates=jnp.ones((3, 2))), "[K, 2] with a K that divides the 2 heads"),
    (lambda: encode(rates=np.array([1, np.nan])), "rates are [1.0, nan]; they must be finite"),
    (lambda: encode(householder=jnp.ones(3)), "householder has shape (3,); it must be [4]"),
    (lambda: encode(householder=np.zeros(4)), "householder is [0.0, 0.0, 0.0, 0.0]; it must be finite"),
    (lambda: encode(basis="identity", householder=lrpe.householder(4)), "leave it out, or use basis"),
    (lambda: encode(permutation=np.arange(3)), "leave it out, or use core 'permutation'"),
    (lambda: permuted(np.zeros(4, int)), "must hold each of 0 to 3 once"),
    (lambda: permuted(np.array([range(4), [0] * 4])), "must hold each of 0 to 3 once"),
    (lambda: permuted(lrpe.permutation(4, heads=3)), "it must be [4], or [K, 4] with a K that divides the"),
    (lambda: permuted(jnp.arange(4.0)), "permutation has dtype float32; it must be an integer dtype"),
    (lambda: encode(core="permutation", basis="identity"), "rates are given, but"),
    (lambda: lrpe.rates("orthogonal", 7, kind="a"), "head size is 7"),
    (lambda: lrpe.rates("mixed", 2, kind="a"), "head size is 2; core 'mixed' needs at least 3"),
    (lambda: lrpe.rates("orthogonal", 8, kind="d"), "it must be one of 'a', 'b', 'c', 'rope', 'cosine'"),
    (lambda: lrpe.rates("orthogonal", 8, kind="b", reference_length=0), "reference_length is 0; it must"),
    (lambda: lrpe.rates("orthogonal", 8, kind="rope", max_document_length=0), "max_document_length is 0;"),
]


def test_other_functions_refuse_odd_arguments():
    for call, message in FUNCTIONS:
        raises_one_line(message, call)
