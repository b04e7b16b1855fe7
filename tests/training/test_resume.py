"""Tests that a run that stops and resumes is to the bit the run that does not, whatever it has in its state."""

import functools
import os
import random
import signal
import time

import jax
import numpy as np
import pytest

from sympow_jax import config, data, layers, loop, training, weights
from sympow_jax.training import metrics
from sympow_jax.weights import runs
from tests import marked
from tests.data import builders
from tests.training import small
from tools import launching


def _encoder(settings, folder):
    """Batch normalization, micro-batches over several epochs, factors of rates and a moving average."""
    words = ("red", "green", "blue")
    lines = [f"{words[i % 3]} {'thing ' * (i % 4)}\t{i % 3}" for i in range(10)]
    (folder / "lines.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")
    of = {"name": "adamw", "ema_decay": 0.9, "weight_decay": 0.1, "accumulate": 2, "learning_rate": 3e-2}
    of["learning_rate_factors"] = ("*.attention.value.kernel=0",)
    rows = {"paths": (str(folder / "lines.tsv"),), "heldout_fraction": 0.0}
    made = small.encoder(vocab_size=256, norm="batch")
    return small.changed(made, data=rows, optimizer=config.OptimizerConfig(**of))


def _corpus(settings, folder, name="a.parquet"):
    """Packed documents of a corpus, other workers, scanned layers, schedule-free, updates that may be skipped."""
    pytest.importorskip("pyarrow")
    write = builders.write_parquet if name == "a.parquet" else builders.write_jsonl
    write(folder / name, [f"{index}: the quick brown fox. " * (1 + index % 7) for index in range(60)])
    source = "parquet" if name == "a.parquet" else "jsonl"
    return small.changed(
        settings,
        data={"source": source, "paths": (str(folder / name),), "packing": "documents"},
        model={"layers": 2},
        optimizer=config.OptimizerConfig(name="schedule_free", learning_rate=3e-2),
        training={"scan_layers": True, "skip_nonfinite": True},
    )


def _jsonl(settings, folder):
    return _corpus(settings, folder, "a.jsonl.zst")


