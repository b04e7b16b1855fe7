"""Tests of train.py as a user runs it: resuming, stopping, failing."""

import collections
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
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
from sympow_jax.training import checkpoint, metrics, sharding
from tests.data import builders
from tools import launching

ROOT = pathlib.Path(__file__).parents[2]


def _metrics(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _losses(folder: pathlib.Path) -> dict[int, float]:
    lines = _metrics(folder)
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["loss"] for line in lines}


def _assert_same_params(one: pathlib.Path, other: pathlib.Path) -> None:
    _, model, step = training.restore_model(one)
    _, expected, expected_step = training.restore_model(other)
    assert step == expected_step
    jax.tree.map(np.testing.assert_array_equal, _leaves(model), _leaves(expected))


def _leaves(model) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


def test_no_file_of_a_run_is_written_through_a_link(tmp_path, with_training):
    target, plain, linked = (tmp_path / name for name in ("thesis.txt", "plain", "linked"))
    target.write_text("the user's")
    settings = dataclasses.replace(
        with_training(steps=2), evaluation=config.EvaluationConfig(context_lengths=(8, 16))
    )
    assert loop.train(settings, plain) == 0
    names = {path.name for path in plain.iterdir() if path.is_file()} - {"lock"}
    assert {"metrics.jsonl", "data.json", "context_loss.csv", "context_loss.png"} < names
    linked.mkdir()
    for name in names | {"config.json.tmp", "metrics.jsonl.tmp"}:
        (linked / name).symlink_to(target)
    assert loop.train(settings, linked) == 0
    assert target.read_text() == "the user's"
    assert _losses(linked) == _losses(plain)
    assert not any(path.name.startswith(".") for path in linked.iterdir())


def test_ten_steps_equal_five_and_five(tmp_path, with_training, finished, batches):
    whole = finished.batches
    assert loop.train(with_training(steps=5), tmp_path / "halves") == 0
    assert loop.train(with_training(steps=10), tmp_path / "halves") == 0
    heldout = batches.pop(6)  # of the second start
    assert len(whole) == len(batches) == 11
    for one, other in zip([*whole, whole[0]], [*batches, heldout]):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    losses = _losses(finished.folder)
    assert losses == _losses(tmp_path / "halves")
    assert list(losses) == list(range(1, 11))
    assert losses[10] < losses[1]
    _assert_same_params(finished.folder, tmp_path / "halves")
    # The half run reports a held-out loss at every step, the whole run too.
    found, expected = (
        [line["heldout_loss"] for line in _metrics(x)] for x in (tmp_path / "halves", finished.folder)
    )
    assert found == expected


@pytest.mark.parametrize("name", ["a.parquet", pytest.param("a.jsonl.zst", marks=pytest.mark.robust)])
def test_a_run_on_a_corpus_is_resumed_with_other_workers(tmp_path, with_training, name):
    pytest.importorskip("pyarrow")
    write = builders.write_parquet if name == "a.parquet" else builders.write_jsonl
    write(tmp_path / name, [f"{index}: the quick brown fox. " * (1 + index % 7) for index in range(60)])

    def on_corpus(steps: int, workers: int) -> config.Config:
        settings = with_training(steps=steps)
        read = dataclasses.replace(
            settings.data,
            source="parquet" if name == "a.parquet" else "jsonl",
            paths=(str(tmp_path / name),),
            tokenizer_workers=workers,
        )
        return dataclasses.replace(settings, data=read)

    assert loop.train(on_corpus(12, 0), tmp_path / "whole") == 0
    assert loop.train(on_corpus(5, 1), tmp_path / "parts") == 0
    assert loop.train(on_corpus(12, 0), tmp_path / "parts") == 0
    losses = _losses(tmp_path / "whole")
    assert losses == _losses(tmp_path / "parts")
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1]
    _assert_same_params(tmp_path / "whole", tmp_path / "parts")
    assert "heldout_loss" in _metrics(tmp_path / "parts")[-1]
    # Other data under the same name is noticed before anything is trained.
    write(tmp_path / name, [f"{index}: the quick brown cat. " * (1 + index % 7) for index in range(60)])
    with pytest.raises(ValueError, match=r"the data is no longer what the run in .* began with: .*digest"):
        loop.train(on_corpus(13, 0), tmp_path / "parts")


