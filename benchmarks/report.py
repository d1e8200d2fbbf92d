"""The tables of the performance page, in Markdown, from the records that the benchmarks wrote.

Every number on that page comes through here when the site is built, so a new record changes the page and nothing has to
be typed. What a number says is written beside its table: a fraction is the time of a copy that moves as many bytes over
the time of the call, and a speed-up is the time of jax.nn (or optax, or a composition of JAX's functions) over that
of jaxsoft.
"""

import datetime
import json
import pathlib
from collections.abc import Callable, Iterable

import plot

RESULTS = pathlib.Path(__file__).parent / "results"
NOTHING = "\N{EN DASH}"  # where an implementation does not serve a call, or was not measured
TIMES = "\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}"  # between the lengths of a shape
ORDER = ("jax.nn", "jaxsoft", "ffi", "pallas", "triton")


def load(name: str) -> dict:
    """A record by its name, which is that of its file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def exists(name: str) -> bool:
    """Whether there is a record of this name."""
    return (RESULTS / f"{name}.json").exists()


def circumstances(name: str) -> str:
    """Device, versions, flags, commit and date of a record, in one sentence."""
    header = load(name)["header"]
    versions = ", ".join(f"{package} {version}" for package, version in header["versions"].items())
    date = datetime.datetime.fromisoformat(header["date"])
    commit = header["commit"] or "unknown"
    cores = f" ({header['cores']} CPU cores)" if header.get("cores") else ""
    flags = f" and `XLA_FLAGS={header['flags']}`" if header.get("flags") else ""
    return (
        f"*Measured on {header['device']}{cores} with {versions}{flags}, at commit `{commit[:12]}`, on {date.day} "
        f"{date:%B %Y}. Record: `benchmarks/results/{name}.json`.*"
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A Markdown table, of which the first columns are aligned to the left and the others to the right."""
    heads = list(heads)
    rule = [":--" if i < left else "--:" for i in range(len(heads))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rule, *map(list, rows)])


def number(value: float | None) -> str:
    """A number with about three digits."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Iterable[float]) -> str:
    """The smallest and the largest of some numbers."""
    values = sorted(values)
    if not values:
        return NOTHING
    low, high = number(values[0]), number(values[-1])
    return low if low == high else f"{low} to {high}"


def lines(name: str, **wanted) -> dict[tuple, dict[str, dict]]:
    """The records of speed.py that match, by case, and in each case by implementation."""
    found: dict[tuple, dict[str, dict]] = {}
    for record in load(name)["records"]:
        if all(record[key] == value for key, value in wanted.items()):
            case = (record["op"], record["direction"], record["dtype"], tuple(record["shape"]), record["extras"])
            found.setdefault(case, {})[record["implementation"]] = record
    return found


def named(cases: dict[tuple, dict[str, dict]]) -> list[str]:
    """The implementations that occur in some cases."""
    return [name for name in ORDER if any(name in case for case in cases.values())]


def by_title(name: str, titles: dict[str, str]) -> dict[str, list[dict]]:
    """The records of a file, by the titles of their groups."""
    found: dict[str, list[dict]] = {}
    for record in load(name)["records"]:
        found.setdefault(titles[record["group"]], []).append(record)
    return found


def shape(dimensions: Iterable[int]) -> str:
    """A shape as a reader writes it."""
    return TIMES.join(map(str, dimensions))


def tabs(contents: dict[str, str]) -> str:
    """Content that shares a place on the page, by title."""
    return "\n\n".join(f'=== "{title}"\n\n' + _indented(text) for title, text in contents.items())


def _indented(text: str) -> str:
    return "\n".join("    " + line if line else "" for line in text.splitlines())


def operations(name: str) -> list[str]:
    """The operations that a record has, in its order."""
    return list(dict.fromkeys(record["op"] for record in load(name)["records"]))


def by_length(name: str, op: str) -> str:
    """Fractions of a copy's speed by row length, in a tab for each direction and dtype."""
    contents = {}
    for direction in ("forward", "backward"):
        for dtype in ("float32", "bfloat16", "float16"):
            cases = lines(name, group="rows", op=op, direction=direction, dtype=dtype)
            names = named(cases)
            rows = []
            for case, by_name in sorted(cases.items(), key=lambda item: item[0][3][1]):
                fractions = [number(by_name.get(n, {}).get("fraction")) for n in names]
                faster = number(by_name["jaxsoft"].get("faster"))
                rows.append([plot.length(case[3][1]), *fractions, faster])
            if rows:
                contents[f"{direction}, {dtype}"] = table(["row length", *names, "speed-up over jax.nn"], rows)
    return tabs(contents)


