"""Tests of `benchmarks.reading` on a tiny corpus."""

import json

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")

from benchmarks import reading

pytestmark = pytest.mark.robust


def test_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CASES", [("byte", "jsonl.zst", 0), ("bpe", "parquet", 0)])
    monkeypatch.setattr(reading, "PREPARATIONS", [("bin", 1)])
    monkeypatch.setattr(reading, "CONTEXTS", (64, 1 << 20))
    reading.main(["--megabytes=0.1", f"--out={tmp_path / 'reading.json'}"])
    report = json.loads((tmp_path / "reading.json").read_text())
    assert report["bytes"] > 1e5
    by_byte, by_bpe = report["speeds"]
    assert min(by_byte["tokens_per_second"], by_bpe["tokens_per_second"]) > 0
    # The byte tokenizer also ends each document with a token.
    bytes_and_ends = report["bytes"] + report["documents"]
    assert by_byte["bytes_per_token"] == pytest.approx(report["bytes"] / bytes_and_ends)
    assert by_bpe["bytes_per_token"] > 2
    (preparation,) = report["preparations"]
    short, too_long = report["waste"]
    assert preparation["tokens"] == short["tokens"] == too_long["tokens"]
    # A row needs one more token, the last target.
    assert 0 < short["dropped"] <= 64
    assert too_long["dropped"] == too_long["tokens"]


def test_a_corpus_without_a_size_is_an_error_of_the_option(tmp_path, capsys):
    with pytest.raises(SystemExit):
        reading.main(["--megabytes=0", f"--out={tmp_path / 'reading.json'}"])
    assert "--megabytes is 0; it must be above 0" in capsys.readouterr().err
