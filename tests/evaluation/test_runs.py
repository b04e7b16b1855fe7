"""Tests of whole evaluations: names, documents, files, warnings and errors, with models of known loss."""

import contextlib
import csv
import dataclasses
import io
import json
import math

import numpy as np
import pytest

from sympow_jax import config, data, evaluation
from sympow_jax.evaluation import over_runs
from sympow_jax.process import workdir
from tests.data import builders
from tests.evaluation import fakes


@pytest.fixture
def corpus(tmp_path):
    """Writes a training file and 30 held-out documents of 10, 12, ... 68 tokens that count upward."""
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    for index, tokens in enumerate(fakes.counting_documents(30, 68)):
        tokens[: 10 + 2 * index].astype(np.uint16).tofile(tmp_path / f"heldout{index:02}.bin")
    return tmp_path


def make_run(corpus, name, *, preset="conformal", train_context=16, vocabulary=fakes.VOCABULARY, **data):
    data = {
        "source": "tokens",
        "paths": (str(corpus / "train.bin"),),
        "heldout_paths": (str(corpus / "heldout*.bin"),),
        **data,
    }
    settings = config.Config(
        model=config.ModelConfig(
            vocab_size=vocabulary, layers=1, width=8, heads=2, attention=config.preset(preset)
        ),
        data=config.DataConfig(context_length=train_context, batch_tokens=train_context, **data),
        evaluation=config.EvaluationConfig(context_lengths=(4, 16, 32), documents=25),
    )
    workdir.open_workdir(corpus / name, settings)
    return corpus / name


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Makes every run's newest checkpoint a `CountingModel` at step 7."""
    monkeypatch.setattr(
        over_runs.training,
        "restore_model",
        lambda path: (workdir.read_config(path), fakes.CountingModel(), 7),
    )
    monkeypatch.setattr(over_runs.checkpoint, "require_checkpoint", lambda path: None)


def evaluate(workdirs, lengths=None, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()) as file:
        rows = evaluation.evaluate_runs(workdirs, lengths, **kwargs)
    return rows, file.getvalue()


def mean_loss(first, last):
    """Returns the mean loss of positions first .. last; position t is predicted from t - 1 tokens."""
    return fakes.expected_loss(np.arange(first - 1, last)).mean()


def test_a_run_is_evaluated_with_the_settings_of_its_config(corpus, tmp_path):
    rows, _ = evaluate([make_run(corpus, "a")], out=tmp_path / "out")
    assert [row.context_length for row in rows] == [4, 16, 32]
    expected = [mean_loss(2, 4), mean_loss(5, 16), mean_loss(17, 32)]
    np.testing.assert_allclose([row.loss for row in rows], expected, rtol=1e-6)
    # 19 documents have at least 32 tokens.
    assert [row.tokens for row in rows] == [19 * 3, 19 * 12, 19 * 16]
    assert {row.documents for row in rows} == {19}
    assert {row.train_context for row in rows} == {16}


def test_longcrawl64_predicts_position_1_from_the_lead_id(corpus, tmp_path):
    rows, length = 22, 40
    values = np.tile(fakes.counting_documents(2, length)[1], (rows, 1)).astype(np.uint16)  # 1, 2, 3, ...
    path = builders.write_zarr(tmp_path / "heldout.zarr", values)
    run = make_run(
        corpus, "a", source="longcrawl64", paths=("gone.zarr",), heldout_paths=(path,), document_separator=0
    )
    evaluated, text = evaluate([run], (1, 8, length), out=tmp_path / "out")
    # Position t is predicted from t tokens, including the leading one.
    expected = [fakes.expected_loss(np.arange(a, b + 1)).mean() for a, b in ((1, 1), (2, 8), (9, length))]
    np.testing.assert_allclose([row.loss for row in evaluated], expected, rtol=1e-6)
    assert [row.tokens for row in evaluated] == [rows * 1, rows * 7, rows * 32]
    assert "warning" not in text
    with pytest.raises(ValueError, match=r"context length 41 .*the longest has 40 tokens"):
        evaluate([run], (41,), out=tmp_path / "out")


