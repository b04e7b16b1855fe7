"""Tests that training over simulated devices equals training on one, with the designed collectives."""

import collections
import re
import types

import numpy as np
import pytest

from sympow_jax import config
from sympow_jax.config import optimizer as optimizer_lib
from sympow_jax.training import optimizer, sharding
from tests import marked
from tests.training import sharded, small

AXES = ("data", "fsdp", "context", "tensor")
# All choices of four sizes whose product is 8.
FACTORIZATIONS = [
    {"data": data, "fsdp": fsdp, "context": context, "tensor": 8 // (data * fsdp * context)}
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    for context in (1, 2, 4, 8)
    if 8 % (data * fsdp * context) == 0
]
PURE = [{axis: 8} for axis in AXES]
MIXES = [
    {"data": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "context": 4, "remat": "attention", "accumulate": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "arrangement"),
    [
        ("softmax_alibi", {"data": 2}),
        ("conformal_paper", {"fsdp": 2, "remat": "full", "layers": 2, "scan_layers": True}),
        # A hybrid.
        (
            "conformal_paper",
            {
                "fsdp": 2,
                "layers": 4,
                "scan_layers": True,
                "attention_pattern": ["conformal_paper", "softmax"],
            },
        ),
        (
            "softmax",
            {
                **{"fsdp": 2, "layers": 2, "scan_layers": True, "task": "match_attention"},
                "attention_pattern": ["sympow_gated_paper", "shared"],
            },
        ),
        # RMSNorm, SwiGLU, norms of queries and keys, and an untied head.
        ("qwen3", {"fsdp": 2, "remat": "elementwise", "layers": 2, "scan_layers": True}),
    ],
)
def test_models_over_devices(preset, arrangement):
    sharded.check(preset, [{"context": 2, "tensor": 2} | arrangement])


OPTIMIZED = {"data": 2, "fsdp": 2, "tensor": 2, "layers": 2, "scan_layers": True}


# Adafactor's means and muon's matrices are of whole parameters, and states are sharded.
@marked.cases("name", ["adafactor"], slow=sorted({*optimizer_lib.OPTIMIZERS} - {"adafactor"}))
def test_every_optimizer_over_devices(name, monkeypatch):
    monkeypatch.setattr(optimizer, "FACTORED_SIZE", 32)
    sharded.check_optimizer("sympow_gated_paper", OPTIMIZED, name)


@pytest.mark.slow
def test_updates_of_a_program_over_devices():
    sharded.check_program("softmax", {"data": 2, "fsdp": 2, "tensor": 2})


def test_a_mesh_that_does_not_fit(monkeypatch, settings):
    devices = 8 * sharding.jax.devices()[:1]
    monkeypatch.setattr(sharding.jax, "devices", lambda: devices)
    settings = small.changed(settings, data={"context_length": 18, "batch_tokens": 72})
    for sizes, message in (
        ({"data": 3}, "sharding data 3 x fsdp 1 x tensor 1 x context 1 does not multiply to the 8 devices"),
        ({"context": 3}, "data ? x fsdp 1 x tensor 1 x context 3 does not multiply to the 8 devices there"),
        ({"data": 1}, "leave sharding.data unset to take what the others leave"),
        ({"fsdp": 2}, "4 rows, which sharding.data 4 x sharding.fsdp 2 do not divide; change data"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            sharding.make_mesh(small.changed(settings, sharding=config.ShardingConfig(**sizes)))


def test_sizes_that_an_axis_does_not_divide(settings):
    reference = config.preset("conformal_paper", implementation="reference")
    by_channel = config.preset("conformal_paper", decay="channel_learned")
    for sizes, model, message in (
        ({"tensor": 4}, {}, "sharding.tensor is 4 and does not divide model.kv_heads, 2; use a divisor of"),
        ({"tensor": 2}, {"vocab_size": 255}, "does not divide model.vocab_size, 255"),
        ({"context": 3}, {}, "sharding.context is 3 and does not divide data.context_length 16; use a"),
        ({"context": 2}, {"attention": reference}, "'reference', which cannot divide the sequence over"),
        ({"context": 2}, {"attention": by_channel}, "gates by channel cannot divide the sequence over"),
        ({"fsdp": 0}, {}, "sharding.fsdp is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            small.changed(settings, model=model, sharding=config.ShardingConfig(**sizes))


def test_the_parts_of_a_batch_that_a_process_reads(monkeypatch):
    """Processes have two devices each: rows over four of eight devices, time over the other two."""
    devices = np.array([types.SimpleNamespace(process_index=number // 2) for number in range(8)])

    def share(devices, **shape):
        sizes = dict.fromkeys(AXES, 1) | shape
        return sharding.batch_share(types.SimpleNamespace(shape=sizes, devices=devices))

    monkeypatch.setattr(sharding.jax, "process_index", lambda: 2)
    assert share(devices, data=4, context=2) == (2, 4)
    # Time over all: the same rows for every process.
    assert share(devices, context=8) == (0, 1)
    # Neighbors in rows are in different processes.
    with pytest.raises(ValueError, match=r"parts \[2, 6\] of the 8 .* which is no equal range"):
        share(devices[[0, 2, 4, 6, 1, 3, 5, 7]], data=8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_conformal_over_every_factorization():
    assert len({tuple(x.items()) for x in FACTORIZATIONS}) == 20
    sharded.check("conformal_paper", [{"layers": 2} | x for x in FACTORIZATIONS + MIXES[1:]])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", [name for name in config.PRESETS if name != "conformal_paper"])
def test_presets_over_devices(preset):
    sharded.check(preset, [{"layers": 2} | x for x in PURE + MIXES])


LAYERS = 1
# Sizes on a device, with two along every axis: rows, times, width.
ACTIVATIONS = (sharded.ROWS // 4, sharded.CONTEXT // 2, 64)
# Kernels of a layer: a device's part, and its shape after the gather over fsdp.
QUERY, OUT, KEY = ((32, 32), (64, 32)), ((32, 32), (32, 64)), ((32, 16), (64, 16))
UP, DOWN, PER_HEAD = ((32, 128), (64, 128)), ((128, 32), (128, 64)), ((32, 2), (64, 2))
KERNELS = {"softmax": [QUERY, KEY, KEY, OUT, UP, DOWN]}
KERNELS["conformal_paper"] = [*KERNELS["softmax"], PER_HEAD, PER_HEAD]
EMBEDDING = (128, 32)
SMALL = 256  # bytes: summaries of documents, positions and gradients by head


def over(found, kind, *axes):
    """Returns the shapes, with their numbers, of collectives of that kind over exactly these axes, without scalars."""
    return collections.Counter(x.shape for x in found if x.kind == kind and x.axes == axes and x.shape)


@pytest.mark.parametrize("preset", ["conformal_paper", "softmax"])
def test_what_devices_exchange(preset):
    found = sharded.exchanged(preset, dict.fromkeys(AXES, 2))
    parts, wholes = (LAYERS * list(shapes) for shapes in zip(*KERNELS[preset]))
    # fsdp: parameters are gathered once a pass; the embedding once, for the lookup and for the logits' part of it.
    assert over(found, "all-gather", "fsdp") == collections.Counter(2 * wholes + [(256, 64), (128, 64)])
    assert over(found, "reduce-scatter", "fsdp") == collections.Counter([*parts, EMBEDDING, EMBEDDING])
    assert not over(found, "all-reduce", "fsdp")
    # data and context: gradients of parameters, which were scattered over fsdp before.
    assert over(found, "all-reduce", "data", "context") == collections.Counter([*parts, EMBEDDING, EMBEDDING])
    # tensor: activations twice per layer and pass, and the input of the logits; the embedding for the lookup.
    sums = over(found, "all-reduce", "tensor")
    assert sums[ACTIVATIONS] == 4 * LAYERS + 1
    assert set(sums) <= {ACTIVATIONS, ACTIVATIONS[:2]}
    assert over(found, "all-gather", "tensor") == collections.Counter([(256, 32)])
    check_context(found, preset)
    # Nothing else is gathered, and only norms' gradients and scalars go over other axes.
    known = {("fsdp",), ("tensor",), ("context",), ("data", "context")}
    others = [x for x in found if x.axes not in known and x.shape]
    assert {x.shape for x in others} == {(64,)}
    assert {x.kind for x in others} == {"all-reduce"}


def check_context(found, preset):
    """Checks that summaries are gathered, states and windows go to neighbors, and heads are exchanged for time."""
    assert not over(found, "all-gather", "data")
    gathered = [x for x in found if x.kind == "all-gather" and x.axes == ("context",)]
    moved = over(found, "collective-permute", "context")
    exchanged = over(found, "all-to-all", "context")
    rows = ACTIVATIONS[0]
    if preset == "conformal_paper":
        assert max(x.nbytes for x in gathered) <= SMALL
        state, exact_window = (rows, 2, 36, 9), (rows, sharded.WINDOW, 2, 8)
        # Both passes of each layer: one state, keys and values of one window.
        assert moved[state] == 2 * LAYERS
        assert moved[exact_window] == 4 * LAYERS
        assert set(moved) == {state, exact_window, exact_window[:3], exact_window[:2]}
        assert not exchanged
    else:
        ids = rows * sharded.CONTEXT * 4
        assert max(x.nbytes for x in gathered) <= ids
        assert not moved
        assert sum(exchanged.values()) >= 2 * 4 * LAYERS