@pytest.mark.parametrize("change", [_encoder, _corpus, pytest.param(_jsonl, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_whole_one(tmp_path, settings, change):
    of, steps = change(settings, tmp_path), 8
    workers = {"tokenizer_workers": 1} if change in (_corpus, _jsonl) else {}

    def train(steps, folder, **read):
        run = small.changed(of, training={"steps": steps}, data=read)
        assert loop.train(run, tmp_path / folder) == 0
        return run

    whole = train(steps, "whole")
    train(3, "parts", **workers)  # what other processes read is the same
    train(steps, "parts")
    expected, found = (small.lines(tmp_path / name) for name in ("whole", "parts"))
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    timed = {"step_seconds", "tokens_per_second", "model_flops_per_second", "data_wait_seconds"}
    for one, other in zip(found, expected, strict=True):
        assert {name: one[name] for name in one.keys() - timed} == {x: other[x] for x in other.keys() - timed}
    assert found[-1]["loss"] < found[0]["loss"]
    (arrays, step), (others, _) = (small.arrays(whole, tmp_path / name) for name in ("parts", "whole"))
    assert step == steps
    small.assert_same(arrays, others)
    # What is evaluated is the average, which the optimizer's settings name.
    trained, _ = small.arrays(small.changed(whole, optimizer=config.OptimizerConfig()), tmp_path / "whole")
    assert not np.array_equal(trained["params"]["embedding"], arrays["params"]["embedding"])
    (_check_encoder if change is _encoder else _check_corpus)(tmp_path, whole, arrays, trained)


def _check_corpus(folder, settings, arrays, trained):
    """All that reads a run has the averages, and other data is noticed before anything is trained."""
    runs.export_run(folder / "whole", folder / "weights.safetensors")
    exported = weights.load(folder / "weights.safetensors", settings)
    program, (_, model, _) = small.program(settings), training.restore_model(folder / "whole")
    for found in (exported, model):
        small.assert_same(*(jax.tree.leaves(x) for x in (found, program.merge(**arrays))))
    heldout = data.HeldoutData(settings.data, settings.task, vocab_size=256).sample()
    means = program.heldout_means(arrays["params"], {}, heldout)
    assert float(means["loss"]) == pytest.approx(small.lines(folder / "whole")[-1]["heldout_loss"], rel=1e-6)
    (path,) = settings.data.paths
    write = builders.write_parquet if path.endswith("parquet") else builders.write_jsonl
    write(folder / path, [f"{index}: the quick brown cat. " * (1 + index % 7) for index in range(60)])
    with pytest.raises(ValueError, match=r"the data is no longer what the run in .* began with: .*digest"):
        loop.train(small.changed(settings, training={"steps": 13}), folder / "parts")


def _check_encoder(folder, settings, arrays, trained):
    """Evaluation normalizes by the running means, and frozen parameters stay."""
    begun = small.program(settings).init_state().params
    attention, first = (tree["stacked_blocks"][0]["attention"] for tree in (trained["params"], begun))
    np.testing.assert_array_equal(attention["value"]["kernel"], first["value"]["kernel"])
    assert (attention["key"]["kernel"] != first["key"]["kernel"]).all()
    assert set(arrays) == {"params", "statistics"}
    assert np.abs(arrays["statistics"]["final_norm"]["mean"]).max() > 0
    _, model, _ = training.restore_model(folder / "whole")
    means, norm = arrays["statistics"]["embedding_norm"], model.embedding_norm
    x = np.random.default_rng(0).normal(size=(1, 3, 16)).astype(np.float32)
    wanted = (x - means["mean"]) / np.sqrt(means["var"] + 1e-5) * norm.scale[...] + norm.bias[...]
    np.testing.assert_allclose(layers.normalize(norm, x, None), wanted, rtol=1e-4, atol=1e-5)
    assert all(0 <= line["accuracy"] <= 1 for line in small.lines(folder / "parts"))


@pytest.mark.usefixtures("interruptible")
@marked.cases("number", [signal.SIGINT], robust=[signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_says_how_to_go_on(
    tmp_path, settings, finished, batches, monkeypatch, capsys, number
):
    report = metrics.Reporter.report

    def report_and_signal(reporter, step, scalars, held_out):
        report(reporter, step, scalars, held_out)
        if step == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(metrics.Reporter, "report", report_and_signal)
    capsys.readouterr()
    run = tmp_path / "stopped"
    assert loop.train(settings, run) == 128 + number
    # Update 3 was running when the metrics of update 2 arrived.
    assert "stopped after step 3, which is saved; the same command resumes the run" in capsys.readouterr().out
    assert (run / "checkpoints" / "3").is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(metrics.Reporter, "report", report)
    assert loop.train(settings, run) == 0
    # Every batch is that of the run without a stop; the held-out one comes first at each start.
    small.assert_same(batches.pop(4), finished.batches[0])
    small.assert_same(batches, finished.batches)
    assert small.losses(run) == small.losses(finished.folder)
    small.assert_same(*(small.arrays(settings, folder) for folder in (run, finished.folder)))


# (saves, seconds): waits until a start has begun that many saves, or not at all if None, and for up to `seconds` more;
# then a process is killed.
_MOMENTS = [(None, 2), (0, 0.1), (1, 0), (1, 0.1), (3, 0.05), (1, 0.3), (2, 0.02), (3, 0.1)]


@pytest.mark.robust
@pytest.mark.timeout(900)  # Orbax waits a minute or more for a process that was killed while both saved
@pytest.mark.parametrize(("processes", "moments"), [(1, _MOMENTS), (2, [(1, 0), (1, 0.3)])])
def test_a_run_that_is_killed_is_the_whole_one(tmp_path, settings, finished, processes, moments):
    """Kills one process while it starts, before the first save, in saves and between them.

    If there is another one, it ends with an error then.
    """
    run, whole, chosen = tmp_path / "run", tmp_path / "whole", random.Random(0)
    arguments = [f"--config={finished.folder}/config.json", "--config.training.checkpoint_every=5"]
    arguments.append("--config.training.steps=150")

    def start(folder):
        options = {"processes": processes, "cache": jax.config.jax_compilation_cache_dir}
        return launching.start([*arguments, f"--workdir={folder}"], tmp_path / "says", **options)

    def newest():
        return max((int(x.name) for x in run.glob("checkpoints/*") if x.name.isdigit()), default=0)

    def begun(started):  # what the first says after it has removed leftovers
        said = [line for one in started for line in one.said()]
        return [int(line.split()[2]) for line in said if line.startswith("training: step ")]

    def is_past(started, saves, seen):
        seen.update(x.name for x in run.glob("checkpoints/*tmp*") if begun(started))
        return bool(begun(started)) and len(seen) >= saves

    undisturbed = start(whole)
    for number, (saves, seconds) in enumerate(moments):
        at, started, seen = newest(), start(run), set()
        if saves is not None:
            launching.wait_until(functools.partial(is_past, started, saves, seen), started)
        time.sleep(chosen.uniform(0, seconds))
        before, killed = newest(), started.pop(number % processes)
        killed.send(signal.SIGKILL)
        assert (killed.wait(), killed.errors()) == (-signal.SIGKILL, [])
        for one in started:
            code, said = one.wait(600), "\n".join(one.errors())
            assert (code > 0 and "error: " in said) or (
                code == -signal.SIGABRT and "another task died" in said
            )
        assert begun([killed, *started]) in ([], [at])
        assert newest() >= before
    at, started = newest(), start(run)
    assert [one.wait() for one in (*undisturbed, *started)] == [0] * 2 * processes
    assert begun(started) == [at]
    assert [line for one in started for line in one.errors()] == []
    assert small.losses(run) == small.losses(whole)
    small.assert_same(*(small.arrays(settings, folder) for folder in (run, whole)))
