"""A short form of `tools.fuzz`, and tests that it notices what is wrong."""

import math
import re
import signal

import pytest

pytest.importorskip("hypothesis")

from hypothesis import strategies as st

from tools.fuzz import __main__ as fuzz
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
    assert outcome.problem is None
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
    monkeypatch.setattr(trying, "_SECONDS", 0.2)
    assert re.match(f"{problem}(.|\n)*; the input is 0$", tried(read).problem)


def test_an_interrupt_is_no_problem(tried):
    with pytest.raises(KeyboardInterrupt):
        tried(_raises(KeyboardInterrupt()))


def test_accepted_and_refused(tried):
    accepted, refused = tried(lambda value: None), tried(_raises(OSError("wrong")))
    assert (accepted.accepted, accepted.refused, accepted.problem, accepted.longest) == (5, 0, None, 0)
    assert (refused.accepted, refused.refused, refused.problem, refused.longest) == (0, 5, None, 5)
    with pytest.raises(ValueError, match=r"reader: a good input is refused: .*'x'"):
        tried(lambda value: int("x"))


def test_a_problem_is_shrunk(tried):
    outcome = tried(_raises(TypeError("wrong"), above=1000), examples=500)
    assert outcome.problem.endswith("; the input is 1001")


def test_cases_are_tried(tried):
    read = _raises(TypeError("wrong"), above=1000)
    assert tried(read, bad=st.just(3)).problem is None
    assert tried(read, bad=st.just(3), cases=[3, 5000]).problem.endswith("; the input is 5000")


def _hang(last):
    """Blocks the signal of the limit, as native code does that never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    trying._PATIENCE = 0.5
    readers.READERS = {"reader": readers.Reader(None, st.just("x"), _spin, 1)}
    return trying.try_reader("reader", 1, 0, last)


def test_a_process_that_hangs():
    assert trying.try_in_process(_hang).problem == "the process died; the input is 'x'"


def test_results_are_reused_only_with_the_options_that_made_them(monkeypatch, tmp_path, capsys):
    tries = []

    def try_in_process(try_reader):
        tries.append(try_reader.args)
        return trying.Outcome(accepted=2, problem="wrong")

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(trying, "try_in_process", try_in_process)
    monkeypatch.setattr(readers, "READERS", dict.fromkeys("ab", readers.Reader(None, _INTEGERS, int, 7)))
    results = f"--results={tmp_path}"
    assert fuzz.main([results, "--only=a", "--examples=2"]) == 1
    assert fuzz.main([results, "--only=b", "--seed=3"]) == 1
    assert fuzz.main([results, "--only=a", "--examples=2", "--seed=0"]) == 1
    assert fuzz.main([results, f"--out={tmp_path / 'page.md'}"]) == 1
    assert tries == [("a", 2, 0), ("b", 7, 3)]
    page = (tmp_path / "page.md").read_text()
    assert "| a | 3 | 2 | 0 | 1 | 0 | 0 |" in page
    assert "6 inputs, 2 problems." in page
    capsys.readouterr()
    for option, message in (
        ("--examples=5", "made with --examples=2, not 5"),
        ("--seed=4", "--seed=0, not 4"),
    ):
        with pytest.raises(SystemExit):
            fuzz.main([results, "--only=a", option])
        assert message in capsys.readouterr().err


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
