"""The tables of decoding on the performance page, in Markdown, from the records that decode.py and traffic.py wrote."""

import math

from columns import Column, among, each, table
from records import BYTES, load
from report import by_title, circumstances, tabs

ORDER = ("cudnn", "xla", "jaxsoft", "pallas")
TITLES = {
    "one": "one query",
    "several": "16 queries",
    "paged": "pages",
    "ragged": "different lengths",
    "short": "short caches",
    "heads": "heads",
    "cpu": "keys and values",
}
WHAT = ("batch", "heads of a cache", "keys", "decoded")


def section(name: str) -> str:
    """The circumstances, and in a tab a group the time of a call and the fraction of the speed of reading."""
    contents = {}
    for title, cases in by_title(name, TITLES).items():
        columns = [c for quantity in ("µs", "reading") for c in each(quantity, among(ORDER, cases))]
        contents[title] = table(cases, [*WHAT, "reading, µs", *columns])
    return f"{circumstances(name)}\n\n{tabs(contents)}"


def _bytes(case: dict) -> int:
    """Of the keys and values of sequences that are equally long."""
    batch, _, _, size = case["shape"]
    return 2 * math.prod((batch, case["keys"], case["key_heads"], size, BYTES[case["pages_dtype"]]))


def traffic(name: str) -> str:
    """Bytes that were read over those of the keys and values that count, as the GPU counted them."""
    sides = [Column(side, lambda case, side=side: case[side]["jaxsoft"] / _bytes(case)) for side in ("read", "written")]
    size = Column("keys and values, MB", lambda case: _bytes(case) / 1e6)
    return table(load(name).cases, [*WHAT, size, *sides])
