r"""Makes a table of slow tests from pytest's reports, one report for each file of tests.

    uv run pytest -n 0 -m "slow and not gpu and not h100 and not interpret" --timeout=3600 \
        --junitxml=REPORTS/tests_ops_test_meshes.xml tests/ops/test_meshes.py
    uv run python -m tools.slow_grids REPORTS/*.xml

Slow tests are compiled at XLA's default optimization, unlike all others (`tests/conftest.py`).
"""

import argparse
import pathlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

__all__ = ["main", "row"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row for each report, and the first line of every failure and reason to skip."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=pathlib.Path, help="files that --junitxml wrote")
    reports = parser.parse_args(arguments).reports
    print("| tests | passed | failed | skipped | minutes |\n|---|---|---|---|---|")
    suites = [suite for report in reports for suite in ElementTree.parse(report).iter("testsuite")]
    for report, suite in zip(reports, suites, strict=True):
        print(row(report.stem, suite))
    for suite in suites:
        for case in suite.iter("testcase"):
            for result in case:
                if result.tag in ("failure", "error", "skipped"):
                    print(f"\n{case.get('name')}: {result.tag}: {str(result.get('message')).splitlines()[0]}")


def row(name: str, suite: ElementTree.Element) -> str:
    """Returns the row of a report of one file of tests."""
    total, failures, errors, skipped = (
        int(suite.get(count, 0)) for count in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    minutes = float(suite.get("time", 0)) / 60
    return f"| {name} | {total - failed - skipped} | {failed} | {skipped} | {minutes:.1f} |"


if __name__ == "__main__":
    main()
