"""Tests of train.py as a user runs it: what a run writes, evaluates and refuses, and how it stops and fails."""

import collections
import json
import os
import signal
import sys
import types

import jax
import numpy as np
import pytest
from tensorboardX.event_file_writer import EventsWriter

from sympow_jax import config, data, evaluation, generation, loop, training
from sympow_jax.commands import launch
from sympow_jax.data import files
from sympow_jax.process import signals
from sympow_jax.training import checkpoint
from tests import mistakes
from tests.data import builders
from tests.training import small
from tools import launching


def test_no_file_of_a_run_is_written_through_a_link_and_data_is_opened_once(
    tmp_path, settings, finished, monkeypatch
):
    opened, open_file = [], files.open_file
    monkeypatch.setattr(files, "open_file", lambda path: opened.append(path) or open_file(path))
    target, linked = tmp_path / "thesis.txt", tmp_path / "linked"
    target.write_text("the user's")
    names = {path.name for path in finished.folder.iterdir() if path.is_file()} - {"lock"}
    names |= {f"context_loss.{kind}" for kind in ("csv", "json", "png", "pdf")}
    assert {"metrics.jsonl", "data.json", "config.json", "environment.json"} < names
    linked.mkdir()
    for name in names | {"config.json.tmp", "metrics.jsonl.tmp"}:
        (linked / name).symlink_to(target)
    evaluated = config.EvaluationConfig(context_lengths=(8, 16))
    assert loop.train(small.changed(settings, training={"steps": 2}, evaluation=evaluated), linked) == 0
    assert set(collections.Counter(opened).values()) == {1}
    assert target.read_text() == "the user's"
    assert not any((linked / name).is_symlink() for name in names if not name.startswith("events"))
    expected = small.losses(finished.folder)
    assert small.losses(linked) == {step: expected[step] for step in (1, 2)}
    assert not any(path.name.startswith(".") for path in linked.iterdir())
    assert (linked / "context_loss.csv").read_text().splitlines()[0] == (
        "run,context_length,loss,perplexity,bits_per_token,tokens,documents,train_context"
    )


