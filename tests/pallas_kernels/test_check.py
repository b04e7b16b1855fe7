"""Tests of `sympow check`: isolation of cases, identity of a verdict, and its consumers."""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.check import cases, run, supervisor, verdict
from pallas_kernels.check.supervisor import Status
from sympow_jax import commands, ops
from sympow_jax.ops import target
from tests import mistakes

KIND = "NVIDIA H100 80GB HBM3"


def printing(**result):
    line = supervisor.RESULT + json.dumps({"bounds": {"mean": 1e-3}, "different": [], **result})
    return f"print({line!r})"


# Programs of cases, and what becomes of them.
CONTENDERS = {
    "right": (printing(errors={"mean": 1e-4}), Status.OK),
    "hangs": ("import time; time.sleep(600)", Status.HANG),
    # Its child would survive if only the process itself were killed.
    "hangs with a child": ("import subprocess; subprocess.run(['sleep', '600'])", Status.HANG),
    "crashes": ("import os, sys; print('bad address', file=sys.stderr); os.abort()", Status.CRASH),
    "says nothing": ("pass", Status.CRASH),
    "is off": (printing(errors={"mean": 2e-3}), Status.WRONG),
    "is not a number": (printing(errors={"mean": float("nan")}), Status.WRONG),
    "compares nothing": (printing(errors={}), Status.WRONG),
    "differs between runs": (printing(errors={"mean": 0.0}, different=["mean"]), Status.WRONG),
    "prints nonsense": (f"print({supervisor.RESULT!r} + '[1, 2')", Status.CRASH),
    "has a list of errors": (printing(errors=[0.0]), Status.CRASH),
    "prints bytes": ("import sys; sys.stdout.buffer.write(bytes([255, 254, 10]))", Status.CRASH),
    "right again": (printing(errors={"mean": 0.0}), Status.OK),
}


def program(case):
    return [sys.executable, "-c", CONTENDERS[case][0]]


@pytest.mark.robust
def test_every_case_runs_whatever_the_others_do():
    outcomes = list(supervisor.run_all(list(CONTENDERS), program, seconds=3.0, deadline=float("inf"), jobs=4))
    expected = {case: status for case, (_, status) in CONTENDERS.items()}
    assert {outcome.case: outcome.status for outcome in outcomes} == expected
    assert [outcome.case for outcome in outcomes] == list(CONTENDERS)
    said = {outcome.case: outcome.line() for outcome in outcomes}
    assert "bad address" in said["crashes"]
    assert "mean is off by 2.0e-03, more than 1.0e-03" in said["is off"]
    assert "no result within 3 s" in said["hangs"]
    assert all("\n" not in line for line in said.values())


@pytest.mark.robust
def test_a_case_that_hangs_leaves_no_process():
    marker = f"599.{os.getpid()}"
    run = f"import subprocess; subprocess.run(['sleep', {marker!r}])"
    outcome = supervisor.run("child", [sys.executable, "-c", run], seconds=2.0)
    assert outcome.status is Status.HANG
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert marker not in process.read_text()
        except OSError:  # it ended meanwhile
            continue


@pytest.mark.robust
def test_a_case_that_runs_out_of_time_is_not_called_a_hang():
    begin = time.monotonic()
    outcomes = supervisor.run_all(["hangs", "right"], program, seconds=60.0, deadline=begin + 2.0)
    assert [outcome.status for outcome in outcomes] == [Status.SKIPPED, Status.SKIPPED]
    assert time.monotonic() - begin < 20


def test_families_need_their_cases_and_the_toolchain():
    family_of = {"copy": "toolchain", "a": "power_step", "b": "power_step", "c": "power_attention"}

    def families(**status):
        outcomes = [supervisor.Outcome(case=case, status=found) for case, found in status.items()]
        return {name for name, right in run._families(outcomes, family_of).items() if right}

    assert families(copy=Status.OK, a=Status.OK, b=Status.OK, c=Status.OK) == {
        "power_step",
        "power_attention",
    }
    assert families(copy=Status.OK, a=Status.OK, b=Status.SKIPPED, c=Status.OK) == {"power_attention"}
    assert families(copy=Status.CRASH, a=Status.OK, b=Status.OK, c=Status.OK) == set()
    assert families(copy=Status.OK) == set()


