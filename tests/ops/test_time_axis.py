"""Tests that context-parallel ops equal those on one device."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import documents, rotary, target
from tests import marked
from tests.ops import cases, linear_formula
from tests.pallas_kernels import plain, plain_quartic
from tests.pallas_kernels import test_op as interpreted
from tests.training import collectives

AXIS = "context"
TIME = 256
SHARED = {"time": TIME, "head_dim": 8, "value_dim": 5, "group": 3}
# Queries read the state, and shards of 32 positions are longer than the window.
SHORT = {"exact_window": 12, "chunk_size": 20}


def segment_ids():
    """Returns three rows of documents, for shards of 32, 64 and 128 positions.

    The first row has a document over six shards of 32, one of them all padding, and boundaries on edges and next to
    them. The second has boundaries on every second edge and padding at the end. The third has boundaries and padding
    anywhere.
    """
    first = np.full(TIME, 5)
    first[40:45] = first[100:170] = -1
    first[192:223], first[223:224], first[224:] = 1, 2, 3
    second = np.arange(TIME) // 64 % 2
    second[230:] = -1
    third = cases.arrays(cases.Case(time=TIME, segments="padded"), batch=1)["segment_ids"][0]
    return np.stack([first, second, third]).astype(np.int32)


def over_time(f, devices, arrays, out=None):
    """Returns f(axis name, arrays) with every array sharded over time; `out` for results other than one such array."""
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, AXIS)
    specs = jax.tree.map(lambda _: spec, arrays)
    return jax.shard_map(
        functools.partial(f, AXIS), mesh=mesh, in_specs=(specs,), out_specs=spec if out is None else out
    )


@functools.cache
def sharded(op, devices):
    def call(**arrays):
        return over_time(lambda axis_name, arrays: op(**arrays, axis_name=axis_name), devices, arrays)(arrays)

    return call


def drawn_for(ids=None, **options):
    arrays = cases.arrays(cases.Case(**SHARED | options), batch=3, kv_heads=2)
    return arrays | {"segment_ids": ids}


def rotated_linear(*, axis_name=None, **arguments):
    """Computes linear attention whose features are rotated by their positions on all devices."""
    time = arguments["query"].shape[1]
    begin = 0 if axis_name is None else time * jax.lax.axis_index(axis_name)
    rotate = linear_formula.rotation(begin + jnp.arange(time))
    return ops.linear_attention(**arguments, rotate=rotate, axis_name=axis_name)


def alibi():
    arrays = drawn_for(segment_ids())
    return arrays | {"log_decay": np.broadcast_to(-np.array(ops.alibi_slopes(2)), arrays["log_decay"].shape)}


def few_keys():
    """Draws a few keys before a shard of padding: queries after it still attend to them exactly."""
    ids = np.repeat([[1, 2, -1, 2]], [91, 5, 64, 96], axis=1).repeat(3, axis=0)
    return drawn_for(ids, decay="gentle")


def documents_of(**options):
    return functools.partial(lambda: drawn_for(segment_ids(), **options))


def one_document(**options):
    return functools.partial(drawn_for, **options)


FORMULA = functools.partial(ops.power_attention, implementation="reference")
CHUNKED, ATTENTION = (
    functools.partial(ops.power_attention, form=form, **SHORT) for form in ("chunked", "attention")
)
RECURRENT = functools.partial(ops.power_attention, form="recurrent", exact_window=SHORT["exact_window"])
NO_WINDOW = functools.partial(ops.power_attention, form="chunked", exact_window=0)
NO_FORM = functools.partial(ops.power_attention, exact_window=32)
QUARTIC = functools.partial(ops.power_attention, power=4, form="chunked", exact_window=32, chunk_size=64)
LINEAR, LINEAR_BY_HEADS = (
    functools.partial(rotated_linear, form=form, **SHORT) for form in ("chunked", "attention")
)
OF_LINEAR = functools.partial(rotated_linear, implementation="reference")
SOFTMAX = ops.softmax_attention
WINDOW = functools.partial(SOFTMAX, window=50, block_size=48)
EXPRESSIVE = functools.partial(ops.expressive_attention, block_size=48)
EXTREME, GENTLE = documents_of(), documents_of(decay="gentle")
PLAIN = one_document(decay="gentle")
SINGLE, DOUBLE = ("float32",), ("float64", "float32")

# What is drawn, the formula, the op, and the dtypes.
CASES = {
    "extreme chunked": (EXTREME, FORMULA, CHUNKED, DOUBLE),
    # After strong gates, little is left of a state.
    "gentle chunked": (GENTLE, FORMULA, CHUNKED, DOUBLE),
    "extreme pairs": (EXTREME, FORMULA, ATTENTION, DOUBLE),
    "gentle pairs": (GENTLE, FORMULA, ATTENTION, DOUBLE),
    "softmax": (alibi, SOFTMAX, SOFTMAX, SINGLE),
    "plain softmax": (one_document(decay="none"), SOFTMAX, SOFTMAX, SINGLE),
    "window": (alibi, WINDOW, WINDOW, SINGLE),
    "expressive": (EXTREME, EXPRESSIVE, EXPRESSIVE, SINGLE),
    "long keys": (documents_of(decay="gentle", scale=1e3), FORMULA, CHUNKED, SINGLE),
    "short keys": (documents_of(scale=1e-3), FORMULA, CHUNKED, SINGLE),
    "no decay": (one_document(decay="none"), FORMULA, CHUNKED, SINGLE),
    "quartic": (PLAIN, functools.partial(FORMULA, power=4), QUARTIC, SINGLE),
    "few keys": (few_keys, functools.partial(FORMULA, power=6), functools.partial(CHUNKED, power=6), SINGLE),
    "recurrent": (GENTLE, FORMULA, RECURRENT, ("float64",)),
    "no window": (GENTLE, FORMULA, NO_WINDOW, ("float64",)),
    "no form": (GENTLE, FORMULA, NO_FORM, ("float64",)),
    # One document whose tokens weigh to its end: the last of four devices needs the state of the first.
    "linear of one document": (PLAIN, OF_LINEAR, LINEAR, SINGLE),
    "linear": (EXTREME, OF_LINEAR, LINEAR, DOUBLE),
    "linear by heads": (GENTLE, OF_LINEAR, LINEAR_BY_HEADS, SINGLE),
}
OFTEN = {
    "extreme chunked": (8, "float64"),
    "gentle chunked": (8, "float64"),
    "gentle pairs": (4, "float32"),
    "softmax": (8, "float32"),
    "window": (4, "float32"),
    "expressive": (4, "float32"),
}
# Numbers of devices, where not 2, 4 and 8.
ON = {"linear by heads": (2, 4), "window": (2, 4), "few keys": (8,)}


def check(name, drawn, expected, devices, dtype):
    actual = cases.outputs_and_gradients(sharded(CASES[name][2], devices), drawn, dtype)
    cases.check(actual, expected, drawn, dtype)


@pytest.mark.parametrize("name", OFTEN)
def test_an_op_over_devices_is_that_of_one(name):
    drawn = CASES[name][0]()
    check(name, drawn, cases.outputs_and_gradients(CASES[name][1], drawn, "float64"), *OFTEN[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_every_op_over_devices_is_that_of_one(name):
    draw, formula, _, dtypes = CASES[name]
    drawn = draw()
    expected = cases.outputs_and_gradients(formula, drawn, "float64")
    for devices, dtype in itertools.product(ON.get(name, (2, 4, 8)), dtypes):
        check(name, drawn, expected, devices, dtype)


def results_and_gradients(drawn, ids, state, devices, **options):
    """Returns outputs and the state after the tokens, then the gradients of a sum of these."""
    time, whole = jax.sharding.PartitionSpec(None, AXIS), jax.sharding.PartitionSpec()
    fixed = {} if ids is None else {"segment_ids": ids}
    leaves, structure = jax.tree.flatten(state)

    def attend(arrays, state, axis_name=None):
        return ops.power_attention(
            **arrays, initial_state=state, return_state=True, axis_name=axis_name, **options
        )

    def over(arrays, state):
        mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        specs = jax.tree.map(lambda _: time, arrays), whole
        mapped = functools.partial(attend, axis_name=AXIS)
        return jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=(time, whole))(arrays, state)

    def loss(arrays, leaves):
        op = attend if devices == 1 else over
        results = jax.tree.leaves(op(arrays | fixed, jax.tree.unflatten(structure, leaves)))
        return sum((x * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum() for x in results), results

    differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    (_, results), gradients = jax.jit(differentiate)(drawn, leaves)
    return [*results, *(x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0)]


def tokens_and_state(case, dtype, *, before=30, steps=0, **options):
    """Draws tokens, and the state after others of a document with id 5, the last ones one at a time."""
    drawn = {}
    for time in (case.time, before, steps):
        arrays = cases.arrays(dataclasses.replace(case, time=max(time, 1)), batch=3, kv_heads=2)
        drawn[time] = {
            name: jnp.asarray(arrays[name], dtype) for name in ("query", "key", "value", "log_decay")
        }
    ids = np.full((3, before), 5, np.int32)
    state = ops.power_attention(**drawn[before], segment_ids=ids, return_state=True, **options)[1]
    for step in range(steps):
        token = {name: x[:, step] for name, x in drawn[steps].items()}
        options.pop("exact_window", None)
        state = ops.power_attention_step(**token, state=state, segment_ids=ids[:, 0], **options)[1]
    return drawn[case.time], state


# Segment ids, and options of the state and of the op.
STATES = {
    "documents": (segment_ids(), {}, {}),
    "one document": (None, {}, {}),
    "padding alone": (np.full((3, TIME), -1, np.int32), {}, {}),
    "a longer window": (segment_ids(), {"steps": 9}, {}),
    "few tokens before": (segment_ids(), {"before": 5}, {}),
    "no window": (segment_ids(), {"exact_window": 0}, {"exact_window": 0}),
    "quartic": (segment_ids(), {"power": 4}, {"power": 4, "chunk_size": 64}),
    "recurrent": (segment_ids(), {}, {"form": "recurrent", "chunk_size": None}),
    "no form": (segment_ids(), {}, {"form": None}),
    "shards shorter than the window": (segment_ids()[:, ::4], {}, {}),
    # A state has ids of 32 bits.
    "long ids": (segment_ids().astype(np.int64), {}, {}),
}


@marked.cases(
    ("name", "devices", "begun"),
    [("documents", 8, True)],
    slow=[
        *((name, 8, name != "long ids") for name in STATES if name != "documents"),
        *((name, n, begun) for name in list(STATES)[:2] for n in (2, 4) for begun in (True, False)),
    ],
)
def test_states_over_devices(name, devices, begun):
    ids, of_state, of_op = STATES[name]
    options = {"form": "chunked"} | SHORT | of_op
    with jax.enable_x64(True):
        case = cases.Case(**SHARED | {"decay": "gentle", "power": options.get("power", 2)})
        case = dataclasses.replace(case, time=TIME if ids is None else ids.shape[1])
        drawn, state = tokens_and_state(case, np.float64, **{"exact_window": 12} | of_state)
        state = state if begun else None
        many, one = (results_and_gradients(drawn, ids, state, n, **options) for n in (devices, 1))
        for x, y in zip(many, one, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * (1 + np.abs(y).max(initial=0)))


@marked.cases(
    ("ids", "devices", "pairs"),
    [(segment_ids(), 8, ())],
    slow=[(ids, *sizes) for ids in (segment_ids(), None) for sizes in ((2, ()), (4, (4,)), (8, ()))],
)
def test_learned_angles(ids, devices, pairs):
    """Checks that positions and angles are bitwise those of one device, and gradients of rates to rounding."""
    random = np.random.default_rng(0)
    rate = (1 + np.tanh(random.standard_normal((3, TIME, 2, *pairs)))).astype(np.float32)
    weight = random.standard_normal((3, TIME, 2, 4)).astype(np.float32)
    arrays = {"rate": rate, "weight": weight} | ({} if ids is None else {"segment_ids": ids})
    whole = jnp.full((3, 2, *pairs), 7)
    state = rotary.RotaryState(whole, jnp.full(whole.shape, 2**31, jnp.uint32), jnp.array([5, 1, 0]))

    def f(axis_name, arrays):
        segments = arrays.get("segment_ids")

        def loss(rate):
            result, end = rotary.learned_angles(
                rate, 8, segment_ids=segments, initial_state=state, axis_name=axis_name
            )
            return (result * arrays["weight"]).sum(), (result, end)

        gradient, (result, end) = jax.grad(loss, has_aux=True)(arrays["rate"])
        segments = jnp.zeros(rate.shape[:2], jnp.int32) if segments is None else segments
        begun = documents.PositionState(jnp.full(3, 11), state.segment)
        places, last = documents.positions(segments[:, : arrays["rate"].shape[1]], begun, axis_name=axis_name)
        ends = jax.tree.map(lambda x: x[:, None], (end, last))
        return gradient, (result, places, ends)

    one = jax.device_get(jax.jit(functools.partial(f, None))(arrays))
    spec = jax.sharding.PartitionSpec(None, AXIS)
    many = jax.device_get(jax.jit(over_time(f, devices, arrays, (spec, spec)))(arrays))
    *_, ends = many[1]
    for x, y in zip(jax.tree.leaves(many[1]), jax.tree.leaves(one[1]), strict=True):
        np.testing.assert_array_equal(x[:, -1:] if x.shape != y.shape else x, y)
    assert jax.tree.leaves(ends)[0].shape[1] == devices
    assert cases.error(many[0], one[0]) <= 1e-5


CANNOT = {
    "takes and returns no state; use": (ops.power_attention, 8, {"form": "attention", "return_state": True}),
    "use implementation='xla'": (ops.power_attention, 8, {"implementation": "reference"}),
    "equal numbers of keys and queries": (ops.power_attention, 7, {}),
    "equal numbers of keys and queries, not 8 and 7": (ops.softmax_attention, 7, {}),
    "numbers of keys and queries, not 8 and 7": (ops.expressive_attention, 7, {}),
    "8 of 16 positions, fewer than the window of 9": (ops.power_attention, 8, {"exact_window": 9}),
}


def test_unsupported_requests_are_named():
    x = jnp.ones((1, 16, 1, 8))
    for message, (op, queries, options) in CANNOT.items():
        form = {"form": "chunked"} if options.get("exact_window") == 9 else {}
        attempt = functools.partial(op, **options, **form)

        def shard(axis, x, attempt=attempt, queries=queries):
            return attempt(x[:, :queries], x, x, axis_name=axis)

        with pytest.raises(ValueError if form else NotImplementedError, match=message):
            jax.eval_shape(over_time(shard, 2, x), x)


IDS = np.repeat(segment_ids()[:2], 2, axis=1)
KERNELS = {
    "documents": (cases.Case(head_dim=32, value_dim=24, decay="gentle", group=2), IDS, 4),
    "gates": (cases.Case(head_dim=32, value_dim=24, decay="mixed", group=2), IDS, 4),
    "one document": (cases.Case(head_dim=64, value_dim=32, decay="gentle", scale=1e3), None, 2),
    "quartic": (cases.Case(power=4, decay="gentle", group=2), IDS, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_over_devices_are_as_exact_as_plain_jax_on_one(name):
    """The chunked form in bfloat16, by xla and by the kernels' plain JAX stand-ins."""
    case, segments, devices = KERNELS[name]
    case = dataclasses.replace(case, time=2 * TIME)
    drawn = cases.arrays(case, batch=2, dtype="bfloat16") | {"segment_ids": segments}

    def errors(implementation, devices):
        options = {"power": case.power, "implementation": implementation, "form": "chunked", "chunk_size": 64}
        op = functools.partial(ops.power_attention, **options)
        op = op if devices == 1 else sharded(op, devices)
        return cases.errors(cases.outputs_and_gradients(op, drawn, "bfloat16"), expected, drawn)

    with target.interpreted(object()), plain.kernels(), plain_quartic.kernels():
        formula = functools.partial(FORMULA, power=case.power)
        expected = cases.outputs_and_gradients(formula, drawn, "float64")
        interpreted.check(errors("mosaic_gpu", devices), errors("xla", 1))


