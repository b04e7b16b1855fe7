"""Tests of states of a running batch: forked, inserted, extracted, saved and restored."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from sympow_jax import config, generation
from tests.generation import small


@pytest.fixture(
    scope="module",
    params=[
        ("conformal_paper", None),
        ("softmax", 200),
        ("sliding_window", None),
        ("sympow_gated_window", None),
    ],
    ids=["recurrent", "kv_cache", "window", "window_and_state"],
)
def prefilled(request):
    preset, max_length = request.param
    model = small.model(preset)
    return model, filled(model, 3, max_length)


def filled(model, rows, max_length=None):
    random = np.random.default_rng(0)

    def draw(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(-random.random(x.shape), x.dtype)  # decays are negative
        return jnp.asarray(random.integers(0, 2, x.shape), x.dtype)

    return jax.tree.map(draw, generation.Program(model).init_state(rows, max_length=max_length))


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_fork_repeats_each_row(prefilled):
    _, state = prefilled
    forked = generation.fork(state, 2)
    for slot in range(3):
        for copy in (2 * slot, 2 * slot + 1):
            same(generation.take(forked, copy), generation.take(state, slot))


def test_a_slot_changes_alone(prefilled):
    model, state = prefilled
    program = generation.Program(model)
    capacity = 200 if None in model.kv_cache_lengths else None
    empty = program.init_state(3, max_length=capacity)
    changed = jax.jit(generation.insert)(empty, 1, generation.take(state, 2))
    same(generation.take(changed, 1), generation.take(state, 2))
    for slot in (0, 2):
        same(generation.take(changed, slot), generation.take(empty, slot))
    # A row continues in a slot as it would have in any other slot.
    actual, _ = program.decode(changed, np.array([3, 4, 5]))
    expected, _ = program.decode(state, np.array([0, 0, 4]))
    np.testing.assert_allclose(actual[1], expected[2], rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_fit():
    state = filled(small.model("softmax"), 3, 200)
    for slot in (-1, 3):
        with pytest.raises(ValueError, match=rf"slot is {slot}; the batch has slots 0 to 2"):
            generation.take(state, slot)
        with pytest.raises(ValueError, match=rf"slot is {slot}"):
            generation.insert(state, slot, generation.take(state, 0))
    other = generation.Program(small.model("softmax")).init_state(1, max_length=201)
    for row in (other, state):
        with pytest.raises(ValueError, match="does not fit the batch"):
            generation.insert(state, 0, row)
    with pytest.raises(ValueError, match="copies is 0"):
        generation.fork(state, 0)


def test_saved_and_restored(prefilled, tmp_path):
    model, state = prefilled
    generation.save_state(tmp_path / "context", model, state)
    restored = generation.restore_state(tmp_path / "context", model)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    same(restored, state)
    assert [path.name for path in tmp_path.iterdir()] == ["context"]


def test_bfloat16_keys_are_saved_and_restored(tmp_path):
    model = small.model("softmax", dtype="bfloat16")
    state = generation.Program(model).init_state(2, max_length=5)
    # NaN of any kind is kept to the bit.
    nan = jax.lax.bitcast_convert_type(np.uint16(0x7FC1), "bfloat16")
    state = jax.tree.map(
        lambda x: x.at[..., 0].set(nan) if x.dtype == "bfloat16" else jnp.ones_like(x), state
    )
    assert state.layers[0].memory.key.dtype == "bfloat16"
    generation.save_state(tmp_path / "context", model, state)
    restored = generation.restore_state(tmp_path / "context", model)
    assert [x.tobytes() for x in map(np.asarray, jax.tree.leaves(restored))] == [
        x.tobytes() for x in map(np.asarray, jax.tree.leaves(state))
    ]
    assert restored.layers[0].memory.key.dtype == "bfloat16"


def test_recurrent_states_in_bfloat16_are_saved_and_restored(tmp_path):
    model = small.model("conformal_paper", state_dtype="bfloat16")
    program = generation.Program(model)
    state = filled(model, 2)
    assert state.layers[0].memory.kv.dtype == "bfloat16"
    generation.save_state(tmp_path / "context", model, state)
    same(generation.restore_state(tmp_path / "context", model), state)
    # A KV cache is used while it is smaller, and is folded into a state of this dtype.
    assert model.kv_cache_lengths < small.model("conformal_paper").kv_cache_lengths
    folded = jax.eval_shape(program.fold, program.init_state(2, max_length=9))
    assert folded.layers[0].memory.kv.dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"another model: state_dtype is 'bfloat16' there and 'float32'"):
        generation.restore_state(tmp_path / "context", small.model("conformal_paper"))


def test_a_state_of_another_model(prefilled, tmp_path):
    model, state = prefilled
    path = tmp_path / "context"
    generation.save_state(path, model, state)
    preset = config.preset_name(model.config.attention)
    with pytest.raises(ValueError, match="another model: its settings are those of this one, its param"):
        generation.restore_state(path, small.model(preset, seed=1))
    with pytest.raises(ValueError, match=r"another model: attention.exact_window is 4 there and 8 here"):
        generation.restore_state(path, small.model(preset, exact_window=8))
    with pytest.raises(ValueError, match="the state is a tuple"):
        generation.save_state(path, model, ())
    with pytest.raises(ValueError, match="the state has 1 layers and the model 2"):
        small.model(preset, layers=2).fold(state)
    with pytest.raises(ValueError, match="the state has 1 layers and the model 2"):
        generation.save_state(path, small.model(preset, layers=2), state)


@pytest.mark.robust
def test_a_damaged_state(tmp_path):
    model, path = small.model("softmax"), tmp_path / "context"
    state = filled(model, 3, 200)
    generation.save_state(path, model, state)
    whole, arrays = path.read_bytes(), safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, framework="np") as file:
        metadata = file.metadata()
    changes = {
        "rows": [10**30, 2**31 - 1, "x", None, 1.0, 0],
        "model": [[], None],
        "capacities": [[], "yes", ["x"], [2**63], [None], {}],
    }
    changed = [{key: json.dumps(value)} for key, values in changes.items() for value in values]
    changed += [{"model": text} for text in ("{", "[" * 10**5 + "]" * 10**5)]
    wrong = [safetensors.numpy.save(arrays, metadata | change) for change in changed]
    name = min(arrays)
    for array in (arrays[name][..., None], arrays[name].astype("int8")):
        wrong.append(safetensors.numpy.save(arrays | {name: array}, metadata))
    wrong += [safetensors.numpy.save(arrays), safetensors.numpy.save({}, metadata)]
    for content in (*wrong, whole[:-100], whole[:5], b"PK\3\4"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a saved state, or is damaged"):
            generation.restore_state(path, model)
    with pytest.raises(OSError, match="nothing"):
        generation.restore_state(tmp_path / "nothing", model)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device"):
        generation.restore_state(tmp_path / "pipe", model)
