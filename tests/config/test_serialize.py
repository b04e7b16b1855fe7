"""Tests of the JSON that settings and metadata are read from."""

import os

import pytest

from sympow_jax.config import serialize


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_object_is_read(tmp_path, mark):
    (tmp_path / "a.json").write_text(mark + '{"a": [1, {"b": null}]}')
    assert serialize.read_object(tmp_path / "a.json") == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not JSON: Expecting property name"),
        ("\xff", "can't decode byte"),
        ("[1]", "it has no JSON object, which begins with {"),
        ('{"a": ' + "[" * 100_000, "too many levels"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_object_is_an_error_of_one_line(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        serialize.read_object(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"a\.json: it has more than 67,108,864 bytes"):
        serialize.read_object(tmp_path / "a.json")


def test_pipes_and_devices_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="is a pipe or a device; put a file in its place"):
            serialize.read_object(tmp_path / name)
