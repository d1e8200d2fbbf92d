"""The speed of attention over sequences that lie on several devices of this machine, against that of one device.

    python benchmarks/ring.py [--quick] [--only GROUP ...] [--having TEXT] [--record FILE] [--commit HASH]

All devices are one axis of a mesh, along which sequences are sharded, under jit; on a CPU there are eight virtual ones
and short sequences, which shows that everything runs. A line is one call under a causal rule, in bfloat16 with heads of
128, forward or with the gradients by query, key and value. Every result of jaxsoft's is first compared with that of one
device for the whole sequence, and a wrong one ends the run. The times are medians, and whatever is compared takes turns
in each repeat, in an order drawn anew. Short calls follow one another inside a compiled function, as the layers of a
model do, and such functions in samples of some tenths of a second, so that launching them on several devices takes no
time, and the clock is that of continued work.

  share    milliseconds of one device for the whole sequence, over the number of devices: jaxsoft's own
           `dot_product_attention`, which benchmarks/attention.py compares with cuDNN
and for each of the others
  ms       milliseconds a call
  share    the fraction of that speed: the share over this time

  ring, all_gather, all_to_all   the methods of `jaxsoft.ring_attention`, in the zigzag layout
  contiguous, striped            the ring in another layout
  jax.nn                         the peer, which XLA partitions: implementation="xla", since "cudnn" refuses sequences
                                 that are sharded

The group "longest" says how long a sequence may be: the largest power of 2 of tokens a device whose gradients are
computed in the memory that there is, from the sizes that the compiled program states, run once.
"""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import timing
from columns import line
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from mesh_cases import AXIS, mesh
from shared import begin, compare, parser_of_cases, progress

import jaxsoft

jax.config.update("jax_num_cpu_devices", 8)
CPU = jax.default_backend() == "cpu"
SIZE = 32 if CPU else 128
REPEATS = 3 if CPU else 5
# The calls of a program, and the programs that follow one another in a sample, take about as long, at this rate. The
# GPUs wait for the first, several of them longer than one, and run faster for a while after they have waited.
PROGRAM_SECONDS, SAMPLE_SECONDS = 0.01, 0.05 if CPU else 0.2
RATE = 1e10 if CPU else 4e14
ALLOWED = 1.5e-2  # the norm of the difference over that of the result: bfloat16 has 8 bits
METHODS = ("ring", "all_gather", "all_to_all")
LAYOUTS = ("contiguous", "striped")
MOST_TOKENS = 2**12 if CPU else 2**20
MOST_CALLS = 4  # of a program
# Of a device's memory, for a program: its arrays cannot lie as closely as its sizes say.
SHARE_OF_MEMORY = 0.75
PEER = "jax.nn"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
      heads, key_heads: of queries and of keys.
      tokens: of a device.
      gradients: whether these are computed too.
      names: what is compared.
    """

    heads: int
    key_heads: int
    tokens: int
    gradients: bool
    names: tuple[str, ...] = ("ring",)

    def __str__(self) -> str:
        """The case in words."""
        what = "with gradients" if self.gradients else "forward"
        return f"{self.heads}/{self.key_heads} heads, {self.tokens} tokens a device, {what}"

    def record(self) -> dict:
        """What is written of the case."""
        direction = "with gradients" if self.gradients else "forward"
        heads = [self.heads, self.key_heads]
        return {"heads": heads, "tokens": self.tokens, "direction": direction, "devices": jax.device_count()}

    def length(self) -> int:
        """Of the whole sequence."""
        return self.tokens * jax.device_count()

    def calls(self) -> int:
        """How many calls a program has."""
        return max(1, min(MOST_CALLS, round(PROGRAM_SECONDS * RATE / self.operations())))

    def operations(self) -> float:
        """Of one device's share."""
        products = 7 if self.gradients else 2
        return products * self.heads * SIZE * float(self.length()) ** 2 / jax.device_count()


def attention(name: str) -> Callable:
    """Attention of query, key and value by one of the names that cases have."""
    if name == "one device":
        return lambda *qkv: jaxsoft.dot_product_attention(*qkv, is_causal=True)
    if name == PEER:
        return lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="xla")
    static = {"axis_name": AXIS, "layout": layout_of(name), "method": name if name in METHODS else "ring"}
    return lambda *qkv: jaxsoft.ring_attention(*qkv, is_causal=True, **static)


def function(name: str, gradients: bool, calls: int = 1) -> Callable:
    """So many calls, one after the other, as a function of query, key, value and the output's cotangent."""
    f = attention(name)

    @jax.jit  # which is traced once
    def call(query, key, value, cotangent):
        if not gradients:
            return (f(query, key, value),)
        y, pull = jax.vjp(f, query, key, value)
        return (y, *pull(cotangent))

    def several(*given):
        found = [call(*given)]
        for _ in range(1, calls):  # each waits for the one before on its own device alone
            given, found[-1] = jax.lax.optimization_barrier((given, found[-1]))
            found.append(call(*given))
        return found

    return several


def types(case: Case, name: str) -> list[jax.ShapeDtypeStruct]:
    """The types of query, key, value and cotangent, and where a call has them."""
    one = name == "one device"
    place = SingleDeviceSharding(jax.devices()[0]) if one else NamedSharding(mesh(), P(None, AXIS))
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    shapes = ((1, case.length(), number, SIZE) for number in heads)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]


def build(case: Case, name: str, calls: int) -> Compiled:
    """The compiled calls."""
    with contextlib.nullcontext() if name == "one device" else jax.set_mesh(mesh()):
        return jax.jit(function(name, case.gradients, calls)).lower(*types(case, name)).compile()


