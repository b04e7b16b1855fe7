"""Every op with small arguments, the axes of its arrays, and gradients of all of its floats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import ops
from sympow_jax.ops import documents, lrpe, rotary, spe
from tests.ops import cases

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, WINDOW = 4, 21, 4, 2, 4, 3, 4
LAYOUTS = {
    "query": "B T N D",
    "key": "B S K D",
    "value": "B S K E",
    "log_decay": "B S K",
    "segment_ids": "B S",
    "positions": "B T",
    "x": "B T N D",
}
STEP = {name: layout.replace(" T", "").replace(" S", "") for name, layout in LAYOUTS.items()}
OUT, STEP_OUT = "B T N E", "B N E"


def drawn(time=TIME, seed=0, leave_out=()):
    case = cases.Case(
        time=time, head_dim=HEAD_DIM, value_dim=VALUE_DIM, decay="gentle", segments="padded", group=2
    )
    arrays = cases.arrays(case, batch=BATCH, kv_heads=KV_HEADS, seed=seed)
    return {
        name: jnp.asarray(x, jnp.int32 if name == "segment_ids" else jnp.float32)
        for name, x in arrays.items()
        if name not in ("dout", *leave_out)
    }


def counted(x):
    return jnp.ones(x.shape[:2], jnp.int32).cumsum(1)


def per_channel(arrays):
    return arrays | {"log_decay": arrays["log_decay"][..., None] * (1 + arrays["value"] ** 2)}


def with_positions(arrays):
    return arrays | {"positions": counted(arrays["key"])}


def written(arrays):
    return arrays | {"delta": jax.nn.sigmoid(arrays["value"].sum(-1))}


def stateful(op, step, state_layout, prepare=lambda arrays: arrays, before=11, **layouts):
    """Returns an op from a state to a state, or its step if one is given, after some tokens."""
    call = functools.partial(op, return_state=True)
    state = jax.jit(call)(**prepare(drawn(before, seed=1)))[1]
    arguments = prepare(drawn())
    if step is None:
        layouts = LAYOUTS | layouts | {"initial_state": state_layout}
        return call, arguments | {"initial_state": state}, layouts, (OUT, state_layout)
    arguments = {name: x[:, -1:] if name == "positions" else x[:, -1] for name, x in arguments.items()}
    layouts = STEP | {name: layout.replace(" S", "") for name, layout in layouts.items()}
    layouts |= {"state": state_layout, "positions": "B T"}
    return step, arguments | {"state": state}, layouts, (STEP_OUT, state_layout)


def power(form, step=None, **options):
    size = {} if form == "recurrent" else {"chunk_size": 8}
    before = options.pop("before", 11)
    op = functools.partial(ops.power_attention, form=form, exact_window=WINDOW, **size, **options)
    return stateful(op, step, ops.PowerState.layout(), before=before)


def channel_gated(step=None):
    layout = ops.PowerState.layout(per_channel=True)
    op = functools.partial(ops.power_attention, exact_window=WINDOW)
    return stateful(op, step, layout, per_channel, log_decay="B S K E")


def delta(step=None):
    op = functools.partial(ops.delta_attention, chunk_size=8)
    return stateful(op, step, ops.DeltaState.layout(), written, delta="B S K")


def stateless_delta():
    arrays = written(drawn())
    return functools.partial(ops.delta_attention, form="attention"), arrays, LAYOUTS | {"delta": "B S K"}, OUT


def rotated(f, positions, **arguments):
    def rotate(features):
        return rotary.rotate(features, rotary.rope_angles(positions, features.shape[-1]))

    return f(**arguments, rotate=rotate)


def linear(step=None):
    op = functools.partial(rotated, ops.linear_attention, form="chunked", exact_window=WINDOW)
    step = None if step is None else functools.partial(rotated, step)
    return stateful(op, step, ops.LinearState.layout(separate=True), with_positions)


def stateless(op, leave_out=(), **options):
    return functools.partial(op, **options), drawn(leave_out=leave_out), LAYOUTS, OUT


def learned_positions():
    def call(rate, segment_ids, state):
        return rotary.learned_angles(rate, HEAD_DIM, segment_ids=segment_ids, initial_state=state)

    arguments = {"rate": jnp.abs(drawn()["log_decay"]), "segment_ids": drawn()["segment_ids"]}
    layouts = {"rate": "B T K", "segment_ids": "B T", "state": rotary.RotaryState.layout()}
    arguments["state"] = rotary.RotaryState.zeros(BATCH, KV_HEADS)
    return call, arguments, layouts, ("B T K D", rotary.RotaryState.layout())


def positions():
    arguments = {"segment_ids": drawn()["segment_ids"], "state": documents.PositionState.zeros(BATCH)}
    layouts = {"segment_ids": "B T", "state": documents.PositionState.layout()}
    return documents.positions, arguments, layouts, ("B T", documents.PositionState.layout())


def of_positions(op, outputs="B T N D", **options):
    x = drawn()["query"]
    return functools.partial(op, **options), {"x": x, "positions": counted(x)}, LAYOUTS, outputs


def encoded(core, basis):
    call, arguments, layouts, outputs = of_positions(lrpe.encode, core=core, basis=basis)
    if core != "permutation":
        arguments["rates"] = jnp.asarray(lrpe.rates(core, HEAD_DIM, kind="a"), jnp.float32)
    return call, arguments, layouts | {"rates": "R"}, outputs


def stochastic():
    random = np.random.default_rng(0)
    names = ("frequencies", "phases", "gains")
    arguments = {name: random.random((KV_HEADS, HEAD_DIM, 2)) for name in names}
    arguments["noise"] = random.normal(size=(KV_HEADS, HEAD_DIM, 4, 5))
    arguments = {name: jnp.asarray(x, jnp.float32) for name, x in arguments.items()}
    arguments |= with_positions(drawn(leave_out=("value", "log_decay", "segment_ids")))
    layouts = LAYOUTS | dict.fromkeys(names, "K D Q") | {"noise": "K D Q R", "key": "B T K D"}
    return spe.encode, arguments, layouts, ("B T N R", "B T K R")


def append_to_cache():
    def call(state, **new):
        both, missing = state.append(**new)
        return both.without_gaps().newest(8), missing

    state = ops.KVCache.zeros(BATCH, 8, KV_HEADS, HEAD_DIM, VALUE_DIM)
    arguments = drawn(leave_out=("query",)) | {"state": state}
    return call, arguments, LAYOUTS | {"state": ops.KVCache.layout()}, (ops.KVCache.layout(), "B T")


def squares(scores, log_decay):
    return scores**2 * jnp.exp(log_decay)


def cache_step():
    def call(state, **token):
        return state.step(**token, weigh=squares)

    def filled():
        state = ops.KVCache.zeros(BATCH, 8, KV_HEADS, HEAD_DIM, VALUE_DIM)
        return state.append(**drawn(leave_out=("query",)))[0].newest(8)

    layout = ops.KVCache.layout()
    arguments = {name: x[:, -1] for name, x in drawn().items()} | {"state": jax.jit(filled)()}
    return call, arguments, STEP | {"state": layout}, (STEP_OUT, layout, "B")


def feature_map():
    return functools.partial(ops.symmetric_power, power=4), {"x": drawn()["query"]}, LAYOUTS, "B T N F"


call = functools.partial
NO_DECAY, NEITHER = ("log_decay",), ("log_decay", "segment_ids")
# Functions that return an op, its arguments by name, their layouts, and those of its outputs.
OPS = {
    "attention": call(power, "attention"),
    "chunked": call(power, "chunked"),
    "recurrent": call(power, "recurrent"),
    "reference": call(power, "attention", implementation="reference"),
    # Without states, decays and documents.
    "plain-attention": call(stateless, ops.power_attention, NEITHER, form="attention", chunk_size=8),
    "plain-chunked": call(
        stateless, ops.power_attention, NEITHER, form="chunked", chunk_size=8, exact_window=WINDOW
    ),
    "step": call(power, "chunked", ops.power_attention_step),
    # For some rows the window is full.
    "step-that-folds": call(power, "chunked", ops.power_attention_step, before=2 * WINDOW - 1),
    "channel-gated": channel_gated,
    "channel-gated-step": call(channel_gated, ops.power_attention_step),
    "delta": delta,
    "delta-step": call(delta, ops.delta_attention_step),
    "delta-attention": stateless_delta,
    "linear": linear,
    "linear-step": call(linear, ops.linear_attention_step),
    "bidirectional": call(stateless, ops.linear_attention, NEITHER, causal=False, chunk_size=8),
    "bidirectional-documents": call(stateless, ops.linear_attention, NO_DECAY, causal=False, chunk_size=8),
    "softmax": call(stateless, ops.softmax_attention, block_size=4),
    "softmax-window": call(stateless, ops.softmax_attention, block_size=4, window=3),
    "expressive": call(stateless, ops.expressive_attention, block_size=4),
    "learned-positions": learned_positions,
    "positions": positions,
    "rope": call(of_positions, rotary.rope),
    "lrpe": call(encoded, "orthogonal", "householder"),
    "lrpe-complex": call(encoded, "unitary", "fourier"),
    "lrpe-permutation": call(encoded, "permutation", "odd_even"),
    "spe": stochastic,
    "kv_cache": append_to_cache,
    "kv_cache-step": cache_step,
    "feature-map": feature_map,
}
# States are computed once.
OPS = {name: functools.cache(make) for name, make in OPS.items()}


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def outputs_and_gradients(f, arrays, *, backward=True):
    leaves, tree = jax.tree.flatten(arrays)
    floats = [i for i, x in enumerate(leaves) if is_float(x)]

    def loss(varied):
        merged = list(leaves)
        for i, x in zip(floats, varied):
            merged[i] = x
        out = f(**jax.tree.unflatten(tree, merged))
        # Positive and unequal weights, so that no gradient vanishes.
        float_outputs = [x for x in jax.tree.leaves(out) if is_float(x)]
        sums = [(jnp.sin(x + 1) * (1 + i)).sum(dtype=jnp.float32) for i, x in enumerate(float_outputs)]
        return sum(sums), out

    if not backward or not floats:
        return loss([leaves[i] for i in floats])[1], []
    gradients, out = jax.grad(loss, has_aux=True)([leaves[i] for i in floats])
    return out, gradients
