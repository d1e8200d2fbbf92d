"""The columns of all tables that are made of records: on a terminal, as a benchmark runs, and on the site's pages.

COLUMNS says of a case which one it is; EACH says of an implementation of a case what was measured of it, or follows
from that. Each has a heading with the unit, how the value is derived, and how it is written. A table is a list of them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

from records import faster, floor, fraction, peer, rate

NOTHING = "\N{EN DASH}"  # where an implementation does not serve a call, or was not measured
TIMES = "\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}"  # between the lengths of a shape

type Value = float | str | None


def number(value: Value) -> str:
    """A number with about three digits; words as they are."""
    if value is None or isinstance(value, str):
        return value or NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Iterable[float]) -> str:
    """The smallest and the largest of some numbers."""
    values = sorted(values)
    if not values:
        return NOTHING
    low, high = number(values[0]), number(values[-1])
    return low if low == high else f"{low} to {high}"


def shape(dimensions: Iterable[int | str]) -> str:
    """A shape as a reader writes it."""
    return TIMES.join(map(str, dimensions))


def length(n: int) -> str:
    """A length as it is usually said: 32K for 32768, and every digit where it is no multiple of 1024."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{name}"
    return str(n)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      head: its heading, with the unit.
      value: of a case.
      text: how a value is written.
      left: whether it is aligned to the left.
    """

    head: str
    value: Callable[[dict], Value]
    text: Callable[[Value], str] = number
    left: bool = False

    def headed(self, head: str) -> "Column":
        """The same under another heading."""
        return dataclasses.replace(self, head=head)


@dataclasses.dataclass(frozen=True)
class Each:
    """A column that each implementation has.

    Attributes:
      head: its heading, in which {} stands for the implementation.
      value: of a case and an implementation.
      spec: how it is written on a terminal.
    """

    head: str
    value: Callable[[dict, str], Value]
    spec: str


def _words(head: str, value: Callable[[dict], str]) -> Column:
    return Column(head, value, lambda words: str(words or NOTHING), left=True)


def _decoded(case: dict) -> str:
    """What there is beside the batch, the heads and the keys of a case of decoding."""
    beside = [f"{case['shape'][1]} queries"] * (case["shape"][1] > 1) + ["different lengths"] * case["ragged"]
    beside += [f"pages of {case['page']}"] if case["page"] else []
    return ", ".join(beside + [case["pages_dtype"]] * (case["pages_dtype"] != case["dtype"]))


def _option(case: dict, name: str) -> str:
    """The value after a word of what a case of losses.py says of itself."""
    return case["what"].partition(name)[2].split(" ")[0]


COLUMNS = {
    "operation": _words("operation", lambda c: f"`{c['op']}`"),
    "call": _words("operation", lambda c: f"`{c['op']}`" + (f", {c['extras']}" if c["extras"] else "")),
    "direction": _words("direction", lambda c: c["direction"]),
    "dtype": _words("dtype", lambda c: c["dtype"]),
    "shape": _words("shape", lambda c: shape(c["shape"])),
    "extras": _words("beside the scores", lambda c: c["extras"]),
    "what": _words("", lambda c: c["what"]),
    "row length": Column("row length", lambda c: length(c["shape"][-1])),
    "rows": Column("rows", lambda c: str(math.prod(c["shape"][:-1]))),
    "k": Column("k", lambda c: _option(c, "k=")),
    "filters": _words("filters", lambda c: ", ".join(f"`{v}`" for v in c["what"].split() if "=" in v) or "none"),
    "deviation": Column("standard deviation", lambda c: _option(c, "deviation ")),
    "batch, length, heads": _words("batch, length, heads", lambda c: shape(c["shape"][:3])),
    "batch, length": _words("batch, length", lambda c: shape(c["shape"][:2])),
    "rule": _words("rule", lambda c: "causal" if c["causal"] else "all keys"),
    "beside the operands": _words("beside the operands", lambda c: f"{c['what'] or 'plain'}{', causal' * c['causal']}"),
    "batch": _words("batch", lambda c: str(c["shape"][0])),
    "heads of a cache": _words("heads", lambda c: f"{c['shape'][2]} / {shape((c['key_heads'], c['shape'][3]))}"),
    "keys": _words("keys", lambda c: str(c["keys"])),
    "decoded": Column("", _decoded, str, left=True),
    "heads": _words("heads", lambda c: " / ".join(map(str, c["heads"]))),
    "tokens": Column("tokens a device", lambda c: length(c["tokens"])),
    "method": _words("", lambda c: next(iter(c["seconds"]))),
    "seconds": Column("seconds", lambda c: next(iter(c["seconds"].values()))),
    "floor, µs": Column("floor, µs", lambda c: 1e6 * floor(c)),
    "reading, µs": Column("reading, µs", lambda c: 1e6 * floor(c)),
    "share, ms": Column("share, ms", lambda c: floor(c) and 1e3 * floor(c)),
}


def _time(unit: float) -> Callable[[dict, str], Value]:
    def value(case: dict, name: str) -> Value:
        return unit * case["seconds"][name] if name in case["seconds"] else _lacking(case, name)

    return value


def _rate(unit: float) -> Callable[[dict, str], Value]:
    def value(case: dict, name: str) -> Value:
        found = rate(case, name)
        return found / unit if found else _lacking(case, name)

    return value


def _lacking(case: dict, name: str) -> str | None:
    """Why there is no number, where that says something of the implementation."""
    return "out of memory" if "out of memory" in case.get("failed", {}).get(name, "") else None


EACH = {
    "ms": Each("{}, ms", _time(1e3), "9.3f"),
    "µs": Each("{}, µs", _time(1e6), "9.1f"),
    "fraction": Each("{}", fraction, "6.3f"),
    "floor": Each("floor / {}", fraction, "6.3f"),
    "reading": Each("reading / {}", fraction, "6.3f"),
    "share": Each("share / {}", fraction, "6.3f"),
    "faster": Each("speed-up of {}", faster, "6.2f"),
    "error": Each("error of {}", lambda case, name: case["errors"].get(name), "6.2f"),
    "TFLOP/s": Each("{}, TFLOP/s", _rate(1e12), "6.1f"),
    "GFLOP/s": Each("{}, GFLOP/s", _rate(1e9), "6.1f"),
    "MB": Each("{}, MB", lambda case, name: case["memory"][name] / 1e6, "9.1f"),
}


def each(quantity: str, names: Iterable[str]) -> list[Column]:
    """A column of EACH for each of some implementations."""
    found = EACH[quantity]
    return [Column(found.head.format(name), lambda case, name=name: found.value(case, name)) for name in names]


def speed_up(than: str | None, head: str = "speed-up over {}", of: str = "jaxsoft") -> Column:
    """How many times as fast as a peer jaxsoft is."""
    return Column(head.format(than), lambda case: than and faster(case, of, than))


def over_fastest(of: str = "jaxsoft") -> Column:
    """How many times as fast as the fastest peer of a case it is, with the name of that peer."""

    def value(case: dict) -> Value:
        gain = faster(case, of)
        return f"{number(gain)} ({peer(case)})" if gain else None

    return Column(f"{of} / fastest peer", value)


def table(cases: Iterable[dict], columns: Iterable[str | Column]) -> str:
    """Cases as a Markdown table; empty without any. Columns may be given by their name in COLUMNS."""
    found = [COLUMNS[column] if isinstance(column, str) else column for column in columns]
    rows = [[column.text(column.value(case)) for column in found] for case in cases]
    return markdown([(column.head, column.left) for column in found], rows)


def markdown(heads: Iterable[tuple[str, bool]], rows: list[list[str]]) -> str:
    """Cells as a Markdown table, below headings that say whether they are aligned to the left; empty without rows."""
    words, left = zip(*heads, strict=True)
    rule = [":--" if to_the_left else "--:" for to_the_left in left]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (words, rule, *rows)) if rows else ""


def among(order: Iterable[str], cases: Iterable[dict]) -> list[str]:
    """The implementations that have a time in some cases."""
    cases = list(cases)
    return [name for name in order if any(name in case["seconds"] for case in cases)]


def line(what: object, case: dict, quantities: Iterable[str], beside: str = "") -> str:
    """A case on a terminal: what it is, its floor in the first quantity's unit, and each implementation's numbers."""
    shown, least = [EACH[quantity] for quantity in quantities], floor(case)
    text, factor = f"{what!s:56s}", {"{}, ms": 1e3, "{}, µs": 1e6}.get(shown[0].head)
    if least and factor:
        text += f" {least * factor:9.3f}"
    for name in (name for name in case["seconds"] if name not in ("copy", "one device")):  # which the floor is
        values = [(of_each.value(case, name), of_each.spec) for of_each in shown]
        cells = (f"{v:{spec}}" if isinstance(v, float) else "-".rjust(int(spec.split(".")[0])) for v, spec in values)
        text += f" | {name} {' '.join(cells)}"
    return text + beside + "".join(f" | {name}: {why[:60]}" for name, why in case.get("failed", {}).items())
