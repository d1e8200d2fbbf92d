"""This machine's speed of attention when decoding, against the speed at which keys and values can be read.

    python benchmarks/decode.py [--quick] [--only GROUP ...] [--having TEXT] [--json FILE] [--commit HASH]

A line is one call of benchmarks/decode_cases.py, of few queries of each sequence over its keys and values, which lie in
one piece or in pages. Every result is first checked against float64 on some heads, and a wrong one of jaxsoft's ends
the run. The calls follow one another inside a compiled function, each with other keys and values. The times are
medians, and whatever is compared takes turns in each repeat, in an order drawn anew.

  floor    microseconds in which a copy moves as many bytes as the keys and values that count have: it reads half of
           them and writes half
and for each implementation
  us       microseconds a call
  floor    the fraction of that speed: the floor over this time

  cudnn    the peer: jax.nn's implementation="cudnn", of pages after they are gathered
  xla      jax.nn's implementation="xla"; of pages, jaxsoft's implementation="xla"
  jaxsoft  jaxsoft's own choice
  pallas   by name
"""

import json
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import timing
from decode_cases import CALLS, CPU_GROUPS, GROUPS, PEERS, Case, chain, error, implementations, operands, record
from speed import header, parser_of_cases, progress, reason

CPU = jax.default_backend() == "cpu"
REPEATS = 5 if CPU else 9
# The norm of the error over that of the result. With 8 bits the errors are those of bfloat16, too: what the pages hold
# is exact in both.
ALLOWED = 1.5e-2
# Bytes of the array whose copy says what the floor is: so many that to wait for the last of some copies takes 1 % of
# their time, as for the last of some chains of calls.
COPIED = 2**26 if CPU else 2**32


def run(case: Case, repeats: int) -> dict:
    """Checks, then times. A wrong result of jaxsoft's ends the process."""
    arrays = operands(case)
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    calls: dict[str, timing.Call] = {}
    for name in sorted(implementations(case), key=lambda name: name in PEERS):  # jaxsoft into memory without its result
        progress(f"compiling {name}, {case}")
        try:
            errors[name] = error(case, arrays, jax.jit(chain(case, name, 1))(arrays)) / ALLOWED
            program = jax.jit(chain(case, name)).lower(arrays).compile()
        except Exception as problem:  # an implementation that does not serve the call, or has not the memory
            failed[name] = reason(problem)
            continue
        if name not in PEERS and not errors[name] <= 1:  # NaN is an error too
            sys.exit(f"{name}, {case}: wrong, {errors[name]:.3g} times the allowed error")
        calls[name] = program, [(arrays,)]
    source = jnp.ones(COPIED // 4, jnp.float32)
    calls["copy"] = jax.jit(jnp.negative if CPU else jnp.copy).lower(source).compile(), [(source,)]
    progress(f"timing {case}")
    times = timing.measure(calls, case.bytes() * CALLS, repeats, number=4)
    progress("")
    failed |= {name: reason(time) for name, time in times.items() if isinstance(time, Exception)}
    seconds = {name: time / CALLS for name, time in times.items() if isinstance(time, float) and name != "copy"}
    copy = times["copy"]
    assert isinstance(copy, float)
    return record(case) | {
        "floor": copy * case.bytes() / (2 * COPIED),
        "seconds": {name: seconds[name] for name in implementations(case) if name in seconds},
        "errors": errors,
        "failed": failed,
    }


def line(case: Case, found: dict) -> str:
    """One line of the table."""
    text = f"{case!s:56s} {found['floor'] * 1e6:9.1f}"
    for name, seconds in found["seconds"].items():
        text += f" | {name} {seconds * 1e6:9.1f} {found['floor'] / seconds:5.3f}"
    for name, why in found["failed"].items():
        text += f" | {name}: {why[:40]}"
    return text


def measure(cases: Sequence[Case], result: dict, path: pathlib.Path | None) -> None:
    """Prints the table of some cases as it comes, and writes the record after each."""
    for case in cases:
        found = run(case, REPEATS)
        print(line(case, found), flush=True)
        result["records"].append(found)
        if path:
            path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measures what is asked for."""
    groups = CPU_GROUPS if CPU else GROUPS
    args = parser_of_cases(__doc__, groups, '"pages of 64"').parse_args()
    result: dict = {"header": header(args.commit), "records": []}
    print(result["header"]["device"], result["header"]["versions"], flush=True)
    for group in args.only or groups:
        print(f"\n{group}: floor in us; implementation, us, fraction of the floor's speed", flush=True)
        wanted = [case for case in groups[group](args.quick) if args.having is None or args.having in str(case)]
        measure(wanted, result, args.json)


if __name__ == "__main__":
    main()
