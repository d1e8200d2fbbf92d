"""What `jaxsoft.explain` prints in the guide, kept in explained/: `python docs/generate/explained.py` makes it anew.

The page's programs are lowered for the GPU that they name, as if the library for CUDA were here. The one for CPUs,
which has to be built, answers what CUDA's would.
"""

import contextlib
import dataclasses
import io
import logging
import pathlib
import re
import sys
from unittest import mock

import public

FOLDER = pathlib.Path(__file__).parent / "explained"
_PAGE = public.ROOT / "docs/guide/implementations.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_KEPT = re.compile(r'^--8<-- "docs/generate/explained/(\w+)\.txt"', re.MULTILINE)


class _Everything:
    """The names of all operations."""

    def __contains__(self, name: str) -> bool:
        return True


def explained() -> dict[str, str]:
    """The explanations by the names that the page has for them."""
    import jax

    from jaxsoft._core import library
    from jaxsoft._core.implementations import REGISTERED

    there = dataclasses.replace(REGISTERED["ffi"], unavailable=lambda platform: None)
    page, found = _PAGE.read_text(), {}
    with contextlib.ExitStack() as stack:
        jax.clear_caches()  # what was traced without a library, and in the end what was traced with this one
        stack.callback(jax.clear_caches)
        stack.enter_context(mock.patch.dict(REGISTERED, ffi=there))
        stack.enter_context(mock.patch.object(library, "unavailable", lambda platform: None))
        stack.enter_context(mock.patch.object(library, "find", lambda platform, find=library.find: find("cpu")))
        operations = library.operations
        every = {"cpu": operations("cpu"), "cuda": _Everything()}
        stack.enter_context(mock.patch.object(library, "operations", every.__getitem__))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.callback(logging.getLogger("jaxsoft").setLevel, logging.NOTSET)
        exec(compile("\n".join(_BLOCK.findall(page)), str(_PAGE), "exec"), found)
    return {name: f"{found[name]}\n" for name in _KEPT.findall(page)}


if __name__ == "__main__":
    sys.path.insert(0, str(public.ROOT))
    FOLDER.mkdir(exist_ok=True)
    for name, printed in explained().items():
        (FOLDER / name).with_suffix(".txt").write_text(printed)
