"""The tables and plots of the page on many devices, in Markdown: from the record of scaling.py, and by transfers.py."""

import datetime
import math
from collections.abc import Callable

import plot
from report import NOTHING, TIMES, exists, load, number, table, tabs
from transfers import KEPT_BLOCKS, LINKS, METHODS, MIB, Call, Rates, hidden_from, share

HEADS = ((16, 16), (32, 8))
SAID_OF_LINKS = {
    "NVLink": "over NVLink, as it was measured between two H200s, one way",
    "InfiniBand": "over InfiniBand, as it is **assumed and was not measured**, with 400 Gbit/s for each GPU",
}
NOT_RECORDED = "*This has not been recorded yet.*"
TITLES = {
    "linear": "`linear_softmax_cross_entropy`",
    "linear, mean": '`linear_softmax_cross_entropy`, `reduction="mean"`',
    "cross_entropy": "`softmax_cross_entropy_with_integer_labels`",
}


def circumstances(name: str) -> str:
    """Versions, commit and date of a record, in one sentence."""
    header = load(name)["header"]
    date = datetime.datetime.fromisoformat(header["date"])
    return (
        f"*Read from programs that jax {header['versions']['jax']} compiled for CPU devices, at commit "
        f"`{(header['commit'] or 'unknown')[:12]}`, on {date.day} {date:%B %Y}. Record: "
        f"`benchmarks/results/{name}.json`.*"
    )


def _by_devices(name: str, value: Callable[[dict], str], *groups: str) -> tuple[list[int], list[list[str]]]:
    """The numbers of devices, and a row for each call: the function, what is sharded, and a value for each number."""
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for record in load(name)["records"]:
        if record["group"] in groups:
            what = TITLES.get(record["what"], f"`{record['what']}`")
            direction = "with gradients" if record["gradients"] else "forward"
            call = (what, record["where"], record["sizes"].replace(" x ", TIMES), direction)
            found.setdefault(call, {})[record["devices"]] = value(record)
    devices = sorted({n for by_devices in found.values() for n in by_devices})
    return devices, [[*call, *(values.get(n, NOTHING) for n in devices)] for call, values in found.items()]


def _sent(record: dict) -> str:
    """The MB that a device sends, or 0; a sum of the scalars of a mean is no MB."""
    total = sum(record["sent"].values())
    if 0 < total < 1000:
        return f"{total:.0f} bytes"
    return number(total / 1e6) if total >= 1e6 else f"{total / 1e6:.3f}" if total else "0"


def _memory(record: dict) -> str:
    return number(_bytes_of_memory(record) / 1e6)


def _bytes_of_memory(record: dict) -> int:
    return record["operands"] + record["results"] + record["temporary"]


def sent(name: str, *groups: str) -> str:
    """What a device sends in the calls of some groups."""
    if not exists(name):
        return NOT_RECORDED
    devices, rows = _by_devices(name, _sent, *groups)
    return table(["", "", "", "", *(f"{n} devices, MB" for n in devices)], rows, left=4)


def memory(name: str, *groups: str) -> str:
    """What memory a device needs in all, operands and results too."""
    if not exists(name):
        return NOT_RECORDED
    devices, rows = _by_devices(name, _memory, *groups)
    return table(["", "", "", "", *(f"{n} devices, MB" for n in devices)], rows, left=4)


def growth(name: str) -> str:
    """How the memory of a ring with gradients grows with the devices, in words."""
    if not exists(name):
        return NOT_RECORDED
    records = [
        r for r in load(name)["records"] if (r["group"], r["what"], r["where"]) == ("sequence", "ring", "zigzag")
    ]
    found = []
    for gradients in (False, True):
        some = [r for r in records if r["gradients"] == gradients and r["sizes"] == records[0]["sizes"]]
        few, many = (f(some, key=lambda record: record["devices"]) for f in (min, max))
        of_each = (_bytes_of_memory(many) - _bytes_of_memory(few)) / (many["devices"] - few["devices"])
        grows = f"by {number(of_each / 1e6)} MB for each device more" if of_each > 1e5 else "not at all"
        found.append(f"{'with gradients' if gradients else 'forward'} {grows}")
    return f"The memory of a ring with {records[0]['sizes']} grows {', and '.join(found)}."


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
    if not exists(name):
        return NOT_RECORDED
    rows = []
    for record in load(name)["records"]:
        if record["group"] == "long":
            direction = "with gradients" if record["gradients"] else "forward"
            parts = [number(record[part] / 1e9) for part in ("operands", "results", "temporary")]
            in_all, sent_ = _bytes_of_memory(record) / 1e9, sum(record["sent"].values()) / 1e9
            rows.append([record["sizes"], direction, *parts, number(in_all), number(sent_)])
    return table(["", "", "operands, GB", "results, GB", "temporary, GB", "in all, GB", "sent, GB"], rows, left=2)


