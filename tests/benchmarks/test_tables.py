"""Tests that the pages have the numbers of the committed results."""

import pathlib
import re

import pytest

from benchmarks import tables

ROOT = pathlib.Path(__file__).parents[2]
PAGES = tables.pages()


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_tables_are_made_from_the_results(page):
    content = (ROOT / page).read_text()
    for table in PAGES[page]:
        assert table in content


def test_no_table_of_speeds_is_from_elsewhere():
    shown = re.findall(r"^\|.*(?:\n\|.*)*", (ROOT / "docs/speed.md").read_text(), re.MULTILINE)
    assert shown == PAGES["docs/speed.md"]
