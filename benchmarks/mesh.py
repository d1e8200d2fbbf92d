"""The speed of jaxsoft over several devices of this machine, against optax and jax.nn, and against a copy.

    python benchmarks/mesh.py [--quick] [--only GROUP ...] [--having TEXT] [--json FILE] [--commit HASH]

All devices are one axis of a mesh, along which the classes of logits are sharded; on a CPU there are eight virtual ones
and small arrays, which shows that everything runs. A line is one call of benchmarks/mesh_cases.py. Every result is
first checked, of functions of logits against float64 in some rows, and a wrong one of jaxsoft's ends the run. The times
are medians, and whatever is compared takes turns in each repeat, in an order drawn anew. Several calls of different
logits follow one another inside a compiled function, and many of those in a sample, so that launching them takes no
time.

  floor    microseconds in which each device copies as many bytes as it must move (it reads half of them and writes
           half): logits are read once for a number a row, and for its gradient read again and written; softmax and
           log_softmax read and write once, and with the pullback read their result and the cotangent, and write
and for each implementation
  us       microseconds a call
  floor    the fraction of that speed: the floor over this time
  faster   how many times faster than the first one named

  optax, jax.nn, lax.top_k    the peers, which XLA partitions
  jaxsoft                     classes sharded, as for the peers
  rows sharded                jaxsoft where rows are sharded instead, so that no device needs another
  one part                    top-k of one device in rows as long as its part, while the others wait

In the group "linear" the loss is that of hidden @ weight, with the gradients of both, the weight is sharded by classes,
and the floor is the time of the three matrix products alone ("products"), with the sum over devices that one needs.
"""

import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import timing
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from mesh_cases import AXIS, GROUPS, PEERS, Case, Linear, chain, error, implementations, linear, mesh, operands
from speed import header, parser_of_cases, progress, reason

jax.config.update("jax_num_cpu_devices", 8)
CPU = jax.default_backend() == "cpu"
REPEATS = 3 if CPU else 9
# Programs that follow one another in a sample. The GPUs wait for the first: with 4 programs, top-k came out a fifth
# slower than with 64.
SAMPLE = 4 if CPU else 32
COPIED = 2**20 if CPU else 2**31  # bytes of the array on each device whose copy says what the floor is


def run(case: Case) -> dict:
    """Checks, then times. A wrong result of jaxsoft's ends the process."""
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    calls: dict[str, timing.Call] = {}
    functions = implementations(case)
    shared = {name: "" if name in (*PEERS, "jaxsoft") else name for name in functions}
    given: dict[str, tuple] = {}  # by the name of the first that has operands that lie so
    for name in functions:
        if shared[name] not in given:
            given[shared[name]] = operands(case, name)
    progress(f"compiling {case}")
    for name, program in _compiled({name: (chain(f), given[shared[name]]) for name, f in functions.items()}).items():
        arguments = given[shared[name]]
        try:
            if isinstance(program, Exception):
                raise program
            errors[name] = error(case, arguments, program(*arguments)[0])
        except Exception as problem:  # a peer that does not serve the call, or has not the memory
            failed[name] = reason(problem)
            continue
        _check(name, case, errors[name])
        calls[name] = program, [arguments]
    calls["copy"] = _copy()
    progress(f"timing {case}")
    times = timing.measure(calls, case.bytes() * case.calls(), REPEATS, number=SAMPLE)
    progress("")
    copy = times.pop("copy")
    assert isinstance(copy, float)
    seconds = {name: times[name] for name in calls if isinstance(times.get(name), float)}
    return {
        "group": case.group,
        "what": case.what,
        "shape": [case.rows, case.classes],
        "dtype": case.dtype,
        "bytes": case.bytes(),
        "calls": case.calls(),
        "floor": copy * case.bytes() / (2 * COPIED),
        "seconds": {name: time / case.calls() for name, time in seconds.items()},
        "errors": errors,
        "failed": failed | {name: reason(time) for name, time in times.items() if isinstance(time, Exception)},
    }