def test_a_corrupt_corpus_ends_a_run_whose_checkpoint_is_kept(tmp_path, with_training, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("sympow_jax.data.corpus.pieces.GROUP_BYTES", 500)
    monkeypatch.setattr("sympow_jax.data.sources.corpus._SAMPLE_BYTES", 500)
    monkeypatch.setattr("sympow_jax.data.sources.corpus._ROWS", 0)
    path = tmp_path / "a.jsonl"
    builders.write_jsonl(path, [f"{index}: the quick brown fox jumps. " * 5 for index in range(12)])
    settings = with_training(steps=40, checkpoint_every=1)
    read = dataclasses.replace(
        settings.data, source="jsonl", paths=(str(path),), tokenizer_workers=0, heldout_fraction=0.0
    )
    settings = dataclasses.replace(settings, data=read)
    lines = path.read_bytes().splitlines(keepends=True)
    broken = b"".join([*lines[:6], lines[6].replace(b'"', b"'"), *lines[7:]])
    path.write_bytes(broken)
    with pytest.raises(ValueError, match=r"a\.jsonl \(line at byte \d+\) is not JSON: .*; correct the line"):
        loop.train(settings, tmp_path / "run")
    _, _, step = training.restore_model(tmp_path / "run")
    assert 0 < step == _metrics(tmp_path / "run")[-1]["step"] < 40


def test_a_run_with_learning_rate_factors_is_resumed(tmp_path, with_training):
    def with_factors(steps: int, *factors: str) -> config.Config:
        settings = with_training(steps=steps)
        optimizer = dataclasses.replace(settings.optimizer, learning_rate_factors=factors)
        return dataclasses.replace(settings, optimizer=optimizer)

    frozen = "*.attention.value.kernel=0"
    with pytest.raises(
        ValueError, match=r"matches no parameter; did you mean blocks\.0\.attention\.value\.kernel\?"
    ):
        loop.train(with_factors(2, "blocks.0.attention.values.kernel=0"), tmp_path / "halves")
    assert not (tmp_path / "halves").exists()
    for steps in (2, 4):
        assert loop.train(with_factors(steps, frozen), tmp_path / "halves") == 0
    assert loop.train(with_factors(4, frozen), tmp_path / "whole") == 0
    assert _losses(tmp_path / "whole") == _losses(tmp_path / "halves")
    _assert_same_params(tmp_path / "whole", tmp_path / "halves")
    _, model, _ = training.restore_model(tmp_path / "whole")
    program = training.Program(with_factors(4), sharding.whole_mesh())
    begun, attention = (one.blocks[0].attention for one in (program.model(program.init_state()), model))
    np.testing.assert_array_equal(attention.value.kernel[...], begun.value.kernel[...])
    assert (attention.key.kernel[...] != begun.key.kernel[...]).all()
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate_factors"):
        loop.train(with_factors(6), tmp_path / "whole")


def test_held_out_losses_are_those_of_the_formula_and_change_nothing(tmp_path, with_training):
    settings = with_training(steps=4, checkpoint_every=2)
    every = dataclasses.replace(settings.evaluation, every=2)
    assert loop.train(dataclasses.replace(settings, evaluation=every), tmp_path / "with") == 0
    off = dataclasses.replace(settings.evaluation, every=0)
    assert loop.train(dataclasses.replace(settings, evaluation=off), tmp_path / "without") == 0
    assert _losses(tmp_path / "with") == _losses(tmp_path / "without")
    _assert_same_params(tmp_path / "with", tmp_path / "without")
    assert not any("heldout_loss" in line for line in _metrics(tmp_path / "without"))
    found = {
        line["step"]: line["heldout_loss"] for line in _metrics(tmp_path / "with") if "heldout_loss" in line
    }
    assert list(found) == [2, 4]
    _, model, _ = training.restore_model(tmp_path / "with")
    rows = data.HeldoutData(settings.data, settings.task, vocab_size=256).sample()
    logs = np.asarray(jax.nn.log_softmax(model(rows["inputs"])), np.float64)
    counts = rows["targets"] >= 0
    picked = np.take_along_axis(logs, np.maximum(rows["targets"], 0)[..., None], -1)[..., 0]
    assert found[4] == pytest.approx(-picked[counts].mean(), rel=1e-5)


def test_prompts_are_continued_and_change_nothing(tmp_path, with_training, monkeypatch):
    seen = {}

    def record(self, event):
        for value in event.summary.value:
            name, _, kind = value.tag.rpartition("/")
            if kind == "text_summary":
                seen[name, event.step] = value.tensor.string_val[0].decode()

    monkeypatch.setattr(EventsWriter, "write_event", record)
    settings = with_training(steps=4, checkpoint_every=4)
    assert loop.train(settings, tmp_path / "without") == 0
    assert not seen
    prompted = dataclasses.replace(settings.evaluation, every=2, prompts=("the ", "a\nb"))
    assert loop.train(dataclasses.replace(settings, evaluation=prompted), tmp_path / "with") == 0
    assert set(seen) == {(prompt, step) for prompt in prompted.prompts for step in (2, 4)}
    assert seen["a\nb", 4].startswith("    a\n    b")
    assert len(seen["the ", 2]) > len("    the ")
    assert _losses(tmp_path / "with") == _losses(tmp_path / "without")


def _with_prompts(settings: config.Config, *prompts: str, **attention) -> config.Config:
    changed = dataclasses.replace(settings.model.attention, **attention)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, attention=changed),
        evaluation=dataclasses.replace(settings.evaluation, prompts=prompts),
    )


