"""Hooks for mkdocs: they add pages from outside docs/ and convert formulas to MathML."""

import html
import pathlib
import re
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]
# Pages outside docs/, and files that pages show or link to.
OUTSIDE = (
    "README.md",
    "benchmarks/results/README.md",
    "benchmarks/results/*/*.json",
    "benchmarks/results/*/*.log",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/*.py",
    "examples/README.md",
    "experiments/README.md",
    "experiments/results/**/*.png",
    "pallas_kernels/**/README.md",
)
# The output of pymdownx.arithmatex for $...$ and $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Gives pages the same paths as in the repository, so that links that work there also work on the site."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
            files.append(File.generated(config, f"docs/{file.src_uri}", abs_src_path=str(file.abs_src_path)))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Converts formulas to MathML, which browsers render without a script."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return latex2mathml.converter.convert(html.unescape(found[2]).strip(), display=display)
