"""The generated parts of pages. A page says `<!-- generate: NAME ARGUMENTS -->` on a line of its own, and gets

- `record`, with a function of benchmarks/report.py and its arguments: a table or a plot of a record of measurements,
- `attention`, `decode`, `mesh` and `scaling` likewise, with functions of benchmarks/attention_report.py and so on,
- `figure`, with a function of figures.py: a drawing,
- `include`, with a file of the repository's root: its text, with its plots and with links that hold from this page.

What cannot be generated is reported, and so is a file that a page names and that does not exist.
"""

import pathlib
import posixpath
import re
import shlex
import sys
from collections.abc import Callable

import figures
import public

sys.path.insert(0, str(public.ROOT / "benchmarks"))

import attention_report
import decode_report
import mesh_report
import report
import scaling_report

_DIRECTIVE = re.compile(r"^(?P<indent> *)<!-- generate: (?P<call>.+?) -->$", re.MULTILINE)
_LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\((?P<target>(?!https?://)[^)#\s]+)(?P<anchor>[^)]*)\)")
_INCLUDED = re.compile(r"<!-- generate: include (\S+) -->")
_FOLDERS = "jaxsoft|pallas_kernels|triton_kernels|ffi|tests|benchmarks|examples|docs"
_FILE = re.compile(rf"`((?:{_FOLDERS})/[^`\s]*)`")
_DOCUMENTED = re.compile(r"^::: (\S+)", re.MULTILINE)

type Report = Callable[[str], None]  # takes what is wrong, in words


def _include(page, path):
    """The text of a Markdown file of the root, without its title, as if it were written on this page."""
    _, _, text = (public.ROOT / path).read_text().partition("\n")
    here, pages = posixpath.dirname(f"docs/{page}"), _included()

    def link(match):
        target = pages.get(match["target"], match["target"])
        if target.endswith(".svg"):
            return report.picture(pathlib.Path(target).stem, "softmax")  # in the colours of the site
        if target.startswith("docs/"):
            return f"[{match['text']}]({posixpath.relpath(target, here)}{match['anchor']})"
        return f"`{target}`"  # which the site does not have

    return _LINK.sub(link, text)


def _included():
    """The pages that show a file of the root, by its name."""
    pages = (public.ROOT / "docs").rglob("*.md")
    return {name: str(page.relative_to(public.ROOT)) for page in pages for name in _INCLUDED.findall(page.read_text())}


MODULES = {
    "record": report,
    "attention": attention_report,
    "decode": decode_report,
    "mesh": mesh_report,
    "scaling": scaling_report,
    "figure": figures,
}


def filled(page: str, markdown: str, wrong: Report) -> str:
    """A page with its generated parts.

    Args:
      page: its path within docs/.
      markdown: its source.
      wrong: is told what cannot be generated.
    """

    def generated(match):
        name, *arguments = shlex.split(match["call"])
        text = ""
        try:
            if name == "include":
                text = _include(page, *arguments)
            else:
                text = str(getattr(MODULES[name], arguments[0])(*arguments[1:]))
        except Exception as error:
            wrong(f"{page}: {match['call']}: {type(error).__name__}: {error}")
        return "\n".join(match["indent"] + line if line else "" for line in text.splitlines())

    markdown = _DIRECTIVE.sub(generated, markdown)
    for path in _FILE.findall(markdown):
        if not list(public.ROOT.glob(path.rstrip("/"))):
            wrong(f"{page} names `{path}`, which does not exist")
    return markdown


def check_public_names(pages: pathlib.Path, wrong: Report) -> None:
    """Reports public names that have no docstring, or no place in the pages of docs/api."""
    sources = "".join(path.read_text() for path in (pages / "api").glob("*.md"))
    documented = set(_DOCUMENTED.findall(sources))
    for module, path in public.modules().items():
        for name in public.names(path):
            if not public.docstring(path, name):
                wrong(f"{module}.{name} is public and has no docstring")
            if f"{module}.{name}" not in documented:
                wrong(f"{module}.{name} is public and is on no page of docs/api")