@pytest.mark.robust
def test_a_corrupt_corpus_ends_a_run_whose_checkpoint_is_kept(tmp_path, settings, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("sympow_jax.data.corpus.pieces.GROUP_BYTES", 500)
    monkeypatch.setattr("sympow_jax.data.sources.corpus._SAMPLE_BYTES", 500)
    monkeypatch.setattr("sympow_jax.data.sources.corpus._ROWS", 0)
    path = tmp_path / "a.jsonl"
    builders.write_jsonl(path, [f"{index}: the quick brown fox jumps. " * 5 for index in range(12)])
    read = {"source": "jsonl", "paths": (str(path),), "tokenizer_workers": 0, "heldout_fraction": 0.0}
    settings = small.changed(settings, training={"steps": 40, "checkpoint_every": 1}, data=read)
    lines = path.read_bytes().splitlines(keepends=True)
    broken = b"".join([*lines[:6], lines[6].replace(b'"', b"'"), *lines[7:]])
    path.write_bytes(broken)
    with pytest.raises(ValueError, match=r"a\.jsonl \(line at byte \d+\) is not JSON: .*; correct the line"):
        loop.train(settings, tmp_path / "run")
    _, _, step = training.restore_model(tmp_path / "run")
    assert 0 < step == small.lines(tmp_path / "run")[-1]["step"] < 40


def test_held_out_losses_are_the_formula_and_with_prompts_and_traces_change_nothing(
    tmp_path, settings, finished, monkeypatch
):
    seen = {}

    def record(self, event):
        for value in event.summary.value:
            name, _, kind = value.tag.rpartition("/")
            if kind == "text_summary":
                seen[name, event.step] = value.tensor.string_val[0].decode()

    monkeypatch.setattr(EventsWriter, "write_event", record)
    evaluated = {"every": 2, "prompts": ("the ", "a\nb")}
    settings = small.changed(settings, training={"steps": 4, "profile_steps": (1, 1)}, evaluation=evaluated)
    assert loop.train(settings, tmp_path) == 0
    (path,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert "PjitFunction(jit(update))" in events
    assert set(seen) == {(prompt, step) for prompt in settings.evaluation.prompts for step in (2, 4)}
    assert seen["a\nb", 4].startswith("    a\n    b")
    assert len(seen["the ", 2]) > len("    the ")
    # The finished run has no prompts, and held-out losses at every step.
    expected = small.lines(finished.folder)[:4]
    assert small.losses(tmp_path) == {line["step"]: line["loss"] for line in expected}
    found = {line["step"]: line["heldout_loss"] for line in small.lines(tmp_path) if "heldout_loss" in line}
    assert found == {line["step"]: line["heldout_loss"] for line in expected if line["step"] in (2, 4)}
    _, model, _ = training.restore_model(tmp_path)
    rows = data.HeldoutData(settings.data, settings.task, vocab_size=256).sample()
    logs = np.asarray(jax.nn.log_softmax(model(rows["inputs"])), np.float64)
    counts = rows["targets"] >= 0
    picked = np.take_along_axis(logs, np.maximum(rows["targets"], 0)[..., None], -1)[..., 0]
    assert found[4] == pytest.approx(-picked[counts].mean(), rel=1e-5)


def _with_prompts(settings: config.Config, *prompts: str, **attention) -> config.Config:
    changed = config.preset("softmax", **attention)
    return small.changed(settings, model={"attention": changed}, evaluation={"prompts": prompts})


def _periodic(program: training.Program) -> evaluation.Periodic:
    settings = program.config
    opened = data.HeldoutData(settings.data, settings.task, vocab_size=settings.model.vocab_size)
    return evaluation.Periodic(program, opened)


def test_prompts_that_a_run_cannot_have_are_errors_at_its_start(settings):
    learned = {"position": "learned_absolute", "max_document_length": 129}
    _periodic(small.program(_with_prompts(settings, "th", **learned)))
    prompted = _with_prompts(settings, "the ")
    many = small.program(small.changed(prompted, data={"heldout_fraction": 0.0}))
    many.mesh = types.SimpleNamespace(size=8)
    tokens = small.changed(prompted, data={"source": "tokens", "heldout_fraction": 0.0})
    for program, message in (
        (small.program(tokens), "data.source tokens and 1 device: leave them out"),
        (many, "data.source text and 8 devices: leave them out"),
        (small.program(_with_prompts(settings, "the", "caf\udce9")), r"'caf\udce9' is not UTF-8"),
        (small.program(_with_prompts(settings, "a", "the", **learned)), "all but the last of its 128 tokens"),
    ):
        with pytest.raises(ValueError, match=r"evaluation\.prompts") as caught:
            _periodic(program)
        assert message in str(caught.value)


def test_prompts_are_continued_without_the_implementation_that_trains(settings, monkeypatch):
    program = small.program(_with_prompts(settings, "a", implementation="xla"))
    used = []

    def complete(model, *arguments, **options):
        used.append(model.config.attention.implementation)
        return ["b"]

    monkeypatch.setattr(generation, "complete", complete)
    assert _periodic(program).texts(program.init_state()) == {"a": "ab"}
    assert used == [None]


def test_a_finished_run_is_left_as_it_is(tmp_path, with_training, finished, batches):
    run = finished.copy(tmp_path / "run")
    before = (run / "metrics.jsonl").read_text()
    assert loop.train(with_training(), run) == 0
    assert len(batches) == 1
    assert (run / "metrics.jsonl").read_text() == before
    with pytest.raises(ValueError, match=r"at step 10, past training.steps=9"):
        loop.train(with_training(steps=9), run)


@pytest.mark.parametrize("every", [1, 1000])
def test_a_loss_that_is_not_finite(tmp_path, settings, every):
    diverging = config.OptimizerConfig(name="sgd", learning_rate=1e30)
    prompts = {"prompts": ("the ",) if every > 1 else ()}  # which wait for the loss as a checkpoint does
    changed = small.changed(
        settings, optimizer=diverging, training={"checkpoint_every": every}, evaluation=prompts
    )
    with pytest.raises(ValueError, match=r"is (nan|inf) at step (\d+); the last checkpoint is") as caught:
        loop.train(changed, tmp_path)
    failed = int(str(caught.value).split(" at step ")[1].split(";")[0])
    assert list(small.losses(tmp_path)) == list(range(1, failed))
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept[-1:] == [failed - 1] * (every == 1 and failed > 1)
    if kept:
        found, _ = small.arrays(changed, tmp_path)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.usefixtures("interruptible")
def test_a_second_signal_stops_at_once(monkeypatch):
    monkeypatch.setattr(signals, "_DUPLICATE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt), signals.StopSignals():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_that_a_parent_passes_on_too_is_one():
    """Simulates `uv run` without a terminal: otherwise it would stop at once, without a checkpoint."""
    with signals.StopSignals() as stopping:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert stopping.received == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.robust
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_compiling_ends_at_once(tmp_path, settings, monkeypatch, capfd):
    compile_it = jax.stages.Lowered.compile

    def interrupt(lowered, *arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return compile_it(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", interrupt)
    with pytest.raises(SystemExit) as caught, signals.user_errors():
        loop.train(settings, tmp_path)
    assert caught.value.code == 130
    assert capfd.readouterr().err == "interrupted\n"
    assert not (tmp_path / "metrics.jsonl").read_text()
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_signal_during_the_last_save_stops_before_the_evaluation(tmp_path, settings, monkeypatch, capfd):
    (tmp_path / "context_loss.csv").write_text("of an earlier step")
    evaluated = config.EvaluationConfig(context_lengths=(8,))
    settings = small.changed(settings, training={"steps": 4}, evaluation=evaluated)
    save = checkpoint.Checkpoints.save

    def save_and_signal(checkpoints, number, *arguments):
        save(checkpoints, number, *arguments)
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", save_and_signal)
    assert loop.train(settings, tmp_path) == 128 + signal.SIGTERM
    captured = capfd.readouterr()
    assert captured.err == f"{signals.SAVING}\n"
    assert captured.out.splitlines()[-1].startswith("stopped after step 4, which is saved")
    assert "table: " not in captured.out
    assert (tmp_path / "context_loss.csv").read_text() == "of an earlier step"
    plan = json.loads((tmp_path / "environment.json").read_text())["plan"]
    assert plan[-1].startswith("memory of a device: ")
    assert set(plan) <= set(captured.out.splitlines())
    # The results are those that were written now.
    assert loop.train(settings, tmp_path) == 0
    assert capfd.readouterr().out.splitlines()[-3:] == [
        f"table: {tmp_path}/context_loss.csv",
        f"plot: {tmp_path}/context_loss.png",
        f"checkpoint: {tmp_path}/checkpoints/4",
    ]
    off = small.changed(settings, evaluation={"context_lengths": ()})
    assert loop.train(off, tmp_path) == 0
    assert "table: " not in capfd.readouterr().out


def test_an_error_of_the_held_out_loss_comes_before_the_first_update(tmp_path, settings, monkeypatch):
    def fail(*_):
        raise ValueError("out of memory")

    monkeypatch.setattr(training.Program, "heldout_means", jax.jit(fail))
    with pytest.raises(ValueError, match="out of memory"):
        loop.train(settings, tmp_path)
    assert not (tmp_path / "metrics.jsonl").read_text()


MISTAKES = {
    "--config.data.paths=nothing/*.txt": "nothing/*.txt",
    "--workdir=/proc/run": "cannot write to --workdir /proc/run",
    "--config.evaluation.context_lengths=16,100000": "100000 is longer than any held-out document",
    "--config.model.attention.kernel=power --config.model.attention.implementation=mosaic_gpu": (
        "'mosaic_gpu' needs a Hopper GPU"
    ),
    "--config.data.paths=sympow_jax/*.py --config.data.heldout_paths=sympow_jax/*.py": (
        "sympow_jax/__init__.py; change one of them, or leave data.heldout_paths empty"
    ),
    "--config.optimizer.accumulate=3": "optimizer.accumulate is 3 and does not divide the 4 rows",
    "--config.optimizer.learning_rate_factors=blocks.0.mlp.upper.kernel=0": (
        "matches no parameter; did you mean blocks.0.mlp.up.kernel?"
    ),
}


def test_mistakes_found_before_anything_is_written(tmp_path, settings, capsys, monkeypatch):
    for more, message in MISTAKES.items():
        arguments = [f"--config=configs/text.py:{settings.data.paths[0]}", f"--workdir={tmp_path}/run"]
        arguments += [*launching.SMALLEST, *more.split()]
        assert message in mistakes.line(launch.main, arguments, capsys)
        assert not (tmp_path / "run").exists()
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ModuleNotFoundError, match="grain"):
        loop.train(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
