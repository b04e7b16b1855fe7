"""Tests of states of a running batch: forked, inserted, extracted, saved and restored."""

import io
import json
import os
import tracemalloc
import warnings
import zipfile

import jax
import numpy as np
import pytest

from sympow_jax import config, generation
from tests.generation import small


@pytest.fixture(
    scope="module",
    params=[("conformal", None), ("softmax", 200), ("sliding_window", None)],
    ids=["recurrent", "kv_cache", "window"],
)
def prefilled(request):
    preset, max_length = request.param
    return small.model(preset), small.prefilled(preset, max_length)[1]


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_fork_repeats_each_row(prefilled):
    _, state = prefilled
    forked = generation.fork(state, 2)
    for slot in range(3):
        for copy in (2 * slot, 2 * slot + 1):
            same(generation.take(forked, copy), generation.take(state, slot))
    with pytest.raises(ValueError, match="copies is 0"):
        generation.fork(state, 0)


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


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_outside_the_batch(prefilled, slot):
    _, state = prefilled
    with pytest.raises(ValueError, match=rf"slot is {slot}; the batch has slots 0 to 2"):
        generation.take(state, slot)
    with pytest.raises(ValueError, match=rf"slot is {slot}"):
        generation.insert(state, slot, generation.take(state, 0))


def test_a_row_that_does_not_fit(prefilled):
    _, state = prefilled
    other = generation.Program(small.model("softmax")).init_state(1, max_length=201)
    with pytest.raises(ValueError, match="does not fit the batch"):
        generation.insert(state, 0, other)
    with pytest.raises(ValueError, match="does not fit the batch"):
        generation.insert(state, 0, state)


def test_saved_and_restored(prefilled, tmp_path):
    model, state = prefilled
    generation.save_state(tmp_path / "context", model, state)
    restored = generation.restore_state(tmp_path / "context", model)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    same(restored, state)
    assert [path.name for path in tmp_path.iterdir()] == ["context"]


def test_bfloat16_keys_are_saved_and_restored(tmp_path):
    model = small.model("softmax", dtype="bfloat16")
    state = jax.tree.map(lambda x: x + x.dtype.type(1), generation.Program(model).init_state(2, max_length=5))
    assert state.layers[0].memory.key.dtype == "bfloat16"
    generation.save_state(tmp_path / "context", model, state)
    restored = generation.restore_state(tmp_path / "context", model)
    assert restored.layers[0].memory.key.dtype == "bfloat16"
    same(restored, state)


def test_recurrent_states_in_bfloat16_are_saved_and_restored(tmp_path):
    model = small.model("conformal", state_dtype="bfloat16")
    program = generation.Program(model)
    state = program.prefill(small.tokens(2, 21), np.array([21, 9]))[1]
    assert state.layers[0].memory.kv.dtype == "bfloat16"
    generation.save_state(tmp_path / "context", model, state)
    same(generation.restore_state(tmp_path / "context", model), state)
    # A KV cache is used while it is smaller, and is folded into a state of this dtype.
    assert model.kv_cache_lengths < small.model("conformal").kv_cache_lengths
    cache = program.prefill(small.tokens(2, 9), np.array([9, 5]), max_length=9)[1]
    assert program.fold(cache).layers[0].memory.kv.dtype == "bfloat16"
    with pytest.raises(
        ValueError, match=r"another model: state_dtype is 'bfloat16' there and 'float32' here"
    ):
        generation.restore_state(tmp_path / "context", small.model("conformal"))


