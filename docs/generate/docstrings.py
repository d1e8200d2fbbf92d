"""Turns jaxsoft's docstrings, which are written to be read as plain text, into the Markdown that the site renders.

A griffe extension, named in mkdocs.yml. It changes what the site is made from and nothing in the package:

- a `.. math::` block becomes a displayed formula,
- a `>>>` example becomes a block of code,
- "Returns:" and "Raises:" become paragraphs, as theirs are sentences and not lists of values,
- "a, b: text" under "Args:" becomes one entry for each parameter,
- a public name in backticks becomes a link to its page, and "arXiv:1805.02867" a link to the paper.
"""

import pathlib
import re
import sys
from typing import Any

import griffe

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import public

_BLOCK = r"((?:\n+  .*)+)"  # the lines of an indented block, with blank lines within it


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package after griffe has read it and before mkdocstrings parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The docstring as Markdown."""
    return linked(examples(paragraphs(parameters(formulas(text)))))


def formulas(text: str) -> str:
    """`.. math::` blocks as displayed formulas."""
    return re.sub(rf"^ *\.\. math::{_BLOCK}", lambda match: f"$$\n{_formula(match[1])}\n$$", text, flags=re.MULTILINE)


def _formula(block: str) -> str:
    return "\n".join(line.strip() for line in block.splitlines() if line.strip())


def parameters(text: str) -> str:
    """Several parameters with one description, each with a copy of it."""

    def each(match: re.Match) -> str:
        names, rest = match[1].split(":", 1)
        return "\n".join(f"  {name.strip()}:{rest}" for name in names.split(","))

    def entries(match: re.Match) -> str:
        return "Args:\n" + re.sub(r"^  (\S.*(?:\n+    .*)*)", each, match[1].strip("\n"), flags=re.MULTILINE)

    return re.sub(rf"^Args:{_BLOCK}", entries, text, flags=re.MULTILINE)


def paragraphs(text: str) -> str:
    """The sections whose content is sentences, with a bold title."""

    def section(match: re.Match) -> str:
        return f"**{match[1]}** " + re.sub("^  ", "", match[2].strip("\n"), flags=re.MULTILINE)

    return re.sub(rf"^(Returns:|Raises:){_BLOCK}", section, text, flags=re.MULTILINE)


def examples(text: str) -> str:
    """Interactive examples as blocks of code."""
    return re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)


def linked(text: str) -> str:
    """Public names and papers as links. Examples stay as they are."""
    names = public.paths()

    def link(match: re.Match) -> str:
        path = names.get(match[1].removeprefix("jaxsoft."))
        return f"[`{match[1]}`][{path}]" if path else match[0]

    parts = re.split(r"(```pycon.*?```)", text, flags=re.DOTALL)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<!\[)`([A-Za-z_.]+)`", link, parts[i])
        parts[i] = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", parts[i])
    return "".join(parts)
