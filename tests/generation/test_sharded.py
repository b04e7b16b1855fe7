"""Tests of generation over devices: the tokens of one device, from states that are sharded."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, generation, models
from sympow_jax.layers import partitioning
from sympow_jax.layers.attention import memory
from sympow_jax.training import sharding
from tests import devices, marked
from tests.generation import small

D, T = "data", "tensor"
LENGTHS = (21, 3, 11, 9)


def on_mesh(model: models.DecoderLM, sizes: dict) -> models.DecoderLM:
    with devices.seen(math.prod(sizes.values())):
        mesh = sharding.mesh_of(config.ShardingConfig(**sizes), jax.devices())
    specs = models.parameter_specs(model)
    graph, params = nnx.split(model)

    def place(path, x):
        spec = partitioning.fit(specs[tuple(key.key for key in path)], x.shape, mesh.shape)
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(place, nnx.to_pure_dict(params)))


def spec(x: jax.Array) -> list:
    axes = list(x.sharding.spec)
    while axes and axes[-1] is None:
        axes.pop()
    return axes


def axes(rows, heads):
    """Returns the axes that should shard the arrays of a cache, then those of a recurrent state."""
    slots = [rows, None, heads] if heads else [rows] if rows else []
    state = [rows, heads] if heads else [rows] if rows else []
    row = [rows] if rows else []
    cache = dict.fromkeys(("key", "value", "log_decay"), state)
    cache |= dict.fromkeys(("segment_ids", "next", "segment", "complete"), row)
    window = dict.fromkeys(("keys", "values", "log_decays"), slots)
    recurrent = dict.fromkeys(("kv", "norm"), state) | window | dict.fromkeys(("length", "segment"), row)
    return (
        {f".memory.{name}": value for name, value in cache.items()},
        {f".memory.{name}": value for name, value in recurrent.items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "kv_heads", "rows", "sizes", "row_axis", "head_axis"),
    [
        ("conformal_paper", 2, 4, {D: 4, T: 2}, D, T),
        ("softmax", 4, 4, {D: 2, T: 4}, D, T),
        # Axes that do not divide: every device has all rows, and all heads.
        ("conformal_paper", 2, 3, {D: 2, T: 4}, None, None),
    ],
)
def test_tokens_are_those_of_one_device(preset, kv_heads, rows, sizes, row_axis, head_axis):
    """Rows and key/value heads of states are sharded over these axes."""
    one = small.model(preset)
    if one.config.kv_heads != kv_heads:
        one = models.DecoderLM(dataclasses.replace(one.config, kv_heads=kv_heads), rngs=0)
    model = on_mesh(one, sizes)
    program = generation.Program(model)
    prompts = [row[:length].tolist() for row, length in zip(small.tokens(rows, 40), LENGTHS)]
    sampling = generation.Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1)
    options = {"max_tokens": 24, "sampling": sampling, "samples": 2, "block": 8}
    expected, actual = (
        np.concatenate(list(generation.generate(x, prompts, **options)), axis=1) for x in (one, model)
    )
    np.testing.assert_array_equal(actual, expected)
    assert len(np.unique(actual)) > 10
    # A KV cache at first, and a recurrent state once it is folded.
    states = [program.init_state(rows, max_length=24)]
    lengths = np.array(LENGTHS[:rows])
    logits, state = program.prefill(small.tokens(rows, 21), lengths, initial_state=states[0])
    draft = np.stack([logits.argmax(-1), np.full(rows, -1)], axis=1)
    accepted, _, verified = generation.verify(program, state, logits, draft, np.full(rows, 2))
    np.testing.assert_array_equal(accepted, np.ones(rows))
    states += [state, program.decode(state, logits.argmax(-1))[1], verified]
    if None not in model.kv_cache_lengths:
        states.append(program.fold(state))
    cache, recurrent = axes(row_axis, head_axis)
    for state, wanted in zip(states, [*[cache] * 4, recurrent]):
        leaves = jax.tree_util.tree_leaves_with_path(state)
        specs = {jax.tree_util.keystr(path[2:]): spec(x) for path, x in leaves}
        assert {name: specs[name] for name in wanted if name in specs} == wanted
        if ".position.whole" in specs:
            assert specs[".position.whole"] == [axis for axis in (row_axis, head_axis) if axis]


@marked.cases("preset", ["conformal"], slow=["sympow", "linear_lrpe", "softmax", "sympow_gated_window"])
def test_prefill_with_time_over_devices(preset, monkeypatch):
    """The state after a prompt, and after another, is that of one device; a KV cache needs all of the time."""
    names, extend, cached = set(), memory.extend, preset in ("softmax", "sympow_gated_window")

    def recorded(*arguments, axis_name=None, **options):
        names.add(axis_name)
        return extend(*arguments, axis_name=axis_name, **options)

    monkeypatch.setattr(memory, "extend", recorded)
    one, rows = small.model(preset), small.tokens(2, 509)
    found = {}
    for name, model in (("one", one), ("many", on_mesh(one, {"context": 4, T: 2}))):
        program = generation.Program(model)
        _, state = program.prefill(rows[:, :256], np.array([256, 130]), max_length=1024)
        state = state if preset == "softmax" else program.fold(state)
        logits, state = program.prefill(rows[:, 256:], np.array([200, 253]), initial_state=state)
        found[name] = [logits, program.decode(state, rows[:, 0])[0]]
        # The slots of a cache depend on the length of rows.
        found[name] += [] if cached else jax.tree.leaves(state)
    assert names == ({None} if cached else {None, "context"})
    for x, y in zip(*found.values(), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * max(1, np.abs(x).max(initial=0)))


def test_rows_are_moved_on_every_kind_of_mesh():
    tree = {"logits": np.arange(32, dtype=np.float32).reshape(4, 8), "position": np.arange(4, dtype=np.int32)}
    calls = {
        "fork": lambda x: generation.fork(x, 2),
        "take": lambda x: generation.take(x, 2),
        "take traced": lambda x: generation.take(x, jnp.int32(2)),
        "insert": lambda x: generation.insert(x, 2, generation.take(x, 1)),
        "insert from the host": lambda x: generation.insert(x, 2, jax.tree.map(lambda y: y[1:2], tree)),
    }
    types = {
        "fork": ["float32[8@data,8@tensor]", "int32[8@data]"],
        "take": ["float32[1,8@tensor]", "int32[1]"],
        "insert": ["float32[4@data,8@tensor]", "int32[4@data]"],
    }
    shardings = {"logits": jax.P("data", "tensor"), "position": jax.P("data")}
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
        placed = {
            name: jax.device_put(x, jax.NamedSharding(mesh, shardings[name])) for name, x in tree.items()
        }
        for name, call in calls.items():
            for scope, jitted in ((contextlib.nullcontext(), False), (jax.set_mesh(mesh), True)):
                with scope:
                    actual = (jax.jit(call) if jitted else call)(placed)
                jax.tree.map(np.testing.assert_array_equal, actual, call(tree))
                if kind is jax.sharding.AxisType.Explicit:
                    assert [str(jax.typeof(x)) for x in actual.values()] == types[name.split()[0]]
