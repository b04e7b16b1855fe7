"""Tests of `benchmarks.training` that need no GPU: rows, table, plot and failures."""

import json
import math
import types

import pytest

from benchmarks import _contenders, training

pytestmark = pytest.mark.robust


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Returns the report, output and folder of the smoke run."""
    folder = tmp_path_factory.mktemp("benchmark")
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(training, "_print", printed.append)
        patch.setattr(training, "MOST_STEPS", 3)
        patch.setattr(training, "SMOKE_CONTEXTS", (64,))
        training.main(["--smoke", "--preset=softmax", "--preset=conformal", f"--out={folder}/training.json"])
    assert printed == [json.loads((folder / "training.json").read_text())]
    return printed[0], folder


def test_smoke_trains_the_presets(smoke):
    report, folder = smoke
    found = [(row["context"], row["preset"], row["attention"]) for row in report["rows"]]
    assert found == [(64, "softmax", "softmax/xla"), (64, "conformal", "attention/xla")]
    for row in report["rows"]:
        assert row["tokens_per_second"] == pytest.approx(256 / row["seconds"])
        assert row["steps"] == 3
        assert row["last_loss"] < row["first_loss"] < 7
        # Parameters and Adam's two moments of them, in float32.
        assert row["program_bytes"] > 3 * 4 * 128 * 32
        assert row["kernels"] == []
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")


def test_table_shows_rows_and_notes(smoke, capsys):
    report, _ = smoke
    fast = report["rows"][0] | {
        "tokens_per_second": 2e5,
        "peak_bytes": 12e9,
        "kernels": ["__cudnn$fmhaSoftmax"],
    }
    slow = fast | {"preset": "conformal", "tokens_per_second": 3e5}
    failed = {"context": 65_536, "preset": "sympow", "tokens": 256, "note": "RESOURCE_EXHAUSTED"}
    training._print(report | {"rows": [fast, slow, failed]})
    printed = capsys.readouterr().out
    for cell in ("1.50x", "1.00x", "300,000", "12.00", "fmhaSoftmax", "65,536", "RESOURCE_EXHAUSTED"):
        assert cell in printed


def test_attention_is_what_the_program_says():
    program = """
    %a = custom-call(), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(f)/softmax_cudnn/x"}
    %b = custom-call(), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(f)/y"}
    """
    assert training.attention(program) == {
        "attention": "softmax/cudnn",
        "kernels": ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"],
    }
    program = (
        'op_name="jit(f)/transpose(jvp(chunked_mosaic_gpu))/power_state_query" op_name="jit(power_attention)"'
    )
    assert training.attention(program) == {
        "attention": "chunked/mosaic_gpu",
        "kernels": ["power_state_query"],
    }


def test_losses_that_are_not_finite_are_no_result(monkeypatch):
    # A copy of the module, because the ops check their own numbers.
    patched = types.SimpleNamespace(**{**vars(math), "isfinite": lambda loss: False})
    monkeypatch.setattr(training, "math", patched)
    with pytest.raises(_contenders.WrongResult, match="losses are not all finite"):
        training.measure({"preset": "softmax", "context": 64, "tokens": 64, "tiny": True})


def test_a_profiler_that_fails_loses_only_its_times(monkeypatch):
    def fail(call):
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(training._timing, "traced_seconds", fail)
    monkeypatch.setattr(training, "MOST_STEPS", 3)
    row = training.measure({"preset": "softmax", "context": 64, "tokens": 64, "tiny": True})
    assert row["kernels_note"] == "RuntimeError: CUPTI is in use"
    assert row["tokens_per_second"] > 0


def test_without_a_gpu_it_says_so_in_a_line():
    with pytest.raises(SystemExit) as ended:
        training.main(["--brief"])
    assert ended.value.code.startswith(
        "benchmarks.training measures on a GPU: JAX sees no GPU here, only cpu"
    )
    assert "\n" not in ended.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset=sofmax"], "preset is 'sofmax'"),
        (["--preset=conformal,p=3"], "power is 3"),
        (["--context=1000"], "invalid choice"),
        (["--brief", "--context=1024"], "contexts of their own"),
    ],
)
def test_a_mistake_is_found_before_the_work(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        training.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
