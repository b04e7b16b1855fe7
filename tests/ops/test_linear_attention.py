"""Tests of linear attention in every form against its formula in float64."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import cases, linear_formula

REFERENCES = (("reference", "attention"), ("reference", "recurrent"))
FORMS = (("xla", "attention"), ("xla", "chunked"), ("xla", "recurrent"))
DEGREES = {"elu": (2,), "relu": (2,), "identity": (2,), "symmetric": (1, 2, 3), "tensor": (2,)}
STATIC = ("feature_map", "power", "rotate", "normalizer", "causal")
OPTIONS = ("implementation", "form", "exact_window", "chunk_size")
ROTATIONS = {
    "none": (None, "unrotated"),
    "rotation": (linear_formula.rotation(), "unrotated"),
    "doubled": (linear_formula.rotation(doubled=True), "unrotated"),
    # Slow enough that features of one sign stay on one side.
    "rotated": (linear_formula.rotation(rate=1e-3), "rotated"),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Combination of a feature map and a `rotate`."""

    feature_map: str = "elu"
    power: int = 2
    rotate: str = "none"

    def __str__(self):
        return f"{self.feature_map}{self.power}-{self.rotate}"

    @property
    def arguments(self):
        rotate, normalizer = ROTATIONS[self.rotate]
        return {
            "feature_map": self.feature_map,
            "power": self.power,
            "rotate": rotate,
            "normalizer": normalizer,
        }

    def arrays(self, case, **options):
        """Draws arguments so that no denominator comes near zero, unless all of it does."""
        drawn = cases.arrays(case, kv_heads=2, **options)
        if self.feature_map != "elu":
            # Positive entries: signed kernels then have positive weights, and weights of powers do not nearly vanish.
            drawn |= {name: np.abs(drawn[name]) + 0.125 for name in ("query", "key")}
        return drawn


KINDS = [
    Kind(name, power, rotate) for name, powers in DEGREES.items() for power in powers for rotate in ROTATIONS
]
SMALL = cases.Case(head_dim=5, value_dim=3, time=37, decay="gentle", segments="padded", group=2)
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
SHORT = {"exact_window": 4, "chunk_size": 8}
WHOLE = dataclasses.replace(SMALL, decay="none")


@functools.partial(jax.jit, static_argnames=(*STATIC, *OPTIONS))
def outputs_and_gradients(drawn, *, implementation, **options):
    """Returns the output and its gradients; implementation `formula` is that of the tests."""
    varied = {name: drawn[name] for name in cases.GRADIENTS if drawn[name] is not None}
    op = linear_formula.attention
    if implementation != "formula":
        op = functools.partial(ops.linear_attention, implementation=implementation)

    def loss(arguments):
        out = op(**{"log_decay": None} | arguments, segment_ids=drawn["segment_ids"], **options)
        return (out * drawn["dout"]).sum(dtype=jnp.promote_types(out.dtype, jnp.float32)), out

    gradients, out = jax.grad(loss, has_aux=True)(varied)
    return {"out": out} | gradients


def cast(drawn, dtype):
    return {
        name: x if x is None or name == "segment_ids" else jnp.asarray(x, dtype) for name, x in drawn.items()
    }


def check(kind, case, forms=FORMS, dtypes=("float64", "float32"), *, causal=True, **options):
    """Compares outputs and gradients of every form with the formula."""
    drawn = kind.arrays(case)
    fixed = kind.arguments | {"causal": causal}
    with jax.enable_x64(True):
        expected = outputs_and_gradients(cast(drawn, "float64"), implementation="formula", **fixed)
    for dtype in dtypes:
        for implementation, form in forms:
            chosen = fixed | {"implementation": implementation, "form": form}
            if implementation != "reference":
                chosen |= {
                    name: x for name, x in options.items() if (name, form) != ("chunk_size", "recurrent")
                }
            with jax.enable_x64(dtype == "float64"):
                actual = outputs_and_gradients(cast(drawn, dtype), **chosen)
            compare(actual, expected, drawn, dtype, fixed)