def _periodic(program: training.Program) -> evaluation.Periodic:
    settings = program.config
    opened = data.HeldoutData(settings.data, settings.task, vocab_size=settings.model.vocab_size)
    return evaluation.Periodic(program, opened)


def test_prompts_that_a_run_cannot_have_are_errors_at_its_start(settings):
    def error(settings: config.Config) -> str:
        with pytest.raises(ValueError, match=r"evaluation\.prompts") as caught:
            _periodic(training.Program(settings, sharding.whole_mesh()))
        return str(caught.value)

    tokens = dataclasses.replace(settings.data, source="tokens", heldout_fraction=0.0)
    found = error(dataclasses.replace(_with_prompts(settings, "the "), data=tokens))
    assert "data.source tokens and 1 device: leave them out" in found
    assert (
        error(_with_prompts(settings, "the", "caf\udce9")) == "evaluation.prompts: 'caf\\udce9' is not UTF-8"
    )
    learned = {"position": "learned_absolute", "max_document_length": 130}
    _periodic(training.Program(_with_prompts(settings, "th", **learned), sharding.whole_mesh()))
    assert error(_with_prompts(settings, "a", "the", **learned)) == (
        "evaluation.prompts: a prompt and its 128 tokens must fit model.attention.max_document_length, 130; shorten "
        "or leave out the prompts"
    )
    nothing_held_out = dataclasses.replace(settings.data, heldout_fraction=0.0)
    program = training.Program(
        dataclasses.replace(_with_prompts(settings, "the "), data=nothing_held_out), sharding.whole_mesh()
    )
    program.mesh = types.SimpleNamespace(size=8)
    with pytest.raises(ValueError, match=r"data\.source text and 8 devices: leave them out"):
        _periodic(program)


def test_prompts_are_continued_without_the_implementation_that_trains(settings, monkeypatch):
    program = training.Program(_with_prompts(settings, "a", implementation="xla"), sharding.whole_mesh())
    used = []
    complete = generation.complete

    def record(model, *arguments, **options):
        used.append(model.config.attention.implementation)
        return complete(model, *arguments, **options)

    monkeypatch.setattr(generation, "complete", record)
    assert _periodic(program).texts(program.init_state())["a"].startswith("a")
    assert used == [None]


def test_a_finished_run_is_left_as_it_is(tmp_path, with_training, finished, batches):
    run = finished.copy(tmp_path / "run")
    before = (run / "metrics.jsonl").read_text()
    assert loop.train(with_training(), run) == 0
    assert len(batches) == 1
    assert (run / "metrics.jsonl").read_text() == before
    with pytest.raises(ValueError, match=r"at step 10, past training.steps=9"):
        loop.train(with_training(steps=9), run)


