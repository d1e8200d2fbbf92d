"""This machine's speed of jaxsoft's losses and top-k, against optax, `jax.lax.top_k` and the plain composition.

    python benchmarks/losses.py [--only GROUP ...] [--json FILE] [--commit HASH]

A line is one call. Every result is first checked on a few rows against float64, and a wrong one of jaxsoft's ends the
run. The times are medians, and whatever is compared takes turns in each repeat.

  floor   the time that a copy takes which moves as many bytes as the call must (it reads half of them and writes half)
and for each implementation ("jaxsoft" is its own choice of a kernel)
  ms      milliseconds a call
  floor   the fraction of the floor's speed: the floor over this time
  faster  how many times faster than the first one named

  cross_entropy  integer labels: forward, which must read the logits once, and the loss with its gradient, which must
                 read them twice and write once
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import timing
from speed import git_commit, header

import jaxsoft

CPU = jax.default_backend() == "cpu"


@dataclasses.dataclass(frozen=True)
class Call:
    """One line of the table.

    Attributes:
      what: in words.
      arguments: makes a new list of arguments.
      functions: what is compared, by name, the peer first.
      bytes: that must move.
      check: of arguments and a result: the largest error, in units of what is allowed.
    """

    what: str
    arguments: Callable[[], tuple]
    functions: dict[str, Callable]
    bytes: int
    check: Callable[[tuple, object], float]


def logits(shape: tuple[int, int], dtype: str) -> jax.Array:
    """Random numbers of standard deviation 4."""
    return jax.jit(lambda numbers: programs.fill(numbers, shape))(programs.random(0, dtype))


def available(*names: str) -> list[str]:
    """Those implementations that can be used here."""
    reasons = jaxsoft.implementations()
    return [name for name in names if reasons[name] is None]


def cross_entropy() -> Iterator[Call]:
    """Integer labels."""
    shapes = [(8192, 128256), (4096, 262144), (16384, 50257), (8192, 32000)]
    if CPU:
        shapes = [(128, 128256), (256, 50257), (512, 32000), (50_000, 100), (500_000, 10)]
    for shape in shapes[2:] if CPU else shapes:
        labels = jax.random.randint(jax.random.key(1), shape[:1], 0, shape[1])
        for dtype in ("bfloat16", "float32"):
            losses = {"optax": optax.softmax_cross_entropy_with_integer_labels}
            losses["jaxsoft"] = jaxsoft.softmax_cross_entropy_with_integer_labels
            for name in available("pallas", "xla"):
                losses[name] = lambda x, y, name=name: jaxsoft.softmax_cross_entropy_with_integer_labels(
                    x, y, implementation=name
                )
            size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
            arguments = lambda shape=shape, dtype=dtype, labels=labels: (logits(shape, dtype), labels)  # noqa: E731
            what = f"cross_entropy {'x'.join(map(str, shape))} {dtype}"
            yield Call(f"{what} forward", arguments, losses, size, _check_losses)
            gradients = {
                name: jax.value_and_grad(lambda x, y, f=f: f(x, y).astype(jnp.float32).mean())
                for name, f in losses.items()
            }
            yield Call(f"{what} with gradient", arguments, gradients, 3 * size, _check_gradients)


def _some(x: jax.Array, labels: jax.Array) -> tuple[np.ndarray, ...]:
    """A few rows, the gradients of their losses, and the losses, in float64."""
    rows = np.unique([0, len(labels) // 3, len(labels) - 1])
    z, y = np.asarray(x[rows]).astype(np.float64), np.asarray(labels)[rows]
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    p, every = e / e.sum(axis=-1, keepdims=True), np.arange(len(rows))
    loss = -np.log(p[every, y])
    p[every, y] -= 1
    return rows, p, loss


def _check_losses(arguments: tuple, result) -> float:
    rows, _, loss = _some(*arguments)
    return float(np.max(np.abs(np.asarray(result)[rows] - loss) / (2e-6 * (4 + loss))))


def _check_gradients(arguments: tuple, result) -> float:
    rows, dx, _ = _some(*arguments)
    actual = np.asarray(result[1][rows]).astype(np.float64) * len(arguments[1])
    unit = 2.0**-8 if arguments[0].dtype == jnp.bfloat16 else 1e-5
    return float(np.max(np.abs(actual - dx) / (unit * np.abs(dx) + 1e-30)))


GROUPS = {"cross_entropy": cross_entropy}


def run(call: Call, repeats: int) -> dict:
    """Checks, then times. A wrong result of jaxsoft's ends the process."""
    first = call.arguments()
    compiled, errors = {}, {}
    for name, function in call.functions.items():
        try:
            compiled[name] = jax.jit(function).lower(*first).compile()
        except ValueError:  # a named implementation that does not serve the call
            continue
        errors[name] = call.check(first, compiled[name](*first))
        if name != next(iter(call.functions)) and not errors[name] <= 1:
            sys.exit(f"{name}, {call.what}: wrong, {errors[name]:.3g} times the allowed error")
    size = sum(v.nbytes for v in jax.tree.leaves(first))
    every = [first, *(call.arguments() for _ in range(1, timing.buffers(size, call.bytes, repeats)))]
    calls: dict[str, timing.Call] = {name: (function, every) for name, function in compiled.items()}
    shape = (call.bytes // 8,)
    (copy,) = (program.compile() for program in programs.lower_copy(shape))
    sources = [jnp.full(shape, k, jnp.float32) for k in range(timing.buffers(call.bytes // 2, call.bytes, repeats))]
    calls["copy"] = copy, [(source,) for source in sources]
    times = timing.measure(calls, call.bytes, repeats)
    copied = times.pop("copy")
    return {"what": call.what, "bytes": call.bytes, "floor": copied, "seconds": times, "errors": errors}


def line(found: dict) -> str:
    """One line of the table."""
    peer = next(iter(found["seconds"].values()))
    text = f"{found['what']:48s} {found['floor'] * 1e3:8.3f}"
    for name, seconds in found["seconds"].items():
        if isinstance(seconds, Exception):
            text += f" | {name:8s} {type(seconds).__name__}"
        else:
            text += f" | {name:8s} {seconds * 1e3:8.3f} {found['floor'] / seconds:5.2f} {peer / seconds:6.2f}"
    return text


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="these groups (default: all)")
    parser.add_argument("--json", type=pathlib.Path, help="write the results here")
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    args = parser.parse_args()
    result: dict = {"header": header(args.commit or git_commit()), "records": []}
    print(result["header"]["device"], result["header"]["versions"])
    for group in args.only or GROUPS:
        print(f"\n{'':48s} {'floor':>8s} | implementation, ms, fraction of the floor's speed, times faster", flush=True)
        for call in GROUPS[group]():
            found = run(call, 5 if CPU else 7)
            print(line(found), flush=True)
            failed = {name: str(v) for name, v in found["seconds"].items() if isinstance(v, Exception)}
            seconds = {name: v for name, v in found["seconds"].items() if name not in failed}
            result["records"].append({**found, "group": group, "seconds": seconds, "failed": failed})
            if args.json:
                args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
