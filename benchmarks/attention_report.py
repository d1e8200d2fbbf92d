"""The tables and plots of attention on the performance page, in Markdown, from the records that attention.py wrote."""

import statistics

import plot
from columns import Column, among, each, number, over_fastest, table
from records import OF_ATTENTION, faster, load, peer, rate
from report import circumstances, tabs

ORDER = (*OF_ATTENTION, "jaxsoft", "deterministic=False", "ffi", "pallas")
CHOICES = ("jaxsoft", "deterministic=False")  # which are jaxsoft's own
CLOSE = 0.02  # behind by so much, which two runs of the same program may differ by
IN_WORDS = {"cudnn": "cuDNN", "xla": "XLA"} | {name: name.partition(",")[0] for name in OF_ATTENTION[2:]}


def by_length(name: str) -> str:
    """The rate of attention by length, in a tab for each direction, size of heads and dtype."""
    record, contents = load(name), {}
    for case in record.of("lengths", "cpu", "dtypes"):
        title = f"{case['direction']}, heads of {case['shape'][3]}, {case['dtype']}"
        contents.setdefault(title, []).append(case)
    for title, some in contents.items():
        names = among(ORDER, some)
        gains = [over_fastest(own) for own in CHOICES if own in names]
        columns = ["batch, length, heads", "rule", *each(plot.unit_of_rate(record), names), *gains]
        contents[title] = table(sorted(some, key=lambda case: (case["shape"][1], case["causal"])), columns)
    return tabs(contents)


def extras(name: str) -> str:
    """The rate over what counts of calls with extras, as a fraction of the plain kernel's, in a tab a direction."""
    record, contents = load(name), {}
    every = record.of("extras")
    own = "pallas" if among(["pallas"], every) else "jaxsoft"
    for direction in dict.fromkeys(case["direction"] for case in every):
        some = [case for case in every if case["direction"] == direction]
        plain = {case["causal"]: rate(case, own) for case in some if not case["what"]}

        def of_plain(case: dict, plain: dict = plain) -> float | None:
            found, base = rate(case, own), plain.get(case["causal"])
            return found / base if found and base else None

        rates = each(plot.unit_of_rate(record), among(ORDER, some))
        gains = [over_fastest(), Column(f"{own} / plain", of_plain)]
        contents[direction] = table(some, ["beside the operands", *rates, *gains])
    return tabs(contents)


def training(name: str) -> str:
    """The rate of what training uses under the causal rule, in a tab a direction."""
    record, contents = load(name), {}
    for case in record.of("training"):
        contents.setdefault(case["direction"], []).append(case)
    for direction, some in contents.items():
        names = among(ORDER, some)
        gains = [over_fastest(own) for own in CHOICES if own in names]
        columns = ["what", "batch, length", "heads of a cache", *each(plot.unit_of_rate(record), names), *gains]
        contents[direction] = table(some, columns)
    return tabs(contents)


def compared(name: str) -> list[dict]:
    """The cases that jaxsoft's own choice and a peer serve, from the slowest beside the fastest peer on."""
    some = [case for case in load(name).cases if faster(case, "jaxsoft")]
    return sorted(some, key=lambda case: faster(case, "jaxsoft"))


def behind(name: str) -> list[dict]:
    """Those in which jaxsoft's own choice took longer than the fastest peer."""
    return [case for case in compared(name) if faster(case, "jaxsoft") < 1]


def standing(name: str) -> str:
    """In how many cases jaxsoft is behind the fastest peer, and in which, in words."""
    every, slower = compared(name), behind(name)
    *others, last = dict.fromkeys(IN_WORDS[found] for found in among(OF_ATTENTION, every))
    peers = f"{', '.join(others)} and {last}" if others else last
    kinds: dict[str, list[float]] = {}
    for case in slower:
        within = faster(case, "jaxsoft") >= 1 - CLOSE
        kinds.setdefault("the others" if within else _kind(case), []).append(faster(case, "jaxsoft"))
    cells = [f"{kind}, in {len(gains)} by up to {number(100 / min(gains) - 100)} %" for kind, gains in kinds.items()]
    return (
        f"Attention is compared with the fastest of {peers} in each case, and takes longer than that in "
        f"{len(slower) or 'none'} of {len(every)} cases" + (f": {'; '.join(cells)}." if cells else ".")
    )


def _kind(case: dict) -> str:
    """What a case has in common with others, in words."""
    beside = case["what"] or f"heads of {case['shape'][3]}" + f" in {case['dtype']}" * (case["dtype"] != "bfloat16")
    return f"{case['direction']}, {beside}"


def slower(name: str) -> str:
    """The cases in which jaxsoft's own choice is behind, each with the fastest peer; empty without any."""
    gain = Column(over_fastest().head, lambda case: f"{faster(case, 'jaxsoft'):.3f} ({peer(case)})")
    return table(behind(name), ["what", "direction", "dtype", "shape", "rule", gain])


def noise(name: str) -> str:
    """How far the times of two columns that are the same program differ.

    That is seen by their memory, and forward only: with gradients, two kernels may come from two implementations.
    """
    differences = []
    for case in load(name).cases:
        seconds, memory = case["seconds"], case["memory"]
        if case["direction"] == "forward" and "jaxsoft" in seconds:
            same = (n for n in ("ffi", "pallas") if n in seconds and memory[n] == memory["jaxsoft"])
            differences += [abs(seconds["jaxsoft"] / seconds[n] - 1) for n in same]
    return (
        "How exact these times are: forward, `jaxsoft` is the same program as `ffi` or `pallas`. Their times differ by "
        f"{statistics.median(differences):.1%} in the median of all cases, and by {max(differences):.0%} at most."
    )


def section(name: str) -> str:
    """Plots and tables of a record of attention, but for the extras."""
    record = load(name)
    sizes = dict.fromkeys(c["shape"][3] for c in record.of("lengths", "cpu") if c["dtype"] == "bfloat16")
    drawn = [plot.figure(plot.attention_by_length(record, size)) for size in sizes]
    parts = [circumstances(name), noise(name), standing(name), slower(name), *drawn, by_length(name)]
    if record.of("training"):
        parts += ["What training uses, under the causal rule:", training(name)]
    return "\n\n".join(part for part in parts if part)