def compare(actual, expected, drawn, dtype, fixed):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        natural = cases.natural_size(name, drawn)
        rms = cases.error(actual[name], x, natural)
        bound = {"float64": 1e-10, "float32": 2e-6 if name == "out" else 1e-5}[dtype]
        if rms > bound and dtype == "float32":
            # Precision that the plain formula loses in float32 is not an error of a form.
            plain = outputs_and_gradients(cast(drawn, dtype), implementation="formula", **fixed)
            bound = max(bound, 4 * cases.error(plain[name], x, natural))
        assert rms <= bound, (dtype, name, rms, bound)


@pytest.mark.parametrize(
    ("kind", "form", "dtype"),
    [
        (Kind(rotate="doubled"), "chunked", "float32"),
        (Kind("identity", rotate="rotated"), "attention", "float64"),
    ],
    ids=str,
)
def test_forms(kind, form, dtype):
    check(kind, SMALL, [("xla", form)], (dtype,), **SHORT)


def test_reference():
    check(Kind("tensor", rotate="rotation"), SMALL, REFERENCES[:1], ("float64",))


def test_whole_documents():
    check(Kind("relu", rotate="rotation"), WHOLE, [("xla", None)], ("float32",), causal=False, chunk_size=8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "case"), [(kind, GRID[i % len(GRID)]) for i, kind in enumerate(KINDS)], ids=str
)
def test_full_grid(kind, case):
    check(kind, case, (*REFERENCES, *FORMS), **SHORT)
    undecayed = dataclasses.replace(case, decay="none")
    check(kind, undecayed, [("reference", None), ("xla", None)], causal=False, chunk_size=16)


def part(drawn, begin, end):
    names = ("query", "key", "value", "log_decay", "segment_ids")
    return {name: None if drawn[name] is None else jnp.asarray(drawn[name])[:, begin:end] for name in names}


def rotation_from(begin, *, doubled=False):
    """Returns the `rotate` of a call whose first token is at `begin`, with a key for every query."""

    def rotate(x):
        return linear_formula.rotation(begin + jnp.arange(x.shape[1]), doubled=doubled)(x)

    return rotate


STATES = [("elu", "rotation", "unrotated"), ("symmetric", None, "unrotated"), ("relu", "doubled", "rotated")]


@pytest.mark.parametrize(
    ("feature_map", "rotate", "normalizer", "form", "cuts"),
    [
        ("elu", "rotation", "unrotated", "chunked", (0, 21, 37)),
        *(
            pytest.param(*state, form, (0, 15, 29, 37), marks=pytest.mark.slow)
            for state in STATES
            for form in ("attention", "chunked", "recurrent")
        ),
    ],
)
def test_any_split_and_steps_equal_one_call(feature_map, rotate, normalizer, form, cuts):
    """Runs calls, then steps from their state, with gradients through states."""
    kind = Kind(feature_map, 2)
    fixed = {"feature_map": feature_map, "normalizer": normalizer}
    sizes = {"exact_window": 4} if form == "recurrent" else SHORT

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
        drawn = cast(kind.arrays(SMALL), "float64")
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
    drawn = cast(Kind().arrays(SMALL), "float32")
    rotate = linear_formula.rotation(jnp.arange(SMALL.time))

    @jax.jit
    def both(arrays):
        last = ops.linear_attention(**arrays | {"query": arrays["query"][:, 30:]}, rotate=rotate)
        return last, linear_formula.attention(**arrays, rotate=rotate)[:, 30:]

    assert cases.error(*both(part(drawn, 0, None))) <= 2e-6


def quarter_rotation(x):
    """Rotates pairs by exactly a quarter turn per position."""
    first, second = jnp.split(x, 2, -1)
    turns = [(first, second), (-second, first), (-first, -second), (second, -first)]
    choices = jnp.stack([jnp.concatenate(t, -1) for t in turns])
    position = (jnp.arange(x.shape[1]) % 4)[None, None, :, None, None]
    return jnp.take_along_axis(choices, position, 0)[0]


