"""The tables and plots of the page on many devices, in Markdown: from the record of scaling.py, and by transfers.py."""

import functools
from collections.abc import Callable

import plot
from report import NOTHING, TIMES, direction, load, number, origin, records, table, tabs
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
    version = load(name)["header"]["versions"]["jax"]
    return f"*Read from programs that jax {version} compiled for CPU devices, {origin(name)}*"


def _by_devices(value: Callable[[dict], str], name: str, *groups: str) -> str:
    """A row for each call of some groups: the function, what is sharded, and a value for each number of devices."""
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for record in records(name, *groups):
        what = TITLES.get(record["what"], f"`{record['what']}`")
        call = (what, record["where"], record["sizes"].replace(" x ", TIMES), direction(record))
        found.setdefault(call, {})[record["devices"]] = value(record)
    devices = sorted({n for by_devices in found.values() for n in by_devices})
    rows = [[*call, *(values.get(n, NOTHING) for n in devices)] for call, values in found.items()]
    return table(["", "", "", "", *(f"{n} devices, MB" for n in devices)], rows, left=4)


def _sent(record: dict) -> str:
    """The MB that a device sends, or 0; a sum of the scalars of a mean is no MB."""
    total = sum(record["sent"].values())
    if 0 < total < 1000:
        return f"{total:.0f} bytes"
    return number(total / 1e6) if total >= 1e6 else f"{total / 1e6:.3f}" if total else "0"


def _bytes_of_memory(record: dict) -> int:
    return record["operands"] + record["results"] + record["temporary"]


# What a device sends in the calls of some groups, and what memory it needs in all, operands and results too.
sent = functools.partial(_by_devices, _sent)
memory = functools.partial(_by_devices, lambda record: number(_bytes_of_memory(record) / 1e6))


def _sequences(name: str) -> list[dict]:
    """The calls over a sequence in the layout "zigzag", with as many heads of keys as of queries."""
    found = [record for record in records(name, "sequence") if record["where"] == "zigzag"]
    return [record for record in found if record["sizes"] == found[0]["sizes"]]


def growth(name: str) -> str:
    """How the memory of a ring with gradients grows with the devices, in words."""
    rings = [record for record in _sequences(name) if record["what"] == "ring"]
    found = []
    for gradients in (False, True):
        some = [record for record in rings if record["gradients"] == gradients]
        few, many = (f(some, key=lambda record: record["devices"]) for f in (min, max))
        of_each = (_bytes_of_memory(many) - _bytes_of_memory(few)) / (many["devices"] - few["devices"])
        grows = f"by {number(of_each / 1e6)} MB for each device more" if of_each > 1e5 else "not at all"
        found.append(f"{direction(many)} {grows}")
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
    rows = []
    for record in records(name, "long"):
        parts = [number(record[part] / 1e9) for part in ("operands", "results", "temporary")]
        in_all, sent_ = _bytes_of_memory(record) / 1e9, sum(record["sent"].values()) / 1e9
        rows.append([record["sizes"], direction(record), *parts, number(in_all), number(sent_)])
    return table(["", "", "operands, GB", "results, GB", "temporary, GB", "in all, GB", "sent, GB"], rows, left=2)


def picture(name: str) -> str:
    """What a device sends, and its memory, by the number of devices, for each method."""
    values: dict[str, Callable[[dict], float]] = {
        "MB that a device sends": lambda record: sum(record["sent"].values()) / 1e6,
        "MB of a device's memory": lambda record: _bytes_of_memory(record) / 1e6,
    }
    found, drawn = _sequences(name), []
    for label, value in values.items():
        panels = []
        for gradients in (False, True):
            lines: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
            for record in found:
                if record["gradients"] == gradients:
                    lines[record["what"]].append((record["devices"], value(record)))
            panels.append(plot.Panel("with gradients" if gradients else "forward", lines))
        title = f"{label}, {found[0]['sizes']}"
        svg = plot.chart(panels, title, "devices", label, alone=False, scale=plot.scale_of(panels))
        drawn.append(f'<figure class="wide">\n{svg}</figure>')
    return "\n\n".join(drawn)


def rates(name: str) -> Rates:
    """The rates of one device, from a record of attention: of its longest sequence without a causal rule."""
    some = [r for r in records(name, "lengths") if (r["causal"], r["dtype"]) == (False, "bfloat16")]
    some = [r for r in some if r["shape"][3] == 128]
    longest = max(record["shape"][1] for record in some)
    forward, both = (
        next(r for r in some if (r["shape"][1], r["direction"]) == (longest, way))
        for way in ("forward", "with gradients")
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
    devices, found, rows = load(name)["header"]["devices"], rates(attention), []
    for record in records(name, "methods"):
        seconds, cells = record["seconds"], []
        call = Call(devices, record["tokens"], *record["heads"])
        for method in METHODS:
            timed = {"one device", method} <= seconds.keys()
            measured = seconds["one device"] / devices / seconds[method] if timed else None
            cells += [number(measured), number(share(call, method, found, LINKS["NVLink"], record["gradients"]))]
        rows.append([f"{call.heads} / {call.key_heads}", direction(record), plot.length(call.tokens), *cells])
    heads = [cell for method in METHODS for cell in (f"`{method}`", "model")]
    return table(["heads", "", "tokens of a device", *heads], rows, left=2)
