"""The tables of speed over several devices, in Markdown, from the records that mesh.py and ring.py wrote."""

import plot
from report import among, by_title, circumstances, direction, fractions, gain, load, number, shape, table, tabs, times
from report import records as of_groups

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
    found = {}
    for title, records in by_title(name, TITLES).items():
        names, cells = among(ROWS, records), []
        peer = next((n for n in names if n in PEERS), None)
        for record in records:
            what = record["what"].split(" ", 1)[0] if record["group"] == "linear" else record["what"]
            case = [what, shape(record["shape"]), record["dtype"], number(1e6 * record["floor"])]
            compared = [*times(record, names, 1e6), *fractions(record, names, record["floor"])]
            cells.append([*case, *compared, gain(record, peer)])
        heads = ["", "shape", "dtype", "floor, µs", *(f"{n}, µs" for n in names), *(f"floor / {n}" for n in names)]
        found[title] = table([*heads, f"speed-up over {peer}"], cells, left=3)
    return f"{circumstances(name)}\n\n{tabs(found)}"


def heads(record: dict) -> str:
    """The heads of queries and of keys."""
    return " / ".join(map(str, record["heads"]))


def ring(name: str) -> str:
    """Attention over sequences on several devices: the share of one device, and each method's fraction of its speed."""
    devices = load(name)["header"]["devices"]
    found = {}
    for title, records in by_title(name, {"speed": "the ring", "methods": "methods and layouts"}).items():
        names, cells = among(RING, records), []
        for record in records:
            seconds = record["seconds"]
            share = seconds["one device"] / devices if "one device" in seconds else None
            case = [heads(record), direction(record), plot.length(record["tokens"])]
            one = number(None if share is None else 1e3 * share)
            cells.append([*case, one, *times(record, names, 1e3), *fractions(record, names, share)])
        heading = ["heads", "", "tokens a device", "share, ms", *(f"{n}, ms" for n in names)]
        found[title] = table([*heading, *(f"share / {n}" for n in names)], cells, left=2)
    return f"{circumstances(name)}\n\n{tabs(found)}"


def longest(name: str) -> str:
    """How long a sequence may be whose gradients fit the memory."""
    records = [record for record in of_groups(name, "longest") if record["tokens"]]
    cells = []
    for record in records:
        tokens, sizes = plot.length(record["tokens"]), number(record["bytes"] / 1e9)
        cells.append([record["name"], heads(record), tokens, sizes, number(record["seconds"])])
    names = ["", "heads", "tokens a device", "arrays on a device, GB", "seconds"]
    memory = number(records[0]["memory"] / 1e9)
    return f"{circumstances(name)} JAX has {memory} GB on each device.\n\n{table(names, cells, left=2)}"