def test_runs_are_overlaid_in_every_file(corpus, tmp_path):
    workdirs = [make_run(corpus, "a"), make_run(corpus, "b", preset="softmax", train_context=4)]
    rows, text = evaluate(workdirs, (4, 32), out=tmp_path / "deep" / "out")
    folder = tmp_path / "deep" / "out"
    assert {path.name for path in folder.iterdir()} == {
        f"context_loss.{x}" for x in ("csv", "json", "pdf", "png")
    }
    with (folder / "context_loss.csv").open() as file:
        records = list(csv.DictReader(file))
    columns = "run,context_length,loss,perplexity,bits_per_token,tokens,documents,train_context"
    assert ",".join(records[0]) == columns
    found = [(record["run"], record["context_length"], record["train_context"]) for record in records]
    assert found == [("a", "4", "16"), ("a", "32", "16"), ("b", "4", "4"), ("b", "32", "4")]
    for record, row in zip(records, rows, strict=True):
        assert float(record["loss"]) == row.loss
        assert float(record["perplexity"]) == pytest.approx(math.exp(row.loss), rel=1e-15)
        assert float(record["bits_per_token"]) == pytest.approx(row.loss / math.log(2), rel=1e-15)
    content = json.loads((folder / "context_loss.json").read_text())
    assert [(run["run"], run["step"]) for run in content["runs"]] == [("a", 7), ("b", 7)]
    assert content["runs"][1]["config"]["model"]["attention"]["kernel"] == "softmax"
    assert content["first_position"] == 2
    assert content["document_indices"] == list(range(11, 30))
    assert [row["loss"] for row in content["rows"]] == [row.loss for row in rows]
    assert "a: step 7, " in text


def test_runs_are_named_by_folder_and_by_preset_or_path_where_that_is_ambiguous(corpus, tmp_path):
    (corpus / "x").mkdir()
    (corpus / "y").mkdir()
    one, two = make_run(corpus, "x/run"), make_run(corpus, "y/run", preset="sympow")
    rows, _ = evaluate([one, f"{two}/"], (4,), out=tmp_path / "out")
    assert [row.run for row in rows] == ["run (conformal)", "run (sympow)"]
    three = make_run(corpus, "run", preset="even_power")
    rows, _ = evaluate([three, two], (4,), out=tmp_path / "out")
    assert [row.run for row in rows] == ["run (even_power)", "run (sympow)"]
    (corpus / "z").mkdir()
    four = make_run(corpus, "z/run")
    rows, _ = evaluate([one, four], (4,), out=tmp_path / "out")
    assert [row.run for row in rows] == [str(one), str(four)]


def test_few_documents_are_a_warning(corpus, tmp_path):
    _, text = evaluate([make_run(corpus, "a")], (4, 64), out=tmp_path / "out")
    assert "warning: 3 held-out documents of at least 64 tokens" in text
    _, text = evaluate([corpus / "a"], (4, 16), out=tmp_path / "out")
    assert "warning" not in text
    # A document as long as the longest length counts.
    rows, text = evaluate([corpus / "a"], (68,), out=tmp_path / "out")
    assert "warning: 1 held-out document of" in text
    assert [(row.documents, row.tokens) for row in rows] == [(1, 67)]
    with pytest.raises(ValueError, match=r"context length 69 .* the longest has 68 tokens"):
        evaluate([corpus / "a"], (69,), out=tmp_path / "out")


def test_data_that_changed_since_training_is_a_warning(corpus, tmp_path):
    run = make_run(corpus, "a")
    settings = workdir.read_config(run)
    workdir.write_json(run / "data.json", data.describe(settings.data))
    _, text = evaluate([run], (4,), out=tmp_path / "out")
    assert "has changed" not in text
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "train.bin")
    _, text = evaluate([run], (4,), out=tmp_path / "out")
    assert f"warning: the data has changed since {run} was trained on it" in text


def test_other_data_than_the_runs_is_evaluated(corpus, tmp_path, capsys):
    """The model was imported: it has no record of data, and its config has a path that does not exist."""
    run = make_run(corpus, "a", paths=("data/train.bin",), heldout_paths=())
    with pytest.raises(ValueError, match=r"data\.paths: there is no file or folder 'data/train\.bin'"):
        evaluate([run], (4,), out=tmp_path / "out")
    changes = {"data.heldout_paths": str(corpus / "heldout29.bin")}
    rows, text = evaluate([run], (4, 68), out=tmp_path / "out", changes=changes)
    assert [row.documents for row in rows] == [1, 1]
    assert {row.train_context for row in rows} == {16}
    assert "has changed" not in text
    assert not capsys.readouterr().err
    # A trained run, whose data is gone, may have been trained on anything.
    workdir.write_json(run / "data.json", {})
    evaluate([run], (4,), out=tmp_path / "out", changes=changes)
    assert f"not trained on by {run}, whose data/train.bin cannot be read" in capsys.readouterr().err


