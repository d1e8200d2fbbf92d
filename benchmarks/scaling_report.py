"""The tables and plots of the page on many devices, in Markdown: from the record of scaling.py, and by transfers.py."""

import functools
from collections.abc import Callable

import plot
from columns import COLUMNS, NOTHING, TIMES, Column, length, markdown, number, table
from records import fraction, load, operations
from report import origin, tabs
from transfers import KEPT_BLOCKS, LINKS, METHODS, MIB, Call, Rates, hidden_from, share

HEADS = ((16, 16), (32, 8))
SAID_OF_LINKS = {
    "NVLink": "over NVLink, as it was measured between two H200s, one way",
    "InfiniBand": "over InfiniBand, as it is **assumed and was not measured**, with 400 Gbit/s for each GPU",
}
TITLES = {
    "linear": "`linear_softmax_cross_entropy`",
    "linear, mean": '`linear_softmax_cross_entropy`, `reduction="mean"`',
    "cross_entropy": "`softmax_cross_entropy_with_integer_labels`",
}


def circumstances(name: str) -> str:
    """Versions, commit and date of a record, in one sentence."""
    version = load(name).header["versions"]["jax"]
    return f"*Read from programs that jax {version} compiled for CPU devices, {origin(name)}*"


def _by_devices(value: Callable[[dict], str], name: str, *groups: str) -> str:
    """A row for each call of some groups: the function, what is sharded, and a value for each number of devices."""
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for case in load(name).of(*groups):
        what = TITLES.get(case["what"], f"`{case['what']}`")
        call = (what, case["where"], case["sizes"].replace(" x ", TIMES), case["direction"])
        found.setdefault(call, {})[case["devices"]] = value(case)
    devices = sorted({n for by_devices in found.values() for n in by_devices})
    rows = [[*call, *(values.get(n, NOTHING) for n in devices)] for call, values in found.items()]
    return markdown([("", True)] * 4 + [(f"{n} devices, MB", False) for n in devices], rows)


def _sent(case: dict) -> str:
    """The MB that a device sends, or 0; a sum of the scalars of a mean is no MB."""
    total = sum(case["sent"].values())
    if 0 < total < 1000:
        return f"{total:.0f} bytes"
    return number(total / 1e6) if total >= 1e6 else f"{total / 1e6:.3f}" if total else "0"


def _memory(case: dict) -> int:
    """The bytes that a device needs in all."""
    return sum(case["memory"].values())


# What a device sends in the calls of some groups, and what memory it needs in all, operands and results too.
sent = functools.partial(_by_devices, _sent)
memory = functools.partial(_by_devices, lambda case: number(_memory(case) / 1e6))


def _sequences(name: str) -> list[dict]:
    """The calls over a sequence in the layout "zigzag", with as many heads of keys as of queries."""
    found = [case for case in load(name).of("sequence") if case["where"] == "zigzag"]
    return [case for case in found if case["sizes"] == found[0]["sizes"]]


DIRECTIONS = ("forward", "with gradients")


def growth(name: str) -> str:
    """How the memory of a ring with gradients grows with the devices, in words."""
    rings = [case for case in _sequences(name) if case["what"] == "ring"]
    found = []
    for direction in DIRECTIONS:
        some = [case for case in rings if case["direction"] == direction]
        few, many = (f(some, key=lambda case: case["devices"]) for f in (min, max))
        of_each = (_memory(many) - _memory(few)) / (many["devices"] - few["devices"])
        grows = f"by {number(of_each / 1e6)} MB for each device more" if of_each > 1e5 else "not at all"
        found.append(f"{direction} {grows}")
    return f"The memory of a ring with {rings[0]['sizes']} grows {', and '.join(found)}."


def kept_blocks() -> str:
    """What a ring does not send again for its gradients, in words."""
    if not KEPT_BLOCKS:
        return ""
    return (
        "A ring sends 4 T K D bytes less than that: for the gradients it begins with the block of keys and values that "
        "arrived last, and sends them the other way round."
    )


def longest(name: str) -> str:
    """The memory of the longest sequences."""
    parts = ("operands", "results", "temporary")
    columns = [Column(f"{part}, GB", lambda case, part=part: case["memory"][part] / 1e9) for part in parts]
    columns.append(Column("in all, GB", lambda case: _memory(case) / 1e9))
    columns.append(Column("sent, GB", lambda case: sum(case["sent"].values()) / 1e9))
    sizes = Column("", lambda case: case["sizes"], str, left=True)
    return table(load(name).of("long"), [sizes, COLUMNS["direction"].headed(""), *columns])


