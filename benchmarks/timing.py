"""How time is taken: samples, with the implementations in turn, so that what slows the machine slows all of them.

The order is drawn anew for each turn. A GPU whose power is limited runs faster for a while after a call that needs
little: in one order, the same program was up to 13 % faster where it came after such a call than elsewhere.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

type Call = tuple[Callable[..., Any], Sequence[tuple]]  # a function, and the lists of arguments that take turns
type Times = dict[str, list[float] | Exception]  # samples of the seconds of a call by name, or why there are none

# Copies of the input take turns, as many as hold this together: more than the caches, which would flatter small ones.
ROTATION_BYTES = 2**27
# The calls that follow one another in a sample on a GPU move this together: some 4 ms, beside which waiting for the
# last is short, and launching one takes no time while another runs.
SAMPLE_BYTES = 2**34
# A chain is timed as the difference of two numbers of runs, so that what a run costs beside its calls cancels.
CHAIN_RUNS = (2, 12)


def calls_a_sample(moved: int) -> int:
    """How many calls that move so many bytes follow one another in a sample."""
    return 1 if jax.default_backend() == "cpu" else min(20, max(4, SAMPLE_BYTES // moved))


def buffers(size: int, moved: int, repeats: int) -> int:
    """How many copies of an input of this many bytes take turns."""
    return max(1, min(ROTATION_BYTES // size, (repeats + 1) * calls_a_sample(moved)))


def measure(calls: dict[str, Call], moved: int, repeats: int, number: int | None = None) -> Times:
    """So many samples, `repeats`, of each.

    Args:
      calls: what is timed.
      moved: the bytes that a call moves.
      repeats: how many samples are taken of each.
      number: how many calls a sample has; None for as many as follow from the bytes.
    """
    number = number or calls_a_sample(moved)
    # What another function's memory takes to be freed, some of it by threads of XLA's, is not this one's time.
    pause = 0 if jax.default_backend() != "cpu" else 0.02 if moved > 2**26 else 0.005
    turns = {name: itertools.cycle(arguments) for name, (_, arguments) in calls.items()}

    def sample(name: str) -> float:
        function, result = calls[name][0], None
        time.sleep(pause)
        start = time.perf_counter()
        for arguments in itertools.islice(turns[name], number):
            result = None  # its memory can serve the next call
            result = function(*arguments)
        jax.block_until_ready(result)  # calls run in order: the last one ends last
        return (time.perf_counter() - start) / number

    return _samples(list(calls), sample, repeats)


def measure_chains(
    chains: dict[str, Callable[[jax.Array], jax.Array]], make: Callable[[], jax.Array], length: int, repeats: int
) -> Times:
    """Samples of one of the `length` calls in a chain, `repeats` of each. A chain consumes what `make` makes."""
    few, many = CHAIN_RUNS

    def seconds(name: str, runs: int) -> float:
        x = jax.block_until_ready(make())
        start = time.perf_counter()
        for _ in range(runs):
            x = chains[name](x)
        jax.block_until_ready(x)
        return time.perf_counter() - start

    def sample(name: str) -> float:
        return (seconds(name, many) - seconds(name, few)) / ((many - few) * length)

    return _samples(list(chains), sample, repeats)


def _samples(names: list[str], sample: Callable[[str], float], repeats: int) -> Times:
    samples: dict[str, list[float]] = {name: [] for name in names}
    failures: dict[str, Exception] = {}
    order = random.Random(0)
    for repeat in range(-1, repeats):  # the first round warms up
        for name in order.sample(names, len(names)):
            if name in failures:
                continue
            try:
                taken = sample(name)
            except jax.errors.JaxRuntimeError as error:  # out of memory
                failures[name] = error
                continue
            if repeat >= 0:
                samples[name].append(taken)
    return samples | failures


def spread(samples: Sequence[float]) -> float:
    """Half of the range between the quartiles, as a fraction of the median."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / (2 * middle) if middle > 0 else 1.0  # as differences of chains can be
