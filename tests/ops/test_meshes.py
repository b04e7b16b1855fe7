"""Tests that ops on meshes of Auto and Explicit axes and within `jax.shard_map` equal those on one device."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import documents, kv_cache, rotary
from tests.ops import cases

Spec = jax.sharding.PartitionSpec
BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, WINDOW = 4, 21, 4, 2, 4, 3, 4
AXES = {"B": "data", "N": "model", "K": "model"}
LAYOUTS = {
    "query": "B T N D",
    "key": "B S K D",
    "value": "B S K E",
    "log_decay": "B S K",
    "segment_ids": "B S",
}
STEP = {name: layout.replace(" T", "").replace(" S", "") for name, layout in LAYOUTS.items()}
OUT, STEP_OUT = "B T N E", "B N E"


def drawn(time=TIME, seed=0):
    """Draws arguments of attention, with documents and padding."""
    case = cases.Case(
        time=time, head_dim=HEAD_DIM, value_dim=VALUE_DIM, decay="gentle", segments="padded", group=2
    )
    arrays = cases.arrays(case, batch=BATCH, kv_heads=KV_HEADS, seed=seed)
    del arrays["dout"]
    return {
        name: jnp.asarray(x, jnp.int32 if name == "segment_ids" else jnp.float32)
        for name, x in arrays.items()
    }


def without(*names, time=TIME):
    return {name: x for name, x in drawn(time).items() if name not in names}


def last(arrays):
    return {name: x[:, -1] for name, x in arrays.items()}


def power(form, **options):
    """Returns the op from a state to a state."""
    options |= {} if form == "recurrent" else {"chunk_size": 8}
    call = functools.partial(ops.power_attention, form=form, exact_window=WINDOW, **options)
    state = jax.jit(functools.partial(call, return_state=True))(**drawn(11, seed=1))[1]
    layouts = LAYOUTS | {"initial_state": ops.PowerState.layout()}
    return (
        functools.partial(call, return_state=True),
        drawn() | {"initial_state": state},
        layouts,
        (OUT, ops.PowerState.layout()),
    )


def plain(form):
    """Returns the op without states, decays and documents."""
    call = functools.partial(ops.power_attention, form=form, exact_window=WINDOW, chunk_size=8)
    return call, without("log_decay", "segment_ids"), LAYOUTS, OUT


def power_step(tokens):
    """Returns a step after `tokens` tokens; for some values the window is full."""
    call = functools.partial(ops.power_attention, exact_window=WINDOW, return_state=True, form="chunked")
    state = jax.jit(call)(**drawn(tokens, seed=1))[1]
    layouts = STEP | {"state": ops.PowerState.layout()}
    arguments = last(drawn()) | {"state": state}
    return ops.power_attention_step, arguments, layouts, (STEP_OUT, ops.PowerState.layout())


@functools.cache
def channel_gated():
    call = functools.partial(ops.power_attention, exact_window=WINDOW, return_state=True)

    def arguments(**options):
        arrays = drawn(**options)
        return arrays | {"log_decay": arrays["log_decay"][..., None] * (1 + arrays["value"] ** 2)}

    state = jax.jit(call)(**arguments(time=11, seed=1))[1]
    layouts = LAYOUTS | {"log_decay": "B S K E", "initial_state": ops.PowerState.layout(per_channel=True)}
    return (
        call,
        arguments() | {"initial_state": state},
        layouts,
        (OUT, ops.PowerState.layout(per_channel=True)),
    )


def channel_gated_step():
    _, arguments, _, (_, state_layout) = channel_gated()
    state = arguments["initial_state"]
    arrays = last({name: x for name, x in arguments.items() if name != "initial_state"})
    layouts = STEP | {"log_decay": "B K E", "state": state_layout}
    return ops.power_attention_step, arrays | {"state": state}, layouts, (STEP_OUT, state_layout)


def rotated(f, positions, **arguments):
    """Calls `f` with features rotated by position."""

    def rotate(features):
        angles = rotary.rope_angles(positions, features.shape[-1])
        return rotary.rotate(features, angles)

    return f(**arguments, rotate=rotate)


@functools.cache
def linear():
    call = functools.partial(
        rotated, ops.linear_attention, form="chunked", exact_window=WINDOW, return_state=True
    )

    def arguments(**options):
        arrays = drawn(**options)
        count = jnp.cumsum(jnp.ones_like(arrays["segment_ids"]), 1)
        return arrays | {"positions": count}

    state = jax.jit(call)(**arguments(time=11, seed=1))[1]
    layouts = LAYOUTS | {"positions": "B T", "initial_state": ops.LinearState.layout(separate=True)}
    outputs = OUT, ops.LinearState.layout(separate=True)
    return call, arguments() | {"initial_state": state}, layouts, outputs


def linear_step():
    _, arguments, _, (_, state_layout) = linear()
    state = arguments["initial_state"]
    arrays = last({name: x for name, x in arguments.items() if name not in ("initial_state", "positions")})
    arrays["positions"] = arguments["positions"][:, -1:]
    layouts = STEP | {"positions": "B T", "state": state_layout}
    step = functools.partial(rotated, ops.linear_attention_step)
    return step, arrays | {"state": state}, layouts, (STEP_OUT, state_layout)


def bidirectional(segments):
    arrays = without("log_decay") if segments else without("log_decay", "segment_ids")
    return functools.partial(ops.linear_attention, causal=False, chunk_size=8), arrays, LAYOUTS, OUT


def softmax(**options):
    return functools.partial(ops.softmax_attention, block_size=4, **options), drawn(), LAYOUTS, OUT


def expressive(**options):
    return functools.partial(ops.expressive_attention, block_size=4, **options), drawn(), LAYOUTS, OUT


def learned_positions():
    """Returns angles of learned rates, with the state after them."""

    def call(rate, segment_ids, state):
        return rotary.learned_angles(rate, HEAD_DIM, segment_ids=segment_ids, initial_state=state)

    rate = jnp.abs(drawn()["log_decay"])
    ids = drawn()["segment_ids"]
    state = rotary.RotaryState.zeros(BATCH, KV_HEADS)
    layouts = {"rate": "B T K", "segment_ids": "B T", "state": rotary.RotaryState.layout()}
    outputs = "B T K D", rotary.RotaryState.layout()
    return call, {"rate": rate, "segment_ids": ids, "state": state}, layouts, outputs


def positions():
    arguments = {"segment_ids": drawn()["segment_ids"], "state": documents.PositionState.zeros(BATCH)}
    layouts = {"segment_ids": "B T", "state": documents.PositionState.layout()}
    return documents.positions, arguments, layouts, ("B T", documents.PositionState.layout())


def rope():
    arguments = {"x": drawn()["query"], "positions": jnp.ones((BATCH, TIME), jnp.int32).cumsum(1)}
    return ops.rotary.rope, arguments, {"x": "B T N D", "positions": "B T"}, "B T N D"


def lrpe(core, basis, outputs="B T N D"):
    call = functools.partial(ops.lrpe.encode, core=core, basis=basis)
    arguments = {"x": drawn()["query"], "positions": jnp.ones((BATCH, TIME), jnp.int32).cumsum(1)}
    layouts = {"x": "B T N D", "positions": "B T", "rates": "R"}
    if core != "permutation":
        arguments["rates"] = jnp.asarray(ops.lrpe.rates(core, HEAD_DIM, kind="a"), jnp.float32)
    return call, arguments, layouts, outputs


def spe():
    random = np.random.default_rng(0)
    shapes = {"frequencies": 2, "phases": 2, "gains": 2}
    arguments = {name: random.random((KV_HEADS, HEAD_DIM, size)) for name, size in shapes.items()}
    arguments["noise"] = random.normal(size=(KV_HEADS, HEAD_DIM, 4, 5))
    arguments = {name: jnp.asarray(x, jnp.float32) for name, x in arguments.items()}
    arguments |= {name: drawn()[name] for name in ("query", "key")}
    arguments["positions"] = jnp.ones((BATCH, TIME), jnp.int32).cumsum(1)
    layouts = dict.fromkeys(shapes, "K D Q") | {"noise": "K D Q R"}
    layouts |= {"query": "B T N D", "key": "B T K D", "positions": "B T"}
    return ops.spe.encode, arguments, layouts, ("B T N R", "B T K R")


def append_to_cache():
    """Returns a call that appends to a KV cache and drops the oldest positions."""

    def call(state, **new):
        both, missing = state.append(**new)
        return both.without_gaps().newest(8), missing

    state = kv_cache.KVCache.zeros(BATCH, 8, KV_HEADS, HEAD_DIM, VALUE_DIM)
    layout = kv_cache.KVCache.layout()
    return call, without("query") | {"state": state}, LAYOUTS | {"state": layout}, (layout, "B T")


def _squared(scores, log_decay):
    return scores**2 * jnp.exp(log_decay)


def cache_step():
    """Returns a call that attends to a KV cache with one token, and writes it."""

    def call(state, **token):
        return state.step(**token, weigh=_squared)

    def filled():
        state = kv_cache.KVCache.zeros(BATCH, 8, KV_HEADS, HEAD_DIM, VALUE_DIM)
        return state.append(**without("query"))[0].newest(8)

    layout = kv_cache.KVCache.layout()
    arguments = last(drawn()) | {"state": jax.jit(filled)()}
    return call, arguments, STEP | {"state": layout}, (STEP_OUT, layout, "B")


def feature_map():
    arguments = {"x": drawn()["query"]}
    return functools.partial(ops.symmetric_power, power=4), arguments, {"x": "B T N D"}, "B T N F"


OPS = {
    "attention": functools.partial(power, "attention"),
    "chunked": functools.partial(power, "chunked"),
    "recurrent": functools.partial(power, "recurrent"),
    "reference": functools.partial(power, "attention", implementation="reference"),
    "recurrent-reference": functools.partial(power, "recurrent", implementation="reference"),
    "plain-attention": functools.partial(plain, "attention"),
    "plain-chunked": functools.partial(plain, "chunked"),
    "step": functools.partial(power_step, 11),
    "step-that-folds": functools.partial(power_step, 2 * WINDOW - 1),
    "channel-gated": channel_gated,
    "channel-gated-step": channel_gated_step,
    "linear": linear,
    "linear-step": linear_step,
    "bidirectional": functools.partial(bidirectional, False),
    "bidirectional-documents": functools.partial(bidirectional, True),
    "softmax": softmax,
    "softmax-window": functools.partial(softmax, window=3),
    "expressive": expressive,
    "expressive-reference": functools.partial(expressive, implementation="reference"),
    "learned-positions": learned_positions,
    "positions": positions,
    "rope": rope,
    "lrpe": functools.partial(lrpe, "orthogonal", "householder"),
    "lrpe-complex": functools.partial(lrpe, "unitary", "fourier"),
    "lrpe-permutation": functools.partial(lrpe, "permutation", "odd_even"),
    "spe": spe,
    "kv_cache": append_to_cache,
    "kv_cache-step": cache_step,
    "feature-map": feature_map,
}
WAYS = (
    "Auto jit",
    "Auto eager",
    "Explicit jit",
    "Explicit eager",
    "Explicit without a mesh in scope",
    "Explicit jit without a mesh in scope",
    "shard_map jit",
    "shard_map eager",
    "shard_map jit check_vma=False",
    "shard_map jit gradient within",
)

# Both types of mesh axes; eager calls compile each of their operations. Without a mesh in scope a call differs only
# until it is lowered.
FEW = "Explicit jit", "shard_map jit", "Explicit lowered without a mesh in scope"
# Ops that together cover most loops and custom gradients, each by the ways that differ for it.
FAST = {
    "chunked": FEW,
    "step-that-folds": ("Explicit jit",),
    "softmax": FEW[1:],
    "kv_cache-step": ("Explicit jit",),
    "lrpe": FEW,
}


def spec_of(layout):
    return Spec(*(AXES.get(letter) for letter in layout.split()))


def outputs_and_gradients(f, arrays, *, backward=True):
    """Returns the outputs of f, and the gradients of a sum over them with respect to its float arguments."""
    leaves, tree = jax.tree.flatten(arrays)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(varied):
        merged = list(leaves)
        for i, x in zip(floats, varied):
            merged[i] = x
        out = f(**jax.tree.unflatten(tree, merged))
        # Positive and unequal weights, so that no gradient vanishes.
        total = sum((jnp.sin(x + 1) * (1 + i)).sum() for i, x in enumerate(_floats(out)))
        return total, out

    if not backward or not floats:
        return loss([leaves[i] for i in floats])[1], []
    gradients, out = jax.grad(loss, has_aux=True)([leaves[i] for i in floats])
    return out, gradients


def _floats(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def results(way, f, arrays, layouts, outputs):
    """Returns outputs and gradients of f for one way of running it; None if it is only lowered."""
    kind, *_ = way.split()
    axis_type = jax.sharding.AxisType["Explicit" if kind == "Explicit" else "Auto"]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    specs = jax.tree.map(spec_of, {name: layouts[name] for name in arrays})
    backward = "without" not in way
    maybe_jit = jax.jit if "jit" in way else lambda g: g
    if kind == "shard_map":
        out_specs = jax.tree.map(spec_of, outputs)
        if "within" in way:
            floats = [
                spec
                for spec, x in zip(jax.tree.leaves(specs), jax.tree.leaves(arrays), strict=True)
                if jnp.issubdtype(x.dtype, jnp.floating)
            ]

            def local(arrays):
                return outputs_and_gradients(f, arrays)

            mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(out_specs, floats))
            return jax.jit(mapped)(arrays)

        def call(**arrays):
            mapped = jax.shard_map(
                lambda arrays: f(**arrays),
                mesh=mesh,
                in_specs=(specs,),
                out_specs=out_specs,
                check_vma="check_vma=False" not in way,
            )
            return mapped(arrays)

        return maybe_jit(functools.partial(outputs_and_gradients, call))(arrays)
    arrays = jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), arrays, specs)
    if "lowered" in way:
        traced = jax.jit(lambda arrays: f(**arrays)).trace(arrays)
        traced.lower()
        for x, layout in zip(traced.jaxpr.out_avals, jax.tree.leaves(outputs), strict=True):
            assert tuple(x.sharding.spec) == tuple(spec_of(layout)), (x, layout)
        return None
    with jax.set_mesh(mesh) if backward else contextlib.nullcontext():
        actual = maybe_jit(functools.partial(outputs_and_gradients, f, backward=backward))(arrays)
    if kind == "Explicit":
        for x, layout in zip(jax.tree.leaves(actual[0]), jax.tree.leaves(outputs), strict=True):
            assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec_of(layout)), x.ndim), (x, layout)
    return actual


def check(name, ways):
    """Compares the op on a mesh of four devices with that on one, for each way of running it."""
    f, arrays, layouts, outputs = OPS[name]()
    expected = jax.jit(functools.partial(outputs_and_gradients, f))(arrays)
    for way in ways:
        if "within" in way and name in ("lrpe", "lrpe-complex"):
            continue  # the gradient of rates that all devices share is a sum over devices
        actual = results(way, f, arrays, layouts, outputs)
        if actual is None:
            continue
        needed = expected if actual[1] or not expected[1] else (expected[0], [])
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(needed), strict=True):
            assert cases.error(a, b) <= 1e-5, (name, way)


@pytest.mark.parametrize("name", FAST)
def test_sharded_arrays(name):
    check(name, FAST[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPS)
def test_every_kind_of_mesh(name):
    check(name, WAYS)
