"""The documents: their examples run, their links and excerpts are there, and the plot is that of the record.

The Python blocks of a page run one after the other, as one program. They do so under JAX's usual promotion of dtypes
and in its default 32 bits, as a reader's program does. `<!-- test: needs 8 devices -->` before a block says so.
"""

import contextlib
import logging
import pathlib
import re
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "docs" / "generate"))

import directives
import explained
import plot
import readme
import records
from common import pallas_is_tested
from public import ROOT

from jaxsoft._core import library

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted(path for path in ROOT.glob("docs/**/*.md"))
BLOCK = re.compile(r"^(?:<!-- test: needs (?P<devices>\d+) devices -->\n)?```python\n(?P<code>.*?)^```", re.M | re.S)
SNIPPET = re.compile(r'^ *--8<-- "([^":]+)(?::(\w+))?"$', re.MULTILINE)
MARKER = re.compile(r"--8<-- \[(start|end):(\w+)\]")
LINE = re.compile(r'<g id="(\w+, \w+: [^"]+)">\n<path d="([^"]+)"')
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path):
    """The code of a page's blocks, each on the lines that it has in the page, and how many devices it needs."""
    text = path.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n")
        yield "\n" * line + match["code"], int(match["devices"] or 1)


@pytest.mark.parametrize("path", [path for path in PAGES if any(blocks(path))], ids=name_of)
def test_examples(path):
    if "AbstractDevice(" in path.read_text() and jax.__version_info__ <= (0, 10, 0):
        pytest.skip("JAX 0.10.0 does not take the platform of a GPU that is not here")
    names = {"__name__": "page"}
    with contextlib.ExitStack() as usual:
        usual.enter_context(jax.enable_x64(False))
        usual.enter_context(jax.numpy_dtype_promotion("standard"))
        usual.enter_context(jax.numpy_rank_promotion("allow"))
        usual.callback(logging.getLogger("jaxsoft").setLevel, logging.NOTSET)
        for code, devices in blocks(path):
            if devices > len(jax.devices()):
                pytest.skip(f"a block of this page needs {devices} devices")
            exec(compile(code, name_of(path), "exec"), names)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links(path):
    """Files that a document links to are there. (The site's build also checks the anchors.)"""
    for target in LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), f"{name_of(path)} links to {target}"


def test_generated():
    """Tables, plots and figures are made, and files that pages name exist."""
    pytest.importorskip("matplotlib")
    wrong = []
    docs = ROOT / "docs"
    for path in (path for path in PAGES if path.is_relative_to(docs)):
        directives.filled(str(path.relative_to(docs)), path.read_text(), wrong.append)
    assert not wrong


def test_snippets():
    """Each excerpt in a page is a file or a section of one, and each section that the sources mark is in a page."""
    named = {match for path in PAGES for match in SNIPPET.findall(path.read_text())}
    assert all((ROOT / path).is_file() for path, _ in named)
    marked = []
    for folder in ("jaxsoft", "ffi", "pallas_kernels", "triton_kernels", "examples"):
        for path in ROOT.glob(f"{folder}/**/*.*"):
            if path.suffix in (".py", ".h", ".cc", ".cu", ".cuh"):
                marked += [(name_of(path), *match) for match in MARKER.findall(path.read_text())]
    sections = sorted((path, section) for path, section in named if section)
    assert sorted((path, name) for path, kind, name in marked if kind == "start") == sections
    assert sorted((path, name) for path, kind, name in marked if kind == "end") == sections


@pytest.mark.skipif(library.find("cpu") is None, reason="the library for CPUs was not built")
@pallas_is_tested
def test_explained():
    """What the guide shows of `jaxsoft.explain` is what it prints: docs/generate/explained.py makes it anew."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = explained.explained()
    assert found == {name: (explained.FOLDER / name).with_suffix(".txt").read_text() for name in found}


def test_readme():
    """The README's table is what the records say: docs/generate/readme.py makes it anew."""
    assert readme.filled(readme.README.read_text()) == readme.README.read_text()


def test_public_names():
    """Every public name has a docstring and a place in the API's pages."""
    wrong = []
    directives.check_public_names(ROOT / "docs", wrong.append)
    assert not wrong


def test_plot():
    """The README's plot has the lines of the record: benchmarks/plot.py draws it anew, here by any matplotlib."""
    pytest.importorskip("matplotlib")
    drawn = plot.softmax_by_length(records.load("h200"))
    assert drawn == plot.softmax_by_length(records.load("h200"))  # nothing in it is of the run
    lines = {match[1]: match[2] for match in LINE.finditer((ROOT / "benchmarks/results/h200.svg").read_text())}
    assert lines == {match[1]: match[2] for match in LINE.finditer(drawn)} and len(lines) == 12
    assert len(drawn) < 60_000
