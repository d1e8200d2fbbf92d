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
DIRECTIONS = ("forward", "backward")


def load(name: str) -> dict:
    """A record by its name, which is that of its file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def records(name: str, *groups: str) -> list[dict]:
    """The records of some groups."""
    return [record for record in load(name)["records"] if record["group"] in groups]


def circumstances(name: str) -> str:
    """Device, versions, flags, commit and date of a record, in one sentence."""
    header = load(name)["header"]
    versions = ", ".join(f"{package} {version}" for package, version in header["versions"].items())
    cores = f" ({header['cores']} CPU cores)" if header.get("cores") else ""
    flags = f" and `XLA_FLAGS={header['flags']}`" if header.get("flags") else ""
    return f"*Measured on {header['device']}{cores} with {versions}{flags}, {origin(name)}*"


def origin(name: str) -> str:
    """Commit, date and file of a record, the end of a sentence."""
    header = load(name)["header"]
    date = datetime.datetime.fromisoformat(header["date"])
    commit = (header["commit"] or "unknown")[:12]
    return f"at commit `{commit}`, on {date.day} {date:%B %Y}. Record: `benchmarks/results/{name}.json`."


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


def among(order: Iterable[str], some: list[dict]) -> list[str]:
    """The implementations that have a time in some records."""
    return [name for name in order if any(name in record["seconds"] for record in some)]


def times(record: dict, names: Iterable[str], unit: float) -> list[str]:
    """The time of each implementation, so many units of which are a second."""
    seconds, failed = record["seconds"], record["failed"]
    lacking = {n: "out of memory" if "out of memory" in failed.get(n, "") else NOTHING for n in names}
    return [number(unit * seconds[n]) if n in seconds else lacking[n] for n in names]


def fractions(record: dict, names: Iterable[str], floor: float | None) -> list[str]:
    """The fraction of each implementation's time that the floor is."""
    seconds = record["seconds"]
    return [number(floor / seconds[n] if floor and n in seconds else None) for n in names]


def gain(record: dict, peer: str | None) -> str:
    """How many times as fast as the peer jaxsoft is."""
    seconds = record["seconds"]
    return number(seconds[peer] / seconds["jaxsoft"] if peer in seconds and seconds.get("jaxsoft", 0) > 0 else None)


def direction(record: dict) -> str:
    """Of a call that has gradients or not, in words."""
    return "with gradients" if record["gradients"] else "forward"


def by_title(name: str, titles: dict[str, str]) -> dict[str, list[dict]]:
    """The records of the groups that have a title, by it."""
    found = {title: records(name, group) for group, title in titles.items()}
    return {title: some for title, some in found.items() if some}


def shape(dimensions: Iterable[int]) -> str:
    """A shape as a reader writes it."""
    return TIMES.join(map(str, dimensions))


def tabs(contents: dict[str, str]) -> str:
    """Content that shares a place on the page, by title, as far as there is any."""
    return "\n\n".join(f'=== "{title}"\n\n' + _indented(text) for title, text in contents.items() if text)


def _indented(text: str) -> str:
    return "\n".join("    " + line if line else "" for line in text.splitlines())


def operations(name: str) -> list[str]:
    """The operations that a record has, in its order."""
    return list(dict.fromkeys(record["op"] for record in load(name)["records"]))


def _compared(
    name: str,
    columns: dict[str, Callable[[dict], str]],
    unit: str = "",
    left: int | None = None,
    order: Iterable[str] = ORDER,
    **wanted: str,
) -> str:
    """A table of the cases of speed.py that match, if there are any: the implementations, and the speed-up.

    Args:
      name: of the record.
      columns: what the first ones say of a case.
      unit: of times, "ms" or "µs"; empty for fractions of a copy's speed.
      left: how many columns are aligned to the left; None for all of the first ones.
      order: the implementations.
      wanted: what the records have.
    """
    cases = list(lines(name, **wanted).values())
    names = [n for n in order if any(n in case for case in cases)]
    key, factor = {"": ("fraction", 1), "ms": ("milliseconds", 1), "µs": ("milliseconds", 1e3)}[unit]
    rows = []
    for case in cases:
        found = [case[n].get(key) if n in case else None for n in names]
        values = [number(None if value is None else factor * value) for value in found]
        first = [text(case["jaxsoft"]) for text in columns.values()]
        rows.append([*first, *values, number(case["jaxsoft"].get("faster"))])
    heads = [*columns, *(f"{n}, {unit}" if unit else n for n in names), "speed-up over jax.nn"]
    return table(heads, rows, len(columns) if left is None else left) if rows else ""


