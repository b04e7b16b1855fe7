"""Tests of every implementation and form of power attention, in one suite, against the reference in float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests import marked
from tests.ops import cases

FORMS = ("attention", "chunked", "recurrent")
TIME = 62
# Most tests below draw arrays of this shape, so that its programs are compiled once.
MAIN = cases.Case(time=TIME, value_dim=24, segments="padded", group=2)
CHANNELS = dataclasses.replace(MAIN, decay="channels")
PLAIN = cases.Case(head_dim=32, time=200, decay="none", segments="edges")
ONE = cases.Case(head_dim=64, time=1)
QUARTIC = cases.Case(power=4, time=TIME, segments="padded", group=2)
LARGE = cases.Case(power=6, head_dim=64, time=TIME, segments="padded", group=2)
# Its window is longer than those of the others: sums over features cancel too much for bfloat16.
HALF = dataclasses.replace(MAIN, time=200)
HIGHEST = cases.Case(power=16, head_dim=2, value_dim=3, time=TIME, segments="padded", group=2)


def features_mib(case):
    return ops.symmetric_power_dim(case.head_dim, case.power) * case.value_dim * 4 / 2**20


FULL = cases.pairwise(
    {
        "power": (2, 4, 6),
        "head_dim": (16, 32, 64),
        "time": (1, 2, 7, 64, 300, 1025, 2048),
        "scale": (1e-3, 1.0, 1e3),
        "decay": ("none", "mixed"),
        "segments": ("none", "edges", "padded"),
        "value_dim": (16, 24),
        "group": (1, 2),
    },
    keep=lambda case: features_mib(case) <= 512,
)
FULL_CHANNELS = (
    cases.Case(time=70, head_dim=8, scale=1e3, power=4, segments="edges", decay="channels"),
    cases.Case(time=63, head_dim=8, scale=1e-3, power=6, decay="channels"),
    cases.Case(time=300, value_dim=24, decay="gentle channels"),
    cases.Case(time=1, decay="channels"),
)


def arrays(case, **options):
    """Draws arguments of two key heads; of one for high powers, whose states are large."""
    return cases.arrays(case, kv_heads=2 if case.power == 2 else 1, **options)


def outputs_and_gradients(drawn, **options):
    return cases.compiled(drawn, op=ops.power_attention, options=tuple(options.items()))


def run(drawn, dtype, form, *, implementation="xla", exact_window=16, **options):
    """Returns the output and its gradients, of short chunks and windows unless others are given."""
    size = {"chunk_size": 24} if implementation == "xla" and form != "recurrent" else {}
    if (implementation, form) != ("reference", "attention"):  # which has no window
        size["exact_window"] = exact_window
    options = {"power": 2, "implementation": implementation, "form": form} | size | options
    return cases.outputs_and_gradients(ops.power_attention, drawn, dtype, **options)


def expected_for(drawn, case):
    return run(drawn, "float64", "attention", implementation="reference", power=case.power)


@functools.cache
def expected_of(case):
    return expected_for(arrays(case), case)


def check(case, dtype, form, **options):
    drawn, expected = arrays(case), expected_of(case)
    options = {"power": case.power} | options
    plain = functools.partial(run, drawn, dtype, "attention", **options | {"implementation": "reference"})
    cases.check(run(drawn, dtype, form, **options), expected, drawn, dtype, plain)


@pytest.mark.parametrize(
    ("case", "form", "dtype"),
    [
        (MAIN, "attention", "float64"),
        (MAIN, "attention", "float32"),
        (MAIN, "chunked", "float32"),
        (MAIN, "recurrent", "float64"),
        (CHANNELS, "chunked", "float32"),  # in float64 from states, in test_power_state.py
        (PLAIN, "chunked", "float64"),
        (ONE, "chunked", "float32"),
        # High powers differ in their features, which take long to compile.
        (QUARTIC, "chunked", "float32"),
        (LARGE, "attention", "float32"),
    ],
    ids=str,
)
def test_forms(case, form, dtype):
    """In float64 bounds show every wrong term, in float32 lost digits. Queries also read the state."""
    sizes = {"chunk_size": None, "exact_window": 64} if case is PLAIN else {}
    for scale in (1.0, 1e-3, 1e3):  # of one program
        check(dataclasses.replace(case, scale=scale), dtype, form, **sizes)
    if (case.decay, dtype) == ("mixed", "float64"):
        check(dataclasses.replace(case, decay="gentle"), dtype, form, **sizes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [*FULL, *FULL_CHANNELS], ids=str)
def test_full_grid(case):
    forms = ("chunked",) if "channels" in case.decay else FORMS
    for form in forms if case.time <= 300 else forms[:2]:
        for dtype in ("float64", "float32"):
            check(case, dtype, form, chunk_size=None, exact_window=64)
            if case.time <= 128 and form == "chunked":
                check(case, dtype, form)


@marked.cases(("form", "chunk_size"), [("chunked", 7)], slow=[(None, 24), ("chunked", 1), ("chunked", 512)])
def test_chunk_size_changes_nothing(form, chunk_size):
    for decay in ("mixed", "gentle"):  # after strong gates, little is left of a state
        case = dataclasses.replace(MAIN, decay=decay)
        check(case, "float64", form, chunk_size=chunk_size, exact_window=10)


@marked.cases(
    ("case", "form"),
    [(MAIN, "attention"), (MAIN, "chunked"), (HIGHEST, "attention")],
    slow=[(HIGHEST, "chunked")],
    ids=str,
)
def test_the_size_of_keys_does_not_matter_without_states(case, form):
    drawn = arrays(case)
    # No score is nearly zero, which would underflow relative to others at a power of 16.
    drawn["query"], drawn["key"] = np.abs(drawn["query"]) + 0.1, np.abs(drawn["key"]) + 0.1
    expected = expected_for(drawn, case)
    for scale in (1e-10, 1e-3, 1.0, 1e3, 1e10):
        scaled = drawn | {"key": drawn["key"] * scale}
        actual = run(scaled, "float32", form, power=case.power)
        gradients = actual | {"key": np.asarray(actual["key"], np.float64) * scale}
        cases.check(gradients, expected, drawn, "float32")


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_a_power_of_two_of_keys_changes_no_bit(form):
    check_scaled_keys(arrays(MAIN, dtype="bfloat16"), "float32", form)


def check_scaled_keys(drawn, dtype, form, **options):
    """Checks that keys times a power of two change no bit of outputs and gradients; returns these."""
    plain = run(drawn, dtype, form, **options)
    for factor in (2.0**-6, 2.0**6):
        scaled = run(drawn | {"key": drawn["key"] * factor}, dtype, form, **options)
        scaled["key"] = scaled["key"] * scaled["key"].dtype.type(factor)
        for name in scaled:
            np.testing.assert_array_equal(scaled[name], plain[name], err_msg=name)
    return plain


def test_gradient_of_a_key_that_outweighs_all_others():
    """Most of the gradient of such a key cancels: it is the sum of what its query gives to all other keys."""
    # Documents of two tokens.
    drawn = arrays(QUARTIC) | {"segment_ids": np.arange(TIME)[None].repeat(2, 0).astype(np.int32) // 2}
    # No score cancels, and that of the second key is about a twelfth: its weight is a few parts in 100,000.
    drawn["query"] = np.abs(drawn["query"])
    drawn["key"] = np.abs(drawn["key"]) * np.where(np.arange(TIME) % 2, 0.08, 1)[:, None, None]
    drawn["log_decay"] = np.zeros_like(drawn["log_decay"])
    expected = expected_for(drawn, QUARTIC)["key"]
    actual = run(drawn, "float32", "chunked", power=QUARTIC.power)["key"]
    for begin in range(0, TIME, 2):
        for a, b in zip(actual[:, begin : begin + 2], expected[:, begin : begin + 2]):
            assert cases.error(a, b) <= 1e-5, begin


@marked.cases(
    ("case", "form"),
    [(HALF, "chunked")],
    slow=itertools.product(
        (dataclasses.replace(x, time=300) for x in (QUARTIC, PLAIN)), ("attention", "chunked")
    ),
    ids=str,
)
def test_bfloat16(case, form):
    # With two key heads of `HALF`, some queries see one key, to which their weight is small.
    drawn = arrays(case, dtype="bfloat16")
    actual = check_scaled_keys(drawn, "bfloat16", form, power=case.power, exact_window=64)
    assert actual["out"].dtype == actual["query"].dtype == jnp.bfloat16
    cases.check(actual, expected_for(drawn, case), drawn, "bfloat16")


def test_channels_in_bfloat16_are_summed_in_float32():
    drawn = arrays(CHANNELS, dtype="bfloat16")
    expected = expected_for(drawn, CHANNELS)["out"]
    del drawn["dout"]
    # Rounded once, at the end.
    assert cases.error(outputs(**cases.cast(drawn, "bfloat16")), expected) <= 2**-9


outputs = jax.jit(
    ops.power_attention, static_argnames=("implementation", "form", "power", "exact_window", "chunk_size")
)


@marked.cases(("power", "head_dim"), [(2, 32), (4, 16)], slow=[(6, 8)])
def test_pure_recurrence_is_as_exact_as_its_condition(power, head_dim):
    """Without a window each row is off by at most 2e-6 kappa. kappa = sum b |q|^p |k|^p / sum b (q.k)^p."""
    for decay in ("none", "gentle", "mixed"):
        drawn = arrays(cases.Case(power=power, head_dim=head_dim, decay=decay, time=60))
        if decay == "none":
            drawn["log_decay"] = np.zeros(drawn["key"].shape[:3])  # of the program of the others
        names = ("query", "key", "value", "log_decay")
        with jax.enable_x64(True):
            double = cases.cast({name: drawn[name] for name in names}, "float64")
            expected = np.asarray(outputs(**double, power=power, implementation="reference"))
        lengths = {name: np.linalg.norm(drawn[name], axis=-1, keepdims=True) for name in ("query", "key")}
        kappa = _weight_sums(drawn | lengths, power) / _weight_sums(drawn, power)
        single = cases.cast({name: drawn[name] for name in names}, "float32")
        out = outputs(**single, power=power, form="recurrent", exact_window=0)
        row_error = np.sqrt(np.square(out - expected).mean(-1))
        scale = np.sqrt(np.square(expected).mean(-1)).mean()
        assert (row_error <= 2e-6 * kappa * scale).all(), decay


def _weight_sums(drawn, power):
    time = drawn["query"].shape[1]
    between = np.cumsum(
        drawn["log_decay"][:, :, None, :] * (np.arange(time)[:, None] > np.arange(time))[None, :, :, None], 1
    )
    scores = np.einsum("btnd,bsnd->btsn", drawn["query"], drawn["key"])
    return (np.tri(time)[None, :, :, None] * np.exp(between) * scores**power).sum(2)


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
def test_every_product_of_float32_is_at_full_precision(form):
    drawn = cases.cast(arrays(cases.Case(time=40)), "float32")

    def loss(arguments):
        out, state = ops.power_attention(**arguments, form=form, return_state=True)
        return (out * drawn["dout"]).sum() + state.kv.sum()

    program = jax.jit(jax.grad(loss)).lower({name: drawn[name] for name in cases.GRADIENTS}).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 5
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize(
    ("case", "implementation", "form"),
    [
        (MAIN, "reference", "attention"),
        (MAIN, "xla", "attention"),
        (MAIN, "xla", "chunked"),
        (CHANNELS, "xla", "chunked"),
    ],
    ids=str,
)
def test_zero_queries_give_zero_and_finite_gradients(case, implementation, form):
    drawn = arrays(case)
    drawn["query"][:, 5:9] = drawn["key"][:, 20:30] = 0
    dtype = "float64" if implementation == "reference" else "float32"
    result = run(drawn, dtype, form, implementation=implementation)
    assert (result["out"][:, 5:9] == 0).all()
    assert all(np.isfinite(x).all() for x in result.values())


def test_one_overwhelming_gate_everywhere_keeps_only_the_own_value():
    drawn = arrays(MAIN) | {"segment_ids": np.zeros((2, TIME), np.int32)}
    drawn["log_decay"] = np.full_like(drawn["log_decay"], -1e4)
    for dtype, form in (("float32", "attention"), ("float32", "chunked"), ("float64", "recurrent")):
        result = run(drawn, dtype, form)
        np.testing.assert_allclose(result["out"], np.repeat(drawn["value"], 2, 2), rtol=1e-6)
        assert np.abs(result["log_decay"]).max() == 0


@marked.cases(("power", "queries", "dtype"), [(2, 1, "float64")], slow=[(4, 5, "float32")])
def test_queries_are_the_last_positions_of_the_keys(power, queries, dtype):
    case = dataclasses.replace(MAIN, power=power)
    drawn = cases.arrays(case, kv_heads=2)
    drawn["segment_ids"][:, -30:] = 7  # a document over the last queries
    drawn["dout"][:, :-queries] = 0
    expected = expected_for(drawn, case)
    cut = drawn | {name: drawn[name][:, -queries:] for name in ("query", "dout")}
    actual = run(cut, dtype, "attention", power=power)
    for name in ("out", "query"):
        expected[name] = expected[name][:, -queries:]
    cases.check(actual, expected, cut, dtype)


def test_an_old_key_that_outweighs_all_others():
    """Checks the bound of docs/mathematics.md on outputs whose keys of weight are older than the window."""
    for other in (1e-2, 1e-3, 0.0):
        query, key, value = np.random.default_rng(0).normal(size=(3, 200, 16)).astype("float32")
        key[1:] *= np.float32(other)
        causal = np.tri(len(query))
        weights = causal * (query.astype("float64") @ key.T.astype("float64")) ** 2
        expected = weights / weights.sum(1, keepdims=True) @ value
        lengths = (np.linalg.norm(x.astype("float64"), axis=1) ** 2 for x in (query, key))
        kappa = (causal * np.multiply.outer(*lengths)).sum(1) / weights.sum(1)
        inputs = [x[None, :, None] for x in (query, key, value)]
        for form in ("attention", "chunked", "recurrent"):
            error = outputs(*inputs, form=form)[0, :, 0] - expected
            if form == "attention":
                assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) <= 2e-6, other
            else:
                bound = 2e-6 * kappa * np.linalg.norm(expected, axis=1)
                assert (np.linalg.norm(error, axis=1) <= bound).all(), (form, other)
