"""Draws the figures of the pages, as PNG and PDF: `uv run docs/figures.py [NAME ...]`.

Without names it draws all of them. Nothing is timed. The PDFs are not kept in the repository.
"""

import pathlib
import sys
from collections.abc import Sequence

import choosing_figures
import mathematics_figures

from sympow_jax import plotting

FOLDER = pathlib.Path(__file__).parent / "figures"
FIGURES = mathematics_figures.FIGURES | choosing_figures.FIGURES


def main(names: Sequence[str]) -> int:
    """Draws the named figures, or all; returns the exit code."""
    if unknown := [name for name in names if name not in FIGURES]:
        print(f"error: there is no figure {unknown[0]!r}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    for name in names or FIGURES:
        plotting.save(FIGURES[name](), FOLDER / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