def picture(name: str) -> str:
    """What a device sends, and its memory, by the number of devices, for each method."""
    values: dict[str, Callable[[dict], float]] = {
        "MB that a device sends": lambda case: sum(case["sent"].values()) / 1e6,
        "MB of a device's memory": lambda case: _memory(case) / 1e6,
    }
    found, drawn = _sequences(name), []
    for label, value in values.items():
        panels = []
        for direction in DIRECTIONS:
            lines: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
            for case in found:
                if case["direction"] == direction:
                    lines[case["what"]].append((case["devices"], value(case)))
            panels.append(plot.Panel(direction, lines))
        drawn.append(plot.figure(plot.chart(panels, f"{label}, {found[0]['sizes']}", "devices", label)))
    return "\n\n".join(drawn)


def rates(name: str) -> Rates:
    """The rates of one device, from a record of attention: of its longest sequence without a causal rule."""
    some = [c for c in load(name).of("lengths") if (c["causal"], c["dtype"], c["shape"][3]) == (False, "bfloat16", 128)]
    longest = max(case["shape"][1] for case in some)
    forward, both = (
        next(case for case in some if (case["shape"][1], case["direction"]) == (longest, direction))
        for direction in DIRECTIONS
    )
    seconds, of_both = forward["seconds"]["jaxsoft"], both["seconds"]["jaxsoft"]
    return Rates(operations(forward) / seconds, (operations(both) - operations(forward)) / (of_both - seconds))


def measured_rates(name: str) -> str:
    """The two rates in words."""
    found = rates(name)
    return f"{found.forward / 1e12:.0f} TFLOP/s forward and {found.backward / 1e12:.0f} backward"


def links() -> str:
    """What the model takes a message to cost, as a list."""
    lines = []
    for name, said in SAID_OF_LINKS.items():
        link = LINKS[name]
        rates_ = ", ".join(f"{rate / 1e9:.0f} GB/s at {size / MIB:.0f} MiB" for size, rate in link.rates)
        lines.append(f"- {said}: {link.latency * 1e6:.1f} µs for the smallest one, and {rates_}.")
    return "\n".join(lines)


def hides(name: str) -> str:
    """From how many tokens of a device on a ring waits for no message."""
    found = rates(name)
    rows = []
    for heads, key_heads in HEADS:
        for backward in (False, True):
            tokens = [str(hidden_from(heads, key_heads, found, link, backward)) for link in LINKS.values()]
            rows.append([f"{heads} / {key_heads}", "backward" if backward else "forward", *tokens])
    return markdown([("heads", True), ("", True), *((f"{link}, tokens", False) for link in LINKS)], rows)


def shares(name: str, link: str, devices: str) -> str:
    """The fraction of the time in which a device computes, by method and length, in a tab for heads and direction."""
    found, count, contents = rates(name), int(devices), {}
    heading = [(head, False) for head in ("tokens of a device", *(f"`{m}`" for m in METHODS), "fastest")]
    for heads, key_heads in HEADS:
        for direction in DIRECTIONS:
            rows = []
            for tokens in (2**k for k in range(9, 18)):
                call = Call(count, tokens, heads, key_heads)
                served = [m for m in METHODS if m != "all_to_all" or key_heads % count == 0]
                fractions = {m: share(call, m, found, LINKS[link], direction != "forward") for m in served}
                best = max(fractions, key=lambda m: fractions[m])
                cells = [f"{fractions[m]:.3f}" if m in fractions else NOTHING for m in METHODS]
                rows.append([length(tokens), *cells, f"`{best}`"])
            contents[f"heads {heads} / {key_heads}, {direction}"] = markdown(heading, rows)
    return tabs(contents)


def against(name: str, attention: str) -> str:
    """The fraction of its time in which a device computes, as ring.py measured it and by the model over NVLink."""
    found, columns = rates(attention), []

    def model(case: dict, method: str) -> float:
        call = Call(case["devices"], case["tokens"], *case["heads"])
        return share(call, method, found, LINKS["NVLink"], case["direction"] != "forward")

    for method in METHODS:
        columns.append(Column(f"`{method}`", lambda case, method=method: fraction(case, method)))
        columns.append(Column("model", lambda case, method=method: model(case, method)))
    what = ["heads", COLUMNS["direction"].headed(""), COLUMNS["tokens"].headed("tokens of a device")]
    return table(load(name).of("methods"), [*what, *columns])
