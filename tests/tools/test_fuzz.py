"""A short form of `tools.fuzz`, and tests that it notices what is wrong."""

import math
import re
import signal

import pytest

pytest.importorskip("hypothesis")

from hypothesis import strategies as st

from tools.fuzz import inputs, readers, trying

# They take more than a second per input.
SLOW = (
    "checkpoint and its metadata",
    "shapes and segment ids of power attention",
    "tokens and lengths of prompts",
)
PACKAGES = {"parquet and JSON lines": ("pyarrow", "fsspec", "zstandard"), "tokenizer files": ("tokenizers",)}


@pytest.mark.parametrize("name", [name for name in readers.READERS if name not in SLOW])
def test_bad_inputs_are_errors_of_one_line(name, tmp_path):
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    outcome = trying.try_reader(name, 25, 0, tmp_path / "last")
    assert outcome.problems == []
    assert outcome.refused


_INTEGERS = st.integers()


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """Tries a function as a reader, whose good input is None."""

    def run(read, *, examples=5, bad=_INTEGERS, cases=()):
        monkeypatch.setattr(readers, "READERS", {"reader": readers.Reader(None, bad, read, examples, cases)})
        return trying.try_reader("reader", examples, 0, tmp_path / "last")

    return run


def _raises(error, *, above=-math.inf):
    def read(value):
        if value is not None and abs(value) > above:
            raise error

    return read


def _spin(value):
    while value is not None:
        pass


def _allocate(value):
    if value is not None:
        bytes(3 << 30)


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (_raises(ValueError("wrong\nindeed")), "an error of 12 characters"),
        (_raises(ValueError("wrong" * 200)), "an error of 1000 characters"),
        (_raises(TypeError("wrong")), "TypeError in .*: wrong"),
        (_allocate, "MemoryError in "),
        (_spin, "more than 0.2 s"),
    ],
)
def test_problems(monkeypatch, tried, read, problem):
    monkeypatch.setattr(trying, "SECONDS", 0.2)
    (found,) = tried(read).problems
    assert re.match(f"{problem}(.|\n)*; the input is 0$", found)


def test_accepted_and_refused(tried):
    accepted, refused = tried(lambda value: None), tried(_raises(OSError("wrong")))
    assert (accepted.accepted, accepted.refused, accepted.problems, accepted.longest) == (5, 0, [], 0)
    assert (refused.accepted, refused.refused, refused.problems, refused.longest) == (0, 5, [], 5)
    with pytest.raises(ValueError, match=r"reader: a good input is refused: .*'x'"):
        tried(lambda value: int("x"))


def test_a_problem_is_shrunk(tried):
    (found,) = tried(_raises(TypeError("wrong"), above=1000), examples=500).problems
    assert found.endswith("; the input is 1001")


def test_cases_are_tried(tried):
    read = _raises(TypeError("wrong"), above=1000)
    assert tried(read, bad=st.just(3)).problems == []
    (found,) = tried(read, bad=st.just(3), cases=[3, 5000]).problems
    assert found.endswith("; the input is 5000")


def _hang(last):
    """Blocks the signal of the limit, as native code does that never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    trying._PATIENCE = 0.5
    readers.READERS = {"reader": readers.Reader(None, st.just("x"), _spin, 1)}
    return trying.try_reader("reader", 1, 0, last)


def test_a_process_that_hangs():
    assert trying.try_in_process(_hang).problems == ["the process died; the input is 'x'"]


@pytest.mark.parametrize(
    ("change", "content"),
    [
        (inputs.Part("a", ("x", 1), "NaN"), b'{"x": [1, NaN]}'),
        (inputs.Part("a", ("x", 1), None), b'{"x": [1]}'),
        (inputs.Part("a", ("y",), "[["), b'{"x": [1, 2], "y": [[}'),
        (inputs.Part("a", ("x", "y"), "1"), b'{"x": [1, 2]}'),
        (inputs.Part("a", (), "z"), b"z"),
        (inputs.Part("a", (), None), None),
        (inputs.Splice("a", 1, 1, b""), b'{x": [1, 2]}'),
    ],
)
def test_changes(change, content):
    assert inputs.changed({"a": b'{"x": [1, 2]}'}, [change]).get("a") == content
