"""This machine's speed of attention, against cuDNN's and XLA's in `jax.nn`, and FlashAttention-3 and -4.

    python benchmarks/attention.py [--quick] [--only GROUP ...] [--having TEXT] [--record FILE] [--plot FILE]
                                   [--commit HASH]

A line is one call of benchmarks/attention_cases.py, of as many queries as keys, forward or with the gradients by
query, key and value. Every result is first checked against float64 on one head, and a wrong one of jaxsoft's ends the
run: some rows of the output and of the query's gradient, and of short sequences the whole gradients by key and value.
The times are medians, and whatever is compared takes turns in each repeat, in an order drawn anew.
For each implementation

  TFLOP/s  operations of the products over the scores that count, in 10^12 a second (on a CPU, in 10^9): forward two
           products, 2 B N T S (H + D), and with gradients seven. Under a causal rule, a window, lengths or
           segments only the scores that count are counted.
  faster   how many times as fast as the fastest peer of the case, whose name ends the line
  plain    the rate of Pallas (on a CPU, of jaxsoft's own choice) as a fraction of that of the same call without the
           extra

  cudnn                a peer: jax.nn's implementation="cudnn"
  xla                  a peer: jax.nn's implementation="xla", which stores all scores
  FlashAttention-3     a peer, from JAX by the package dew-flash-attn-cu13, on Hopper
  FlashAttention-4     a peer, of PyTorch by the package flash-attn-4; with gradients also with deterministic=True, by
                       which they have equal bits
  jaxsoft              jaxsoft's own choice
  deterministic=False  the same without the promise of equal bits, which concerns the gradients
  ffi, pallas          by name

Which peers are not installed is said at the beginning, and a case has those that take it. A peer's result that is wrong
is noted as that, without a time, and so is a call that has not enough memory. The most important cases come first, and
the record is written after each, so that a run that is cut short keeps what it has.
"""

import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import flash_attention
import jax
import numpy as np
import plot
import timing
from attention_cases import CAP, CPU_GROUPS, GROUPS, PACKED, Case, operands, options, scores
from columns import line
from jax.stages import Compiled
from records import OF_ATTENTION as PEERS
from records import Record, peer, rate
from shared import begin, compare, compiling, parser_of_cases, progress

import jaxsoft

CPU = jax.default_backend() == "cpu"
BATCH = 12  # cases that are compiled together, on all cores, before any of them is timed
REPEATS = 7
SAMPLE_SECONDS = 0.03  # the calls that follow one another in a sample take about as long, at this rate
RATE = 2e10 if CPU else 4e14
UNIT = "GFLOP/s" if CPU else "TFLOP/s"
WHOLE = 2**22  # scores of a head, up to which all of its gradients are checked
# The norm of the error over that of the result, in units of which errors are given. f32 may be rounded to 11 bits.
ALLOWED = {"bfloat16": 1.5e-2, "float16": 4e-3, "float32": 4e-3}


def implementations(case: Case) -> list[str]:
    """What is compared."""
    of_jax = [] if case.extra in ("cap", "sinks") else ["cudnn", "xla"]  # which jax.nn has not
    if CPU:
        return [*of_jax[1:], "jaxsoft"]
    own = ["jaxsoft", "deterministic=False", "ffi", "pallas"]
    names = [*of_jax, *flash_attention.peers(case), *own]
    if not case.gradients or case.extra:  # where it makes no difference
        names = [name for name in names if name != "deterministic=False"]
    # What stores all scores takes long where these are many, so one size of heads has to do.
    if case.group in ("extras", "training") or (case.length > 2048 and case.size != 128):
        names = [name for name in names if name != "xla"]
    if case.dtype == "float32":
        names = [name for name in names if name in ("xla", "jaxsoft", "deterministic=False")]
    return names


def function(case: Case, name: str) -> Callable:
    """The call by an implementation, as a function of the arrays."""
    static = options(case)

    def own(query, key, value, extra):
        chosen: dict = {"implementation": name} if name in ("ffi", "pallas") else {}
        if name == "deterministic=False":
            chosen["deterministic"] = False
        extra = dict(extra)
        if "segment_ids" in extra:
            extra["query_segment_ids"] = extra["key_value_segment_ids"] = extra.pop("segment_ids")
        return jaxsoft.dot_product_attention(query, key, value, **extra, **static, **chosen)

    def of_jax(query, key, value, extra):
        extra = dict(extra)
        if case.extra in PACKED:
            ids = extra.pop("segment_ids")
            extra["mask"] = (ids[:, :, None] == ids[:, None])[:, None]
        if "bias" in extra:
            extra["bias"] = extra["bias"].astype(query.dtype)
        return jax.nn.dot_product_attention(query, key, value, **extra, **static, implementation=name)

    attend = flash_attention.in_jax(case) if name == flash_attention.IN_JAX else of_jax if name in PEERS else own

    def run(arrays):
        extra = dict(arrays)
        query, key, value, cotangent = (extra.pop(n) for n in ("query", "key", "value", "cotangent"))
        if not case.gradients:
            return (attend(query, key, value, extra),)
        if case.extra == "bias gradient":
            bias = extra.pop("bias")
            y, pullback = jax.vjp(lambda q, k, v, b: attend(q, k, v, extra | {"bias": b}), query, key, value, bias)
        else:
            y, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, extra), query, key, value)
        return y, *pullback(cotangent)

    return run


