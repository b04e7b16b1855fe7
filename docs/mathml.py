"""Python-Markdown extension that converts formulas to MathML, which browsers render without a script."""

import html
import re

import latex2mathml.converter
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor

# The output of pymdownx.arithmatex for $...$ and $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# A function's name before its argument, where TeX has a thin space and latex2mathml none.
_FUNCTION = re.compile(r"(?<!<msub>)<mi>log</mi>(?=<m(?:i|n|sub)>)")


class _Formulas(Postprocessor):
    def run(self, text: str) -> str:
        return _FORMULA.sub(_mathml, text)


class MathML(Extension):
    """Converts formulas after all other extensions."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Registers the conversion with a Markdown instance."""
        md.postprocessors.register(_Formulas(md), "mathml", -100)


def makeExtension(**options: str) -> MathML:
    """Returns the extension, under the name that Python-Markdown looks for."""
    return MathML(**options)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    formula = latex2mathml.converter.convert(html.unescape(match[2]).strip(), display=display)
    return _FUNCTION.sub('<mi>log</mi><mspace width="0.17em"/>', formula)
