"""What moved between two records of a benchmark, such as one before a change and one after it.

    python benchmarks/compare.py OLD.jsonl NEW.jsonl [--noise PERCENT] [--threshold PERCENT]

Cases are matched by all that says which case they are: operation, pass, shape, dtype and whatever else a line names.
The device and the versions are those of the headers, and it is said where they differ. What is printed has moved beyond
the noise: times, and bytes that are beside the operands, read, written or sent, of which more is worse.

The noise of a time is what its samples scattered, in both records together (half of the range between the quartiles),
and at least --noise: two runs on one machine differ by up to so much. Bytes that differ by less than a MB did not move.

The exit status is 1 if anything of jaxsoft's is worse by more than --threshold or has no value any more because it
failed, and 2 if a file is no record or nothing could be compared. What jaxsoft is compared with is printed apart, and
decides nothing: where a copy or jax.nn has moved as well, the machine has.
"""

import argparse
import collections
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

from records import PEERS, YARDSTICKS, Record, key, read

OTHERS = {*PEERS, *YARDSTICKS} - {"xla"}  # which is an implementation of jaxsoft's too
# What is compared: the unit that it is printed in, how many of them the stored number is, and the least difference.
_MB = ("MB", 1e-6, 1e6)
QUANTITIES = {"seconds": ("µs", 1e6, 0), "memory": _MB, "read": _MB, "written": _MB, "sent": _MB}


class Change(NamedTuple):
    """A value of one implementation (or kind of operation) in both records, and how much of it is noise."""

    case: dict
    name: str
    quantity: str
    old: float
    new: float
    noise: float

    @property
    def by(self) -> float:
        """How much more it has become, as a fraction."""
        return self.new / self.old - 1 if self.old else float("inf")

    @property
    def moved(self) -> bool:
        """Whether it has changed beyond the noise. To be twice as fast is as much as to be twice as slow."""
        less, more = sorted((self.old, self.new))
        return more > (1 + self.noise) * less and more - less > QUANTITIES[self.quantity][2]

    def __str__(self) -> str:
        """In one line."""
        unit, factor, _ = QUANTITIES[self.quantity]
        what = self.name if self.quantity == "seconds" else f"{self.name}, {self.quantity}"
        values = f"{self.by:+8.1%} {self.old * factor:12.2f} {self.new * factor:12.2f} {unit} {self.noise:7.1%}"
        return f"{values}  {what}: {words(self.case)}"


def words(case: dict) -> str:
    """Which case it is, in words."""
    found = []
    for field, value in key(case).items():
        if isinstance(value, list):
            found.append("x".join(map(str, value)))
        elif value:
            found.append(field if value is True else value if isinstance(value, str) else f"{field} {value}")
    return " ".join(found)


def by_key(record: Record) -> dict[str, dict]:
    """The cases by what says which they are. Raises ValueError where two are the same."""
    found: dict[str, dict] = {}
    for case in record.cases:
        if found.setdefault(json.dumps(key(case), sort_keys=True), case) is not case:
            raise ValueError(f"two cases are the same: {words(case)}")
    return found


def changes(old: dict, new: dict, noise: float) -> Iterator[Change]:
    """All values that both records have of a case. What is not named among the bytes that are sent is not sent."""
    for quantity in (quantity for quantity in QUANTITIES if quantity in old and quantity in new):
        before, after = old[quantity], new[quantity]
        for name in before | after:
            both = before.get(name, 0), after.get(name, 0)
            if quantity == "sent" or (name in before and name in after and (quantity != "seconds" or min(both) > 0)):
                scatter = (
                    sum(case.get("spread", {}).get(name, 0) for case in (old, new)) if quantity == "seconds" else 0
                )
                yield Change(old, name, quantity, *both, max(noise, scatter))


def circumstances(old: dict, new: dict) -> Iterator[str]:
    """The headers, and where they differ."""
    for title, header in (("old", old), ("new", new)):
        versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
        commit = (header.get("commit") or "unknown")[:12]
        yield f"{title}: {header['device']}, {versions}, commit {commit}, {header.get('date', 'no date')}"
    fields = ("device", "cores", "versions", "flags")
    if differ := [field for field in fields if (old.get(field) or "") != (new.get(field) or "")]:
        yield f"WARNING: {', '.join(differ)} differ, and may be why something moved"


def section(title: str, lines: list, most: int | None = None) -> None:
    """Prints some lines below a title, if there are any, and no more than so many."""
    if lines:
        print(f"\n{title}: {len(lines)}", *lines[:most], *["..."] * (most is not None and len(lines) > most), sep="\n")


def compare(old: Record, new: Record, noise: float, threshold: float) -> int:
    """Prints what moved, and returns the exit status."""
    print(*circumstances(old.header, new.header), "", "Columns: change, old, new, noise, what", sep="\n")
    before, after = by_key(old), by_key(new)
    both = [(case, after[name]) for name, case in before.items() if name in after]
    every = [change for pair in both for change in changes(*pair, noise)]
    own, others = ([change for change in every if (change.name in OTHERS) == other] for other in (False, True))
    moved = sorted((change for change in own if change.moved), key=lambda change: -change.by)
    worse, better = ([change for change in moved if (change.by > 0) == more] for more in (True, False))
    beyond = sum(change.by > threshold for change in worse)
    failed = [
        f"{name}: {words(was)}: {why}"
        for was, case in both
        for name, why in case.get("failed", {}).items()
        if name in was.get("seconds", {}) and name not in OTHERS
    ]
    section("Slower, or more bytes", worse)
    section("Faster, or fewer bytes", better[::-1])
    section("Not jaxsoft's, moved", [change for change in others if change.moved])
    section("Failed, and did not before", failed)
    section("Only in old", [words(case) for name, case in before.items() if name not in after], most=5)
    section("Only in new", [words(case) for name, case in after.items() if name not in before], most=5)
    drift = collections.defaultdict(list)
    for change in others:
        if change.quantity == "seconds":
            drift[change.name].append(change.by)
    section(
        "The median change of what is not jaxsoft's", [f"{statistics.median(by):+8.1%} {n}" for n, by in drift.items()]
    )
    print(
        f"\n{len(own)} values of jaxsoft's in {len(both)} cases: {len(worse)} worse and {len(better)} better", end=" "
    )
    print(f"beyond the noise, {beyond} worse by more than {threshold:.0%}, {len(failed)} failed")
    if not own and not failed:
        print("Nothing could be compared")
        return 2
    return 1 if beyond or failed else 0


def main() -> None:
    """Compares two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--noise", type=float, default=5, metavar="PERCENT", help="at least so much is noise: 5")
    parser.add_argument("--threshold", type=float, default=10, metavar="PERCENT", help="what fails is more: 10")
    args = parser.parse_args()
    try:
        status = compare(read(args.old), read(args.new), args.noise / 100, args.threshold / 100)
    except (OSError, ValueError) as error:
        parser.error(str(error))  # with status 2
    sys.exit(status)


if __name__ == "__main__":
    main()
