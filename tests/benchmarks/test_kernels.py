"""Tests of `benchmarks.kernels` that need no GPU: work counts, checks, report and failures."""

import dataclasses
import fcntl
import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _contenders, _shapes, _timing, kernels
from pallas_kernels.check import supervisor

pytestmark = pytest.mark.robust

# b1 n8 T = 1,024.
TOKENS = 8 * 1024


@pytest.mark.parametrize(
    ("contender", "sizes", "per_token"),
    [
        # 2 (D + E) T / 2, and 2.5 times as much backward.
        ("attention/mosaic_gpu", {}, 128 * 1024),
        ("softmax/cudnn", {"head_dim": 128}, 256 * 1024),
        ("attention/xla", {"mode": "training", "power": 4}, 3.5 * 128 * 1024),
        # 4 F E + (D + E) (C + 2 W), F = 64 * 65 / 2.
        ("chunked/mosaic_gpu", {}, 4 * 2080 * 64 + 128 * 256),
        ("chunked/xla", {"mode": "training"}, 3 * 4 * 2080 * 64 + 3.5 * 128 * 256),
        # F = 16 * 17 * 18 * 19 / 24.
        ("chunked/mosaic_gpu", {"head_dim": 16, "power": 4}, 4 * 3876 * 16 + 32 * 256),
        # A state of D x E and chunks of 64.
        ("flash-linear-attention", {}, 4 * 64 * 64 + 128 * 64),
    ],
)
def test_flops_are_those_of_the_mathematics(contender, sizes, per_token):
    row = _shapes.Row(contender=contender, time=1024, **sizes)
    assert _shapes.flops(row) == TOKENS * per_token


def test_a_step_reads_the_state_once():
    row = _shapes.Row(contender="step/xla", mode="step", batch=64, time=256)
    state = 64 * 8 * 2080 * 65 * 4
    window_bytes = 64 * 8 * 96 * 129 * 4
    assert _shapes.flops(row) is None
    assert _shapes.step_bytes(row) == state * (1 + 2 / 64) + window_bytes


