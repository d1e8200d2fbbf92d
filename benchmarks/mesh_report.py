"""The tables of speed over several devices, in Markdown, from the records that mesh.py and ring.py wrote."""

import plot
from report import NOTHING, by_title, circumstances, exists, load, number, shape, table, tabs

NOT_RECORDED = "*This has not been recorded yet.*"
TITLES = {
    "cross_entropy": "cross-entropy",
    "smoothing": "label smoothing",
    "entropy": "with the entropy",
    "softmax": "softmax",
    "log_softmax": "log-softmax",
    "logsumexp": "logsumexp",
    "top_k": "top-k",
    "linear": "linear layer",
}
ROWS = ("optax", "jax.nn", "lax.top_k", "lax.top_k(is_stable=False)", "jaxsoft", "rows sharded", "one part")
PEERS = ROWS[:3]
RING = ("ring", "all_gather", "all_to_all", "contiguous", "striped", "jax.nn")


def rows(name: str) -> str:
    """Functions of rows whose classes are sharded: the time of a call, and its fraction of the floor's speed."""
    if not exists(name):
        return NOT_RECORDED
    found = {}
    for title, records in by_title(name, TITLES).items():
        names = [n for n in ROWS if any(n in record["seconds"] for record in records)]
        peer = next((n for n in names if n in PEERS), None)
        cells = []
        for record in records:
            seconds = record["seconds"]
            times = [number(1e6 * seconds[n]) if n in seconds else _why(record, n) for n in names]
            fractions = [number(record["floor"] / seconds[n]) if n in seconds else NOTHING for n in names]
            faster = number(seconds[peer] / seconds["jaxsoft"]) if peer in seconds else NOTHING
            what = record["what"].split(" ", 1)[0] if record["group"] == "linear" else record["what"]
            cells.append(
                [
                    what,
                    shape(record["shape"]),
                    record["dtype"],
                    number(1e6 * record["floor"]),
                    *times,
                    *fractions,
                    faster,
                ]
            )
        heads = ["", "shape", "dtype", "floor, µs", *(f"{n}, µs" for n in names), *(f"floor / {n}" for n in names)]
        found[title] = table([*heads, f"speed-up over {peer}"], cells, left=3)
    return f"{circumstances(name)}\n\n{tabs(found)}"


def _why(record: dict, name: str) -> str:
    """What stands for the time of a call that failed, or was not asked for."""
    return "out of memory" if record["failed"].get(name) == "out of memory" else NOTHING


def ring(name: str) -> str:
    """Attention over sequences on several devices: the share of one device, and each method's fraction of its speed."""
    if not exists(name):
        return NOT_RECORDED
    result = load(name)
    devices = result["header"]["devices"]
    titles = {"speed": "the ring", "methods": "methods and layouts"}
    found = {}
    for group, title in titles.items():
        records = [record for record in result["records"] if record["group"] == group]
        names = [n for n in RING if any(n in record["seconds"] for record in records)]
        cells = []
        for record in records:
            seconds = record["seconds"]
            share = seconds["one device"] / devices if "one device" in seconds else None
            times = [number(1e3 * seconds[n]) if n in seconds else _why(record, n) for n in names]
            fractions = [number(share / seconds[n]) if share and n in seconds else NOTHING for n in names]
            what = "with gradients" if record["gradients"] else "forward"
            heads = f"{record['heads'][0]} / {record['heads'][1]}"
            one = number(None if share is None else 1e3 * share)
            cells.append([heads, what, plot.length(record["tokens"]), one, *times, *fractions])
        heading = ["heads", "", "tokens a device", "share, ms", *(f"{n}, ms" for n in names)]
        if records:
            found[title] = table([*heading, *(f"share / {n}" for n in names)], cells, left=2)
    return f"{circumstances(name)}\n\n{tabs(found)}"


def longest(name: str) -> str:
    """How long a sequence may be whose gradients fit the memory."""
    found = load(name)["records"] if exists(name) else []
    records = [record for record in found if record["group"] == "longest" and record["tokens"]]
    if not records:
        return NOT_RECORDED
    cells = []
    for record in records:
        heads = f"{record['heads'][0]} / {record['heads'][1]}"
        tokens, sizes = plot.length(record["tokens"]), number(record["bytes"] / 1e9)
        cells.append([record["name"], heads, tokens, sizes, number(record["seconds"])])
    names = ["", "heads", "tokens a device", "arrays on a device, GB", "seconds"]
    memory = number(records[0]["memory"] / 1e9)
    return f"{circumstances(name)} JAX has {memory} GB on each device.\n\n{table(names, cells, left=2)}"
