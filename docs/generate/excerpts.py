"""Excerpts of the source in the pages, found by their text, so that no marker is needed in the source.

An excerpt begins at the one line that contains a given text and goes on to the end of what begins there: all lines that
are indented further, and the closing bracket at the same depth. That holds for Python as for C++.
"""

import re

import public

_LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".cuh": "cuda", ".cu": "cuda", ".txt": "cmake"}
_OPENERS = re.compile(r"\s*(template\b|@|//|#(?!include|pragma|if|endif|else|define))")


def excerpt(path: str, text: str) -> str:
    """A block of code with what begins at the line that contains this text, and the file's name as its title."""
    file = public.ROOT / path
    if not file.is_file():
        raise LookupError(f"there is no file {path}")
    lines = file.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if text in line]
    if len(starts) != 1:
        raise LookupError(f"{path} has {len(starts)} lines that contain {text!r}, and should have one")
    found = lines[starts[0] : _end(lines, starts[0])]
    depth = _depth(found[0])
    body = "\n".join(line[depth:].removesuffix("\\").rstrip() for line in found)  # as of a macro
    return f'```{_LANGUAGES.get(file.suffix, "text")} title="{path}"\n{body}\n```'


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _end(lines: list[str], start: int) -> int:
    """The line after the block that begins at `start`."""
    depth, i = _depth(lines[start]), start
    while _OPENERS.match(lines[i]) and i + 1 < len(lines):  # a comment or a decorator, with what it belongs to
        i += 1
    end = i + 1
    for j in range(i + 1, len(lines)):
        line = lines[j]
        if not line.strip() or line.startswith("#pragma"):  # which stands at the margin, wherever its loop is
            continue
        closes = _depth(line) == depth and line.strip()[0] in ")]}"
        if _depth(line) <= depth and not closes and not re.match(r"\s*(private|public|protected):", line):
            break
        end = j + 1
        if closes and not line.rstrip().endswith((":", "{", "(")):
            break
    return end
