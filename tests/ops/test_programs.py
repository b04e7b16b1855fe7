"""Tests of the programs of every op: promotion, export, serialization, calls without `jax.jit`, memory and states."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import documents, rotary
from tests.ops import every_op

# Those that share most of their code with another of them.
RARE = """
attention channel-gated recurrent linear reference plain-attention plain-chunked step
channel-gated-step linear-step bidirectional softmax-window kv_cache lrpe-complex
positions rope feature-map
"""
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in RARE.split() else ()) for name in every_op.OPS]


def argument_specs(name, dtype):
    """Returns the op, and its arguments as shapes of a symbolic batch, its vectors in the dtype."""
    f, arrays, layouts, _ = every_op.OPS[name]()
    (batch,) = jax.export.symbolic_shape("b")

    def spec(path, x, layout):
        shape = (batch, *x.shape[1:]) if layout.startswith("B") else x.shape
        vectors = path[0].key in ("query", "key", "value", "x")
        return jax.ShapeDtypeStruct(shape, dtype if vectors else x.dtype)

    return f, jax.tree.map_with_path(spec, arrays, {name: layouts[name] for name in arrays})


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_need_no_implicit_promotion_and_are_exported_for_any_batch(name, dtype):
    """Export allows only stable operations of XLA."""
    f, specs = argument_specs(name, dtype)
    program = functools.partial(every_op.outputs_and_gradients, f)
    jax.export.export(jax.jit(program), platforms=("cpu", "cuda", "tpu"))(specs)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(program, specs)


@pytest.mark.parametrize(
    "op", [ops.power_attention, ops.linear_attention, ops.softmax_attention, ops.expressive_attention]
)
def test_the_length_may_not_be_symbolic(op):
    x = jax.ShapeDtypeStruct((2, *jax.export.symbolic_shape("t"), 2, 4), jnp.float32)
    with pytest.raises(ValueError, match="only the batch may be symbolic"):
        jax.export.export(jax.jit(op))(x, x, x)


def test_a_step_with_its_state_can_be_serialized():
    pytest.importorskip("flatbuffers")
    state, token = ops.PowerState.zeros(3, 1, 4, 4, power=2, exact_window=2), jnp.ones((3, 1, 4))
    step = jax.jit(ops.power_attention_step)
    restored = jax.export.deserialize(jax.export.export(step)(token, token, token, state).serialize())
    jax.tree.map(
        np.testing.assert_array_equal,
        restored.call(token, token, token, state),
        step(token, token, token, state),
    )
    for other in (
        ops.LinearState.zeros(3, 1, 4, 4, exact_window=2),
        ops.KVCache.zeros(3, 3, 1, 4, 4),
        rotary.RotaryState.zeros(3, 1),
        documents.PositionState.zeros(3),
    ):
        same = jax.export.export(jax.jit(lambda state: state))(other).serialize()
        jax.tree.map(np.testing.assert_array_equal, jax.export.deserialize(same).call(other), other)


@pytest.mark.parametrize(
    ("name", "backward"),
    [("plain-chunked", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in every_op.OPS)],
)
def test_each_argument_may_be_the_one_that_is_mapped(name, backward):
    f, arguments, _, _ = every_op.OPS[name]()
    program = jax.jit(lambda arguments: every_op.outputs_and_gradients(f, arguments, backward=backward))
    alone = program(arguments)
    for argument, value in arguments.items():
        # The second of two elements is the argument itself, the first one differs from it in its floats.
        both = jax.tree.map(lambda x: jnp.stack([x / 2 if every_op.is_float(x) else x, x]), value)
        axes = {name: 0 if name == argument else None for name in arguments}
        mapped = jax.vmap(program, (axes,))(arguments | {argument: both})
        for pair, expected in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
            largest = np.abs(expected).max(initial=0)
            np.testing.assert_allclose(pair[1], expected, rtol=1e-4, atol=1e-4 * largest)


@pytest.mark.parametrize(
    "name",
    [
        *("step-that-folds", "chunked"),
        pytest.param("linear-step", marks=pytest.mark.slow),
        pytest.param("kv_cache-step", marks=pytest.mark.slow),
    ],
)
def test_a_donated_state_gives_the_same_results_in_its_own_memory(name):
    f, arguments, _, _ = every_op.OPS[name]()
    state = "initial_state" if name == "chunked" else "state"
    expected = jax.jit(f)(**arguments)
    donated = jax.tree.map(jnp.copy, arguments[state])
    call = jax.jit(f, donate_argnames=state)
    program = call.lower(**arguments | {state: donated}).compile()
    # Small fields may be computed from others and need not be aliased.
    assert program.memory_analysis().alias_size_in_bytes > donated.nbytes / 2
    results = call(**arguments | {state: donated})
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    assert any(x.is_deleted() for x in jax.tree.leaves(donated))


_events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **_: _events.append(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_second_call_outside_jit_compiles_nothing(name):
    f, arguments, _, _ = every_op.OPS[name]()
    jax.block_until_ready(f(**arguments))
    _events.clear()
    jax.block_until_ready(f(**arguments))
    assert not [event for event in _events if "compile" in event]


@pytest.mark.parametrize(
    ("state", "names", "step", "operations"),
    [
        (
            ops.PowerState.zeros(1, 2, 16, 12, power=2, exact_window=4),
            ("kv",),
            lambda state, q, k, v, decay: ops.power_attention_step(q, k, v, state, log_decay=decay),
            "copy",
        ),
        *(
            (
                ops.KVCache.zeros(batch, 500, 2, 16, 12),
                ("key", "value"),
                lambda cache, *token: cache.step(*token, None, weigh=every_op.squares)[:2],
                "copy|transpose|concatenate|select",
            )
            for batch in (1, 3)
        ),
    ],
    ids=["power", "cache", "cache, batch 3"],
)
def test_a_loop_of_steps_does_not_copy_the_state(state, names, step, operations):
    batch = jax.tree.leaves(state)[0].shape[0]
    token = [jnp.ones((batch, *sizes)) for sizes in ((4, 16), (2, 16), (2, 12), (2,))]

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state):
        def advance(state, _):
            out, state = step(state, *token)
            return state, out

        return jax.lax.scan(advance, state, length=32)

    program = loop.lower(state).compile().as_text()
    for name in names:
        shape = re.escape(f"f32[{','.join(map(str, getattr(state, name).shape))}]")
        assert re.search(shape, program)
        assert not re.findall(rf"= {shape}\S* (?:{operations})\(", program)


def memory(op, length, width, channels=False, **options):
    x = jax.ShapeDtypeStruct((1, length, 1, width), jnp.float32)
    log_decay = x if channels else jax.ShapeDtypeStruct((1, length, 1), jnp.float32)

    def loss(query, key, value, log_decay):
        return op(query, key, value, log_decay=log_decay, **options).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(x, x, x, log_decay).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("form", ["chunked", pytest.param("attention", marks=pytest.mark.slow)])
def test_memory_of_power_attention_is_linear_in_time(form):
    """Neither form holds T x T scores. The backward pass of the chunked form holds no states or features."""
    short, long = (memory(ops.power_attention, length, 32, form=form) for length in (4096, 16_384))
    # In multiples of one token's query, key, value and output, 512 bytes.
    assert (long - short) / (16_384 - 4096) <= 12 * 512
    assert short <= 4096 * 12 * 512 + 32 * 2**20


@pytest.mark.parametrize(
    ("op", "length", "options", "limit"),
    [
        # Arguments, copies and gradients of 2 MiB each, states and windows; one T x T array would be 16 GiB.
        pytest.param(ops.power_attention, 2**16, {"channels": True}, 64 * 2**20, marks=pytest.mark.slow),
        # One block's pairs are 1/64 of all of them; 1/4096 in both directions.
        pytest.param(ops.softmax_attention, 4096, {"block_size": 64}, 4096**2, marks=pytest.mark.slow),
        (ops.expressive_attention, 4096, {"block_size": 64}, 4096**2 / 8),
    ],
)
def test_memory_of_other_attention_is_linear_in_time(op, length, options, limit):
    assert memory(op, length, 8, **options) <= limit


def test_chunked_form_scatters_nothing():
    x = jax.ShapeDtypeStruct((1, 512, 1, 32), jnp.float32)

    def loss(query, key, value):
        return ops.power_attention(query, key, value, form="chunked").sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile().as_text()
    assert "while(" in program
    assert " scatter(" not in program


@pytest.mark.parametrize(
    ("op", "options"),
    [
        (ops.power_attention, {"form": "attention"}),
        (ops.power_attention, {"form": "chunked"}),
        (ops.softmax_attention, {"window": 64}),
        (ops.expressive_attention, {"scale": 1.0}),
    ],
)
def test_results_that_a_checkpoint_policy_names_are_not_computed_again(op, options):
    def products(policy):
        """Returns the number of matrix products in the program of both passes; False means no checkpoint."""

        def loss(query, key, value):
            # Squared, so that the backward pass reads the output, as that of a layer does.
            return jnp.square(op(query, key, value, **options)).sum()

        loss = loss if policy is False else jax.checkpoint(loss, policy=policy)
        x = jax.ShapeDtypeStruct((1, 512, 2, 16), jnp.float32)
        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)).count("dot_general[")

    names, keep = (
        ("power_attention_out", "power_attention_states"),
        jax.checkpoint_policies.save_only_these_names,
    )
    once = products(False)
    assert products(keep(*names)) == once
    # Without the final state, the state is updated with the tokens again, one product, but not queried.
    assert products(keep(names[0])) == once + (options == {"form": "chunked"})
    assert products(None) > once + 1


@pytest.mark.parametrize("return_state", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_window_longer_than_the_sequence_costs_the_same(return_state):
    x = jax.ShapeDtypeStruct((1, 20, 2, 4), jnp.float32)

    def temporaries(exact_window):
        def loss(x):
            options = {"exact_window": exact_window, "form": "chunked", "return_state": return_state}
            out = ops.power_attention(x, x, x, **options)
            return sum(leaf.sum() for leaf in jax.tree.leaves(out) if leaf.dtype == jnp.float32)

        return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes

    slots = 2 * (20_000 - 20) * 2 * (4 + 4 + 1) * 4 if return_state else 0
    assert temporaries(20_000) <= temporaries(20) + 4 * slots + 1024
