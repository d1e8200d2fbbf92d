"""This machine's speed of attention when decoding, against the speed at which keys and values can be read.

    python benchmarks/decode.py [--quick] [--only GROUP ...] [--having TEXT] [--record FILE] [--commit HASH]

A line is one call of benchmarks/decode_cases.py, of few queries of each sequence over its keys and values, which lie in
one piece or in pages. Every result is first checked against float64 on some heads, and a wrong one of jaxsoft's ends
the run. The calls follow one another inside a compiled function, each with other keys and values. The times are
medians, and whatever is compared takes turns in each repeat, in an order drawn anew.

  floor    microseconds in which a copy moves as many bytes as the keys and values that count have: it reads half of
           them and writes half
and for each implementation
  µs       microseconds a call
  floor    the fraction of that speed: the floor over this time

  cudnn    the peer: jax.nn's implementation="cudnn", of pages after they are gathered
  xla      jax.nn's implementation="xla"; of pages, jaxsoft's implementation="xla"
  jaxsoft  jaxsoft's own choice
  pallas   by name
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import timing
from columns import line
from decode_cases import CALLS, CPU_GROUPS, GROUPS, PEERS, Case, chain, error, implementations, operands, record
from shared import begin, compare, parser_of_cases

CPU = jax.default_backend() == "cpu"
REPEATS = 5 if CPU else 9
# The norm of the error over that of the result. With 8 bits the errors are those of bfloat16, too: what the pages hold
# is exact in both.
ALLOWED = 1.5e-2
# Bytes of the array whose copy says what the floor is: so many that to wait for the last of some copies takes 1 % of
# their time, as for the last of some chains of calls.
COPIED = 2**26 if CPU else 2**32


def run(case: Case) -> dict:
    """Checks, then times a case: what is written of it."""
    arrays = operands(case)

    def prepare(name):
        if name == "copy":
            source = jnp.ones(COPIED // 4, jnp.float32)
            return (jax.jit(jnp.negative if CPU else jnp.copy).lower(source).compile(), [(source,)]), None
        wrong = error(case, arrays, jax.jit(chain(case, name, 1))(arrays)) / ALLOWED
        return (jax.jit(chain(case, name)).lower(arrays).compile(), [(arrays,)]), wrong

    def measure(calls):
        return timing.measure(calls, case.bytes() * CALLS, REPEATS, number=4)

    found = compare(case, [*implementations(case), "copy"], (*PEERS, "copy"), prepare, measure)
    of_each = {"copy": case.bytes() / (2 * COPIED)}
    found["seconds"] = {name: time * of_each.get(name, 1 / CALLS) for name, time in found["seconds"].items()}
    return record(case) | found


def main() -> None:
    """Measures what is asked for."""
    groups = CPU_GROUPS if CPU else GROUPS
    args = parser_of_cases(__doc__, groups, having='"pages of 64"').parse_args()
    written = begin(args)
    for group in args.only or groups:
        print(f"\n{group}: floor in µs; implementation, µs, fraction of the floor's speed", flush=True)
        for case in groups[group](args.quick):
            if args.having in str(case):
                found = run(case)
                print(line(case, found, ("µs", "fraction")), flush=True)
                written.add(found)


if __name__ == "__main__":
    main()
