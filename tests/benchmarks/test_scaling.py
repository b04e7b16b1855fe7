"""Tests of the predictions of `benchmarks.scaling` against hand-computed counts, and of their dependence on inputs."""

import dataclasses
import math
import pathlib

import pytest

from benchmarks import _scaling, predicted, scaling
from sympow_jax import config
from sympow_jax.training import flops

CLUSTER = _scaling.H100S
LAYERS, WIDTH, HEADS, VOCABULARY = 12, 768, 12, 50_304
# Matrices of a block, with a decay and a rotation rate for each head, and the embedding.
BLOCK = 12 * WIDTH**2 + 2 * HEADS * WIDTH
PARAMETERS = LAYERS * BLOCK + VOCABULARY * WIDTH
STATE = 4 * 2080 * 65  # bytes of one head: features x (values and their normalizer)


def _job(context: int = 4096, tokens: int = 524_288, **changes) -> _scaling.Job:
    sizes = {"vocab_size": VOCABULARY, "layers": LAYERS, "width": WIDTH, "heads": HEADS, **changes}
    return _scaling.Job(config.ModelConfig(**sizes, attention=config.preset("conformal")), context, tokens)


def _traffic(job: _scaling.Job, **sizes) -> dict[str, _scaling.Traffic]:
    return _scaling.traffic(job, _scaling.Plan(**sizes), 8)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}),
        ({"data": 64}, {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}),
        ({"data": 8, "context": 4, "tensor": 4}, {"data": 1, "fsdp": 1, "context": 2, "tensor": 4}),
        ({"data": 2, "fsdp": 16, "tensor": 2}, {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}),
    ],
)
def test_neighbors_in_a_node(sizes, expected):
    assert _scaling.Plan(**sizes).in_node(8) == expected


@pytest.mark.parametrize("size", [1, 2, 8, 16, 64, 512])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_gather_sends_all_parts_but_its_own(size, rounds):
    sent = _scaling._ring(size, min(size, 8), 1e9, rounds=rounds)
    assert sent.total == pytest.approx(rounds * (size - 1) / size * 1e9)
    assert sent.rounds == rounds * math.log2(size)
    assert (sent.infiniband > 0) == (size > 8)


def test_one_gpu_sends_nothing():
    assert set(_traffic(_job()).values()) == {_scaling.Traffic()}


def test_data_sends_gradients_there_and_back():
    sent = _traffic(_job(), data=8)
    assert sent["data"].total == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS)
    assert sent["data"].rounds == 2 * 3 * 13
    assert not any(sent[axis].total for axis in ("fsdp", "context", "tensor"))
    # Two nodes: within each as before, and then an eighth of it between them.
    two = _traffic(_job(), data=16)["data"]
    assert two.nvlink == sent["data"].nvlink
    assert two.infiniband == pytest.approx(2 * 1 / 2 * 4 * PARAMETERS / 8)


def test_gradients_are_of_all_times_too_but_of_a_share_of_the_parameters():
    sent = _traffic(_job(), fsdp=2, context=2, tensor=2)
    assert sent["data"].total == pytest.approx(2 * 1 / 2 * 4 * PARAMETERS / 4)


@pytest.mark.parametrize(("remat", "gathers"), [("none", 2), ("attention", 3), ("full", 3)])
def test_fsdp_gathers_in_every_pass_and_scatters_once(remat, gathers):
    sent = _traffic(_job(), fsdp=8, remat=remat)
    assert sent["fsdp"].total == pytest.approx(7 / 8 * (gathers * 2 + 4) * PARAMETERS)
    assert sent["data"].total == 0


def test_tensor_sums_activations_twice_a_block_and_pass():
    job = _job(tokens=16 * 4096)
    sums = 2 * 3 / 4 * 2 * 16 * 4096 * WIDTH
    embedding = 3 / 4 * 4 * 50_304 * WIDTH
    assert _traffic(job, tensor=4)["tensor"].total == pytest.approx((4 * 12 + 1) * sums + embedding)
    again = _traffic(job, tensor=4, remat="full")["tensor"].total
    assert again == pytest.approx((6 * 12 + 1) * sums + embedding)


@pytest.mark.parametrize(("size", "states"), [(2, 1), (3, 2), (4, 3), (8, 4), (16, 5), (64, 7)])
def test_context_sends_a_window_and_states_of_one_size(size, states):
    # Two rows.
    sent = _scaling._context(_job(65_536, 2 * 65_536), _scaling.Plan(context=size), size)
    a_row = 2 * 64 * HEADS * (64 + 64) + states * HEADS * STATE
    assert sent == _scaling.Traffic(2 * 2 * a_row, 0.0, 2 * (1 + states))


