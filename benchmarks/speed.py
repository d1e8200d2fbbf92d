"""This machine's speed of jaxsoft against `jax.nn`, and against a copy.

    python benchmarks/speed.py [--quick] [--only GROUP ...] [--json FILE] [--plot FILE] [--commit HASH]
    python benchmarks/speed.py --traffic softmax|decode [--json FILE]

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
from comparison import Record, parser_of_cases, progress
from programs import Programs
from row_cases import CPU, CPU_QUICK, GPU, GPU_QUICK, GROUPS, Case
from running import run

import jaxsoft

BATCH = 32  # cases that are compiled together


def shape_of(case: Case) -> str:
    """The shape and what else there is, in words."""
    return " ".join(["x".join(map(str, case.shape)), case.extras]).strip()


def heading(group: str, names: list[str], width: int, warm: bool) -> str:
    """The two lines above a group's table."""
    unit = "us" if group == "few" else "ms"
    columns = f"{group:22s} {'dtype':8s} {'shape':{width}s} {'MB':>8s} {'copy ' + unit:>9s}" + f" {'warm':>9s}" * warm
    return (
        " " * len(columns)
        + "".join(f" | {name:^31s}" for name in names)
        + f"\n{columns}"
        + f" | {unit:>9s} {'copy':>6s} {'faster':>7s} {'error':>6s}" * len(names)
    )


def table_line(case: Case, found: dict, names: list[str], width: int, warm: bool) -> str:
    """One line of the table."""
    unit = 1e6 if case.chain else 1e3
    line = f"{case.op + ' ' + case.direction:22s} {case.dtype:8s} {shape_of(case):{width}s} {case.bytes / 1e6:8.1f}"
    seconds, absent = found["seconds"], float("nan")
    copy = seconds.get("copy", absent)
    line += f" {copy * unit:9.3f}"
    if warm:
        line += f" {seconds['warm'] * unit:9.3f}" if "warm" in seconds else f" {'-':>9s}"
    for name in names:
        if name in seconds:
            time, faster = seconds[name], seconds.get("jax.nn", absent) / seconds[name]
            line += f" | {time * unit:9.3f} {copy / time:6.3f} {faster:7.2f} {found['errors'][name]:6.2f}"
        else:
            line += f" | {'-':>9s} {'-':>6s} {'-':>7s} {'-':>6s}"
    return line


def records(case: Case, found: dict) -> list[dict]:
    """What is written of a case: one record an implementation."""
    shape = {
        "group": case.group,
        "op": case.op,
        "direction": case.direction,
        "dtype": case.dtype,
        "shape": case.shape,
        "extras": case.extras,
        "n": case.n,
        "rows": case.rows,
        "bytes": case.bytes,
    }
    seconds, written = found["seconds"], []
    for name, key in (("copy", "copy_milliseconds"), ("warm", "warm_copy_milliseconds")):
        if name in seconds:
            shape[key] = seconds[name] * 1e3
    for name in case.implementations:
        record = shape | {"implementation": name}
        if name in seconds:
            record["milliseconds"] = seconds[name] * 1e3
            if "copy" in seconds:
                record["fraction"] = seconds["copy"] / seconds[name]
            if "jax.nn" in seconds:
                record["faster"] = seconds["jax.nn"] / seconds[name]
            record["error"] = found["errors"][name]
        else:
            record["failed"] = found["failed"][name]
        written.append(record)
    return written


def summary(found: list[dict]) -> str:
    """The lowest fraction and the lowest speed-up of jaxsoft in each group, with the case of each."""
    lines = []
    ours = [record for record in found if record["implementation"] == "jaxsoft"]
    for group in dict.fromkeys(record["group"] for record in found):
        timed = [record for record in ours if record["group"] == group and "milliseconds" in record]
        for key, what in (("fraction", "of a copy's speed"), ("faster", "times as fast as jax.nn")):
            with_key = [record for record in timed if key in record]
            if with_key:
                worst = min(with_key, key=lambda record: record[key])
                words = [worst[name] for name in ("op", "direction", "dtype", "shape", "extras")]
                words[3] = "x".join(map(str, words[3]))
                lines.append(f"{group:7s} at least {worst[key]:5.2f} {what:24s} {' '.join(words)}")
    lost = sum("failed" in record for record in ours)
    if lost:
        lines.append(f"{lost} of {len(ours)} cases have no time of jaxsoft's")
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
    names = list(dict.fromkeys(name for case in cases for name in case.implementations))
    width = max(len(shape_of(case)) for case in cases)
    print("\n" + heading(group, names, width, warm=cpu), flush=True)
    for batch in itertools.batched(cases, BATCH):
        compiled = Programs(batch, progress)
        for case in batch:
            measured = run(case, compiled, repeats)
            print(table_line(case, measured, names, width, warm=cpu), flush=True)
            for name, why in measured["failed"].items():
                print(f"  no time of {name}: {why}", flush=True)
            record.add(records(case, measured))


def main() -> None:
    """Measures, and writes what was found."""
    parser = parser_of_cases(__doc__, GROUPS, quick="fewer and smaller cases")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="also draw them there, as SVG")
    parser.add_argument("--traffic", choices=traffic.CASES, help="count the memory traffic of that instead, with ncu")
    args = parser.parse_args()
    if args.traffic:
        counted = traffic.report(args.traffic)  # before JAX takes this process's share of the GPU's memory
        Record(args).add(counted, "traffic")
        return
    record = Record(args)
    for group in args.only or GROUPS:
        measure_group(group, args.quick, record)
    print("\n" + summary(record.content["records"]))
    if args.plot:
        plot.draw(record.content, args.plot)


if __name__ == "__main__":
    main()