def picture(name: str, op: str) -> str:
    """The plot of an operation by row length."""
    return f'<figure class="wide">\n{plot.softmax_by_length(load(name), op, alone=False)}</figure>'


def other_operations(name: str) -> str:
    """A section for each operation but softmax, with its plot and its fractions by row length."""
    sections = []
    for op in operations(name):
        if op != "softmax":
            sections.append(f"### {op}\n\n{picture(name, op)}\n\n{by_length(name, op)}")
    return "\n\n".join(sections)


def group(name: str, of: str, value: str = "fraction") -> str:
    """All cases of a group, in a tab for each direction, by this value of each implementation."""
    contents = {}
    for direction in ("forward", "backward"):
        cases = lines(name, group=of, direction=direction)
        names = named(cases)
        beside = any(case[4] for case in cases)
        rows = []
        for case, by_name in cases.items():
            _, _, dtype, dimensions, extras = case
            cells = [f"{shape(dimensions)}", dtype, *([extras] if beside else [])]
            cells += [number(by_name.get(n, {}).get(value)) for n in names]
            rows.append([*cells, number(by_name["jaxsoft"].get("faster"))])
        if rows:
            heads = ["shape", "dtype", *(["beside the scores"] if beside else [])]
            contents[direction] = table([*heads, *names, "speed-up over jax.nn"], rows, left=len(heads))
    return tabs(contents) if len(contents) > 1 else next(iter(contents.values()))


def few(name: str) -> str:
    """Microseconds of a call on few rows, in a tab for each dtype."""
    contents = {}
    for dtype in ("float32", "bfloat16"):
        cases = lines(name, group="few", dtype=dtype)
        names = named(cases)
        rows = []
        for case, by_name in cases.items():
            times = [by_name.get(n, {}).get("milliseconds") for n in names]
            cells = [number(None if t is None else 1e3 * t) for t in times]
            rows.append([str(case[3][0]), str(case[3][1]), *cells, number(by_name["jaxsoft"].get("faster"))])
        if rows:
            heads = ["rows", "row length", *(f"{n}, µs" for n in names), "speed-up over jax.nn"]
            contents[dtype] = table(heads, rows, left=0)
    return tabs(contents)


def summary(name: str) -> str:
    """For each group of cases, the range of jaxsoft's fractions of a copy and of its gains over jax.nn."""
    rows = []
    titles = {
        "rows": "many rows, by length",
        "short": "short rows",
        "odd": "lengths that fit no vector",
        "few": "few rows",
        "masked": "masks, biases, temperatures",
        "axis": "an axis before the last",
    }
    with_copy = load(name)["header"]["device"].startswith("NVIDIA")
    for of, title in titles.items():
        for op in operations(name):
            for direction in ("forward", "backward"):
                cases = lines(name, group=of, op=op, direction=direction)
                ours = [case["jaxsoft"] for case in cases.values() if "milliseconds" in case.get("jaxsoft", {})]
                if ours:
                    row = [title, f"`{op}`", direction, str(len(ours))]
                    row += (
                        [spread(r["fraction"] for r in ours if "fraction" in r)]
                        if with_copy and of != "few"
                        else ([NOTHING] if with_copy else [])
                    )
                    rows.append([*row, spread(r["faster"] for r in ours if "faster" in r)])
    heads = ["cases", "operation", "direction", "number", *(["fraction of a copy's speed"] if with_copy else [])]
    return table([*heads, "speed-up over jax.nn"], rows, left=3)


def slower(name: str) -> str:
    """Every case in which jaxsoft took longer than jax.nn."""
    rows = []
    for (op, direction, dtype, dimensions, extras), by_name in lines(name).items():
        faster = by_name.get("jaxsoft", {}).get("faster", 1)
        if faster < 1:
            rows.append([f"`{op}`", direction, dtype, shape(dimensions), extras or NOTHING, f"{faster:.3f}"])
    if not rows:
        return "There is no such case in this record."
    rows.sort(key=lambda row: row[-1])
    heads = ["operation", "direction", "dtype", "shape", "beside the scores", "speed-up over jax.nn"]
    return table(heads, rows, left=5)


def millisecond_table(name: str, of: str) -> str:
    """Milliseconds and gains of a group, where a copy says little, as on a CPU; in a tab for each direction."""
    contents = {}
    for direction in ("forward", "backward"):
        cases = lines(name, group=of, direction=direction)
        rows = []
        for (op, _, dtype, dimensions, extras), by_name in cases.items():
            times = [number(by_name.get(n, {}).get("milliseconds")) for n in ("jax.nn", "jaxsoft")]
            what = f"`{op}`" + (f", {extras}" if extras else "")
            rows.append([what, dtype, shape(dimensions), *times, number(by_name["jaxsoft"].get("faster"))])
        if rows:
            heads = ["operation", "dtype", "shape", "jax.nn, ms", "jaxsoft, ms", "speed-up over jax.nn"]
            contents[direction] = table(heads, rows, left=3)
    return tabs(contents) if len(contents) > 1 else next(iter(contents.values()))


