"""Makes Markdown of the docstrings: their formulas become MathML, which browsers draw without a script."""

import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

PARAGRAPH = re.compile(r"^(Inputs?|Outputs?): (?=\S)", re.MULTILINE)
LEARNED = re.compile(r"^Parameters: (?=\S)", re.MULTILINE)  # of a module; those of its constructor have that heading
TOGETHER = re.compile(r"^    (\w+(?:, \w+)+):( .*(?:\n {8}.*)*)", re.MULTILINE)  # arguments or errors with one text
DISPLAYED = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +\S.*)?)*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
OWN = re.compile(r":(?:class|func|meth):`(ostinato\.[\w.]*?)(\w+)`")
DOCTEST = re.compile(r"^>>> .*\n?(?:\S.*\n?)*", re.MULTILINE)  # one that no section holds
OTHER = re.compile(r":(?:class|func|meth|mod):`([^`]+)`")


def to_markdown(docstring: str) -> str:
    """
    >>> to_markdown("See :class:`torch.nn.GRU` and :func:`ostinato.linear_scan`.")
    'See `torch.nn.GRU` and [`linear_scan`][ostinato.linear_scan].'
    """
    text = PARAGRAPH.sub(r"**\1:** ", docstring)
    text = LEARNED.sub("**Learned parameters:** ", text)
    text = TOGETHER.sub(lambda match: "\n".join(f"    {name}:{match[2]}" for name in match[1].split(", ")), text)
    text = DISPLAYED.sub(_formulas, text)
    text = INLINE.sub(lambda match: f"<span>{convert(match[1])}</span>", text)
    text = OWN.sub(r"[`\2`][\1\2]", text)
    text = OTHER.sub(r"`\1`", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # the name that the parser knows
    text = DOCTEST.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _formulas(match: re.Match[str]) -> str:
    """Each paragraph of the directive is a formula."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(match[2]).strip())
    formulas = (convert(" ".join(paragraph.split()), display="block") for paragraph in paragraphs)
    return "\n\n".join(f"{match[1]}<div>{formula}</div>" for formula in formulas) + "\n\n"


class Docstrings(griffe.Extension):
    """What mkdocstrings loads of the project passes through here."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