def operands(case: Case, name: str) -> tuple:
    """Query, key, value and cotangent in the layout and the place that a call has them in."""
    wanted = types(case, name)
    places = jaxsoft.ring_order(case.length(), jax.device_count(), layout_of(name))

    def fill(order):
        keys = jax.random.split(jax.random.key(0), len(wanted))
        rows = [jax.random.normal(key, (case.length(), 1, 1)) for key in keys]
        columns = [jax.random.normal(key, t.shape[2:]) for key, t in zip(keys, wanted, strict=True)]
        waves = [jnp.sin(100 * (row[order] + 1) * (column + 2)) for row, column in zip(rows, columns, strict=True)]
        return tuple(1.4 * x[None].astype(jnp.bfloat16) for x in waves)

    return jax.jit(fill, out_shardings=tuple(t.sharding for t in wanted))(places)


def layout_of(name: str) -> str:
    """The layout in which a call has its tokens."""
    if name in METHODS:
        return "zigzag"
    return name if name in LAYOUTS else "contiguous"


def run(case: Case, building: dict[str, Future[Compiled]]) -> dict:
    """Checks, then times a case: what is written of it."""
    progress(f"compiling {case}")
    given = {layout_of(name): operands(case, name) for name in case.names}
    given["one device"] = operands(case, "one device")
    expected: list[Sequence[jax.Array]] = []  # what one device has found, which is the first to be called

    def prepare(name):
        program, layout = building[name].result(), layout_of(name)
        arguments = given["one device" if name == "one device" else layout]
        result, error = program(*arguments)[0], None
        if name == "one device":
            expected.append(result)
        elif expected:
            error = difference(result, expected[0], layout) / ALLOWED
        return (program, [arguments]), error

    def measure(calls):
        number = max(1, round(SAMPLE_SECONDS * RATE / (case.operations() * case.calls())))
        return timing.measure(calls, 0, REPEATS, number=number)

    found = compare(case, list(building), (PEER,), prepare, measure)
    found["seconds"] = {name: time / case.calls() for name, time in found["seconds"].items()}
    return case.record() | found


def difference(found: Sequence[jax.Array], expected: Sequence[jax.Array], layout: str) -> float:
    """The largest of the norms of the differences, each over that of the result."""
    places = jaxsoft.ring_order(found[0].shape[1], jax.device_count(), layout)

    @jax.jit
    def norms(x, y):
        x, y = (v.astype(jnp.float32) for v in (x, y))
        return jnp.linalg.norm(x - y) / jnp.linalg.norm(y)

    ordered = [jax.device_put(y[:, places], x.sharding) for x, y in zip(found, expected, strict=True)]
    return max(float(norms(x, y)) for x, y in zip(found, ordered, strict=True))


def longest(case: Case, name: str) -> dict | None:
    """How long a sequence may be, and how long it takes; None where none is so short."""
    stats = jax.devices()[0].memory_stats()
    tokens, memory, found = case.tokens, stats["bytes_limit"] if stats else 2**25, None
    while tokens <= MOST_TOKENS:
        longer = dataclasses.replace(case, tokens=tokens)
        progress(f"compiling {name}, {longer}")
        try:
            program = build(longer, name, 1)
        except Exception:  # XLA finds that there is not the memory
            break
        sizes = program.memory_analysis()
        needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
        if needed > SHARE_OF_MEMORY * memory:
            break
        found, tokens = (longer, program, needed), 2 * tokens
    if found is None:
        return None
    longer, program, needed = found
    progress(f"running {name}, {longer}")
    given = jax.block_until_ready(operands(longer, "ring" if name != PEER else PEER))
    start = time.perf_counter()
    jax.block_until_ready(program(*given))
    seconds = time.perf_counter() - start
    return longer.record() | {"limit": memory, "seconds": {name: seconds}, "memory": {name: needed}}


def cases(group: str, quick: bool) -> list[Case]:
    """The cases of a group."""
    if CPU:
        return [Case(8, 8, 32, gradients, (*METHODS, *LAYOUTS, PEER)) for gradients in (False, True)]
    if group == "speed":
        lengths = (8192, 16384) if quick else (8192, 16384, 65536)
        both = ((16, 16), (32, 8))
        return [Case(*heads, tokens, gradients) for heads in both for tokens in lengths for gradients in (False, True)]
    lengths = (1024, 8192) if quick else (1024, 2048, 4096, 8192)
    names = (*METHODS, *LAYOUTS)
    # The peer stores all scores, and takes long to compile.
    peers = {tokens: (PEER,) if tokens == 2048 else () for tokens in lengths}
    return [Case(32, 8, tokens, grad, (*names, *peers[tokens])) for tokens in lengths for grad in (False, True)]


def main() -> None:
    """Measures what is asked for."""
    groups = ("speed", "methods", "longest")
    args = parser_of_cases(__doc__, groups, having='"forward"').parse_args()
    if jax.device_count() < 2:
        sys.exit("needs two devices or more")
    record = begin(args)
    pool = ThreadPoolExecutor(16)
    for group in args.only or groups:
        print(f"\n{group}: a device's share in ms; what, ms, fraction of the share's speed", flush=True)
        if group == "longest":
            first = Case(8, 8, 64, True) if CPU else Case(64, 8, 1024, True)
            for name in ("ring", PEER):
                if found := longest(first, name):
                    print(line(f"{found['tokens']} tokens a device", found, ("ms", "MB")), flush=True)
                    record.add({"group": group} | found)
            continue
        wanted = [case for case in cases(group, args.quick) if args.having in str(case)]
        building = [
            {name: pool.submit(build, case, name, case.calls()) for name in ("one device", *case.names)}
            for case in wanted
        ]
        for case, programs in zip(wanted, building, strict=True):
            found = run(case, programs)
            print(line(case, found, ("ms", "fraction")), flush=True)
            record.add({"group": group} | found)


if __name__ == "__main__":
    main()
