"""Which cases of a test run by default, where it is marked `cover` or `costly`: see conftest.py."""

from collections.abc import Mapping, Sequence


def covering(cases: Sequence[Mapping[str, object]], names: Sequence[str], at_most: int | None = None) -> set[int]:
    """Which cases make a run by default: each combination of the named parameters, and each value of the others.

    One is taken where it shows something new, first those that show most, so the others' values take turns. There may
    be a limit to their number.
    """
    shows = []
    for case in cases:
        values = {name: id(value) for name, value in case.items()}  # not all have a hash; a product has each value once
        combination = tuple(values.pop(name) for name in names)
        shows.append({combination, *values.items()})
    missing: set = set().union(*shows)
    kept: set[int] = set()
    while missing and len(kept) != at_most:
        best = max(range(len(cases)), key=lambda i: len(shows[i] & missing))  # of several the first
        kept.add(best)
        missing -= shows[best]
    return kept
