"""The tables of decoding on the performance page, in Markdown, from the records that decode.py and traffic.py wrote."""

from report import TIMES, among, by_title, circumstances, fractions, load, number, table, tabs, times

ORDER = ("cudnn", "xla", "jaxsoft", "pallas")
TITLES = {
    "one": "one query",
    "several": "16 queries",
    "paged": "pages",
    "ragged": "different lengths",
    "short": "short caches",
    "heads": "heads",
    "cpu": "keys and values",
}


def _what(record: dict) -> list[str]:
    """A case in the first columns of a table: its batch, heads, keys, and what else there is."""
    batch, queries, heads, size = record["shape"]
    beside = [f"{queries} queries"] * (queries > 1) + ["different lengths"] * record["ragged"]
    if record["page"]:
        beside.append(f"pages of {record['page']}")
    if record["pages_dtype"] != record["dtype"]:
        beside.append(record["pages_dtype"])
    return [str(batch), f"{heads} / {record['key_heads']}{TIMES}{size}", str(record["keys"]), ", ".join(beside)]


def section(name: str) -> str:
    """The circumstances, and in a tab a group the time of a call and the fraction of the speed of reading."""
    contents = {}
    for title, records in by_title(name, TITLES).items():
        names, rows = among(ORDER, records), []
        for record in records:
            floor = record["floor"]
            cells = [number(1e6 * floor), *times(record, names, 1e6), *fractions(record, names, floor)]
            rows.append([*_what(record), *cells])
        heads = ["batch", "heads", "keys", "", "reading, µs", *(f"{n}, µs" for n in names)]
        contents[title] = table([*heads, *(f"reading / {n}" for n in names)], rows, left=4)
    return f"{circumstances(name)}\n\n{tabs(contents)}"


def traffic(name: str) -> str:
    """Bytes that were read over those of the keys and values that count, as the GPU counted them."""
    rows = []
    for record in load(name)["traffic"]:
        read, written = (number(record[side] / record["bytes"]) for side in ("read", "written"))
        rows.append([*_what(record), number(record["bytes"] / 1e6), read, written])
    return table(["batch", "heads", "keys", "", "keys and values, MB", "read", "written"], rows, left=4)