def test_a_million_tokens_over_eight_gpus():
    # 12 layers, 12 heads, both passes; 540,800 bytes a state, 4 of them, and windows of 196,608 bytes.
    sent = _traffic(_job(2**20, 2**20), context=8)["context"]
    assert sent.nvlink == 12 * 2 * (4 * 12 * 540_800 + 196_608) == pytest.approx(0.628e9, rel=1e-3)
    assert _traffic(_job(2**14, 2**14), context=8)["context"] == sent
    # Between nodes all wait for the slowest.
    assert _traffic(_job(2**20, 2**20), context=16)["context"].nvlink == 0


def test_attention_by_pairs_sends_all_to_all():
    job = _job(4096, 4096)
    sent = _traffic(job, context=4, form="attention")["context"]
    a_share = 2 * 1024 * 12 * 64
    assert sent.nvlink == pytest.approx(12 * 2 * 4 * 3 / 4 * a_share)
    # Twelve heads on eight GPUs are padded to sixteen.
    assert _traffic(job, context=8, form="attention")["context"].nvlink == pytest.approx(
        12 * 2 * 4 * 7 / 8 * (2 * 512 * 16 * 64)
    )
    crossing = _traffic(job, context=16, form="attention")["context"]
    assert crossing.infiniband / crossing.nvlink == pytest.approx(8 / 7)


def test_products_by_hand():
    found = _scaling.predict(_job(), _scaling.Plan(data=8)).computation["products"]
    a_token = 6 * LAYERS * BLOCK + 8 * VOCABULARY * WIDTH
    assert found == pytest.approx(65_536 * a_token / (0.8 * 989e12))
    again = _scaling.predict(_job(), _scaling.Plan(data=8, remat="attention")).computation["products"]
    assert again == pytest.approx(65_536 * (a_token + 2 * LAYERS * BLOCK) / (0.8 * 989e12))


def test_attention_takes_its_kernels_time():
    job = _job(65_536, 524_288)
    shape = {"batch": 1, "kv_heads": 12, "head_dim": 64, "value_dim": 64, "power": 2, "exact_window": 64}
    kernel = predicted.kernel_seconds("chunked", time=65_536, heads=12, chunk=None, **shape)
    attention = {
        remat: _scaling.predict(job, _scaling.Plan(data=8, remat=remat)).computation["attention"]
        for remat in _scaling.REMATS
    }
    assert attention["none"] == attention["attention"] == pytest.approx(12 * 3.1 * kernel)
    assert attention["full"] == pytest.approx(12 * 4.1 * kernel)


def test_memory_and_optimizer_by_hand():
    found = _scaling.predict(_job(), _scaling.Plan(fsdp=8)).computation
    a_block = 3 * (32 + 8 + 4 * 4) * WIDTH
    assert found["memory"] == pytest.approx(65_536 * (LAYERS * a_block + 32 * VOCABULARY) / (0.8 * 3.35e12))
    assert found["optimizer"] == pytest.approx(40 * PARAMETERS / 8 / (0.8 * 3.35e12))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # Bytes per token and channel: of every block 60, or 75 with states; of its input and attention 8, or of its
        # input 4, and then of one whole block.
        ({"data": 8, "form": "attention"}, 16 * PARAMETERS + 65_536 * 12 * 60 * WIDTH),
        (
            {"data": 8, "remat": "attention", "form": "attention"},
            16 * PARAMETERS + 65_536 * (12 * 8 + 60) * WIDTH,
        ),
        ({"fsdp": 8, "remat": "full"}, 2 * PARAMETERS + 65_536 * (12 * 4 + 75) * WIDTH),
        ({"data": 2, "tensor": 4, "form": "attention"}, 4 * PARAMETERS + 262_144 * 12 * (12 + 12) * WIDTH),
    ],
)
def test_memory_of_a_gpu_by_hand(plan, expected):
    assert _scaling.predict(_job(), _scaling.Plan(**plan)).memory == pytest.approx(expected)


def test_memory_is_near_what_was_compiled():
    """Compares with rows of docs/memory.md, in GB."""
    attention, chunked = _job(), _job(65_536)
    large = _job(**config.MODEL_SIZES["gpt3_1311m"])
    for job, plan, compiled in (
        (attention, {"data": 8, "form": "attention"}, 38.0),
        (chunked, {"data": 8, "form": "chunked"}, 46.9),
        (large, {"fsdp": 8, "remat": "attention", "form": "attention"}, 36.5),
    ):
        found = _scaling.predict(job, _scaling.Plan(**plan)).memory
        assert found == pytest.approx(compiled * 1e9, rel=0.03), (plan, found)


