"""The tables and plots of attention on the performance page, in Markdown, from the records that attention.py wrote."""

import statistics

import plot
from columns import Column, among, each, speed_up, table
from records import load, rate
from report import circumstances, tabs

ORDER = ("cudnn", "xla", "jaxsoft", "deterministic=False", "ffi", "ffi, deterministic=False", "pallas")
CHOICES = ("jaxsoft", "deterministic=False")  # which are jaxsoft's own


def by_length(name: str) -> str:
    """The rate of attention by length, in a tab for each direction, size of heads and dtype."""
    record, contents = load(name), {}
    for case in record.of("lengths", "cpu", "dtypes"):
        title = f"{case['direction']}, heads of {case['shape'][3]}, {case['dtype']}"
        contents.setdefault(title, []).append(case)
    for title, some in contents.items():
        names = among(ORDER, some)
        gains = [speed_up(names[0], f"{own} / {{}}", own) for own in CHOICES if own in names]
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
        contents[direction] = table(some, ["beside the operands", *rates, Column(f"{own} / plain", of_plain)])
    return tabs(contents)


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
    """Plots and tables of a record of attention."""
    record = load(name)
    sizes = dict.fromkeys(c["shape"][3] for c in record.of("lengths", "cpu") if c["dtype"] == "bfloat16")
    drawn = [plot.figure(plot.attention_by_length(record, size)) for size in sizes]
    beside = "Beside query, key and value, over the scores that count:"
    return "\n\n".join([circumstances(name), noise(name), *drawn, by_length(name), beside, extras(name)])