def by_length(name: str, op: str) -> str:
    """Fractions of a copy's speed by row length, in a tab for each direction and dtype."""
    columns, contents = {"row length": lambda r: plot.length(r["n"])}, {}
    for direction in DIRECTIONS:
        for dtype in ("float32", "bfloat16", "float16"):
            some = _compared(name, columns, group="rows", op=op, direction=direction, dtype=dtype)
            contents[f"{direction}, {dtype}"] = some
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


def group(name: str, of: str) -> str:
    """All cases of a group, in a tab for each direction: fractions of a copy's speed."""
    columns = {"shape": lambda r: shape(r["shape"]), "dtype": lambda r: r["dtype"]}
    if any(record["extras"] for record in records(name, of)):
        columns["beside the scores"] = lambda r: r["extras"]
    return tabs({d: _compared(name, columns, group=of, direction=d) for d in DIRECTIONS})


def few(name: str) -> str:
    """Microseconds of a call on few rows, in a tab for each dtype."""
    columns = {"rows": lambda r: str(r["rows"]), "row length": lambda r: str(r["n"])}
    return tabs({d: _compared(name, columns, "µs", left=0, group="few", dtype=d) for d in ("float32", "bfloat16")})


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
            for direction in DIRECTIONS:
                cases = lines(name, group=of, op=op, direction=direction)
                ours = [case["jaxsoft"] for case in cases.values() if "milliseconds" in case.get("jaxsoft", {})]
                if ours:
                    row = [title, f"`{op}`", direction, str(len(ours))]
                    if with_copy:
                        row.append(spread(r["fraction"] for r in ours if "fraction" in r and of != "few"))
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
    columns = {
        "operation": lambda r: f"`{r['op']}`" + (f", {r['extras']}" if r["extras"] else ""),
        "dtype": lambda r: r["dtype"],
        "shape": lambda r: shape(r["shape"]),
    }
    names = ("jax.nn", "jaxsoft")
    contents = {d: _compared(name, columns, "ms", order=names, group=of, direction=d) for d in DIRECTIONS}
    return tabs(contents) if all(contents.values()) else contents["forward"]


def _losses_by_direction(name: str, of: str, names: Iterable[str], peer: str) -> str:
    """Fractions of the speed of a copy of the bytes that must move, in a tab for the loss and one for its gradient."""
    names, contents = among(names, records(name, of)), {}
    for direction in ("forward", "with gradient"):
        rows = []
        for record in records(name, of):
            _, dimensions, dtype, *what = record["what"].split()
            if " ".join(what) == direction:
                cells = [*fractions(record, names, record["floor"]), gain(record, peer)]
                rows.append([dimensions.replace("x", TIMES), dtype, *cells])
        contents[direction] = table(["logits", "dtype", *names, f"speed-up over {peer}"], rows, left=2)
    return tabs(contents)


def cross_entropy(name: str) -> str:
    """Cross-entropy with integer labels beside optax: fractions of the speed of a copy of the bytes that must move."""
    return _losses_by_direction(name, "cross_entropy", ("optax", "jaxsoft", "ffi", "pallas", "xla"), "optax")


def entropy(name: str) -> str:
    """The same of the loss with the entropy, beside the composition, two functions and the loss alone."""
    columns = ("optax, composed", "two functions", "loss alone", "jaxsoft", "ffi", "xla")
    text = (
        "With the entropy beside the loss (`return_entropy=True`), and with the gradient of both, as many bytes must "
        "move as for the loss alone. *optax, composed* is optax's loss and the entropy from `jax.nn.log_softmax`; *two "
        "functions* are jaxsoft's cross-entropy and `jaxsoft.entropy`, one after the other; *loss alone* is what "
        "jaxsoft takes without the entropy:"
    )
    return f"{text}\n\n{_losses_by_direction(name, 'entropy', columns, 'optax, composed')}"


TOP_K = ("lax.top_k", "lax.top_k(is_stable=False)", "jaxsoft")


