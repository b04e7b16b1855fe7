"""Linear attention in every form against its formula in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import cases, linear_formula

REFERENCES = (("reference", "attention"), ("reference", "recurrent"))
FORMS = (("xla", "attention"), ("xla", "chunked"), ("xla", "recurrent"))
DEGREES = {"elu": (2,), "relu": (2,), "identity": (2,), "symmetric": (1, 2, 3), "tensor": (2,)}
STATIC = ("feature_map", "power", "turn", "normaliser", "causal")
OPTIONS = ("implementation", "form", "window", "chunk_size")
TURNS = {
    "none": (None, "unrotated"),
    "rotation": (linear_formula.rotation(), "unrotated"),
    "doubled": (linear_formula.rotation(doubled=True), "unrotated"),
    # Slow enough that features of one sign stay on one side.
    "rotated": (linear_formula.rotation(rate=1e-3), "rotated"),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One combination of a feature map and a turn."""

    feature_map: str = "elu"
    power: int = 2
    turn: str = "none"

    def __str__(self):
        return f"{self.feature_map}{self.power}-{self.turn}"

    @property
    def arguments(self):
        turn, normaliser = TURNS[self.turn]
        return {
            "feature_map": self.feature_map,
            "power": self.power,
            "turn": turn,
            "normaliser": normaliser,
        }

    def arrays(self, case, **options):
        """Drawn so that no denominator comes near zero, unless all of it does."""
        drawn = cases.arrays(case, kv_heads=2, **options)
        if self.feature_map != "elu":
            # Positive entries: what has signs then has positive weights, and those of powers do not all but vanish.
            drawn |= {name: np.abs(drawn[name]) + 0.125 for name in ("query", "key")}
        return drawn


KINDS = [Kind(name, power, turn) for name, powers in DEGREES.items() for power in powers for turn in TURNS]
SMALL = cases.Case(head_dim=5, value_dim=3, time=37, decay="gentle", segments="padded", group=2)
SHORT = {"window": 4, "chunk_size": 8}


@functools.partial(
    jax.jit, static_argnames=(*STATIC, *OPTIONS), compiler_options={"xla_backend_optimization_level": 0}
)
def outputs_and_gradients(drawn, *, implementation, **options):
    """The output and its gradients; implementation `formula` is the tests' own."""
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


def check(kind, case, forms=FORMS, dtypes=("float64", "float32"), causal=True, **options):
    """Outputs and gradients of every form against the formula."""
    drawn = kind.arrays(case)
    fixed = kind.arguments | {"causal": causal}
    with jax.enable_x64(True):
        double = cast(drawn, "float64")
        expected = outputs_and_gradients(double, implementation="formula", **fixed)
    for dtype in dtypes:
        with jax.enable_x64(dtype == "float64"):
            arrays = cast(drawn, dtype)
            plain = {}
            if dtype == "float32":
                plain = outputs_and_gradients(arrays, implementation="formula", **fixed)
            for implementation, form in forms:
                chosen = {"implementation": implementation, "form": form}
                chunks = {} if form == "recurrent" or implementation == "reference" else options
                actual = outputs_and_gradients(arrays, **chosen, **fixed, **chunks)
                assert actual.keys() == expected.keys()
                for name, x in expected.items():
                    natural = cases.natural_size(name, drawn)
                    bound = {"float64": 1e-10, "float32": 2e-6 if name == "out" else 1e-5}[dtype]
                    if plain:
                        bound = max(bound, 4 * cases.error(plain[name], x, natural))
                    found = cases.error(actual[name], x, natural)
                    assert found <= bound, (implementation, form, dtype, name, found, bound)


@pytest.mark.parametrize(
    "kind", [Kind(), Kind("elu", turn="rotation"), Kind("relu", turn="rotated")], ids=str
)
def test_forms(kind):
    check(kind, SMALL, FORMS[:2], **SHORT)


@pytest.mark.parametrize(
    "kind", [Kind("identity"), Kind("symmetric", 3), Kind("symmetric", 2, "doubled")], ids=str
)
def test_signed_and_power_features(kind):
    check(kind, SMALL, FORMS[1:2], **SHORT)


@pytest.mark.parametrize("kind", [Kind(turn="doubled"), Kind("tensor", 2, "rotation")], ids=str)
def test_reference(kind):
    check(kind, SMALL, REFERENCES, ("float64",))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("segments", ["none", "edges", "padded"])
@pytest.mark.parametrize("decay", ["none", "gentle", "mixed"])
def test_full_grid(kind, segments, decay):
    # Rotated features after a strong gate have few keys, whose weights need not be of one sign.
    for time, group in ((1, 2), (63, 1), (150, 3)):
        case = cases.Case(head_dim=6, value_dim=5, time=time, decay=decay, segments=segments, group=group)
        options = SHORT if time > 1 else {}
        check(kind, case, (*REFERENCES, *FORMS), **options)