def run_linear(case: Linear) -> dict:
    """Likewise, of a linear layer."""
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    calls: dict[str, timing.Call] = {}
    given = case.operands()
    progress(f"compiling {case}")
    for name, program in _compiled({name: (f, given) for name, f in case.implementations().items()}).items():
        try:
            if isinstance(program, Exception):
                raise program
            if name != "products":
                errors[name] = case.error(given, program(*given))
        except Exception as problem:  # no memory for the logits
            failed[name] = reason(problem)
            continue
        _check(name, case, errors.get(name, 0.0))
        calls[name] = program, [given]
    progress(f"timing {case}")
    times = timing.measure(calls, 2**30, REPEATS, number=SAMPLE)
    progress("")
    return {
        "group": "linear",
        "what": str(case),
        "shape": [case.rows, case.depth, case.classes],
        "dtype": "bfloat16",
        "floor": times["products"],
        "seconds": {name: time for name, time in times.items() if isinstance(time, float)},
        "errors": errors,
        "failed": failed | {name: reason(time) for name, time in times.items() if isinstance(time, Exception)},
    }


def _compiled(functions: dict[str, tuple[Callable, tuple]]) -> dict[str, Compiled | Exception]:
    """The programs of functions for these arguments, or why there are none. They are compiled at the same time."""

    def program(function: Callable, arguments: tuple) -> Compiled | Exception:
        try:
            return jax.jit(function).lower(*arguments).compile()
        except Exception as problem:
            return problem

    with ThreadPoolExecutor() as pool:
        return dict(zip(functions, pool.map(lambda name: program(*functions[name]), functions), strict=True))


@functools.cache
def _copy() -> timing.Call:
    """A copy on every device at once, which no device waits for."""
    devices = NamedSharding(mesh(), P(AXIS))
    size = COPIED // 4 * jax.device_count()
    source = jax.jit(lambda: jnp.ones(size, jnp.float32), out_shardings=devices)()
    return jax.jit(jnp.negative if CPU else jnp.copy).lower(source).compile(), [(source,)]


def _check(name: str, case: Case | Linear, found: float) -> None:
    if name not in PEERS and not found <= 1:  # NaN is an error too
        sys.exit(f"{name}, {case}: wrong, {found:.3g} times the allowed error")


def line(case: Case | Linear, found: dict) -> str:
    """One line of the table."""
    text = f"{case!s:56s} {found['floor'] * 1e6:9.1f}"
    seconds = found["seconds"]
    peer = next((time for name, time in seconds.items() if name in PEERS), float("nan"))
    for name, time in seconds.items():
        text += f" | {name} {time * 1e6:9.1f} {found['floor'] / time:5.3f} {peer / time:6.2f}"
    for name, why in found["failed"].items():
        text += f" | {name}: {why[:60]}"
    return text


def measure[C: (Case, Linear)](
    cases: Sequence[C], run: Callable[[C], dict], result: dict, path: pathlib.Path | None
) -> None:
    """Prints the table of some cases as it comes, and writes the record after each."""
    for case in cases:
        found = run(case)
        print(line(case, found), flush=True)
        result["records"].append(found)
        if path:
            path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measures what is asked for."""
    groups = [*GROUPS, "linear"]
    args = parser_of_cases(__doc__, groups, '"float32"').parse_args()
    if jax.device_count() < 2:
        sys.exit("needs two devices or more")
    result: dict = {"header": header(args.commit) | {"devices": jax.device_count()}, "records": []}
    print(jax.device_count(), "x", result["header"]["device"], result["header"]["versions"], flush=True)
    for group in args.only or groups:
        print(f"\n{group}: floor in us; implementation, us, fraction of the floor's speed, times faster", flush=True)

        def wanted(cases):
            return [case for case in cases if args.having is None or args.having in str(case)]

        if group == "linear":
            measure(wanted(linear(args.quick)), run_linear, result, args.json)
        else:
            measure(wanted(GROUPS[group](args.quick)), run, result, args.json)


if __name__ == "__main__":
    main()