def _losses(name: str, of: str) -> list[dict]:
    return [record for record in load(name)["records"] if record["group"] == of]


def _compared(record: dict, names: Iterable[str], peer: str, cell: Callable[[dict, str], str]) -> list[str]:
    """A cell for each implementation, and jaxsoft's gain over its peer."""
    seconds = record["seconds"]
    faster = seconds[peer] / seconds["jaxsoft"] if {peer, "jaxsoft"} <= seconds.keys() else None
    return [cell(record, n) if n in seconds else NOTHING for n in names] + [number(faster)]


def _losses_by_direction(name: str, of: str, names: Iterable[str], peer: str) -> str:
    """Fractions of the speed of a copy of the bytes that must move, in a tab for the loss and one for its gradient."""
    names = [n for n in names if _has(name, of, n)]
    contents = {}
    for direction in ("forward", "with gradient"):
        rows = []
        for record in _losses(name, of):
            _, dimensions, dtype, *what = record["what"].split()
            if " ".join(what) == direction:
                cells = _compared(record, names, peer, lambda r, n: number(r["floor"] / r["seconds"][n]))
                rows.append([dimensions.replace("x", TIMES), dtype, *cells])
        contents[direction] = table(["logits", "dtype", *names, f"speed-up over {peer}"], rows, left=2)
    return tabs(contents)


def cross_entropy(name: str) -> str:
    """Cross-entropy with integer labels beside optax: fractions of the speed of a copy of the bytes that must move."""
    return _losses_by_direction(name, "cross_entropy", ("optax", "jaxsoft", "ffi", "pallas", "xla"), "optax")


def cross_entropy_if_recorded(name: str) -> str:
    """The same with its circumstances, where there is such a record."""
    if not exists(name):
        return ""
    return f"Cross-entropy with integer labels:\n\n{circumstances(name)}\n\n{cross_entropy(name)}"


def entropy_if_recorded(name: str) -> str:
    """The same of the loss with the entropy, beside the composition, two functions and the loss alone, if recorded."""
    if not _recorded(name, "entropy"):
        return ""
    columns = ("optax, composed", "two functions", "loss alone", "jaxsoft", "ffi", "xla")
    text = (
        "With the entropy beside the loss (`return_entropy=True`), and with the gradient of both, as many bytes must "
        "move as for the loss alone. *optax, composed* is optax's loss and the entropy from `jax.nn.log_softmax`; *two "
        "functions* are jaxsoft's cross-entropy and `jaxsoft.entropy`, one after the other; *loss alone* is what "
        "jaxsoft takes without the entropy:"
    )
    return f"{text}\n\n{_losses_by_direction(name, 'entropy', columns, 'optax, composed')}"


def _recorded(name: str, of: str) -> bool:
    """Whether there is a record of this name that has this group."""
    return exists(name) and bool(_losses(name, of))


def _has(name: str, of: str, implementation: str) -> bool:
    return any(implementation in record["seconds"] for record in _losses(name, of))


TOP_K = ("lax.top_k", "lax.top_k(is_stable=False)", "jaxsoft")


def top_k(name: str) -> str:
    """The k most probable elements beside `jax.lax.top_k` of `jax.nn.softmax`: milliseconds, and reads of x."""
    rows = []
    for record in _losses(name, "top_k"):
        _, dimensions, dtype, k = record["what"].split(" ")
        times = _compared(record, TOP_K, "lax.top_k", lambda r, n: number(1e3 * r["seconds"][n]))
        # The floor is the time of a copy, which reads half of the bytes and writes the other half.
        reads = number(record["seconds"]["jaxsoft"] / record["floor"])
        rows.append([dimensions.replace("x", TIMES), dtype, k.removeprefix("k="), *times[:-1], reads, times[-1]])
    heads = ["scores", "dtype", "k", "jax.lax.top_k, ms", "is_stable=False, ms", "jaxsoft, ms", "over one read"]
    heads += ["speed-up"]
    return table(heads, rows, left=2)


def top_k_few(name: str) -> str:
    """The same of few rows, or of short ones: microseconds beyond what a step of the chain takes without the call."""
    rows = []
    for record in _losses(name, "few"):
        _, dimensions, dtype, k = record["what"].split(" ")
        rows.append([dimensions.replace("x", TIMES), dtype, k.removeprefix("k="), *_net(record, TOP_K, "lax.top_k")])
    heads = ["scores", "dtype", "k", "jax.lax.top_k, µs", "is_stable=False, µs", "jaxsoft, µs", "speed-up"]
    return table(heads, rows, left=2)


