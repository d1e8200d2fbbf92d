"""The tables of the performance page, in Markdown, from the records that the benchmarks wrote.

Every number on that page comes through here when the site is built, so a new record changes the page and nothing has to
be typed. What a number says is written beside its table: a fraction is the time of a copy that moves as many bytes over
the time of the call, and a speed-up is the time of jax.nn (or optax, or a composition of JAX's functions) over that
of jaxsoft.
"""

import datetime
import math
from collections.abc import Iterable

import plot
from columns import Column, among, each, markdown, number, shape, speed_up, spread, table
from records import BYTES, faster, floor, fraction, load, net

ORDER = ("jax.nn", "jaxsoft", "ffi", "pallas", "triton")
DIRECTIONS = ("forward", "backward")


def circumstances(name: str) -> str:
    """Device, versions, flags, commit and date of a record, in one sentence."""
    header = load(name).header
    versions = ", ".join(f"{package} {version}" for package, version in header["versions"].items())
    cores = f" ({header['cores']} CPU cores)" if header.get("cores") else ""
    flags = f" and `XLA_FLAGS={header['flags']}`" if header.get("flags") else ""
    return f"*Measured on {header['device']}{cores} with {versions}{flags}, {origin(name)}*"


def origin(name: str) -> str:
    """Commit, date and file of a record, the end of a sentence."""
    header = load(name).header
    date = datetime.datetime.fromisoformat(header["date"])
    commit = (header["commit"] or "unknown")[:12]
    return f"at commit `{commit}`, on {date.day} {date:%B %Y}. Record: `benchmarks/results/{name}.jsonl`."


def cases(name: str, **wanted: str) -> list[dict]:
    """The cases that match."""
    return [case for case in load(name).cases if all(case[key] == value for key, value in wanted.items())]


def by_title(name: str, titles: dict[str, str]) -> dict[str, list[dict]]:
    """The cases of the groups that have a title, by it."""
    found = {title: load(name).of(group) for group, title in titles.items()}
    return {title: some for title, some in found.items() if some}


def tabs(contents: dict[str, str]) -> str:
    """Content that shares a place on the page, by title, as far as there is any."""
    return "\n\n".join(f'=== "{title}"\n\n' + _indented(text) for title, text in contents.items() if text)


def _indented(text: str) -> str:
    return "\n".join("    " + line if line else "" for line in text.splitlines())


def _operations(name: str) -> list[str]:
    return list(dict.fromkeys(case["op"] for case in load(name).cases))


def _compared(some: list[dict], first: Iterable[str], quantity: str, order: Iterable[str] = ORDER) -> str:
    """A table of cases of speed.py: what they are, a quantity of each implementation, and the speed-up."""
    return table(some, [*first, *each(quantity, among(order, some)), speed_up("jax.nn")])


def by_length(name: str, op: str) -> str:
    """Fractions of a copy's speed by row length, in a tab for each direction and dtype."""
    return tabs(
        {
            f"{way}, {dtype}": _compared(
                cases(name, group="rows", op=op, direction=way, dtype=dtype), ["row length"], "fraction"
            )
            for way in DIRECTIONS
            for dtype in ("float32", "bfloat16", "float16")
        }
    )


def picture(name: str, op: str) -> str:
    """The plot of an operation by row length."""
    return plot.figure(plot.softmax_by_length(load(name), op))


def other_operations(name: str) -> str:
    """A section for each operation but softmax, with its plot and its fractions by row length."""
    others = [op for op in _operations(name) if op != "softmax"]
    return "\n\n".join(f"### {op}\n\n{picture(name, op)}\n\n{by_length(name, op)}" for op in others)


def group(name: str, of: str) -> str:
    """All cases of a group, in a tab for each direction: fractions of a copy's speed."""
    first = ["shape", "dtype", *["extras"] * any(case["extras"] for case in cases(name, group=of))]
    return tabs({way: _compared(cases(name, group=of, direction=way), first, "fraction") for way in DIRECTIONS})


def few(name: str) -> str:
    """Microseconds of a call on few rows, in a tab for each dtype."""
    some = {dtype: cases(name, group="few", dtype=dtype) for dtype in ("float32", "bfloat16")}
    return tabs({dtype: _compared(found, ["rows", "row length"], "µs") for dtype, found in some.items()})


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
    with_copy = load(name).header["device"].startswith("NVIDIA")
    for of, title in titles.items():
        for op in _operations(name):
            for way in DIRECTIONS:
                found = [c for c in cases(name, group=of, op=op, direction=way) if "jaxsoft" in c["seconds"]]
                if found:
                    row = [title, f"`{op}`", way, str(len(found))]
                    if with_copy:
                        row.append(spread(v for c in found if of != "few" and (v := fraction(c, "jaxsoft"))))
                    rows.append([*row, spread(v for c in found if (v := faster(c, "jaxsoft", "jax.nn")))])
    heads = ["cases", "operation", "direction", "number", *["fraction of a copy's speed"] * with_copy]
    return markdown([(head, i < 3) for i, head in enumerate([*heads, "speed-up over jax.nn"])], rows)


