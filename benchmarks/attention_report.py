"""The tables and plots of attention on the performance page, in Markdown, from the records that attention.py wrote."""

import statistics
from collections.abc import Iterable

import plot
from report import NOTHING, among, circumstances, load, number, records, shape, table, tabs

ORDER = ("cudnn", "xla", "jaxsoft", "deterministic=False", "ffi", "ffi, deterministic=False", "pallas")
CHOICES = ("jaxsoft", "deterministic=False")  # which are jaxsoft's own


def _rate(record: dict, implementation: str) -> float | None:
    """Operations a second over the scores that count."""
    seconds = record["seconds"].get(implementation)
    return None if seconds is None else record["flops"] / seconds


def _row(record: dict, names: Iterable[str], peer: str, unit: float) -> list[str]:
    """The rate of each implementation, and what those of jaxsoft's choices are of the peer's."""
    cells = []
    for implementation in names:
        rate = _rate(record, implementation)
        without = "out of memory" in record["failed"].get(implementation, "")
        cells.append("out of memory" if without else number(rate and rate / unit))
    base = _rate(record, peer)
    for implementation in CHOICES:
        if implementation in names:
            rate = _rate(record, implementation)
            cells.append(number(rate / base) if rate and base else NOTHING)
    return cells


def by_length(name: str) -> str:
    """The rate of attention by length, in a tab for each direction, size of heads and dtype."""
    unit_name, unit = plot.unit_of_rate(load(name))
    contents: dict[str, list[dict]] = {}
    for record in records(name, "lengths", "cpu", "dtypes"):
        title = f"{record['direction']}, heads of {record['shape'][3]}, {record['dtype']}"
        contents.setdefault(title, []).append(record)
    tables = {}
    for title, some in contents.items():
        names = among(ORDER, some)
        peer = names[0]
        some.sort(key=lambda record: (record["shape"][1], record["causal"]))
        rows = []
        for record in some:
            rule = "causal" if record["causal"] else "all keys"
            rows.append([shape(record["shape"][:3]), rule, *_row(record, names, peer, unit)])
        rates = [f"{n}, {unit_name}" for n in names]
        ratios = [f"{n} / {peer}" for n in CHOICES if n in names]
        tables[title] = table(["batch, length, heads", "rule", *rates, *ratios], rows, left=2)
    return tabs(tables)


def extras(name: str) -> str:
    """The rate over what counts of calls with extras, as a fraction of the plain kernel's, in a tab a direction."""
    unit_name, unit = plot.unit_of_rate(load(name))
    every, contents = records(name, "extras"), {}
    own = "pallas" if among(["pallas"], every) else "jaxsoft"
    for direction in dict.fromkeys(record["direction"] for record in every):
        some = [record for record in every if record["direction"] == direction]
        names = among(ORDER, some)
        plain = {r["causal"]: _rate(r, own) for r in some if not r["what"]}
        rows = []
        for r in some:
            rate, base = _rate(r, own), plain.get(r["causal"])
            what = f"{r['what'] or 'plain'}{', causal' * r['causal']}"
            rates = [_rate(r, n) for n in names]
            cells = [number(v and v / unit) for v in rates]
            rows.append([what, *cells, number(rate / base) if rate and base else NOTHING])
        heads = ["beside the operands", *(f"{n}, {unit_name}" for n in names), f"{own} / plain"]
        contents[direction] = table(heads, rows)
    return tabs(contents)


def noise(name: str) -> str:
    """How far the times of two columns that are the same program differ.

    That is seen by their memory, and forward only: with gradients, two kernels may come from two implementations.
    """
    differences = []
    for record in load(name)["records"]:
        seconds, memory = record["seconds"], record["memory"]
        if record["direction"] == "forward" and "jaxsoft" in seconds:
            same = (n for n in ("ffi", "pallas") if n in seconds and memory[n] == memory["jaxsoft"])
            differences += [abs(seconds["jaxsoft"] / seconds[n] - 1) for n in same]
    return (
        "How exact these times are: forward, `jaxsoft` is the same program as `ffi` or `pallas`. Their times differ by "
        f"{statistics.median(differences):.1%} in the median of all cases, and by {max(differences):.0%} at most."
    )


def section(name: str) -> str:
    """Plots and tables of a record of attention."""
    parts = [circumstances(name), noise(name)]
    sizes = dict.fromkeys(r["shape"][3] for r in records(name, "lengths", "cpu") if r["dtype"] == "bfloat16")
    for size in sizes:
        drawn = plot.attention_by_length(load(name), size, alone=False)
        parts.append(f'<figure class="wide">\n{drawn}</figure>')
    beside = "Beside query, key and value, over the scores that count:"
    return "\n\n".join([*parts, by_length(name), beside, extras(name)])
