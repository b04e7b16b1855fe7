"""Tests of `tools.scaling` against counts by hand, compiled steps and its page."""

import pathlib

import numpy as np
import pytest

from sympow_jax import config
from tools import predicted, scaling

LAYERS, WIDTH, HEADS, VOCABULARY = 12, 768, 12, 50_304
# Matrices of a block, with a decay and a rotation rate for each head, and the embedding.
BLOCK = 12 * WIDTH**2 + 2 * HEADS * WIDTH
PARAMETERS = LAYERS * BLOCK + VOCABULARY * WIDTH
STATE = 4 * 2080 * 65  # bytes of one head: features x (values and their normalizer)


def job(context: int = 4096, tokens: int = 524_288, **changes) -> scaling.Job:
    sizes = {"vocab_size": VOCABULARY, "layers": LAYERS, "width": WIDTH, "heads": HEADS, **changes}
    return scaling.Job(config.ModelConfig(**sizes, attention=config.preset("conformal")), context, tokens)


def step(*arguments, **sizes) -> scaling.Step:
    return scaling.predict(job(*arguments), scaling.Plan(**sizes))


SUMS = 2 * 3 / 4 * 2 * 16 * 4096 * WIDTH  # of activations over four devices
A_MILLION = (
    12 * 2 * (4 * 12 * STATE + 196_608)
)  # both passes of 12 layers: 4 states of 12 heads, and a window


@pytest.mark.parametrize(
    ("of", "sizes", "axis", "nvlink", "infiniband", "rounds"),
    [
        ((), {"data": 8}, "data", 2 * 7 / 8 * 4 * PARAMETERS, 0, 2 * 3 * 13),
        # Two nodes: within each as before, and then an eighth of it between them.
        ((), {"data": 16}, "data", 2 * 7 / 8 * 4 * PARAMETERS, 4 * PARAMETERS / 8, 2 * 4 * 13),
        # Gradients are of all times too, but of a share of the parameters.
        ((), {"fsdp": 2, "context": 2, "tensor": 2}, "data", 4 * PARAMETERS / 4, 0, 2 * 13),
        ((), {"fsdp": 8}, "fsdp", 7 / 8 * (2 * 2 + 4) * PARAMETERS, 0, 3 * 3 * 13),
        ((), {"fsdp": 8, "remat": "full"}, "fsdp", 7 / 8 * (3 * 2 + 4) * PARAMETERS, 0, 4 * 3 * 13),
        ((4096, 65_536), {"tensor": 4}, "tensor", 49 * SUMS + 3 * VOCABULARY * WIDTH, 0, 49 * 4 + 2),
        ((2**20, 2**20), {"context": 8}, "context", A_MILLION, 0, 24 * 5),
        ((2**14, 2**14), {"context": 8}, "context", A_MILLION, 0, 24 * 5),
        # Between nodes all wait for the slowest.
        ((2**20, 2**20), {"context": 16}, "context", 0, A_MILLION + 24 * 12 * STATE, 24 * 6),
        # Twelve heads on eight GPUs are padded to sixteen.
        (
            (4096, 4096),
            {"context": 8, "form": "attention"},
            "context",
            24 * 4 * 7 / 8 * 2 * 512 * 16 * 64,
            0,
            96,
        ),
    ],
)
def test_traffic_by_hand(of, sizes, axis, nvlink, infiniband, rounds):
    np.testing.assert_allclose(step(*of, **sizes).traffic[axis], [nvlink, infiniband, rounds])


def test_one_gpu_sends_nothing():
    assert not any(sent.any() for sent in step().traffic.values())


def test_computation_by_hand():
    found = step(65_536, fsdp=8).computation
    shape = {"batch": 1, "kv_heads": 12, "head_dim": 64, "value_dim": 64, "power": 2, "exact_window": 64}
    kernel = predicted.kernel_seconds("chunked", time=65_536, heads=12, **shape)
    block_bytes = LAYERS * 3 * (32 + 8 + 4 * 4) * WIDTH
    assert found == pytest.approx(
        {
            "products": 65_536 * (6 * LAYERS * BLOCK + 8 * VOCABULARY * WIDTH) / (0.8 * 989e12),
            "attention": 12 * 3.1 * kernel,
            "memory": 65_536 * (block_bytes + 32 * VOCABULARY) / (0.8 * 3.35e12),
            "optimizer": 40 * PARAMETERS / 8 / (0.8 * 3.35e12),
        }
    )
    again = step(65_536, fsdp=8, remat="full").computation["attention"]
    assert again == pytest.approx(12 * 4.1 * kernel)


@pytest.mark.parametrize(
    ("sizes", "context", "plan", "gigabytes"),
    [
        ({}, 4096, {"data": 8, "form": "attention"}, 38.0),
        ({}, 65_536, {"data": 8}, 46.9),
        (
            config.MODEL_SIZES["gpt3_1311m"],
            4096,
            {"fsdp": 8, "remat": "attention", "form": "attention"},
            36.5,
        ),
    ],
)
def test_memory_is_near_that_of_compiled_steps(sizes, context, plan, gigabytes):
    """Compares with rows of docs/memory.md."""
    found = scaling.predict(job(context, **sizes), scaling.Plan(**plan))
    assert found.memory == pytest.approx(gigabytes * 1e9, rel=0.03)


def test_gradients_hide_behind_two_thirds_of_the_computation(monkeypatch):
    found = step(data=64)
    computed = sum(found.computation.values())
    assert found.seconds(hidden=False) == pytest.approx(computed + found.sent_seconds("data"))
    assert found.seconds(hidden=True) == computed
    assert 0 < found.mfu(hidden=False) < found.mfu(hidden=True) < 0.8
    monkeypatch.setattr(scaling, "LINKS", np.array([450e9, 1e9]))
    assert found.seconds(hidden=True) == pytest.approx(computed / 3 + found.sent_seconds("data"))


def test_the_best_plan_fits(monkeypatch):
    fast = scaling.best(job(65_536), 64)
    assert fast.memory > 3e9
    monkeypatch.setattr(scaling, "CAPACITY", 3e9)
    small = scaling.best(job(65_536), 64)
    assert small.memory <= 3e9
    assert small.seconds(hidden=False) > fast.seconds(hidden=False)
    monkeypatch.setattr(scaling, "CAPACITY", 1e6)
    with pytest.raises(ValueError, match="no plan for 64 GPUs fits"):
        scaling.best(job(65_536), 64)


def test_the_page_has_the_tables():
    page = (pathlib.Path(scaling.__file__).parents[1] / "docs" / "scaling.md").read_text()
    for name, table in scaling.tables().items():
        assert f"## {name}\n\n{table}\n" in page, "copy the tables that `python -m tools.scaling` prints"