def slower(name: str) -> str:
    """Every case in which jaxsoft took longer than jax.nn."""
    gain = Column("speed-up over jax.nn", lambda case: faster(case, "jaxsoft", "jax.nn") or 1.0, lambda v: f"{v:.3f}")
    found = sorted((case for case in load(name).cases if gain.value(case) < 1), key=gain.value)
    columns = ["operation", "direction", "dtype", "shape", "extras", gain]
    return table(found, columns) or "There is no such case in this record."


def millisecond_table(name: str, of: str) -> str:
    """Milliseconds and gains of a group, where a copy says little, as on a CPU; in a tab for each direction."""
    first, order = ["call", "dtype", "shape"], ("jax.nn", "jaxsoft")
    contents = {w: _compared(cases(name, group=of, direction=w), first, "ms", order) for w in DIRECTIONS}
    return tabs(contents) if all(contents.values()) else contents["forward"]


def _losses_by_direction(name: str, of: str, order: Iterable[str], peer: str) -> str:
    """Fractions of the speed of a copy of the bytes that must move, in a tab for the loss and one for its gradient."""
    names, contents = among(order, cases(name, group=of)), {}
    for way in ("forward", "with gradient"):
        columns = [LOGITS, "dtype", *each("fraction", names), speed_up(peer)]
        contents[way] = table(cases(name, group=of, what=way), columns)
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
LOGITS, SCORES = (Column(head, lambda case: shape(case["shape"]), str, left=True) for head in ("logits", "scores"))
# The floor is the time of a copy, which reads half of the bytes and writes the other half.
READS = Column("over one read", lambda case: case["seconds"]["jaxsoft"] / floor(case))


def top_k(name: str) -> str:
    """The k most probable elements beside `jax.lax.top_k` of `jax.nn.softmax`: milliseconds, and reads of x."""
    columns = [SCORES, "dtype", "k", *each("ms", TOP_K), READS, speed_up("lax.top_k", "speed-up")]
    return table(load(name).of("top_k"), columns)


def top_k_few(name: str) -> str:
    """The same of few rows, or of short ones: microseconds beyond what a step of the chain takes without the call."""
    found = [net(case) for case in load(name).of("few")]
    return table(found, [SCORES, "dtype", "k", *each("µs", TOP_K), speed_up("lax.top_k", "speed-up")])


def sample(name: str) -> str:
    """A token of each row beside the composition of JAX's functions, with a heading."""
    columns = [LOGITS, "dtype", "filters", "deviation", *each("µs", ("composed", "jaxsoft"))]
    found = [net(case) for case in load(name).of("sample")]
    text = (
        "`jaxsoft.random.sample`, microseconds a call, in such a chain, with the random numbers. *Composed* is "
        "`jax.random.categorical` of the logits that the filters leave: after `jax.lax.top_k` of k logits, or of all "
        "of them where there is `top_p` alone. Normal logits with a small standard deviation are flat, and a nucleus "
        "of them has many tokens; with a large one they are peaked:"
    )
    return f"## Sampling\n\n{text}\n\n{table(found, [*columns, speed_up('composed', 'speed-up')])}"


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
    for case in load(name).of("linear"):
        columns = zip(*(each(quantity, titles) for quantity in ("ms", "MB")), strict=True)
        rows = [
            [title, *(number(column.value(case)) for column in of_way)]
            for of_way, (way, title) in zip(columns, titles.items(), strict=True)
            if way in case["seconds"]
        ]
        rows_, depth, classes = case["shape"]
        what = f"{shape((rows_, depth))} -> {classes} {case['dtype']}" + " with a frozen weight" * (case["what"] != "")
        parts.append(f"{what}:\n\n" + markdown([("", True), ("ms", False), ("MB beyond the results", False)], rows))
    return "\n\n".join(parts)


def _arrays(case: dict, name: str) -> list[str]:
    """How many arrays as large as x were read and written: forward one of each must be, backward two and one."""
    array = math.prod(case["shape"]) * BYTES[case["dtype"]]
    return [f"{case[side][name] / array:.2f}" for side in ("read", "written")]


def _counted(name: str, few: bool) -> list[dict]:
    """The cases of traffic of few rows, or those of the largest size."""
    every = load(name).cases
    size = max(math.prod(case["shape"]) for case in every)
    return [case for case in every if (4 * math.prod(case["shape"]) < size) == few]


def traffic(name: str, direction: str, dtype: str) -> str:
    """Arrays as large as x that were read and written, as the GPU counted them, by row length."""
    found = [case for case in _counted(name, few=False) if (case["direction"], case["dtype"]) == (direction, dtype)]
    found.sort(key=lambda case: case["shape"][-1])
    columns = [
        Column(i, lambda case, i=i: " + ".join(_arrays(case, i)) if i in case["read"] else None)
        for i in among(ORDER, found)
    ]
    return table(found, ["row length", *columns])


def traffic_few(name: str) -> str:
    """The same of few long rows."""
    rows = [
        [shape(case["shape"]), case["dtype"], case["direction"], i, *_arrays(case, i)]
        for case in _counted(name, few=True)
        for i in case["read"]
    ]
    heads = ("shape", "dtype", "direction", "implementation", "read", "written")
    return markdown([(head, i < 4) for i, head in enumerate(heads)], rows)