def test_a_damaged_newest_checkpoint(tmp_path, settings, finished, capfd):
    finished.copy(tmp_path / "run")
    losses = _losses(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "10" / "params").rglob("manifest.ocdbt"):
        path.write_bytes(path.read_bytes()[:10])
    capfd.readouterr()
    assert loop.train(settings, tmp_path / "run") == 0
    captured = capfd.readouterr()
    assert "the checkpoint of step 10" in captured.err
    assert "training: step 8 of 10" in captured.out
    assert _losses(tmp_path / "run") == losses


@pytest.mark.parametrize("prompts", [(), ("the ",)])
def test_a_loss_that_is_not_finite(tmp_path, settings, prompts):
    settings = dataclasses.replace(
        _with_prompts(settings, *prompts),
        optimizer=config.OptimizerConfig(name="sgd", learning_rate=1e30),
        training=dataclasses.replace(settings.training, checkpoint_every=1),
    )
    with pytest.raises(
        ValueError, match=r"is (nan|inf) at step (\d+); the last checkpoint is kept"
    ) as caught:
        loop.train(settings, tmp_path)
    failed = int(str(caught.value).split(" at step ")[1].split(";")[0])
    assert list(_losses(tmp_path)) == list(range(1, failed))
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert not kept or kept[-1] == failed - 1
    if kept:
        assert all(np.isfinite(leaf).all() for leaf in _leaves(training.restore_model(tmp_path)[1]))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(number, marks=pytest.mark.robust) for number in (signal.SIGTERM, signal.SIGUSR1)),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, settings, finished, monkeypatch, capsys, number):
    report = metrics.Reporter.report

    def report_and_signal(reporter, step, scalars, held_out):
        report(reporter, step, scalars, held_out)
        if step == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(metrics.Reporter, "report", report_and_signal)
    capsys.readouterr()
    assert loop.train(settings, tmp_path / "stopped") == 128 + number
    # Update 3 was running when the metrics of update 2 arrived.
    assert "stopped after step 3, which is saved; the same command resumes the run" in capsys.readouterr().out
    assert (tmp_path / "stopped" / "checkpoints" / "3").is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(metrics.Reporter, "report", report)
    assert loop.train(settings, tmp_path / "stopped") == 0
    assert _losses(tmp_path / "stopped") == _losses(finished.folder)


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


def test_chosen_steps_are_traced(tmp_path, with_training):
    assert loop.train(with_training(steps=2, profile_steps=(2, 3)), tmp_path) == 0
    (first,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    assert "PjitFunction(jit(update))" in _host_events(first)
    # The resumed run starts in the middle of the steps to be traced, and may also trace other steps.
    assert loop.train(with_training(steps=4, profile_steps=(1, 2)), tmp_path) == 0
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")) == [first]


def _host_events(path: pathlib.Path) -> set[str]:
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return {event.name for plane in planes for line in plane.lines for event in line.events}


def test_packed_documents_accumulation_and_evaluation(tmp_path, settings, capsys):
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, packing="documents"),
        optimizer=dataclasses.replace(settings.optimizer, accumulate=2, name="adamw", weight_decay=0.1),
        training=dataclasses.replace(settings.training, steps=2),
        evaluation=config.EvaluationConfig(context_lengths=(8, 32)),
    )
    assert loop.train(settings, tmp_path) == 0
    assert (tmp_path / "context_loss.csv").read_text().splitlines()[0] == (
        "run,context_length,loss,perplexity,bits_per_token,tokens,documents,train_context"
    )
    assert (tmp_path / "context_loss.json").is_file()
    assert (tmp_path / "context_loss.png").is_file()
    assert capsys.readouterr().out


def _command(settings: config.Config, workdir: pathlib.Path, *more: str) -> list[str]:
    arguments = [
        f"--config=configs/text.py:{settings.data.paths[0]}",
        f"--workdir={workdir}",
        *launching.SMALLEST,
        *more,
    ]
    return [sys.executable, "train.py", *arguments]


