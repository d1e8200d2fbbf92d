"""What MkDocs calls while it builds the site: generated parts of pages, formulas, and the checks that make it strict.

Every warning that is logged here fails `mkdocs build --strict`.
"""

import html
import logging
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import directives
import latex2mathml.converter

log = logging.getLogger("mkdocs.hooks.jaxsoft")

_FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)

# What stands between the formulas of one display, which go to the next line where there is no room.
_BETWEEN = re.compile(r"\\q?quad")

# A name of several letters, which would otherwise be set as their product.
_WORD = re.compile(r"(?<![\\{A-Za-z])([a-z]{2,})(?![A-Za-z}])")


def on_files(files, config, **kwargs):
    """Checks that every public name has a docstring and a place in the API's pages."""
    directives.check_public_names(pathlib.Path(config.docs_dir), log.warning)
    return files


def on_page_markdown(markdown, page, **kwargs):
    """Fills in what is generated."""
    return directives.filled(page.file.src_uri, markdown, log.warning)


def on_page_content(content, page, **kwargs):
    """Formulas as MathML, which browsers draw by themselves, without a script or a network."""

    def formula(match):
        display = "block" if match["tag"] == "div" else "inline"
        tex = _WORD.sub(r"\\mathrm{\1}", html.unescape(match["tex"]).strip())
        try:
            drawn = [latex2mathml.converter.convert(part.strip(), display=display) for part in _BETWEEN.split(tex)]
        except Exception as error:
            log.warning("%s: formula %s: %s", page.file.src_uri, match["tex"], error)
            return match[0]
        if display == "inline":
            return " ".join(drawn)
        return '<div class="formula">' + "".join(f"<div>{part}</div>" for part in drawn) + "</div>"

    return _FORMULA.sub(formula, content)
