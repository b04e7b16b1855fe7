"""Tests of every implementation and form of power attention, in one suite, against the reference in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import cases

FORMS = (("xla", "attention"), ("xla", "chunked"), ("xla", "recurrent"))
GRID = {
    "power": (2, 4, 6),
    "head_dim": (16, 32, 64),
    "time": (1, 63, 300),
    "scale": (1e-3, 1.0, 1e3),
    "decay": ("none", "mixed"),
    "segments": ("none", "edges", "padded"),
    "value_dim": (16, 24),
    "group": (1, 2),
}


def features_mib(case):
    return ops.symmetric_power_dim(case.head_dim, case.power) * case.value_dim * 4 / 2**20


def _is_small(case):
    """Leaves out what takes long to compile: many features, and combinations with high powers.

    High powers differ from the square in their features, which depend on neither decays, documents, values nor groups:
    each head size has its longest time. Cases that differ in scale alone are one program.
    """
    mib = features_mib(case)
    times = [time for time in GRID["time"] if mib <= 4 and mib * time <= 300]
    if case.power == 2:
        return case.time in times
    others = case.decay, case.segments, case.value_dim, case.group
    return case.time == max(times, default=None) and others == ("mixed", "padded", 16, 2)


FAST = cases.pairwise(GRID, keep=_is_small)
LARGE_STATE = cases.pairwise(
    {"power": (4, 6), "head_dim": (32, 64)},
    keep=lambda case: features_mib(case) > 4,
)
FULL = cases.pairwise(
    GRID | {"time": (1, 2, 7, 64, 300, 1025, 2048), "segments": ("none", "padded")},
    keep=lambda case: features_mib(case) <= 512,
)


@functools.partial(jax.jit, static_argnames=("implementation", "form", "power", "exact_window", "chunk_size"))
def outputs_and_gradients(drawn, *, implementation, form, power, exact_window=64, chunk_size=None):
    """Returns the output and its gradients, leaving out arguments that are None."""
    differentiable = {name: drawn[name] for name in cases.GRADIENTS if drawn[name] is not None}

    def loss(arguments):
        out = ops.power_attention(
            **{"log_decay": None, **arguments},
            segment_ids=drawn["segment_ids"],
            power=power,
            implementation=implementation,
            form=form,
            exact_window=exact_window,
            chunk_size=chunk_size,
        )
        return (out * drawn["dout"]).sum(dtype=jnp.promote_types(out.dtype, jnp.float32)), out

    gradients, out = jax.grad(loss, has_aux=True)(differentiable)
    return {"out": out} | gradients


def cast(drawn, dtype):
    decay_dtype = "float32" if dtype == "bfloat16" else dtype
    return {
        name: x
        if x is None or name == "segment_ids"
        else jnp.asarray(x, decay_dtype if name == "log_decay" else dtype)
        for name, x in drawn.items()
    }


def expected_for(drawn, case):
    with jax.enable_x64(True):
        return jax.device_get(
            outputs_and_gradients(
                cast(drawn, "float64"), implementation="reference", form="attention", power=case.power
            )
        )


def errors(actual, expected, drawn):
    assert actual.keys() == expected.keys()
    return {
        name: cases.error(actual[name], expected[name], cases.natural_size(name, drawn)) for name in expected
    }


def check_float64(case, forms=FORMS, expected=None, **options):
    drawn = cases.arrays(case)
    expected = expected or expected_for(drawn, case)
    with jax.enable_x64(True):
        for implementation, form in forms:
            actual = outputs_and_gradients(
                cast(drawn, "float64"), implementation=implementation, form=form, power=case.power, **options
            )
            for name, value in errors(jax.device_get(actual), expected, drawn).items():
                assert value <= 1e-10, (implementation, form, name, value)


def check_float32(case, forms=FORMS, expected=None, **options):
    drawn = cases.arrays(case)
    expected = expected or expected_for(drawn, case)
    single = cast(drawn, "float32")
    run = functools.partial(outputs_and_gradients, single, power=case.power, **options)

    @functools.cache
    def plain():
        return errors(jax.device_get(run(implementation="reference", form="attention")), expected, drawn)

    for implementation, form in forms:
        actual = errors(jax.device_get(run(implementation=implementation, form=form)), expected, drawn)
        for name, value in actual.items():
            bound = 2e-6 if name == "out" else 1e-5
            # The plain formula overflows if p-th powers of long queries do; the implementations must not.
            if not value <= bound and np.isfinite(plain()[name]):
                bound = max(bound, 4 * plain()[name])
            assert value <= bound, (implementation, form, name, value, bound)


@pytest.mark.parametrize("case", FAST, ids=str)
def test_attention_and_chunked_forms(case):
    expected = expected_for(cases.arrays(case), case)
    # Short sequences in short chunks, so that they also read the state.
    options = {} if case.time > 128 else {"chunk_size": 24, "exact_window": 16}
    # One form in float64, whose bounds show every wrong term, the other in float32, whose bounds show lost digits. The
    # forms take turns, except at high powers: their chunked form takes long to compile in float64, and
    # `test_attention_form_of_large_states` has their attention form in float32.
    double, single = FORMS[:2] if case.power > 2 or FAST.index(case) % 2 else FORMS[1::-1]
    check_float64(case, [double], expected, **options)
    check_float32(case, [single], expected, **options)


@pytest.mark.parametrize("power", [2, 4])
def test_recurrent_form(power):
    case = cases.Case(power=power, head_dim=8, value_dim=5, time=90, segments="padded", group=2)
    check = check_float64 if power == 2 else check_float32
    check(case, FORMS[2:])


@pytest.mark.parametrize("form", [form for _, form in FORMS])
@pytest.mark.parametrize(("power", "head_dim"), [(2, 8), (4, 4), (16, 2)])
def test_the_size_of_keys_does_not_matter_without_states(power, head_dim, form):
    case = cases.Case(power=power, head_dim=head_dim, value_dim=3, time=40, segments="padded", group=2)
    drawn = cases.arrays(case)
    # No score is nearly zero, which would underflow relative to others at a power of 16.
    drawn["query"], drawn["key"] = np.abs(drawn["query"]) + 0.1, np.abs(drawn["key"]) + 0.1
    options = {"chunk_size": 16, "exact_window": 8} if form == "chunked" else {}
    expected = expected_for(drawn, case)
    for scale in (1e-10, 1e-3, 1.0, 1e3, 1e10):
        scaled = cast(drawn | {"key": drawn["key"] * scale}, "float32")
        actual = outputs_and_gradients(scaled, implementation="xla", form=form, power=power, **options)
        gradients = actual | {"key": np.asarray(actual["key"], np.float64) * scale}
        for name, value in errors(jax.device_get(gradients), expected, drawn).items():
            assert value <= (2e-6 if name == "out" else 1e-5), (scale, name, value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_a_power_of_two_of_keys_changes_no_bit(form, dtype):
    drawn = cast(cases.arrays(cases.Case(time=40, head_dim=8, value_dim=3)), dtype)
    run = functools.partial(outputs_and_gradients, implementation="xla", form=form, power=2, chunk_size=16)
    plain = run(drawn)
    for factor in (2.0**-6, 2.0**6):
        scaled = run(drawn | {"key": drawn["key"] * factor})
        scaled["key"] *= factor
        for name in scaled:
            np.testing.assert_array_equal(scaled[name], plain[name], err_msg=name)


@pytest.mark.parametrize("case", LARGE_STATE, ids=str)
def test_attention_form_of_large_states(case):
    case = dataclasses.replace(case, segments="padded", group=2)
    for scale in GRID["scale"]:  # of one program
        check_float32(dataclasses.replace(case, scale=scale), FORMS[:1])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_grid(case):
    expected = expected_for(cases.arrays(case), case)
    forms = FORMS if case.time <= 300 else FORMS[:2]
    check_float64(case, forms, expected)
    check_float32(case, forms, expected)


@pytest.mark.parametrize("form", ["chunked", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_gradient_of_a_key_that_outweighs_all_others(form):
    """Most of the gradient of such a key cancels: it is the sum of what its query gives to all other keys."""
    case = cases.Case(power=6, head_dim=16, value_dim=16, time=2, decay="none")
    drawn = cases.arrays(case, batch=30)
    # No score cancels, and that of the second key is about a fifth: its weight is a few parts in 100,000.
    drawn["query"] = np.abs(drawn["query"])
    drawn["key"] = np.abs(drawn["key"]) * np.array([1, 0.2])[:, None, None]
    expected = expected_for(drawn, case)["key"]
    run = functools.partial(outputs_and_gradients, implementation="xla", form=form, power=case.power)
    for row, (a, b) in enumerate(zip(run(cast(drawn, "float32"))["key"], expected)):
        assert cases.error(a, b) <= 1e-5, row


@pytest.mark.parametrize(
    ("power", "decay"),
    [
        (2, "mixed"),
        (4, "none"),
        pytest.param(2, "none", marks=pytest.mark.slow),
        pytest.param(4, "mixed", marks=pytest.mark.slow),
    ],
)
def test_bfloat16(power, decay):
    case = cases.Case(power=power, decay=decay, time=300, group=2, segments="padded")
    drawn = cases.arrays(case, dtype="bfloat16")
    expected = expected_for(drawn, case)
    for implementation, form in FORMS[:2]:
        actual = outputs_and_gradients(
            cast(drawn, "bfloat16"), implementation=implementation, form=form, power=power
        )
        assert actual["out"].dtype == actual["query"].dtype == jnp.bfloat16
        for name, value in errors(jax.device_get(actual), expected, drawn).items():
            assert value <= (1e-2 if name == "out" else 2e-2), (form, name, value)


@pytest.mark.parametrize(
    ("form", "chunk_size"),
    [
        *(("chunked", size) for size in (1, 7, 512)),
        ("attention", 7),
        *(
            pytest.param(form, size, marks=pytest.mark.slow)
            for form, size in (
                ("chunked", 48),
                *(("attention", size) for size in (1, 48, 512)),
            )
        ),
    ],
)
def test_chunk_size_changes_nothing(form, chunk_size):
    case = cases.Case(time=100, segments="padded")
    check_float64(case, [("xla", form)], chunk_size=chunk_size, exact_window=10)


def test_recurrent_reference_is_equation_2():
    """Propositions 1 and 3: the recurrence equals the attention formulation.

    The recurrence is S_i = gamma_i S_{i-1} + V_i phi(K_i)^T.
    """
    check_float64(
        cases.Case(power=4, head_dim=6, value_dim=5, decay="gentle", segments="padded"),
        [("reference", "recurrent")],
    )


outputs = jax.jit(
    ops.power_attention, static_argnames=("implementation", "form", "power", "exact_window", "chunk_size")
)


@pytest.mark.parametrize("decay", ["none", "gentle", "mixed"])
@pytest.mark.parametrize(("power", "head_dim"), [(2, 32), (4, 16), (6, 8)])
def test_pure_recurrence_is_as_exact_as_its_condition(power, head_dim, decay):
    """Without a window each row is off by at most 64 eps kappa.

    kappa = sum b |q|^p |k|^p / sum b (q.k)^p.
    """
    case = cases.Case(power=power, head_dim=head_dim, decay=decay, time=60)
    drawn = cases.arrays(case)
    arguments = [name for name in drawn if name != "dout"]
    with jax.enable_x64(True):
        double = cast({name: drawn[name] for name in arguments}, "float64")
        expected = np.asarray(outputs(**double, power=power, implementation="reference"))
    lengths = {
        **drawn,
        **{name: np.linalg.norm(drawn[name], axis=-1, keepdims=True) for name in ("query", "key")},
    }
    with jax.enable_x64(True):
        upper = _weight_sums(lengths, power)
        kappa = upper / _weight_sums(drawn, power)
    single = cast({name: drawn[name] for name in arguments}, "float32")
    out = outputs(**single, power=power, form="recurrent", exact_window=0)
    row_error = np.sqrt(np.square(out - expected).mean(-1))
    scale = np.sqrt(np.square(expected).mean(-1)).mean()
    assert (row_error <= 64 * np.finfo(np.float32).eps * kappa * scale).all()


def _weight_sums(drawn, power):
    """Returns sum_j b_ij (q_i . k_j)^p in float64, [B, T, N]."""
    batch, time = drawn["query"].shape[:2]
    decay = np.zeros((batch, time, 1)) if drawn["log_decay"] is None else drawn["log_decay"]
    between = np.cumsum(
        decay[:, :, None, :] * (np.arange(time)[:, None] > np.arange(time))[None, :, :, None], 1
    )
    scores = np.einsum("btnd,bsnd->btsn", drawn["query"], drawn["key"])
    return (np.tri(time)[None, :, :, None] * np.exp(between) * scores**power).sum(2)


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
def test_every_product_of_float32_is_at_full_precision(form):
    drawn = cast(cases.arrays(cases.Case(time=40)), "float32")

    def loss(dout, **arguments):
        out, state = ops.power_attention(**arguments, form=form, return_state=True)
        return (out * dout).sum() + state.kv.sum()

    arguments = [name for name in drawn if drawn[name] is not None and name not in ("segment_ids", "dout")]
    gradient = jax.grad(lambda given: loss(drawn["dout"], **given))
    program = jax.jit(gradient).lower({name: drawn[name] for name in arguments}).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 5
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize("form", ["attention", "chunked"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_zero_queries_give_zero_and_finite_gradients(implementation, form):
    if implementation == "reference" and form == "chunked":
        form = "recurrent"
    drawn = cast(cases.arrays(cases.Case(time=200)), "float32")
    drawn["query"] = drawn["query"].at[:, 5:9].set(0)
    drawn["key"] = drawn["key"].at[:, 20:30].set(0)
    result = outputs_and_gradients(drawn, implementation=implementation, form=form, power=2)
    assert (np.asarray(result["out"])[:, 5:9] == 0).all()
    assert all(np.isfinite(x).all() for x in result.values())


def test_one_overwhelming_gate_everywhere_keeps_only_the_own_value():
    drawn = cast(cases.arrays(cases.Case(time=200)), "float32")
    drawn["log_decay"] = jnp.full_like(drawn["log_decay"], -1e4)
    for implementation, form in FORMS:
        result = outputs_and_gradients(drawn, implementation=implementation, form=form, power=2)
        np.testing.assert_allclose(result["out"], drawn["value"], rtol=1e-6)
        assert np.abs(result["log_decay"]).max() == 0


@pytest.mark.parametrize(
    ("power", "queries"),
    [
        (2, 1),
        (4, 5),
        pytest.param(2, 5, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_queries_are_the_last_positions_of_the_keys(power, queries):
    case = cases.Case(
        power=power, head_dim=8, value_dim=5, time=90, decay="mixed", segments="padded", group=2
    )
    drawn = cases.arrays(case, kv_heads=2)
    drawn["segment_ids"][:, -30:] = 7  # a document over the last queries
    drawn["dout"][:, :-queries] = 0

    @functools.partial(jax.jit, static_argnames="cached")
    def run(drawn, *, cached):
        def loss(arguments):
            out = ops.power_attention(
                arguments["query"][:, -queries:] if cached else arguments["query"],
                **{name: arguments[name] for name in ("key", "value", "log_decay")},
                segment_ids=drawn["segment_ids"],
                power=power,
                implementation="xla" if cached else "reference",
                form="attention",
            )[:, -queries:]
            return (out * drawn["dout"][:, -queries:]).sum(), out

        gradients, out = jax.grad(loss, has_aux=True)({name: drawn[name] for name in cases.GRADIENTS})
        return {"out": out} | gradients

    with jax.enable_x64(True):
        wide = cast(drawn, "float64")
        expected = jax.device_get(run(wide, cached=False))
        for name, value in errors(jax.device_get(run(wide, cached=True)), expected, drawn).items():
            assert value <= 1e-10, (name, value)
    for name, value in errors(run(cast(drawn, "float32"), cached=True), expected, drawn).items():
        assert value <= (2e-6 if name == "out" else 1e-5), (name, value)


def test_gradients_without_any_form_named_are_those_of_the_reference():
    case = cases.Case(time=90, head_dim=8, decay="gentle")
    check_float64(case, [(None, None)])


def test_values_of_documents_never_mix():
    """Changing one document changes nothing in the others, bit for bit."""
    drawn = cast(cases.arrays(cases.Case(time=192, segments="edges", decay="gentle")), "float32")
    other = {
        **drawn,
        "key": drawn["key"].at[:, 64:128].mul(100.0),
        "value": drawn["value"].at[:, 64:128].add(3.0),
    }
    for implementation, form in FORMS:
        one, two = (
            np.asarray(
                outputs(
                    **{name: x for name, x in d.items() if name != "dout"},
                    implementation=implementation,
                    form=form,
                )
            )
            for d in (drawn, other)
        )
        np.testing.assert_array_equal(one[:, :64], two[:, :64])
        np.testing.assert_array_equal(one[:, 128:], two[:, 128:])
        assert np.abs(one[:, 64:128] - two[:, 64:128]).max() > 1


@pytest.mark.parametrize("other", [1e-2, 1e-3, 0.0])
@pytest.mark.parametrize("power", [2, 4])
def test_an_old_key_that_outweighs_all_others(power, other):
    """Checks the bound of docs/mathematics.md on outputs whose keys of weight are older than the window."""
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 400, 16)).astype("float32")
    key[1:] *= np.float32(other)
    causal = np.tri(len(query))
    weights = causal * (query.astype("float64") @ key.T.astype("float64")) ** power
    expected = weights / weights.sum(1, keepdims=True) @ value
    lengths = (np.linalg.norm(x.astype("float64"), axis=1) ** power for x in (query, key))
    kappa = (causal * np.multiply.outer(*lengths)).sum(1) / weights.sum(1)
    arrays = [x[None, :, None] for x in (query, key, value)]
    for form in ("attention", "chunked", "recurrent"):
        error = ops.power_attention(*arrays, power=power, form=form)[0, :, 0] - expected
        if form == "attention":
            assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) <= 2e-6
        else:
            assert (np.linalg.norm(error, axis=1) <= 2e-6 * kappa * np.linalg.norm(expected, axis=1)).all(), (
                form
            )
