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

_PARAGRAPHS = ("Returns:", "Raises:")


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package after griffe has read it and before mkdocstrings parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The docstring as Markdown."""
    return linked(examples(paragraphs(parameters(formulas(text)))))


def _block(lines: list[str], start: int) -> int:
    """The end of the indented block that begins at a line; blank lines within it belong to it."""
    end = start
    for i in range(start, len(lines)):
        if lines[i].strip():
            if not lines[i].startswith("  "):
                break
            end = i + 1
    return end


def formulas(text: str) -> str:
    """`.. math::` blocks as displayed formulas."""
    lines, out, i = text.splitlines(), [], 0
    while i < len(lines):
        if lines[i].strip() == ".. math::":
            end = _block(lines, i + 1)
            out += ["$$", *(line.strip() for line in lines[i + 1 : end] if line.strip()), "$$"]
            i = end
        else:
            out.append(lines[i])
            i += 1
    return "\n".join(out)


def parameters(text: str) -> str:
    """Several parameters with one description, each with a copy of it."""
    lines, out, i = text.splitlines(), [], 0
    while i < len(lines):
        out.append(lines[i])
        i += 1
        if out[-1] != "Args:":
            continue
        end = _block(lines, i)
        entries = re.split(r"\n(?=  \S)", "\n".join(lines[i:end]))
        for entry in entries:
            names, _, rest = entry.strip().partition(":")
            out += [f"  {name.strip()}:{rest}" for name in names.split(",")]
        i = end
    return "\n".join(out)


def paragraphs(text: str) -> str:
    """The sections whose content is sentences, with a bold title."""
    lines, out, i = text.splitlines(), [], 0
    while i < len(lines):
        if lines[i] in _PARAGRAPHS:
            end = _block(lines, i + 1)
            first, *rest = (line[2:] for line in lines[i + 1 : end])
            out += [f"**{lines[i]}** {first}", *rest]
            i = end
        else:
            out.append(lines[i])
            i += 1
    return "\n".join(out)


def examples(text: str) -> str:
    """Interactive examples as blocks of code."""
    lines, out, i = text.splitlines(), [], 0
    while i < len(lines):
        if lines[i].startswith(">>> "):
            out.append("```pycon")
            while i < len(lines) and lines[i].strip():
                out.append(lines[i])
                i += 1
            out.append("```")
        else:
            out.append(lines[i])
            i += 1
    return "\n".join(out)


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
