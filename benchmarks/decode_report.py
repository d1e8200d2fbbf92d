"""The tables of decoding on the performance page, in Markdown, from the records that decode.py and traffic.py wrote."""

from report import NOTHING, TIMES, by_title, circumstances, exists, load, number, table, tabs

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


def by_group(name: str) -> str:
    """The time of a call and the fraction of the speed of reading, in a tab a group."""
    contents = {}
    for title, records in by_title(name, TITLES).items():
        names = [n for n in ORDER if any(n in r["seconds"] for r in records)]
        rows = []
        for record in records:
            seconds = record["seconds"]
            times = [number(1e6 * seconds[n]) if n in seconds else NOTHING for n in names]
            fractions = [number(record["floor"] / seconds[n]) if n in seconds else NOTHING for n in names]
            rows.append([*_what(record), number(1e6 * record["floor"]), *times, *fractions])
        heads = ["batch", "heads", "keys", "", "reading, µs", *(f"{n}, µs" for n in names)]
        contents[title] = table([*heads, *(f"reading / {n}" for n in names)], rows, left=4)
    return tabs(contents)


def section(name: str) -> str:
    """The tables of a record of decoding, where there is one."""
    if not exists(name):
        return "*This has not been recorded yet.*"
    return f"{circumstances(name)}\n\n{by_group(name)}"


def traffic(name: str) -> str:
    """Bytes that were read over those of the keys and values that count, as the GPU counted them, where recorded."""
    if not exists(name):
        return "*This has not been recorded yet.*"
    rows = []
    for record in load(name)["traffic"]:
        read, written = (number(record[side] / record["bytes"]) for side in ("read", "written"))
        rows.append([*_what(record), number(record["bytes"] / 1e6), read, written])
    return table(["batch", "heads", "keys", "", "keys and values, MB", "read", "written"], rows, left=4)