def test_without_a_gpu_the_command_says_so(monkeypatch, capfd):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    line = mistakes.line(commands.main, ["check", "--brief"], capfd)
    assert line == "error: sympow check needs an NVIDIA Hopper GPU that JAX sees; there is none here\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdict, "driver_version", lambda: "580.159.04")
    verdict._load.cache_clear()
    yield tmp_path
    verdict._load.cache_clear()


def test_the_command_stores_a_verdict_unless_only_some_cases_ran(cache, monkeypatch, capfd):
    def run_all(names, command, **_):
        assert names == [] or command(names[0])[1:4] == ["-m", "pallas_kernels.check.case_process", names[0]]
        return (supervisor.Outcome(case=name, status=Status.OK) for name in names)

    monkeypatch.setattr(run, "_gpu", lambda: (KIND, ""))
    monkeypatch.setattr(supervisor, "run_all", run_all)
    assert commands.main(["check", "--brief", "--only", "power_step", f"--out={cache}/outcomes.json"]) == 0
    outcomes = json.loads((cache / "outcomes.json").read_text())
    assert outcomes["brief"]
    assert {case["case"] for case in outcomes["cases"]} == {
        case.name for case in cases.CASES if case.brief and "power_step" in case.name
    }
    assert not verdict.trusted("power_step", KIND)
    assert commands.main(["check"]) == 0
    assert "power_step: right" in capfd.readouterr().out
    assert all(verdict.trusted(family, KIND) for family in verdict.FAMILIES)
    # A text that no case has is a mistake, not a success.
    assert commands.main(["check", "--only", "nothing"]) == 1