def test_the_brief_part_has_the_shapes_that_decide():
    for contender in ("attention/mosaic_gpu", "softmax/cudnn"):
        rows = [row for row in _shapes.PARTS["brief"] if (row.mode, row.contender) == ("training", contender)]
        assert {(row.power, row.time) for row in rows} >= {*itertools.product((2, 4), (1024, 8192, 65_536))}
    step = _shapes.Row(part="brief", contender="step/xla", mode="step", batch=64, time=256)
    assert step in _shapes.PARTS["brief"]
    for row in itertools.chain(_shapes.SMOKE, *_shapes.PARTS.values()):
        assert row.contender in _shapes.CONTENDERS


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Returns the report and output of the smoke run."""
    path = tmp_path_factory.mktemp("benchmark") / "kernels.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_timing, "SAMPLE_SECONDS", 1e-3)
        printed = []
        patch.setattr(kernels, "_print", printed.append)
        kernels.main(["--smoke", f"--out={path}"])
    assert printed == [json.loads(path.read_text())]
    return printed[0]


def test_smoke_times_what_a_cpu_can_do_and_says_what_it_cannot(smoke):
    described = map(dataclasses.asdict, _shapes.SMOKE)
    assert [row | wanted for row, wanted in zip(smoke["rows"], described, strict=True)] == smoke["rows"]
    assert smoke["machine"]["jax"] == jax.__version__
    timed = {row["contender"] for row in smoke["rows"] if "seconds" in row}
    assert timed == {"attention/xla", "chunked/xla", "step/xla"}
    for row in (row for row in smoke["rows"] if "seconds" in row):
        assert row["seconds"] > 0
        assert 0 < row["error"] < 1e-2
        tokens = row["batch"] * row["heads"] * (1 if row["mode"] == "step" else row["time"])
        # Queries, keys, values and outputs in 16 bits.
        assert row["memory"] > 2 * 4 * tokens * row["head_dim"]
        unit = "bytes" if row["mode"] == "step" else "flops"
        assert row["fraction"] == pytest.approx(row[f"{unit}_per_second"] / smoke["ceilings"][unit])
    notes = {row["contender"]: row["note"] for row in smoke["rows"] if "seconds" not in row}
    assert "needs a Hopper GPU" in notes["chunked/mosaic_gpu"]
    assert notes["softmax/cudnn"] == "cuDNN needs a GPU"
    assert notes["jax-linear-attention"].startswith("jax-linear-attention is not installed")
    assert notes["retention"].startswith("not installed: torch")


def test_tables_show_times_and_notes(smoke, capsys):
    rows = [row | {"note": row.get("note", "")[:12]} for row in smoke["rows"]]
    fast = dict(rows[0], time=1024, contender="softmax/cudnn", note="", seconds=1e-3, spread=0.01)
    fast |= {"error": 1e-3, "fraction": 0.5, "memory": 123 * 10**9}
    fast |= {"flops_per_second": 4e14, "kernel_seconds": 9e-4}
    slow = fast | {"contender": "attention/mosaic_gpu", "seconds": 2e-3}
    kernels._print(smoke | {"rows": [fast, slow, *rows]})
    printed = capsys.readouterr().out
    for cell in ("123", "0.50x", "TFLOP/s", "400", "0.9", "retention", "cuDNN needs", "GB/s"):
        assert cell in printed


def test_without_a_gpu_it_says_so_in_a_line():
    with pytest.raises(SystemExit) as ended:
        kernels.main(["--part=brief"])
    # Python prints an exit argument that is not a number to standard error and exits with status 1.
    assert ended.value.code.startswith("benchmarks.kernels measures on a GPU: JAX sees no GPU here, only cpu")
    assert "\n" not in ended.value.code


ROW = _shapes.Row(contender="chunked/xla", heads=2, head_dim=8, time=64)


def wrong(monkeypatch, factor=1.0, gradient_factor=1.0):
    """Replaces chunked/xla by a contender whose values or gradients are off by a factor."""

    def right(*arguments):
        return _contenders._linear(*(x.astype(jnp.float32) for x in arguments)).astype(jnp.bfloat16)

    @jax.custom_vjp
    def call(*arguments):
        return right(*arguments) * jnp.bfloat16(factor)

    def backward(arguments, dout):
        return jax.vjp(right, *arguments)[1](dout * jnp.bfloat16(gradient_factor))

    call.defvjp(lambda *arguments: (call(*arguments), arguments), backward)
    monkeypatch.setattr(_contenders, "_contender", lambda row: (call, _contenders._linear))


def test_wrong_results_are_not_timed(monkeypatch):
    for factor in (1.05, float("nan")):
        wrong(monkeypatch, factor=factor)
        with pytest.raises(_contenders.WrongResult):
            _contenders.prepare(ROW)
    training = dataclasses.replace(ROW, mode="training")
    wrong(monkeypatch)
    assert 0 < _contenders.prepare(training).error < 1e-2
    wrong(monkeypatch, gradient_factor=1.05)
    for checked in (2048, 32):  # as timed, shorter
        monkeypatch.setattr(_contenders, "GRADIENT_TIME", checked)
        with pytest.raises(_contenders.WrongResult, match="gradient of query"):
            _contenders.prepare(training)


def test_inputs_are_drawn_while_no_other_process_measures(monkeypatch, tmp_path):
    seeds, drawn = [], _contenders._drawn

    def draw(row, seed):
        with (tmp_path / "lock").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        seeds.append(seed)
        return drawn(row, seed)

    monkeypatch.setenv(supervisor._LOCK, str(tmp_path / "lock"))
    monkeypatch.setattr(_contenders, "_drawn", draw)
    for row in (ROW, dataclasses.replace(ROW, contender="step/xla", mode="step")):
        _contenders.prepare(row)
    assert seeds == [0, 1, 0, 0, 1, 0]
