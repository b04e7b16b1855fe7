"""Tests of the metadata of settings, and of the reference page made from it."""

import dataclasses
import math
import operator
import pathlib
import re
import runpy

import pytest

from sympow_jax import config
from sympow_jax.config import fields, literals

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = [setting for group in fields.groups(config.Config) for setting in group.settings]


def test_every_setting_has_a_sentence_and_a_form():
    for setting in SETTINGS:
        assert re.fullmatch(r"[A-Z].*\.", setting.help), setting.path
        assert re.fullmatch(r"(NAME|INT|FLOAT|TEXT)(,\1,\.\.\.)?|true\|false", setting.form), setting.path
        assert not setting.choices or setting.default in (None, *setting.choices)


def replace(path, value, node=None):
    """Replaces a setting of the quickstart config as a config file does."""
    node = config.load("quickstart") if node is None else node
    name, _, rest = path.partition(".")
    return dataclasses.replace(node, **{name: replace(rest, value, getattr(node, name)) if rest else value})


def test_values_are_checked_by_type_and_choices():
    base = config.load("quickstart")
    for setting in SETTINGS:
        kind, wrong = literals.split_optional(setting.annotation)[0], {}
        if setting.choices:
            wrong["x"] = " is 'x'; it must be one of "
        if kind is float:
            values = (math.nan, math.inf, -math.inf, 1e39, -1e300)
            wrong |= {value: f" is {value}; it must be a finite number" for value in values}
        if kind in (int, float, tuple[int, ...]):
            values = (10**30, -(2**63) - 1, 10**5000)
            wrong |= {x: f" is an integer of {x.bit_length()} bits; it must" for x in values}
        for value, message in wrong.items():
            with pytest.raises(ValueError) as raised:  # noqa: PT011
                replace(setting.path, (value,) if kind == tuple[int, ...] else value, base)
            name = setting.path.removeprefix("model.") if "attention." in setting.path else setting.path
            assert str(raised.value).startswith(name + message)


def test_values_are_written_as_they_are_read():
    base = config.load("gpt2_124m:gpt2")
    read = operator.attrgetter(*(setting.path for setting in SETTINGS))
    texts = {setting.path: literals.written(x) for setting, x in zip(SETTINGS, read(base), strict=True)}
    assert config.override(base, texts) == base
    assert config.override(base, {"data.label_column": " a "}).data.label_column == " a "
    assert config.override(base, {"evaluation.prompts": " "}).evaluation.prompts == (" ",)
    for items in (
        ("Hello, world", "def ", "\n"),
        ("'tis", "don't", 'say "yes", then', '"'),
        ("(a)", "[b", "f(x)", "src/*.[ch]"),
        *((item,) for item in ("(a)", "", "()", "r'a'", "None", "1", "Hello, world")),
    ):
        assert config.override(base, {"data.labels": literals.written(items)}).data.labels == items


def test_the_reference_page_is_up_to_date():
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    page = ROOT / "docs" / "reference" / "settings.md"
    assert page.read_text() == script["render"](), "uv run python docs/settings.py writes it"