def test_a_verdict_is_of_one_kind_of_machine(cache, monkeypatch):
    file = verdict.store(KIND, {"power_step": True, "power_attention": False}, {"cases": []})
    assert file.is_relative_to(cache)
    assert verdict.trusted("power_step", KIND)
    assert not verdict.trusted("power_attention", KIND)
    assert not verdict.trusted("power_state_square", KIND)
    assert not verdict.trusted("power_step", "NVIDIA H200")
    for module, name, other in (
        (verdict, "driver_version", lambda: "590.1"),
        (verdict, "_kernels_digest", lambda: "other"),
        (verdict, "_versions", lambda: ["0.12.0", "0.12.0.1"]),
        (jax, "__version__", "0.99.0"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, other)
            verdict._load.cache_clear()
            assert not verdict.trusted("power_step", KIND), name
        verdict._load.cache_clear()
        assert verdict.trusted("power_step", KIND)


def test_a_run_cut_short_keeps_what_was_known(cache):
    verdict.store(KIND, {"power_step": True, "power_attention": True}, {})
    verdict.store(KIND, {"power_attention": False}, {})
    assert verdict.trusted("power_step", KIND)
    assert not verdict.trusted("power_attention", KIND)


@pytest.mark.robust
def test_ctrl_c_ends_the_processes_of_cases(monkeypatch):
    begin = time.monotonic()
    outcomes = supervisor.run_all(
        ["right", "hangs", "hangs"], program, seconds=60.0, deadline=float("inf"), jobs=3
    )
    assert next(outcomes).status is Status.OK
    with pytest.raises(KeyboardInterrupt):
        outcomes.throw(KeyboardInterrupt)
    assert time.monotonic() - begin < 30
    assert not supervisor._running


def test_without_a_home_directory_nothing_is_trusted(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(verdict.pathlib.Path, "home", no_home)
    verdict._load.cache_clear()
    assert not verdict.trusted("power_step", KIND)


def test_a_damaged_verdict_is_none(cache):
    for text in ("", "{", "[]", "{}", '{"families": 3}', '{"families": {"power_step": "yes"}}', "\ud800"):
        file = verdict.store(KIND, {"power_step": True}, {})
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        verdict._load.cache_clear()
        assert not verdict.trusted("power_step", KIND), text


def test_the_kernels_digest_changes_with_their_sources(tmp_path, monkeypatch):
    package = tmp_path / "pallas_kernels"
    (package / "check").mkdir(parents=True)
    monkeypatch.setattr(verdict, "__file__", str(package / "check" / "verdict.py"))
    digests = set()
    for text in ("a = 1\n", "a = 2\n"):
        (package / "kernel.py").write_text(text)
        verdict._kernels_digest.cache_clear()
        digests.add(verdict._kernels_digest())
    verdict._kernels_digest.cache_clear()
    assert len(digests) == 2


def test_of_several_processes_all_must_agree(cache, monkeypatch):
    verdict.store(KIND, {"power_step": True, "power_attention": True}, {})
    monkeypatch.setattr(verdict.jax, "process_count", lambda: 2)
    assert not verdict.trusted("power_step", KIND)
    other = [family == "power_step" for family in verdict.FAMILIES]
    monkeypatch.setattr(
        verdict.multihost_utils,
        "process_allgather",
        lambda mine: jnp.stack([jnp.asarray(mine), jnp.array(other)]),
    )
    monkeypatch.setattr(verdict, "_agreed", {})
    verdict.agree(KIND)
    assert verdict.trusted("power_step", KIND)
    assert not verdict.trusted("power_attention", KIND)


HOPPER = types.SimpleNamespace(compute_capability="9.0", device_kind=KIND, platform="gpu")


@pytest.mark.parametrize(
    ("form", "family"), [("attention", "power_attention"), ("chunked", "power_state_square")]
)
def test_kernels_are_a_default_only_where_they_were_found_right(cache, monkeypatch, form, family):
    monkeypatch.setattr(target, "device", lambda: HOPPER)
    shape = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)

    def taken(implementation):
        # Use a new function, since JAX caches traces.
        call = functools.partial(ops.power_attention, form=form, implementation=implementation)
        return jax.jit(lambda *x: call(*x)).trace(shape, shape, shape).jaxpr.pretty_print(name_stack=True)

    assert f"{form}_xla" in taken(None)
    assert f"{form}_mosaic_gpu" in taken("mosaic_gpu")
    verdict.store(KIND, {family: False}, {})
    assert f"{form}_xla" in taken(None)
    verdict.store(KIND, {family: True}, {})
    assert f"{form}_mosaic_gpu" in taken(None)
    assert f"{form}_xla" in taken("xla")


def test_a_user_of_a_hopper_gpu_is_told_of_the_check_once_it_would_help(cache):
    said = verdict.advice(HOPPER)
    assert "sympow check --brief" in said
    assert "power_step" in said
    assert "\n" not in said
    verdict.store(KIND, dict.fromkeys(verdict.FAMILIES, True) | {"power_state_quartic": False}, {})
    assert "power_state_quartic" in verdict.advice(HOPPER)
    assert "power_step" not in verdict.advice(HOPPER)
    verdict.store(KIND, dict.fromkeys(verdict.FAMILIES, True), {})
    assert verdict.advice(HOPPER) is None
    assert verdict.advice(types.SimpleNamespace(device_kind="cpu", platform="cpu")) is None
    assert verdict.advice(types.SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")) is None


def test_cases_have_names_of_their_own_and_families_that_are_known():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert {case.family for case in cases.CASES} == {"toolchain", *verdict.FAMILIES}
    assert cases.CASES[0].family == "toolchain"
    for family in verdict.FAMILIES:
        assert any(case.real and case.brief for case in cases.CASES if case.family == family)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "part",
    [
        "toolchain.copy",
        "power_step.fold",
        "power_step.read",
        "power_attention.forward",
        "power_state_square.forward",
    ],
)
def test_the_formulas_of_the_check(part):
    """Correct kernels pass, and results that are off do not."""
    from pallas_kernels.check import case_process

    case = next(case for case in cases.CASES if f"{case.family}.{case.part}" == part)
    case = dataclasses.replace(case, time=min(case.time, 280), batch=1, kv_heads=1)
    result = case_process.measure(case, plgpu.InterpretGPUParams())
    assert not result["different"]
    for name, error in result["errors"].items():
        assert error <= result["bounds"][name], name
    prepared = cases.prepare(case, plgpu.InterpretGPUParams())
    for name, expected in prepared.expected.items():
        off = expected.at[(0,) * expected.ndim].add(10 * jnp.abs(expected).max())
        assert case_process._relative_error(off, expected) > prepared.bounds[name]
