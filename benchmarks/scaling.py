"""What each device sends and how much memory it takes as a mesh grows, from programs that are compiled and not run.

    python benchmarks/scaling.py [--quick] [--only GROUP ...] [--having TEXT] [--record FILE] [--commit HASH]

The record of the repository is benchmarks/results/scaling.jsonl, and takes some three minutes of a processor:

    python benchmarks/scaling.py --record benchmarks/results/scaling.jsonl

8, 16, 32 and 64 virtual CPU devices are one axis of a mesh. A line is one call of benchmarks/scaling_cases.py, forward
or with its gradients, of arrays of 16 bits. XLA's text of the compiled program says which collective operations it has
(benchmarks/collectives.py), and the run FAILS, with exit status 1, where a device does not send exactly what the
formulas of benchmarks/scaling_cases.py and benchmarks/transfers.py say. The dtype is float16, which has as many bytes
as bfloat16: on a CPU XLA sends the latter as float32.

  sent       MB (1e6 bytes) that a device sends, and receives, by the kind of operation
  expected   MB by the formula, where they differ
  operands   MB of a device's parts of what the call is given
  results    MB of its parts of the results
  temporary  MB that it needs beside these, at its peak, as XLA assigns its memory. Within attention that is the memory
             of the formula in blocks of keys, which is what a CPU runs; the kernels for a GPU keep the scores of a
             block in registers and need less

The group "long" is a million tokens over 8 devices.
"""

import math
import pathlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import collectives
import jax
import scaling_cases
from scaling_cases import Case
from shared import begin, parser_of_cases, progress
from transfers import Sent

DEVICES = (8, 16, 32, 64)
GROUPS = ("rows", "head", "attention", "sequence", "long")


def measure(case: Case) -> dict:
    """What a compiled program says."""
    progress(f"compiling {case}")
    program = case.lowered().compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None  # which XLA has of any program for a CPU
    return {
        "group": case.group,
        "what": case.what,
        "where": case.where,
        "sizes": case.sizes,
        "direction": "with gradients" if case.gradients else "forward",
        "devices": case.devices,
        "sent": collectives.read(text, case.devices),
        "memory": {
            "operands": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
        },
    }


def agrees(sent: Sent, expected: Sent) -> bool:
    """Whether a device sends what the formula says."""
    pairs = [(sent.get(kind, 0), expected.get(kind, 0)) for kind in sent.keys() | expected.keys()]
    return all(math.isclose(found, wanted, rel_tol=1e-9) for found, wanted in pairs)


def line(case: Case, found: dict) -> str:
    """One line of the table."""

    def words(sent: Sent) -> str:
        return ", ".join(f"{kind} {value / 1e6:.6g}" for kind, value in sent.items() if value) or "nothing"

    wrong = "" if agrees(found["sent"], case.expected) else f" | EXPECTED {words(case.expected)}"
    memory = " ".join(f"{size / 1e6:9.1f}" for size in found["memory"].values())
    return f"{case!s:108s} {memory} | {words(found['sent'])}{wrong}"


def wanted(only: Sequence[str], quick: bool, having: str) -> list[Case]:
    """The cases, the smallest meshes first."""
    found = scaling_cases.quick() if quick else [case for n in DEVICES for case in scaling_cases.cases(n)]
    found = [case for case in found if case.group in only]
    if "long" in only and not quick:
        found += scaling_cases.long()
    return [case for case in found if having in str(case)]


def main() -> None:
    """Compiles what is asked for."""
    quick = "8 devices alone, and gradients alone"
    args = parser_of_cases(__doc__, GROUPS, quick=quick, having='"forward"').parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES[0] if args.quick else DEVICES[-1])
    record, wrong = begin(args), 0
    print("MB of operands, of results and of temporaries; what a device sends, MB", flush=True)
    some = wanted(args.only or GROUPS, args.quick, args.having)
    with ThreadPoolExecutor() as pool:
        for case, found in zip(some, pool.map(measure, some), strict=True):
            progress("")
            print(line(case, found), flush=True)
            record.add(found)
            wrong += not agrees(found["sent"], case.expected)
    if wrong:
        sys.exit(f"{wrong} of {len(some)} calls do not send what the formulas say")


if __name__ == "__main__":
    main()