def picture(name: str) -> str:
    """What a device sends, and its memory, by the number of devices, for each method."""
    if not exists(name):
        return NOT_RECORDED
    records = [r for r in load(name)["records"] if r["group"] == "sequence" and r["where"] == "zigzag"]
    sizes = records[0]["sizes"]
    records = [r for r in records if r["sizes"] == sizes]
    values: dict[str, Callable[[dict], float]] = {
        "MB that a device sends": lambda record: sum(record["sent"].values()) / 1e6,
        "MB of a device's memory": lambda record: _bytes_of_memory(record) / 1e6,
    }
    drawn = []
    for label, value in values.items():
        panels = []
        for gradients in (False, True):
            lines: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
            for record in records:
                if record["gradients"] == gradients:
                    lines[record["what"]].append((record["devices"], value(record)))
            panels.append(plot.Panel("with gradients" if gradients else "forward", lines))
        top = max(y for panel in panels for line in panel.lines.values() for _, y in line)
        unit = 10.0 ** math.floor(math.log10(top) - 0.3)
        scale = plot.Scale(unit=unit, least=unit, step=1 if top < 6 * unit else 2, heavy=None, format="g")
        svg = plot.chart(panels, f"{label}, {sizes}", "devices", label, alone=False, scale=scale)
        drawn.append(f'<figure class="wide">\n{svg}</figure>')
    return "\n\n".join(drawn)


def rates(name: str) -> Rates:
    """The rates of one device, from a record of attention: of its longest sequence without a causal rule."""
    records = load(name)["records"]
    some = [r for r in records if (r["group"], r["causal"], r["dtype"]) == ("lengths", False, "bfloat16")]
    some = [r for r in some if r["shape"][3] == 128]
    longest = max(record["shape"][1] for record in some)
    forward, both = (
        next(r for r in some if r["shape"][1] == longest and r["direction"] == direction)
        for direction in ("forward", "with gradients")
    )
    seconds, of_both = forward["seconds"]["jaxsoft"], both["seconds"]["jaxsoft"]
    return Rates(forward["flops"] / seconds, (both["flops"] - forward["flops"]) / (of_both - seconds))


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
    return table(["heads", "", *(f"{link}, tokens" for link in LINKS)], rows, left=2)


def shares(name: str, link: str, devices: str) -> str:
    """The fraction of the time in which a device computes, by method and length, in a tab for heads and direction."""
    found, count, contents = rates(name), int(devices), {}
    for heads, key_heads in HEADS:
        for gradients in (False, True):
            rows = []
            for tokens in (2**k for k in range(9, 18)):
                call = Call(count, tokens, heads, key_heads)
                served = [m for m in METHODS if m != "all_to_all" or key_heads % count == 0]
                fractions = {m: share(call, m, found, LINKS[link], gradients) for m in served}
                best = max(fractions, key=lambda m: fractions[m])
                cells = [f"{fractions[m]:.3f}" if m in fractions else NOTHING for m in METHODS]
                rows.append([plot.length(tokens), *cells, f"`{best}`"])
            title = f"heads {heads} / {key_heads}, {'with gradients' if gradients else 'forward'}"
            heading = ["tokens of a device", *(f"`{m}`" for m in METHODS), "fastest"]
            contents[title] = table(heading, rows, left=0)
    return tabs(contents)


def against(name: str, attention: str) -> str:
    """The fraction of its time in which a device computes, as ring.py measured it and by the model over NVLink."""
    if not exists(name):
        return NOT_RECORDED
    result, found, rows = load(name), rates(attention), []
    devices = result["header"]["devices"]
    for record in result["records"]:
        if record["group"] == "methods" and "one device" in record["seconds"]:
            seconds = record["seconds"]
            call = Call(devices, record["tokens"], *record["heads"])
            cells = []
            for method in METHODS:
                measured = seconds["one device"] / devices / seconds[method] if method in seconds else None
                cells += [number(measured), number(share(call, method, found, LINKS["NVLink"], record["gradients"]))]
            what = "with gradients" if record["gradients"] else "forward"
            rows.append([f"{call.heads} / {call.key_heads}", what, plot.length(call.tokens), *cells])
    heads = [cell for method in METHODS for cell in (f"`{method}`", "model")]
    return table(["heads", "", "tokens of a device", *heads], rows, left=2)