@pytest.mark.slow
@pytest.mark.parametrize("power", [2, 4])
def test_states_of_kernels_over_devices(power):
    """The kernels' plain JAX stand-ins, in bfloat16."""
    case = cases.Case(power=power, decay="gentle", group=2, time=2 * TIME)
    drawn, state = tokens_and_state(case, jnp.bfloat16, before=150, power=power)
    ids = np.repeat(segment_ids(), 2, axis=1)
    options = {"power": power, "form": "chunked", "chunk_size": 64, "implementation": "mosaic_gpu"}
    with target.interpreted(object()), plain.kernels(), plain_quartic.kernels():
        many, one = (results_and_gradients(drawn, ids, state, n, **options) for n in (4, 1))
    for x, y in zip(many, one, strict=True):
        assert cases.error(x, y) <= 2e-3


def exchanged(op, with_documents):
    """Returns the kind and the bytes of the result of each collective, forward and backward, on eight devices."""
    x = jax.ShapeDtypeStruct((2, 8 * 128, 8, 16), jnp.float32)
    arrays = {"query": x, "key": x, "value": x, "log_decay": jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)}
    fixed = {"segment_ids": jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)} if with_documents else {}
    mapped = over_time(lambda axis_name, arrays: op(**arrays, axis_name=axis_name), 8, arrays | fixed)

    def loss(arrays, fixed):
        return jnp.square(mapped(arrays | fixed)).sum()

    program = jax.jit(jax.grad(loss)).lower(arrays, fixed).compile().as_text()
    found = []
    for line in program.splitlines():
        kind, results = collectives.called(line)
        if results:
            found.append((kind, sum(collectives.Collective(kind, (), *one).nbytes for one in results)))
    return found