@pytest.mark.robust
def test_ctrl_c_and_kill(tmp_path, settings, compilation_cache):
    workdir = tmp_path / "run"
    command = _command(
        settings, workdir, "--config.training.steps=1000000", "--config.training.checkpoint_every=20"
    )

    def start_and_send(number: int, least_step: int) -> launching.Started:
        (run,) = launching.start(command[2:], tmp_path / "says", cache=compilation_cache)
        launching.wait_until(
            lambda: any(
                int(path.name) >= least_step for path in workdir.glob("checkpoints/*") if path.name.isdigit()
            ),
            [run],
        )
        run.send(number)
        return run

    assert start_and_send(signal.SIGKILL, 20).wait() == -signal.SIGKILL
    run = start_and_send(signal.SIGINT, 60)
    assert run.wait() == 130
    assert run.errors() == [signals.SAVING]
    *plan, last = run.said()
    assert plan[0].startswith("model: softmax, 1 layer of width 16, ")
    assert "devices: 1 x cpu" in plan
    (first,) = (line for line in plan if line.startswith("training: step "))
    assert int(first.split()[2]) >= 20
    assert last.startswith("stopped after step ")
    stopped = int(last.split()[3].rstrip(","))
    assert (workdir / "checkpoints" / str(stopped)).is_dir()
    assert list(_losses(workdir)) == list(range(1, stopped + 1))


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


def test_a_signal_during_the_last_save_stops_before_the_evaluation(
    tmp_path, with_training, monkeypatch, capfd
):
    settings = dataclasses.replace(
        with_training(steps=4), evaluation=config.EvaluationConfig(context_lengths=(8,))
    )
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
    assert not (tmp_path / "context_loss.csv").exists()
    assert loop.train(settings, tmp_path) == 0
    assert (tmp_path / "context_loss.csv").exists()


def test_data_is_opened_once(tmp_path, settings, monkeypatch):
    opened = []
    open_file = files.open_file

    def record(path):
        opened.append(path)
        return open_file(path)

    monkeypatch.setattr(files, "open_file", record)
    for lengths in (None, (8,)):
        opened.clear()
        evaluated = config.EvaluationConfig(context_lengths=lengths)
        changed = dataclasses.replace(settings, evaluation=evaluated)
        assert loop.train(changed, tmp_path / str(lengths)) == 0
        # Once for the run, and once when the evaluation at its end checks that the data has not changed.
        assert set(collections.Counter(opened).values()) == {2}


def test_an_error_of_the_held_out_loss_comes_before_the_first_update(tmp_path, settings, monkeypatch):
    def fail(*_):
        raise ValueError("out of memory")

    monkeypatch.setattr(training.Program, "heldout_means", jax.jit(fail))
    with pytest.raises(ValueError, match="out of memory"):
        loop.train(settings, tmp_path)
    assert not (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.robust
def test_a_mistake_is_one_line(tmp_path, settings):
    command = _command(settings, tmp_path / "run", "--config.model.layer=3")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "error: there is no setting --config.model.layer; did you mean --config.model.layers?\n"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--config.data.paths=nothing/*.txt"], "nothing/*.txt"),
        (["--workdir=/proc/run"], "cannot write to --workdir /proc/run"),
        (["--config.evaluation.context_lengths=16,100000"], "100000 is longer than any held-out document"),
        (
            ["--config.model.attention.kernel=power", "--config.model.attention.implementation=mosaic_gpu"],
            "'mosaic_gpu' needs a Hopper GPU",
        ),
        (
            [f"--config.data.{name}=sympow_jax/*.py" for name in ("paths", "heldout_paths")],
            "sympow_jax/__init__.py; change one of them, or leave data.heldout_paths empty",
        ),
        (["--config.optimizer.accumulate=3"], "optimizer.accumulate is 3 and does not divide the 4 rows"),
    ],
)
def test_mistakes_found_before_anything_is_written(tmp_path, settings, capsys, more, message):
    with pytest.raises(SystemExit) as caught:
        launch.main(_command(settings, tmp_path / "run", *more)[2:])
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "run").exists()
