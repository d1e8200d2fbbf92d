"""The tables of speed over several devices, in Markdown, from the records that mesh.py and ring.py wrote."""

from columns import COLUMNS, Column, among, each, number, speed_up, table
from records import PEERS, load
from report import by_title, circumstances, tabs

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
RING = ("ring", "all_gather", "all_to_all", "contiguous", "striped", "jax.nn")


def _compared(name: str, titles: dict[str, str], order: tuple, first: list, unit: str, of_floor: str) -> str:
    """In a tab a group: what a call is, the times, the fractions of the floor's speed, and a speed-up if there is."""
    contents = {}
    for title, cases in by_title(name, titles).items():
        names = among(order, cases)
        columns = [*first, *each(unit, names), *each(of_floor, names)]
        if of_floor == "floor":
            columns.append(speed_up(next((n for n in names if n in PEERS), None)))
        contents[title] = table(cases, columns)
    return f"{circumstances(name)}\n\n{tabs(contents)}"


def rows(name: str) -> str:
    """Functions of rows whose classes are sharded: the time of a call, and its fraction of the floor's speed."""
    return _compared(name, TITLES, ROWS, ["what", "shape", "dtype", "floor, µs"], "µs", "floor")


def ring(name: str) -> str:
    """Attention over sequences on several devices: the share of one device, and each method's fraction of its speed."""
    titles = {"speed": "the ring", "methods": "methods and layouts"}
    return _compared(
        name, titles, RING, ["heads", COLUMNS["direction"].headed(""), "tokens", "share, ms"], "ms", "share"
    )


def longest(name: str) -> str:
    """How long a sequence may be whose gradients fit the memory."""
    cases = load(name).of("longest")
    sizes = Column("arrays on a device, GB", lambda case: next(iter(case["memory"].values())) / 1e9)
    found = table(cases, ["method", "heads", "tokens", sizes, "seconds"])
    return f"{circumstances(name)} JAX has {number(cases[0]['limit'] / 1e9)} GB on each device.\n\n{found}"
