"""Tests of `benchmarks.training` that need no GPU: rows, table and failures."""

import json

import pytest

from benchmarks import _contenders, training

pytestmark = pytest.mark.robust


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Returns the report of the smoke run, in whose last row the profiler fails."""
    path, trace = tmp_path_factory.mktemp("benchmark") / "training.json", training._timing.traced_seconds

    def traced_seconds(call):
        patch.setattr(training._timing, "traced_seconds", fail)
        return trace(call)

    def fail(call):
        raise RuntimeError("CUPTI is in use")

    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(training, "_print", printed.append)
        patch.setattr(training, "MOST_STEPS", 3)
        patch.setattr(training._timing, "traced_seconds", traced_seconds)
        patch.setattr(training, "SMOKE_CONTEXTS", (64,))
        training.main(["--smoke", "--preset=softmax", "--preset=conformal", "--scan-layers", f"--out={path}"])
    assert printed == [json.loads(path.read_text())]
    return printed[0]


def test_smoke_trains_the_presets(smoke):
    found = [(row["context"], row["preset"], row["attention"]) for row in smoke["rows"]]
    assert found == [(64, "softmax", "softmax/xla"), (64, "conformal", "attention/xla")]
    for row in smoke["rows"]:
        assert row["scan_layers"]
        assert row["tokens_per_second"] == pytest.approx(256 / row["seconds"])
        assert row["steps"] == 3
        assert row["last_loss"] < row["first_loss"] < 7
        # Parameters and Adam's two moments of them, in float32.
        assert row["program_bytes"] > 3 * 4 * 128 * 32
        assert row["kernels"] == []
    assert smoke["rows"][0]["longest"] == {}
    assert smoke["rows"][1]["kernels_note"] == "RuntimeError: CUPTI is in use"


def test_table_shows_rows_and_notes(smoke, capsys):
    fast = smoke["rows"][0] | {
        "tokens_per_second": 2e5,
        "peak_bytes": 12e9,
        "kernels": ["__cudnn$fmhaSoftmax"],
    }
    slow = fast | {"preset": "conformal", "tokens_per_second": 3e5}
    failed = {"context": 65_536, "preset": "sympow", "tokens": 256, "note": "RESOURCE_EXHAUSTED"}
    training._print(smoke | {"rows": [fast, slow, failed]})
    printed = capsys.readouterr().out
    for cell in ("1.50x", "1.00x", "300,000", "12.00", "fmhaSoftmax", "65,536", "RESOURCE_EXHAUSTED"):
        assert cell in printed


def test_attention_is_what_the_program_says():
    program = """
    %a = custom-call(), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(f)/softmax_cudnn/x"}
    %b = custom-call(), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(f)/y"}
    """
    kernels = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert training.attention(program) == {"attention": "softmax/cudnn", "kernels": kernels}
    program = (
        'op_name="jit(f)/transpose(jvp(chunked_mosaic_gpu))/power_state_query" op_name="jit(power_attention)"'
    )
    assert training.attention(program) == {
        "attention": "chunked/mosaic_gpu",
        "kernels": ["power_state_query"],
    }


def test_losses_that_are_not_finite_are_no_result(monkeypatch):
    monkeypatch.setattr(training, "SECONDS", 0.0)
    losses = iter([3.0, 2.0, 1.0, 0.5, float("nan"), 0.1, 0.1])
    with pytest.raises(_contenders.WrongResult, match="losses are not all finite"):
        training._steps(lambda state, batch: (state, {"loss": next(losses)}), 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset=sofmax"], "preset is 'sofmax'"),
        (["--preset=conformal,p=3"], "power is 3"),
        (["--context=1000"], "invalid choice"),
        (["--smoke", "--context=1024"], "contexts of its own"),
        (["--jobs=0"], "--jobs is 0; it must be at least 1"),
        (["--resume"], "--resume needs --out"),
    ],
)
def test_a_mistake_is_found_before_the_work(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        training.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