def test_what_is_hidden_and_what_is_not():
    found = _scaling.predict(_job(), _scaling.Plan(data=64))
    sent = found.sent_seconds("data")
    assert found.step_seconds == pytest.approx(found.compute_seconds + sent)
    assert found.hidden_step_seconds == found.compute_seconds
    # Gradient communication overlaps with only two thirds of the computation.
    slow = _scaling.predict(_job(), _scaling.Plan(data=64), dataclasses.replace(CLUSTER, infiniband=1e9))
    assert slow.hidden_step_seconds == pytest.approx(slow.compute_seconds / 3 + slow.sent_seconds("data"))
    waiting = _scaling.predict(_job(), _scaling.Plan(context=8))
    assert waiting.hidden_step_seconds >= waiting.compute_seconds + waiting.sent_seconds("context")


def test_mfu_is_of_model_flops():
    found = _scaling.predict(_job(), _scaling.Plan(data=8))
    a_token = flops.model_flops_per_token(found.job.model, 4096)
    assert found.mfu(1.0) == pytest.approx(524_288 * a_token / (8 * 989e12))
    again = _scaling.predict(_job(), _scaling.Plan(data=8, remat="full"))
    assert again.mfu(1.0) == found.mfu(1.0)
    assert again.step_seconds > found.step_seconds
    # The counted work cannot run faster than at the fraction of the peak assumed for matrix products.
    assert 0 < found.mfu(found.step_seconds) < 0.8


@pytest.mark.parametrize(
    "changes",
    [
        {"infiniband": 25e9},
        {"nvlink": 200e9},
        {"peak": 500e12},
        {"memory_bandwidth": 2e12},
        {"infiniband_latency": 1e-4},
    ],
)
def test_a_slower_machine_is_slower(changes):
    job, plan = _job(65_536), _scaling.Plan(data=4, fsdp=2, context=8)
    slower = _scaling.predict(job, plan, dataclasses.replace(CLUSTER, **changes))
    assert slower.step_seconds > _scaling.predict(job, plan).step_seconds


@pytest.mark.parametrize("context", [4096, 65_536])
def test_more_gpus_are_faster_but_less_than_in_proportion(context):
    steps = [_scaling.best(_job(context), gpus).step_seconds for gpus in (8, 16, 64, 512)]
    for few, many, times in zip(steps, steps[1:], (2, 4, 8)):
        assert few / times < many < few


def test_the_best_plan_fits_and_divides_the_job():
    job = _job(65_536)
    found = _scaling.best(job, 64)
    assert found.plan.gpus == 64
    assert job.rows % (found.plan.data * found.plan.fsdp) == 0
    assert found.memory <= CLUSTER.memory
    tight = dataclasses.replace(CLUSTER, memory=3e9)
    assert _scaling.best(job, 64, tight).memory <= 3e9 < found.memory
    with pytest.raises(ValueError, match="no arrangement of 64 GPUs fits"):
        _scaling.best(job, 64, dataclasses.replace(CLUSTER, memory=1e6))


def test_rows_that_gpus_do_not_divide():
    with pytest.raises(ValueError, match="8 rows, which data 8 x fsdp 2 do not divide"):
        _scaling.predict(_job(65_536), _scaling.Plan(data=8, fsdp=2))


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_smallest_of_jobs(gpus):
    job = _job(128, 1024, vocab_size=256, layers=1, width=32, heads=2)
    found = _scaling.best(job, gpus)
    assert 0 < found.hidden_step_seconds <= found.step_seconds < 1e-3
    assert 0 < found.mfu(found.step_seconds) < 0.01
    assert (found.step_seconds == found.compute_seconds) == (gpus == 1)


def test_the_page_in_docs_is_what_the_program_writes(tmp_path):
    scaling.main([f"--out={tmp_path}/scaling.md"])
    committed = pathlib.Path(scaling.__file__).parents[1] / "docs" / "scaling.md"
    assert (tmp_path / "scaling.md").read_text() == committed.read_text(), (
        "write the page again: python -m benchmarks.scaling --out=docs/scaling.md"
    )


def test_numbers_of_the_page():
    assert [scaling._number(x) for x in (0.075, 2.345, 23.45, 234.5, 2345)] == [
        "0.07",
        "2.35",
        "23.4",
        "234",
        "2,345",
    ]
    assert scaling._bytes(_scaling.Traffic()) == "-"
    assert scaling._bytes(_scaling.Traffic(1.5e9, 2e7)) == "1.50 NVLink + 0.02 IB"
    table = scaling._table(("a", "b"), [("1", "x"), ("2–3%", "-")])
    assert table.splitlines()[1] == "| ---: | --- |"