def check(case: Case, arrays: dict[str, jax.Array], result: Sequence[jax.Array]) -> float:
    """The largest error of one head's results, in units of what is allowed."""
    row, head = case.batch - 1, case.heads - 1
    key_head = head // (case.heads // case.key_heads)
    whole = case.gradients and case.heads == case.key_heads and case.length**2 <= WHOLE
    some = np.unique([0, case.length // 3, case.length // 2 + 1, case.length - 1])
    queries = np.arange(case.length) if whole else some
    z = scores(case, arrays, row, head, queries)

    def of(x: jax.Array, number: int, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        return np.asarray(x[row, rows, number]).astype(np.float64)

    top = z.max(axis=1, keepdims=True)
    if case.extra == "sinks":
        sink = float(arrays["sinks"][head])
        top = np.maximum(top, sink)
    p = np.exp(z - top)
    p /= p.sum(axis=1, keepdims=True) + (np.exp(sink - top) if case.extra == "sinks" else 0)
    key, value = of(arrays["key"], key_head), of(arrays["value"], key_head)
    pairs = [(of(result[0], head, queries), p @ value)]
    if case.gradients:
        g = of(arrays["cotangent"], head, queries)
        of_p = g @ value.T
        dz = p * (of_p - (p * of_p).sum(axis=1, keepdims=True)) / np.sqrt(case.size)
        if case.extra == "cap":
            dz *= 1 - (np.where(np.isfinite(z), z, 0) / CAP) ** 2
        pairs.append((of(result[1], head, queries), dz @ key))
        if whole:
            pairs.append((of(result[2], key_head), dz.T @ of(arrays["query"], head)))
            pairs.append((of(result[3], key_head), p.T @ g))
    errors = [np.linalg.norm(a - b) / (ALLOWED[case.dtype] * np.linalg.norm(b)) for a, b in pairs]
    return float(np.max(errors))  # NaN if one is


type Programs = dict[tuple[Case, str], Future[list[Compiled]]]


def compiled(cases: Sequence[Case]) -> Programs:
    """The programs of some cases, which are compiled on all cores at once."""
    programs: Programs = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in cases:
            progress(f"compiling {case}")
            types = jax.eval_shape(lambda case=case: operands(case))
            for name in implementations(case):
                if name not in flash_attention.BY_TORCH:  # which compile theirs when they are first called
                    traced = jax.jit(function(case, name))
                    programs[case, name] = compiling(pool, lambda traced=traced, types=types: [traced.lower(types)])
    return programs


def right(name: str, error: float) -> float:
    """The error of a result. A peer's that is too large raises: the time of what is wrong says nothing."""
    if name in PEERS and not error <= 1:  # NaN is too large
        raise ArithmeticError(f"wrong, {error:.3g} times the allowed error")
    return error


def run(case: Case, programs: Programs) -> dict:
    """Checks, then times a case: what is written of it."""
    arrays = operands(case)
    memory: dict[str, int] = {}

    def prepare(name):
        if name in flash_attention.BY_TORCH:
            call, tensors = flash_attention.in_torch(case, name), flash_attention.tensors(case, arrays)
            return (call, [(tensors,)]), right(name, check(case, arrays, call(tensors).arrays(case)))
        (program,) = programs[case, name].result()
        memory[name] = program.memory_analysis().temp_size_in_bytes
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        if limit and memory[name] > limit:  # which XLA would look for in vain
            raise MemoryError(f"out of memory: it takes {memory[name] / 2**30:.0f} GiB beside its operands")
        return (program, [(arrays,)]), right(name, check(case, arrays, program(arrays)))

    def measure(calls):
        number = max(1 if CPU else 2, min(20, round(SAMPLE_SECONDS * RATE / case.flops())))
        return timing.measure(calls, sum(x.nbytes for x in arrays.values()), REPEATS, number)

    found = compare(case, implementations(case), PEERS, prepare, measure)
    return {
        "group": case.group,
        "what": case.what,
        "direction": case.direction,
        "dtype": case.dtype,
        "shape": [case.batch, case.length, case.heads, case.size],
        "key_heads": case.key_heads,
        **({"value_size": case.values} if case.values else {}),
        "causal": case.causal,
        "scores": case.counted(),
        "memory": memory,
    } | found


def measure(cases: Sequence[Case], record: Record) -> None:
    """Prints the table of some cases as it comes."""
    plain: dict[tuple, float | None] = {}  # the rates without extras
    own = "jaxsoft" if CPU else "pallas"
    for batch in itertools.batched(cases, BATCH):
        programs = compiled(batch)
        for case in batch:
            found = run(case, programs)
            rule, of_own = (case.causal, case.direction), rate(found, own)
            if not case.what:
                plain[rule] = of_own
            base = plain.get(rule) if case.what else None
            beside = f" | {own} / plain {of_own / base:.2f}" if of_own and base else ""
            beside += f" | fastest peer: {peer(found)}" if peer(found) else ""
            print(line(case, found, (UNIT, "faster"), beside), flush=True)
            record.add(found)


def main() -> None:
    """Measures what is asked for."""
    groups, examples = CPU_GROUPS if CPU else GROUPS, '"causal with gradients", "sinks" or "x128 "'
    parser = parser_of_cases(__doc__, groups, quick="fewer and, on a CPU, smaller cases", having=examples, drawn=True)
    args = parser.parse_args()
    record = begin(args)
    for name, reason in ({} if CPU else flash_attention.missing()).items():
        print(f"{name} is not compared: {reason}", flush=True)
    for group in args.only or groups:
        print(f"\n{group}: implementation, {UNIT}, times as fast as the best peer; part of the plain rate", flush=True)
        wanted = [case for case in groups[group](args.quick) if args.having in str(case)]
        if wanted and not CPU and not record.cases:
            run(wanted[0], compiled(wanted[:1]))  # in vain: on a GPU, the first case was off by 6 %
        measure(wanted, record)
    if args.plot and record.cases:
        plot.draw(record, args.plot)


if __name__ == "__main__":
    main()
