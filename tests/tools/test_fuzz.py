"""A short form of `tools.fuzz`, and tests that it notices what is wrong."""

import pytest

from tools.fuzz import __main__ as fuzz
from tools.fuzz import readers

# Those that take milliseconds per input.
QUICK = (
    "flags of a command line",
    "settings of a run or of weights",
    "config.json of a published model",
    "saved state",
    "data.json and metrics.jsonl",
    "Zarr array",
    "token file and its sidecar",
    "parquet and JSON lines",
    "tokenizer file",
)
PACKAGES = {"parquet and JSON lines": ("pyarrow", "fsspec", "zstandard"), "tokenizer file": ("tokenizers",)}


@pytest.mark.parametrize("name", QUICK)
def test_bad_inputs_are_errors_of_one_line(name):
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    results = [fuzz.try_one(name, seed=1, number=number) for number in range(25)]
    assert [text for result, text in results if result == "problem"] == []
    assert any(result == "refused" for result, _ in results)


def _spin(source, folder):
    while True:
        pass


def _raise(error):
    def reader(source, folder):
        raise error

    return reader


@pytest.mark.parametrize(
    ("reader", "result"),
    [
        (lambda source, folder: None, "accepted"),
        (_raise(ValueError("wrong")), "refused"),
        (_raise(ValueError("wrong\nindeed")), "problem"),
        (_raise(ValueError("wrong" * 200)), "problem"),
        (_raise(TypeError("wrong")), "problem"),
        (_raise(MemoryError()), "problem"),
        (_spin, "problem"),
    ],
)
def test_what_is_a_problem(monkeypatch, reader, result):
    monkeypatch.setattr(readers, "READERS", {"reader": reader})
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    assert fuzz.try_one("reader", seed=0, number=0)[0] == result
