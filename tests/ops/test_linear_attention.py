"""Tests of linear attention in every form against its formula in float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests import marked
from tests.ops import cases, linear_formula

FORMS = (("reference", "attention"), ("xla", "attention"), ("xla", "chunked"), ("xla", "recurrent"))
DEGREES = {"elu": (2,), "relu": (2,), "identity": (2,), "symmetric": (1, 2, 3), "tensor": (2,)}
ROTATIONS = {
    "none": (None, "unrotated"),
    "rotation": (linear_formula.rotation(), "unrotated"),
    "doubled": (linear_formula.rotation(doubled=True), "unrotated"),
    # Slow enough that features of one sign stay on one side.
    "rotated": (linear_formula.rotation(rate=1e-3), "rotated"),
}
SMALL = cases.Case(head_dim=5, value_dim=3, time=37, decay="gentle", segments="padded", group=2)
WHOLE = dataclasses.replace(SMALL, decay="none")
GRID = cases.pairwise(
    {
        "head_dim": (6,),
        "value_dim": (5,),
        "time": (1, 63, 150),
        "decay": ("none", "gentle", "mixed"),
        "segments": ("none", "edges", "padded"),
        "group": (1, 2, 3),
    }
)
KINDS = [
    (feature_map, power, rotate)
    for feature_map, powers in DEGREES.items()
    for power in powers
    for rotate in ROTATIONS
]


def arguments(feature_map, power, rotate):
    rotate, normalizer = ROTATIONS[rotate]
    return {"feature_map": feature_map, "power": power, "rotate": rotate, "normalizer": normalizer}


def arrays(feature_map, case, **options):
    """Draws arguments so that no denominator comes near zero, unless all of it does."""
    drawn = cases.arrays(case, kv_heads=2, **options)
    if feature_map != "elu":
        # Positive entries: signed kernels then have positive weights, and weights of powers do not nearly vanish.
        drawn |= {name: np.abs(drawn[name]) + 0.125 for name in ("query", "key")}
    return drawn


def check(kind, case, implementation, form, dtype, *, causal=True):
    drawn, fixed = arrays(kind[0], case), arguments(*kind) | {"causal": causal}
    options = {"implementation": implementation, "form": form}
    if implementation == "xla" and causal:
        options |= {"exact_window": 4} | ({} if form == "recurrent" else {"chunk_size": 8})
    elif implementation == "xla":
        options |= {"chunk_size": 8}
    plain = functools.partial(cases.outputs_and_gradients, linear_formula.attention, drawn, **fixed)
    actual = cases.outputs_and_gradients(ops.linear_attention, drawn, dtype, **fixed, **options)
    cases.check(actual, plain("float64"), drawn, dtype, functools.partial(plain, "float32"))


@marked.cases(
    ("kind", "implementation", "form", "dtype"),
    [
        (("elu", 2, "doubled"), "xla", "chunked", "float32"),
        (("tensor", 2, "rotation"), "reference", "attention", "float64"),
        (("relu", 2, "rotation"), "xla", None, "float32"),
    ],
    slow=[
        (("identity", 2, "rotated"), "xla", "attention", "float64"),
        (("symmetric", 3, "none"), "xla", "recurrent", "float32"),
    ],
    ids=str,
)
def test_forms(kind, implementation, form, dtype):
    check(kind, WHOLE if form is None else SMALL, implementation, form, dtype, causal=form is not None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "case"), [(kind, GRID[i % len(GRID)]) for i, kind in enumerate(KINDS)], ids=str
)
def test_full_grid(kind, case):
    undecayed = dataclasses.replace(case, decay="none")
    for dtype in ("float64", "float32"):
        for implementation, form in FORMS:
            check(kind, case, implementation, form, dtype)
        for implementation in ("reference", "xla"):
            check(kind, undecayed, implementation, None, dtype, causal=False)


@pytest.mark.parametrize("segments", [None, "two"])
def test_the_size_of_bidirectional_keys_does_not_matter(segments):
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 20, 2, 8)).astype(np.float32)
    ids = None if segments is None else jnp.arange(20)[None] // 12
    options = {"feature_map": "symmetric", "power": 4, "causal": False, "segment_ids": ids}
    expected = ops.linear_attention(query, key, value, **options)
    for size in (2.0**-40, 2.0**40):
        out = ops.linear_attention(query, key * np.float32(size), value, **options)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def part(drawn, begin, end):
    names = ("query", "key", "value", "log_decay", "segment_ids")
    return {name: None if drawn[name] is None else jnp.asarray(drawn[name])[:, begin:end] for name in names}


def rotation_from(begin, *, doubled=False):
    """Returns the `rotate` of a call whose first token is at `begin`, with a key for every query."""

    def rotate(x):
        return linear_formula.rotation(begin + jnp.arange(x.shape[1]), doubled=doubled)(x)

    return rotate


STATES = [("elu", "rotation", "unrotated"), ("symmetric", None, "unrotated"), ("relu", "doubled", "rotated")]


@marked.cases(
    ("feature_map", "rotate", "normalizer", "form", "cuts"),
    [("elu", "rotation", "unrotated", "chunked", (0, 21, 37))],
    slow=[
        (*state, form, (0, 15, 29, 37)) for state in STATES for form in ("attention", "chunked", "recurrent")
    ],
)
def test_any_split_and_steps_equal_one_call(feature_map, rotate, normalizer, form, cuts):
    """Runs calls, then steps from their state, with gradients through states."""
    fixed = {"feature_map": feature_map, "normalizer": normalizer}
    sizes = {"exact_window": 4} | ({} if form == "recurrent" else {"chunk_size": 8})

    def rotation_at(begin):
        return None if rotate is None else rotation_from(begin, doubled=rotate == "doubled")

    def by_parts(varied):
        arrays = drawn | varied
        state, outputs = zeros, []
        for begin, end in itertools.pairwise(cuts[:-1]):
            out, state = ops.linear_attention(
                **part(arrays, begin, end),
                **fixed,
                rotate=rotation_at(begin),
                form=form,
                **sizes,
                initial_state=state,
                return_state=True,
            )
            outputs.append(out)
        tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in part(arrays, cuts[-2], None).items()}

        def step(carry, token):
            state, position = carry
            out, state = ops.linear_attention_step(
                **token, **fixed, state=state, rotate=rotation_at(position)
            )
            return (state, position + 1), out

        _, out = jax.lax.scan(step, (state, jnp.array(cuts[-2])), tokens)
        out = jnp.concatenate([*outputs, jnp.moveaxis(out, 0, 1)], 1)
        return (out * drawn["dout"]).sum(), out

    def whole(varied):
        out = linear_formula.attention(**part(drawn | varied, 0, None), **fixed, rotate=rotation_at(0))
        return (out * drawn["dout"]).sum(), out

    with jax.enable_x64(True):
        drawn = cases.cast(arrays(feature_map, SMALL), "float64")
        dim = {None: None, "rotation": SMALL.head_dim, "doubled": 2 * SMALL.head_dim}[rotate]
        zeros = ops.LinearState.zeros(
            2, 2, SMALL.head_dim, SMALL.value_dim, rotated_dim=dim, exact_window=4, dtype="float64", **fixed
        )
        varied = {name: drawn[name] for name in cases.GRADIENTS}
        (actual, out), (expected, expected_out) = (
            jax.jit(jax.grad(f, has_aux=True))(varied) for f in (by_parts, whole)
        )
    assert zeros.exact_window == 4
    assert zeros.nbytes == sum(x.nbytes for x in jax.tree.leaves(zeros))
    assert cases.error(out, expected_out) <= 1e-10
    for name, x in expected.items():
        assert cases.error(actual[name], x, cases.natural_size(name, drawn)) <= 1e-10, name


def test_queries_are_the_last_positions_of_the_keys():
    drawn = cases.cast(arrays("elu", SMALL), "float32")
    rotate = linear_formula.rotation(jnp.arange(SMALL.time))

    @jax.jit
    def both(arrays):
        last = ops.linear_attention(**arrays | {"query": arrays["query"][:, 30:]}, rotate=rotate)
        return last, linear_formula.attention(**arrays, rotate=rotate)[:, 30:]

    assert cases.error(*both(part(drawn, 0, None))) <= 2e-6


def quarter_rotation(x):
    first, second = jnp.split(x, 2, -1)
    turns = [(first, second), (-second, first), (-first, -second), (second, -first)]
    choices = jnp.stack([jnp.concatenate(t, -1) for t in turns])
    position = (jnp.arange(x.shape[1]) % 4)[None, None, :, None, None]
    return jnp.take_along_axis(choices, position, 0)[0]


@pytest.mark.parametrize("form", ["chunked", None])
def test_a_denominator_that_vanishes_gives_zero_and_finite_gradients(form):
    """Keys half a turn apart cancel exactly.

    At an even distance from a first key, a quarter turn per position gives zero.
    """
    x = jnp.ones((1, 8, 1, 2))
    value = jax.random.normal(jax.random.key(0), x.shape)
    options = {"rotate": quarter_rotation, "normalizer": "rotated", "feature_map": "identity"}
    if form is None:
        options["causal"] = False
    else:
        options |= {"form": form, "exact_window": 2, "chunk_size": 2}

    def loss(x, value):
        out = ops.linear_attention(x, x, value, **options)
        return (out * value).sum(), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, value)
    # Sums of the cosines of 0, 1, 2, ... quarter turns are 1, 1, 0, 0, ...; over all eight they vanish.
    zero = np.arange(8) % 4 >= 2 if form else np.ones(8, bool)
    np.testing.assert_array_equal((np.asarray(out) == 0).all((0, 2, 3)), zero)
    assert all(np.isfinite(g).all() for g in gradients)


def test_negative_denominators_divide():
    """Values of a single key are returned unchanged, whatever the sign of its weight."""
    query, value = -jnp.ones((1, 1, 1, 2)), jnp.array([[[[1.0, -2.0]]]])
    out = ops.linear_attention(query, -query, value, feature_map="identity", form="chunked")
    np.testing.assert_array_equal(out, value)


def test_gradients_with_rotate_inside_shard_map():
    """The denominator's values have width 0; jax 0.11 forgets which mesh axes such arrays vary over."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rotate, spec = linear_formula.rotation(jnp.arange(24)), jax.sharding.PartitionSpec("data")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, 2, 8)), jnp.float32)

    def attend(x):
        return ops.linear_attention(x, x, x, rotate=rotate, feature_map="elu", form="chunked")

    def loss(attend, x):
        return (attend(x) ** 2).sum()

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    actual, expected = (jax.jit(jax.grad(functools.partial(loss, f)))(x) for f in (sharded, attend))
    assert cases.error(actual, expected) <= 1e-6


def test_rotated_features_may_be_more_than_a_group():
    """Rotated features, here 4,186 and again as many, are read as features of degree 1."""
    drawn = arrays("symmetric", cases.Case(head_dim=91, value_dim=3, time=8))
    given = {name: x for name, x in drawn.items() if x is not None and name != "dout"}
    fixed = arguments("symmetric", 2, "doubled")
    call = functools.partial(ops.linear_attention, **fixed, form="chunked", exact_window=2, chunk_size=2)
    out, expected = (
        jax.jit(f)(**given) for f in (call, functools.partial(linear_formula.attention, **fixed))
    )
    assert cases.error(out, expected) <= 2e-6