def test_a_state_of_an_earlier_version(prefilled, tmp_path):
    """Settings that its file lacks have their defaults; KV caches were in order of time, with slots before heads."""
    model, state = prefilled
    path = tmp_path / "context"
    generation.save_state(path, model, state)
    with np.load(path) as file:
        arrays = dict(file.items())
    header = json.loads(str(arrays["header"]))
    for name in (
        "biases",
        "norm_epsilon",
        "mlp_width",
        "tied_head",
        "attention.qk_norm",
        "attention.rope.base",
    ):
        del header["model"][name]
    del header["format"]
    for name in [name for name in arrays if name.endswith(".memory.next")]:
        assert not arrays.pop(name).any()
        for array in ("key", "value", "log_decay"):
            slots = name.replace("next", array)
            arrays[slots] = np.ascontiguousarray(np.swapaxes(arrays[slots], 1, 2))
    with path.open("wb") as opened:
        np.savez(opened, **(arrays | {"header": np.array(json.dumps(header))}))
    same(generation.restore_state(path, model), state)


def test_a_state_that_is_a_pipe(prefilled, tmp_path):
    model, _ = prefilled
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device"):
        generation.restore_state(tmp_path / "pipe", model)


def test_a_state_of_another_model(prefilled, tmp_path):
    model, state = prefilled
    path = tmp_path / "context"
    generation.save_state(path, model, state)
    preset = config.preset_name(model.config.attention)
    with pytest.raises(ValueError, match="another model: its settings are those of this one, its param"):
        generation.restore_state(path, small.model(preset, seed=1))
    with pytest.raises(ValueError, match=r"another model: attention.exact_window is 4 there and 8 here"):
        generation.restore_state(path, small.model(preset, exact_window=8))
    with pytest.raises(ValueError, match="of another model"):
        generation.save_state(path, small.model(preset, layers=2), state)
    whole = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file.items())
    header = json.loads(str(arrays["header"]))
    headers = (
        {"rows": 10**30},
        {"rows": "x"},
        {"capacity": 2**63},
        {"model": []},
        {"rows": None},
        {"rows": 1.0},
        {"format": 3},
    )
    headers += ({"rows": True}, {"kv_cache": []}, {"kv_cache": "yes"}, {"kv_cache": [1, 0]}, {"kv_cache": {}})
    texts = [json.dumps(header | changes) for changes in headers]
    for text in (*texts, "{}", "[" * 1000 + "]" * 1000, '{"model": ' * 100_000 + "0" + "}" * 100_000):
        with path.open("wb") as opened:
            np.savez(opened, **(arrays | {"header": np.array(text)}))
        with pytest.raises(ValueError, match="not a saved state, or is damaged"):
            generation.restore_state(path, model)
    for old, new in ((b"'descr'", b"\x00descr'"), (b"(3,", b"(((")):  # which Python's parser takes badly
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="not a saved state, or is damaged"):
            generation.restore_state(path, model)
    with path.open("wb") as opened:
        np.savez(opened, **(arrays | {"header": np.array({"a": "pickle"}, dtype=object)}))
    with pytest.raises(ValueError, match="not a saved state, or is damaged"):
        generation.restore_state(path, model)
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="not a saved state, or is damaged"):
        generation.restore_state(path, model)
    with pytest.raises(OSError, match="nothing"):
        generation.restore_state(tmp_path / "nothing", model)


def test_a_state_takes_no_more_memory_than_its_file(prefilled, tmp_path):
    """An archive of zeros, whose 20 kB are 200 MB, and arrays that claim to be larger than the file."""
    model, state = prefilled
    path = tmp_path / "context"
    generation.save_state(path, model, state)
    with np.load(path) as file:
        arrays = dict(file.items())
    largest = max(arrays, key=lambda name: arrays[name].nbytes)
    tracemalloc.start()
    claimed = io.BytesIO()
    np.lib.format.write_array_header_1_0(claimed, {"shape": (10**9,), "fortran_order": False, "descr": "<f4"})
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, array)
            with warnings.catch_warnings(action="ignore"), archive.open(f"{largest}.npy", "w") as member:
                member.write(claimed.getvalue())
                if kind == zipfile.ZIP_DEFLATED:
                    for _ in range(200):
                        member.write(bytes(10**6))
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with pytest.raises(ValueError, match="not a saved state, or is damaged"):
            generation.restore_state(path, model)
        assert tracemalloc.get_traced_memory()[1] - before < 2e7
    tracemalloc.stop()
