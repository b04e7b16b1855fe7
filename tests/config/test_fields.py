"""Tests of the metadata of settings, and of the reference page made from it."""

import dataclasses
import math
import pathlib
import re
import runpy

import pytest

from sympow_jax import config
from sympow_jax.config import fields

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = [setting for group in fields.groups(config.Config) for setting in group.settings]


def test_every_setting_has_a_sentence_and_a_form():
    for setting in SETTINGS:
        assert re.fullmatch(r"[A-Z].*\.", setting.help), setting.path
        assert re.fullmatch(r"(NAME|INT|FLOAT|TEXT)(,\1,\.\.\.)?|true\|false", setting.form), setting.path
        assert not setting.choices or setting.default in (None, *setting.choices)


def test_groups_are_those_of_the_config():
    paths = [group.path for group in fields.groups(config.Config)]
    inner = [f"model.attention.{name}" for name in ("rope", "lrpe")]
    assert paths[:4] == ["model", "model.attention", *inner]
    by_path = {setting.path: setting for setting in SETTINGS}
    assert by_path["model.layers"].default is dataclasses.MISSING
    heads = by_path["model.kv_heads"]
    assert (heads.form, heads.optional, heads.default) == ("INT", True, None)
    assert by_path["evaluation.context_lengths"].form == "INT,INT,..."
    resumable = {path.rpartition(".")[0] for path, setting in by_path.items() if setting.resumable}
    assert resumable == {"model", "data", "training", "sharding", "evaluation"}
    assert all(setting.resumable for path, setting in by_path.items() if path.startswith("sharding."))
    assert not by_path["model.layers"].resumable


@pytest.mark.parametrize("setting", [x for x in SETTINGS if x.choices], ids=lambda setting: setting.path)
def test_choices_are_checked(setting):
    base = config.load("quickstart")
    with pytest.raises(
        ValueError, match=rf"{setting.path.removeprefix('model.')} is 'x'; it must be one of "
    ):
        config.override(base, {setting.path: "x"})


def test_values_are_written_as_they_are_read():
    base = config.load("gpt2_124m:gpt2")
    texts = {}
    for setting in SETTINGS:
        value = base
        for name in setting.path.split("."):
            value = getattr(value, name)
        texts[setting.path] = fields.written(value)
    assert config.override(base, texts) == base


@pytest.mark.parametrize(
    "items",
    [
        ("Hello, world", "def ", "\n"),
        ("'tis", "don't", 'say "yes", then', '"'),
        ("(a)", "[b", "f(x)", "src/*.[ch]"),
        ("(a)",),
        ("",),
        ("()",),
    ],
)
def test_items_are_written_as_they_are_read(items):
    base = config.load("quickstart")
    assert config.override(base, {"data.labels": fields.written(items)}).data.labels == items


def test_floats_are_finite():
    for setting in SETTINGS:
        for value in (math.nan, math.inf, -math.inf, 1e39, -1e300):
            if fields.split_optional(setting.annotation)[0] is float:
                name = setting.path.removeprefix("model.attention.")
                with pytest.raises(
                    ValueError, match=re.escape(f"{name} is {value}; it must be a finite number")
                ):
                    replace(setting.path, value)


def test_integers_fit_in_64_bits():
    for setting in SETTINGS:
        kind = fields.split_optional(setting.annotation)[0]
        for value in (10**30, -(2**63) - 1, 10**5000):
            if kind in (int, float, tuple[int, ...]):
                message = f"{setting.path.removeprefix('model.')} is an integer of {value.bit_length()} bits; it must"
                with pytest.raises(ValueError, match=message):
                    replace(setting.path, (value,) if kind == tuple[int, ...] else value)


@pytest.mark.parametrize("path", ["training.seed", "data.seed"])
@pytest.mark.parametrize("value", [-1, 2**32])
def test_seeds_have_32_bits(path, value):
    with pytest.raises(ValueError, match=f"{path} is {value}; it must be at least 0 and below 4294967296"):
        replace(path, value)


def replace(path, value, node=None):
    """Replaces a setting of the quickstart config as a config file does."""
    node = config.load("quickstart") if node is None else node
    name, _, rest = path.partition(".")
    return dataclasses.replace(node, **{name: replace(rest, value, getattr(node, name)) if rest else value})


def test_the_reference_page_is_up_to_date():
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    page = ROOT / "docs" / "reference" / "settings.md"
    assert page.read_text() == script["render"](), "uv run python docs/settings.py writes it"
