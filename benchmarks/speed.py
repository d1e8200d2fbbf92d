"""This machine's speed of jaxsoft against `jax.nn`, and against a copy.

    python benchmarks/speed.py [--quick] [--only GROUP ...] [--record FILE] [--plot FILE] [--commit HASH]
    python benchmarks/speed.py --traffic softmax|decode [--record FILE]

A line is one case of benchmarks/row_cases.py: a function, forward or backward, of one array. "backward" is the pullback
alone, from what the forward pass kept and a cotangent to the gradient of x. Every result is first checked on a few rows
against float64, and a wrong one of jaxsoft's ends the run. The times are medians; the implementations and the copy take
turns in each repeat.

  MB      the bytes that the case must at least move, counted as benchmarks/row_cases.py says
  copy    milliseconds that a copy takes which moves as many (it reads half of them and writes half)
and for each implementation ("jaxsoft" is its own choice of a kernel)
  ms      milliseconds a call
  copy    the fraction of the copy's speed: the copy's time over this one
  faster  how many times faster than jax.nn
  error   the largest error, in units of what is allowed (jax.nn's, which may exceed 1, is only reported)

On a GPU the copy is the device's own memcpy. In the group "few", where all times are in microseconds, it is -x, a
compiled pass that reads and writes as much. There the calls follow one another inside one compiled function, because
launching one from Python takes longer than running it, and XLA would remove a copy from such a function.

On a CPU the copy is such a pass everywhere. There every large result gets fresh memory, which the operating system
maps and clears page by page. That costs more than the copying itself, and jaxsoft's kernels can be faster than the
copy, for on Linux they ask for large pages. "warm" is a copy by one core into memory that is already in use. With
--quick, results are small enough for the allocator to use the same memory again.

--traffic has the GPU count the bytes instead, under Nsight Compute (ncu).
"""

import dataclasses
import itertools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import plot
import traffic
from columns import line
from programs import Programs
from records import Record, faster, fraction
from row_cases import CPU, CPU_QUICK, GPU, GPU_QUICK, GROUPS, Case
from running import run
from shared import begin, parser_of_cases, progress

import jaxsoft

BATCH = 32  # cases that are compiled together


def written(case: Case) -> dict:
    """What is written of a case, beside what is measured."""
    fields = ("group", "op", "direction", "dtype", "shape", "extras")
    return {field: getattr(case, field) for field in fields}


def summary(cases: list[dict]) -> str:
    """The lowest fraction and the lowest speed-up of jaxsoft in each group, with the case of each."""
    lines = []
    for group in dict.fromkeys(case["group"] for case in cases):
        for derived, what in ((fraction, "of a copy's speed"), (faster, "times as fast as jax.nn")):
            timed = [(value, case) for case in cases if case["group"] == group and (value := derived(case, "jaxsoft"))]
            if timed:
                value, worst = min(timed, key=lambda pair: pair[0])
                words = [worst["op"], worst["direction"], worst["dtype"], "x".join(map(str, worst["shape"]))]
                lines.append(f"{group:7s} at least {value:5.2f} {what:24s} {' '.join([*words, worst['extras']])}")
    lost = sum("jaxsoft" in case["failed"] for case in cases)
    if lost:
        lines.append(f"{lost} of {len(cases)} cases have no time of jaxsoft's")
    return "\n".join(lines)


def measure_group(group: str, quick: bool, record: Record) -> None:
    """Prints a group's table as it comes."""
    cpu = jax.default_backend() == "cpu"
    size = (CPU_QUICK if quick else CPU) if cpu else (GPU_QUICK if quick else GPU)
    repeats = 5 if quick else 7 if cpu else 11
    lacking = [name for name, why_not in jaxsoft.implementations().items() if why_not]
    cases = []
    for case in GROUPS[group](size):
        able = tuple(name for name in case.implementations if name not in lacking)
        cases.append(dataclasses.replace(case, implementations=able))
    unit = "µs" if group == "few" else "ms"
    print(f"\n{group}: MB; copy, {unit}; implementation, {unit}, copy, faster, error", flush=True)
    for batch in itertools.batched(cases, BATCH):
        compiled = Programs(batch, progress)
        for case in batch:
            found = written(case) | run(case, compiled, repeats)
            print(
                line(f"{case!s:60s} {case.bytes / 1e6:8.1f}", found, (unit, "fraction", "faster", "error")), flush=True
            )
            record.add(found)


def main() -> None:
    """Measures, and writes what was found."""
    parser = parser_of_cases(__doc__, GROUPS, quick="fewer and smaller cases", drawn=True)
    parser.add_argument("--traffic", choices=traffic.CASES, help="count the memory traffic of that instead, with ncu")
    args = parser.parse_args()
    if args.traffic:
        counted = traffic.report(args.traffic)  # before JAX takes this process's share of the GPU's memory
        record = begin(args)
        for case in counted:
            record.add(case)
        return
    record = begin(args)
    for group in args.only or GROUPS:
        measure_group(group, args.quick, record)
    print("\n" + summary(record.cases))
    if args.plot:
        plot.draw(record, args.plot)


if __name__ == "__main__":
    main()
