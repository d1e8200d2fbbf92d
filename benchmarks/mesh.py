"""The speed of jaxsoft over several devices of this machine, against optax and jax.nn, and against a copy.

    python benchmarks/mesh.py [--quick] [--only GROUP ...] [--having TEXT] [--record FILE] [--commit HASH]

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
  µs       microseconds a call
  floor    the fraction of that speed: the floor over this time
  faster   how many times faster than the first of the peers

  optax, jax.nn, lax.top_k    the peers, which XLA partitions
  jaxsoft                     classes sharded, as for the peers
  rows sharded                jaxsoft where rows are sharded instead, so that no device needs another
  one part                    top-k of one device in rows as long as its part, while the others wait

In the group "linear" the loss is that of hidden @ weight, with the gradients of both, the weight is sharded by classes,
and the floor is the time of the three matrix products alone ("products"), with the sum over devices that one needs.
"""

import functools
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import timing
from columns import line
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_cases import AXIS, GROUPS, PART, PEERS, ROWS, Case, Linear, mesh
from shared import begin, compare, compiling, parser_of_cases, progress

jax.config.update("jax_num_cpu_devices", 8)
CPU = jax.default_backend() == "cpu"
REPEATS = 3 if CPU else 9
# Programs that follow one another in a sample. The GPUs wait for the first: with 4 programs, top-k came out a fifth
# slower than with 64.
SAMPLE = 4 if CPU else 32
COPIED = 2**20 if CPU else 2**31  # bytes of the array on each device whose copy says what the floor is


def run(case: Case | Linear) -> dict:
    """Checks, then times a case: what is written of it."""
    functions = case.implementations()
    places = {name: name if name in (ROWS, PART) else "" for name in functions}  # where the operands lie
    given = {place: case.operands(place) for place in dict.fromkeys(places.values())}
    progress(f"compiling {case}")

    with ThreadPoolExecutor() as pool:
        programs = {
            name: compiling(pool, lambda f=f, place=places[name]: [jax.jit(f).lower(*given[place])])
            for name, f in functions.items()
        }

    def prepare(name):
        if name == "copy":
            return _copy(), None
        (call,), arguments = programs[name].result(), given[places[name]]
        return (call, [arguments]), None if name == "products" else case.error(arguments, call(*arguments))

    def measure(calls):
        return timing.measure(calls, 0, REPEATS, number=SAMPLE)

    copy = ["copy"] if isinstance(case, Case) else []
    found = compare(case, [*functions, *copy], PEERS, prepare, measure)
    of_each = {"copy": case.bytes() / (2 * COPIED)} if copy else {}
    found["seconds"] = {name: time * of_each.get(name, 1 / case.calls()) for name, time in found["seconds"].items()}
    return case.record() | {"devices": jax.device_count()} | found


@functools.cache
def _copy() -> timing.Call:
    """A copy on every device at once, which no device waits for."""
    devices = NamedSharding(mesh(), P(AXIS))
    size = COPIED // 4 * jax.device_count()
    source = jax.jit(lambda: jnp.ones(size, jnp.float32), out_shardings=devices)()
    return jax.jit(jnp.negative if CPU else jnp.copy).lower(source).compile(), [(source,)]


def main() -> None:
    """Measures what is asked for."""
    args = parser_of_cases(__doc__, GROUPS, having='"float32"').parse_args()
    if jax.device_count() < 2:
        sys.exit("needs two devices or more")
    record = begin(args)
    for group in args.only or GROUPS:
        print(f"\n{group}: floor in µs; implementation, µs, fraction of the floor's speed, times faster", flush=True)
        for case in GROUPS[group](args.quick):
            if args.having in str(case):
                found = run(case)
                print(line(case, found, ("µs", "fraction", "faster")), flush=True)
                record.add(found)


if __name__ == "__main__":
    main()