TRAINED_ON = (
    ({}, {"data.heldout_paths": "{}/train.bin"}),
    ({}, {"data.heldout_paths": ""}),
    ({"heldout_paths": (), "heldout_fraction": 0.1}, {"data.heldout_fraction": "0.2"}),
    ({"heldout_paths": ()}, {"data.document_separator": "3"}),
)


@pytest.mark.parametrize(("data", "changes"), TRAINED_ON)
def test_what_a_run_or_its_initial_run_was_trained_on_is_not_evaluated(corpus, tmp_path, data, changes):
    trained = make_run(corpus, "a", **data)
    other = {"paths": (str(corpus / "heldout00.bin"),), "heldout_paths": (str(corpus / "heldout01.bin"),)}
    run = make_run(corpus, "b", **other)
    settings = workdir.read_config(run)
    task = dataclasses.replace(settings.task, initial_run=str(trained))
    workdir.open_workdir(run, dataclasses.replace(settings, task=task))
    changes = {name: text.format(corpus) for name, text in changes.items()}
    of_initial_run = {"data.paths": f"{corpus}/train.bin", "data.heldout_paths": "", **changes}
    for evaluated, change in ((trained, changes), (run, of_initial_run)):
        with pytest.raises(
            ValueError, match=rf"^data\.paths of {trained} and .* share 1 .*train\.bin; it was trained"
        ):
            evaluate([evaluated], (4,), out=tmp_path / "out", changes=change)


def test_a_diverged_model_is_reported_not_hidden(corpus, tmp_path, monkeypatch):
    class Diverging(fakes.CountingModel):
        def unembed(self, hidden):
            return hidden + np.nan

    monkeypatch.setattr(fakes, "CountingModel", Diverging)
    rows, text = evaluate([make_run(corpus, "a")], out=tmp_path / "out")
    assert all(math.isnan(row.loss) for row in rows)
    assert "warning: numbers of a are not finite" in text
    assert "nan" in (tmp_path / "out" / "context_loss.csv").read_text()
    content = (tmp_path / "out" / "context_loss.json").read_text()
    assert [row["loss"] for row in json.loads(content)["rows"]] == [None] * 3


def test_errors_come_before_the_work(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(over_runs.training, "restore_model", lambda path: pytest.fail("restored"))
    run = make_run(corpus, "a")
    nothing, short = {"heldout_paths": (), "heldout_fraction": 0.0}, {"shortest_document": 1 << 20}
    for index, (change, lengths, message) in enumerate(
        (
            ({}, (), "no context lengths"),
            ({}, (1, 8), "context length 1 holds no prediction"),
            (nothing, (8,), r"no document is held out: .*heldout_fraction is 0\.0, .*; name"),
            (short, (8,), r"no document is held out: .*shortest_document 1048576; name"),
        )
    ):
        with pytest.raises(ValueError, match=message):
            evaluate([make_run(corpus, f"x{index}", **change)], lengths, out=tmp_path / "out")
    # Runs over other data cannot be compared.
    for name, change, message in (
        ("b", {"vocabulary": 12}, r"model\.vocab_size is 11 and 12"),
        ("c", {"heldout_paths": ()}, r"data\.heldout_paths"),
        ("d", {"document_separator": 3}, r"data\.document_separator is None and 3"),
    ):
        with pytest.raises(ValueError, match=f"cannot be compared: {message}"):
            evaluate([run, make_run(corpus, name, **change)], (4,), out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"data\.labels cannot be changed"):
        evaluate([run], (4,), out=tmp_path / "out", changes={"data.labels": "1,0"})
    with pytest.raises(ValueError, match="no workdir is given"):
        evaluate([], (4,), out=tmp_path / "out")
    with pytest.raises(ValueError, match="needs documents of 11 tokens; the shortest has 10"):
        evaluation.context_loss(fakes.CountingModel(), fakes.counting_documents(2, 10), (4, 11))
    assert not (tmp_path / "out").exists()