def top_k(name: str) -> str:
    """The k most probable elements beside `jax.lax.top_k` of `jax.nn.softmax`: milliseconds, and reads of x."""
    rows = []
    for record in records(name, "top_k"):
        _, dimensions, dtype, k = record["what"].split(" ")
        # The floor is the time of a copy, which reads half of the bytes and writes the other half.
        reads = number(record["seconds"]["jaxsoft"] / record["floor"])
        cells = [*times(record, TOP_K, 1e3), reads, gain(record, "lax.top_k")]
        rows.append([dimensions.replace("x", TIMES), dtype, k.removeprefix("k="), *cells])
    heads = ["scores", "dtype", "k", "jax.lax.top_k, ms", "is_stable=False, ms", "jaxsoft, ms"]
    return table([*heads, "over one read", "speed-up"], rows, left=2)


def top_k_few(name: str) -> str:
    """The same of few rows, or of short ones: microseconds beyond what a step of the chain takes without the call."""
    rows = []
    for record in records(name, "few"):
        _, dimensions, dtype, k = record["what"].split(" ")
        net = _net(record)
        cells = [*times(net, TOP_K, 1e6), gain(net, "lax.top_k")]
        rows.append([dimensions.replace("x", TIMES), dtype, k.removeprefix("k="), *cells])
    heads = ["scores", "dtype", "k", "jax.lax.top_k, µs", "is_stable=False, µs", "jaxsoft, µs", "speed-up"]
    return table(heads, rows, left=2)


def _net(record: dict) -> dict:
    """A record of chains with the times beyond their floor."""
    return record | {"seconds": {name: seconds - record["floor"] for name, seconds in record["seconds"].items()}}


def sample(name: str) -> str:
    """A token of each row beside the composition of JAX's functions, with a heading."""
    rows = []
    for record in records(name, "sample"):
        _, dimensions, dtype, *filters, _, deviation = record["what"].split()
        beside = ", ".join(f"`{v}`" for v in filters) or "none"
        net = _net(record)
        cells = [*times(net, ("composed", "jaxsoft"), 1e6), gain(net, "composed")]
        rows.append([dimensions.replace("x", TIMES), dtype, beside, deviation, *cells])
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
    parts = []
    for record in records(name, "linear"):
        rows = []
        for key, title in titles.items():
            if key in record["seconds"]:
                rows.append([title, number(1e3 * record["seconds"][key]), number(record["memory"][key] / 1e6)])
        what = record["what"].removeprefix("linear ").replace("x", TIMES, 1).replace("frozen", "with a frozen weight")
        parts.append(f"{what}:\n\n" + table(["", "ms", "MB beyond the results"], rows))
    return "\n\n".join(parts)


def _arrays(record: dict) -> tuple[str, str]:
    """How many arrays as large as x were read and written: forward one of each must be, backward two and one."""
    array = record["bytes"] / (2 if record["direction"] == "forward" else 3)
    return f"{record['read'] / array:.2f}", f"{record['written'] / array:.2f}"


def traffic(name: str, direction: str, dtype: str) -> str:
    """Arrays as large as x that were read and written, as the GPU counted them, by row length."""
    found = [r for r in load(name)["traffic"] if (r["direction"], r["dtype"]) == (direction, dtype)]
    size = max(r["n"] * r["rows"] for r in found)
    found = [r for r in found if r["n"] * r["rows"] == size]  # without the cases of few rows
    names = [n for n in ORDER if any(r["implementation"] == n for r in found)]
    cells: dict[int, dict[str, str]] = {}
    for r in found:
        cells.setdefault(r["n"], {})[r["implementation"]] = " + ".join(_arrays(r))
    rows = [[plot.length(n), *(by_name.get(i, NOTHING) for i in names)] for n, by_name in sorted(cells.items())]
    return table(["row length", *names], rows)


def traffic_few(name: str) -> str:
    """The same of few long rows."""
    found = load(name)["traffic"]
    size = max(r["n"] * r["rows"] for r in found)
    rows = []
    for r in found:
        if r["n"] * r["rows"] * 4 < size:
            what = [shape((r["rows"], r["n"])), r["dtype"], r["direction"], r["implementation"]]
            rows.append([*what, *_arrays(r)])
    return table(["shape", "dtype", "direction", "implementation", "read", "written"], rows, left=4)