def _net(record: dict, names: Iterable[str], peer: str) -> list[str]:
    """Microseconds of each implementation beyond the floor of a chain, and jaxsoft's gain over its peer."""
    net = {n: seconds - record["floor"] for n, seconds in record["seconds"].items()}
    faster = number(net[peer] / net["jaxsoft"]) if peer in net and net["jaxsoft"] > 0 else NOTHING
    return [number(1e6 * net[n]) if n in net else NOTHING for n in names] + [faster]


def sample_if_recorded(name: str) -> str:
    """A token of each row beside the composition of JAX's functions, with a heading, if recorded."""
    if not _recorded(name, "sample"):
        return ""
    rows = []
    for record in _losses(name, "sample"):
        _, dimensions, dtype, *filters, _, deviation = record["what"].split()
        beside = ", ".join(f"`{v}`" for v in filters) or "none"
        times = _net(record, ("composed", "jaxsoft"), "composed")
        rows.append([dimensions.replace("x", TIMES), dtype, beside, deviation, *times])
    heads = ["logits", "dtype", "filters", "standard deviation", "composed, µs", "jaxsoft, µs", "speed-up"]
    text = (
        "`jaxsoft.random.sample`, microseconds a call, in such a chain, with the random numbers. *Composed* is "
        "`jax.random.categorical` of the logits that the filters leave: after `jax.lax.top_k` of k logits, or of all "
        "of them where there is `top_p` alone. Normal logits with a small standard deviation are flat, and a nucleus "
        "of them has many tokens; with a large one they are peaked:"
    )
    return f"## Sampling\n\n{text}\n\n{table(heads, rows, left=3)}"


def linear(name: str) -> str:
    """The loss of a linear layer with its gradients: time and memory of each way to compute it."""
    titles = {
        "optax": "optax on stored logits",
        "stored": "jaxsoft's cross-entropy on stored logits",
        "mean": '`linear_softmax_cross_entropy`, `reduction="mean"`',
        "jaxsoft": "`linear_softmax_cross_entropy`, one loss a row",
        "recompute=False": "the same, `recompute=False`",
        "chunk_size=8192": "the same, `chunk_size=8192`",
        "products": "the matrix products of stored logits alone",
        "products, logits twice": "four matrix products alone",
    }
    if not _recorded(name, "linear"):
        return "*The record has no times of these.*"
    parts = []
    for record in _losses(name, "linear"):
        rows = []
        for key, title in titles.items():
            if key in record["seconds"]:
                rows.append([title, number(1e3 * record["seconds"][key]), number(record["memory"][key] / 1e6)])
        what = record["what"].removeprefix("linear ").replace("x", TIMES, 1).replace("frozen", "with a frozen weight")
        parts.append(f"{what}:\n\n" + table(["", "ms", "MB beyond the results"], rows))
    return "\n\n".join(parts)


def traffic(name: str, direction: str, dtype: str) -> str:
    """Arrays as large as x that were read and written, as the GPU counted them, by row length."""
    records = [r for r in load(name)["traffic"] if (r["direction"], r["dtype"]) == (direction, dtype)]
    size = max(r["n"] * r["rows"] for r in records)
    records = [r for r in records if r["n"] * r["rows"] == size]  # without the cases of few rows
    names = [n for n in ORDER if any(r["implementation"] == n for r in records)]
    cells: dict[int, dict[str, str]] = {}
    for r in records:
        # Forward one array is read and one written, backward two and one.
        array = r["bytes"] / (2 if direction == "forward" else 3)
        cells.setdefault(r["n"], {})[r["implementation"]] = f"{r['read'] / array:.2f} + {r['written'] / array:.2f}"
    rows = [[plot.length(n), *(by_name.get(i, NOTHING) for i in names)] for n, by_name in sorted(cells.items())]
    return table(["row length", *names], rows)


def traffic_few(name: str) -> str:
    """The same of few long rows."""
    records = load(name)["traffic"]
    size = max(r["n"] * r["rows"] for r in records)
    rows = []
    for r in records:
        if r["n"] * r["rows"] * 4 < size:
            array = r["bytes"] / (2 if r["direction"] == "forward" else 3)
            read, written = f"{r['read'] / array:.2f}", f"{r['written'] / array:.2f}"
            rows.append([shape((r["rows"], r["n"])), r["dtype"], r["direction"], r["implementation"], read, written])
    return table(["shape", "dtype", "direction", "implementation", "read", "written"], rows, left=4)
