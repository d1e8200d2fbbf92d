"""What the devices of a compiled program send each other, read from its text.

All devices are one axis of a mesh, and each sends as many bytes as it receives. How many those are follows from the
kind of a collective operation and from its result, with n devices:

  all-gather           (n - 1) / n of the result: a device's own part goes to every other device
  reduce-scatter       (n - 1) times the result, which is one n-th of what a device gives
  all-reduce           2 (n - 1) / n of the result: a reduce-scatter and an all-gather
  all-to-all           (n - 1) / n of the result: each device keeps its own part
  collective-permute   all of it
"""

import math
import re

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf" = (?P<result>.*?) (?P<kind>{'|'.join(KINDS)}|collective-broadcast)(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<type>[a-z]+)(?P<bits>\d+)?[a-z\d]*\[(?P<dims>[\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?\S+ .*\{$")


def sent(kind: str, result: float, devices: int) -> float:
    """The bytes that a device sends in a collective operation over all devices whose result has so many bytes."""
    others = devices - 1
    match kind:
        case "all-gather" | "all-to-all":
            return others / devices * result
        case "reduce-scatter":
            return others * result
        case "all-reduce":
            return 2 * others / devices * result
        case "collective-permute":
            return result
    raise ValueError(f"nothing is known about {kind}")


def read(text: str, devices: int) -> dict[str, float]:
    """The bytes that a device sends, by the kind of operation.

    Args:
      text: of a program that was compiled for this many devices.
      devices: how many; each collective operation must be over all of them.
    """
    total = dict.fromkeys(KINDS, 0.0)
    in_entry = False
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            in_entry = match["entry"] is not None
        if match := _COLLECTIVE.search(line):
            if not in_entry:  # in a loop, whose number of rounds the operation does not say
                raise ValueError(f"not in the program's own computation: {line.strip()[:200]}")
            if match["start"]:  # its result also has what it is given
                raise ValueError(f"an asynchronous operation: {line.strip()[:200]}")
            if (size := _group(line, devices)) != devices:
                raise ValueError(f"among {size} of {devices} devices: {line.strip()[:200]}")
            value = sent(match["kind"], _bytes(match["result"]), devices)  # refuses kinds that are not in `total`
            total[match["kind"]] += value
    return {kind: value for kind, value in total.items() if value}


def _bytes(result: str) -> int:
    """Of an array, or of all arrays of a tuple."""
    total = 0
    for array in _ARRAY.finditer(result):
        width = 1 if array["type"] == "pred" else int(array["bits"]) // 8
        total += width * math.prod(int(d) for d in array["dims"].split(",") if d)
    return total


def _group(line: str, devices: int) -> int:
    """How many devices take part in an operation together."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return len(re.findall(r"\{\d+,\d+", pairs[0]))
    if mesh := re.search(r"replica_groups=mesh\[(?P<axes>.*?)\] \{(?P<over>.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh["axes"]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh["over"]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    return devices  # no groups are all devices
