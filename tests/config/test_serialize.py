"""Tests of the JSON that settings and metadata are read from."""

import os

import pytest

from sympow_jax.config import serialize


def test_an_object_is_read(tmp_path):
    for mark in ("", "\ufeff"):
        (tmp_path / "a.json").write_text(mark + '{"a": [1, {"b": null}]}')
        assert serialize.read_object(tmp_path / "a.json") == {"a": [1, {"b": None}]}


def test_what_is_no_object_is_an_error_of_one_line(tmp_path):
    path = tmp_path / "a.json"
    for content, message in (
        (b"{", "it is not JSON: Expecting property name"),
        (b"\xff", "can't decode byte"),
        (b"[1]", "it has no JSON object, which begins with {"),
        (b'{"a": ' + b"[" * 100_000, "too many levels"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            serialize.read_object(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < len(str(path)) + 200
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match=r"a\.json: it has more than 67,108,864 bytes"):
        serialize.read_object(path)


def test_pipes_and_devices_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="is a pipe or a device; put a file in its place"):
            serialize.read_object(tmp_path / name)