@pytest.mark.parametrize("form", ["chunked", None, pytest.param("attention", marks=pytest.mark.slow)])
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


def test_documents_never_mix_in_either_direction():
    case = dataclasses.replace(WHOLE, time=192, segments="edges")
    drawn = cast(cases.arrays(case, batch=1), "float32")
    other = drawn | {
        "key": drawn["key"].at[:, 64:128].add(3.0),
        "value": drawn["value"].at[:, 64:128].add(3.0),
    }
    run = jax.jit(functools.partial(ops.linear_attention, causal=False, chunk_size=48))
    one, two = (np.asarray(run(**part(d, 0, None))) for d in (drawn, other))
    np.testing.assert_array_equal(one[:, :64], two[:, :64])
    np.testing.assert_array_equal(one[:, 128:], two[:, 128:])
    assert np.abs(one[:, 64:128] - two[:, 64:128]).min() > 0.1


X = jnp.ones((1, 4, 1, 4))
STATE = ops.LinearState.zeros(1, 1, 4, 4, rotated_dim=8)
BAD = {
    "feature_map is 'cosine'; it must be one of 'elu', 'relu', 'identity', 'symmetric', 'tensor'": {
        "feature_map": "cosine"
    },
    "power is 0; it must be at least 1": {"feature_map": "tensor", "power": 0},
    "normalizer is 'none'; it must be one of 'unrotated', 'rotated'": {"normalizer": "none"},
    "only their length may change": {"rotate": lambda x: x[:, 1:]},
    "rotate returns 3 features for queries and 4 for keys": {
        "rotate": lambda x: x[..., : 5 - x.shape[2]],
        "query": jnp.ones((1, 4, 2, 4)),
    },
    "the state is a PowerState; make it with LinearState.zeros": {
        "initial_state": ops.PowerState.zeros(1, 1, 4, 4, power=2)
    },
    "the state has a denominator of its own, which does not fit rotate and normalizer": {
        "initial_state": STATE
    },
    "kv has shape (1, 1, 8, 4); these inputs need (1, 1, 4, 4); make it with": {
        "initial_state": STATE,
        "rotate": lambda x: x,
    },
    "causal is False, which does not support log_decay": {"causal": False, "log_decay": X[..., 0]},
    "causal is False, which does not support initial_state": {"causal": False, "initial_state": STATE},
    "causal is False, which does not support return_state": {"causal": False, "return_state": True},
    "causal is False, which does not support axis_name": {"causal": False, "axis_name": "context"},
    "causal is False, which does not support form": {"causal": False, "form": "chunked"},
    "has the implementations 'reference' and 'xla', not 'mosaic_gpu'": {
        "causal": False,
        "implementation": "mosaic_gpu",
    },
    "key has 4 tokens and query 3; they must be equal if causal is False; pass a query for each key": {
        "causal": False,
        "query": X[:, 1:],
    },
}


def test_bad_input_is_one_line():
    for message, arguments in BAD.items():
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)) as error:
            ops.linear_attention(**{"query": X, "key": X, "value": X} | arguments)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"form": "attention"}, marks=pytest.mark.slow), {"form": "chunked"}, {"causal": False}],
    ids=str,
)
def test_gradients_with_rotate_inside_shard_map(options):
    """The denominator's values have width 0; jax 0.11 forgets which mesh axes such arrays vary over."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rotate, spec = linear_formula.rotation(jnp.arange(24)), jax.sharding.PartitionSpec("data")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, 2, 8)), jnp.float32)

    def attend(x):
        return ops.linear_attention(x, x, x, rotate=rotate, feature_map="elu", **options)

    def loss(attend, x):
        return (attend(x) ** 2).sum()

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    actual, expected = (jax.jit(jax.grad(functools.partial(loss, f)))(x) for f in (sharded, attend))
    assert cases.error(actual, expected) <= 1e-6