# Two rows of documents' summaries, and of segment ids, in int32.
SUMMARIES, SEGMENTS = 8 * 2 * 4, 8 * 128 * 2 * 4


@pytest.mark.parametrize("with_documents", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_collectives_of_states(with_documents):
    # Two rows of 8 heads, D = E = 16: a window's keys, and states with their normalizers, of up to 160 features.
    exact_window, state = 64 * 2 * 8 * 16 * 4, 160 * 17 * 2 * 8 * 4
    found = exchanged(functools.partial(ops.power_attention, form="chunked"), with_documents)
    assert {kind for kind, _ in found} <= {"collective-permute", "all-gather"}
    assert all(size <= SUMMARIES for kind, size in found if kind == "all-gather")
    assert exact_window <= max(size for kind, size in found if kind == "collective-permute") <= state
    # For states, a shift and three rounds, forward and backward.
    assert sum(size > exact_window for _, size in found) == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("op", [functools.partial(ops.power_attention, form="attention"), SOFTMAX])
def test_collectives_of_pairs(op):
    found = exchanged(op, True)
    # Queries, keys, values, decays and outputs, and the gradients of each.
    assert sum(kind == "all-to-all" for kind, _ in found) == 2 * 5
    assert {kind for kind, _ in found} == {"all-to-all", "all-gather"}
    # Segment ids; the mask of outputs reached by a NaN is a few bytes per row.
    assert [size for kind, size in found if kind == "all-gather" and size > SUMMARIES] == [SEGMENTS]
