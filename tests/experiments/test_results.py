"""Tests that the page of experiments has the numbers of the committed results."""

import importlib
import json
import pathlib
import re

import pytest

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
RESULTS = sorted(path.relative_to(EXPERIMENTS / "results") for path in EXPERIMENTS.glob("results/**/*.json"))
PAGE = (EXPERIMENTS / "README.md").read_text()


def tables(result: pathlib.Path) -> list[str]:
    content = json.loads((EXPERIMENTS / "results" / result).read_text())
    module = importlib.import_module(f"experiments.{result.stem}")
    return [table.markdown() for table in module.tables(content)]


def test_every_experiment_has_results():
    modules = {path.stem for path in EXPERIMENTS.glob("[a-z]*.py")}
    assert modules == {path.stem for path in RESULTS}


@pytest.mark.parametrize("result", RESULTS, ids=str)
def test_the_pages_tables_are_made_from_the_results(result):
    for table in tables(result):
        assert table in PAGE


def test_no_table_of_the_page_is_from_elsewhere():
    """Only the list of commands is written by hand."""
    shown = re.findall(r"^\|.*(?:\n\|.*)*", PAGE, re.MULTILINE)
    made = {table for result in RESULTS for table in tables(result)}
    assert [table.partition("\n")[0] for table in shown if table not in made] == [
        "| command | table or figure of the paper | toy scale, minutes on idle cores |"
    ]
