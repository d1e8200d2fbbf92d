"""This machine's speed of `jaxsoft.softmax` against `jax.nn.softmax`, by row length, and against a copy.

    python benchmarks/speed.py [--quick] [--json FILE]

A line is one row length n, in a matrix of always the same size. "forward" is softmax; "backward" is its pullback alone,
from what the forward pass kept and a cotangent to the gradient. Every result is first checked on a few rows against
float64, and a wrong one of jaxsoft's ends the run. The times are medians. The implementations take turns in each
repeat, so that what slows the machine down for a while slows all of them.

For each implementation ("jaxsoft" is its own choice; a GPU's kernels are also timed by name, and what one of them lacks
is served by the choice):
  ms      milliseconds a call
  copy    the fraction of a copy's speed, where forward has to move as much as a copy does (read a number, write one),
          and backward 1.5 times as much (read two, write one)
  faster  how many times faster than jax.nn
  error   the largest error, in units of what is allowed (jax.nn's, which may exceed 1, is only reported)

On a GPU the copy is the device's own memcpy. On a CPU it is a compiled -x, which moves the same bytes but cannot be
optimized away. There every large result gets fresh memory, which the operating system maps and clears page by page.
That costs more than the copying itself, and jaxsoft's kernels can be faster than the copy, for on Linux they ask for
large pages. "warm" is a copy by one core into memory that is already in use. With --quick, results are small enough for
the allocator to use the same memory again.
"""

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoft

CPU_LENGTHS = (128, 1024, 32768, 131072, 2**20)
GPU_LENGTHS = (128, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 2**20)
# Copies of the input take turns, as many as hold this together: more than the caches, which would flatter small ones.
ROTATION_BYTES = 2**27


def softmax_and_allowance(x, dtype):
    """Softmax of rows in float64, and the error allowed in a result of the dtype."""
    x = x.astype(np.float64)
    shifted = x - np.max(x, axis=-1, keepdims=True)
    y = np.exp(shifted) / np.sum(np.exp(shifted), axis=-1, keepdims=True)
    if dtype == np.float32:  # the rounding of exp's argument, which grows with it, is exp's relative error
        return y, y * (4 - shifted) * 2.0**-23
    return y, 2.0 ** (np.floor(np.log2(np.maximum(y, 1e-300))) - 7)  # one unit in the last place of a bfloat16


def forward_error(x, y):
    """The largest error of y = softmax(x), in units of what is allowed."""
    reference, allowed = softmax_and_allowance(x, y.dtype)
    relevant = reference > 1e-30  # what is much smaller may be flushed to 0
    return float(np.max((np.abs(y.astype(np.float64) - reference) / allowed)[relevant]))


def backward_error(x, g, dx):
    """The largest error of dx = y * (g - sum(y * g)), y = softmax(x), in units of what is allowed."""
    y, allowed = softmax_and_allowance(x, dx.dtype)
    g = g.astype(np.float64)
    reference = y * (g - np.sum(y * g, axis=-1, keepdims=True))
    # What the errors allowed in y make of dx: once through the factor y, and once through the sum.
    magnitude = np.abs(g) + np.sum(y * np.abs(g), axis=-1, keepdims=True)
    allowed = allowed * magnitude + y * np.sum(allowed * np.abs(g), axis=-1, keepdims=True)
    return float(np.max((np.abs(dx.astype(np.float64) - reference) / allowed)[y > 1e-30]))


def candidates():
    """The functions to compare, by name."""
    found = {"jax.nn": jax.nn.softmax, "jaxsoft": jaxsoft.softmax}
    if jax.default_backend() == "gpu":
        for name, why_not in jaxsoft.implementations().items():
            if why_not is None and name not in ("xla", "reference"):
                found[f"jaxsoft {name}"] = lambda x, name=name: jaxsoft.softmax(x, implementation=name)
    return found


def measure(calls, repeats, number):
    """Median seconds a call. calls: name -> (function, the lists of arguments that take turns)."""
    turns = {name: itertools.cycle(arguments) for name, (_, arguments) in calls.items()}
    samples = {name: [] for name in calls}
    for repeat in range(-1, repeats):  # the first round compiles and warms up
        for name, (function, _) in calls.items():
            # What another function's memory takes to be freed, some of it by threads of XLA's, is not this one's time.
            result = None
            time.sleep(0.02)
            start = time.perf_counter()
            for arguments in itertools.islice(turns[name], number):
                result = function(*arguments)
            jax.block_until_ready(result)  # calls run in order: the last one ends last
            if repeat >= 0:
                samples[name].append((time.perf_counter() - start) / number)
    return {name: statistics.median(times) for name, times in samples.items()}


def benchmark(n, total, dtype, repeats, number):
    """Checks, then times. Returns, for "forward" and "backward", the seconds and the errors by name."""
    rows, buffers = total // n, max(1, ROTATION_BYTES // (total * dtype.itemsize))
    x, g = (scale * jax.random.normal(jax.random.key(seed), (rows, n), dtype) for seed, scale in ((0, 4), (1, 1)))
    xs = [jnp.copy(x) for _ in range(buffers)]
    some = np.unique([0, rows // 3, rows - 1])
    x_rows, g_rows = np.asarray(x[some]), np.asarray(g[some])

    cpu = jax.default_backend() == "cpu"
    copies = {"copy": (jax.jit(jnp.negative if cpu else jnp.copy), [(x,) for x in xs])}
    if cpu:
        copies["warm"] = np.copyto, [(np.zeros(x.shape, x.dtype), np.asarray(x))]
    calls, errors = {"forward": copies, "backward": dict(copies)}, {"forward": {}, "backward": {}}
    for name, softmax in candidates().items():
        forward = jax.jit(softmax)
        # A pullback is a pytree: it passes out of one compiled function and into another, with all that it keeps.
        keep = jax.jit(lambda x, softmax=softmax: jax.vjp(softmax, x)[1])
        backward = jax.jit(lambda pullback, g: pullback(g)[0])
        try:
            errors["forward"][name] = forward_error(x_rows, np.asarray(forward(x)[some]))
            errors["backward"][name] = backward_error(x_rows, g_rows, np.asarray(backward(keep(x), g)[some]))
        except ValueError as error:
            if name in ("jax.nn", "jaxsoft"):
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)  # a kernel that cannot serve the call says why
            continue
        for direction, found in errors.items():
            if name != "jax.nn" and not found[name] <= 1:  # NaN is an error too
                sys.exit(f"{name}, {direction}, {dtype}, n={n}: {found[name]:.3g} times the allowed error")
        calls["forward"][name] = forward, [(x,) for x in xs]
        calls["backward"][name] = backward, [(keep(x), g) for x in xs]

    seconds = {direction: measure(those, repeats, number) for direction, those in calls.items()}
    return {direction: (seconds[direction], errors[direction]) for direction in calls}


def table_line(direction, dtype, n, rows, seconds, errors, names):
    """One line of the table."""
    least = seconds["copy"] * (1 if direction == "forward" else 1.5)
    line = f"{direction:8s} {dtype.name:8s} {n:7d} {rows:7d} {seconds['copy'] * 1e3:8.3f}"
    line += f" {seconds['warm'] * 1e3:8.3f}" if "warm" in seconds else f" {'':8s}"
    for name in names:
        if name in errors:
            fraction, faster = least / seconds[name], seconds["jax.nn"] / seconds[name]
            line += f" | {seconds[name] * 1e3:8.3f} {fraction:5.2f} {faster:6.2f} {errors[name]:6.2f}"
        else:
            line += f" | {'-':>8s} {'-':>5s} {'-':>6s} {'-':>6s}"
    return line


def git_commit():
    """The git commit of the benchmark, with "-dirty" if the working tree differs from it; None outside git."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("-dirty" if changes.strip() else "")


def main():
    """Prints the table, and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller matrix and fewer repeats")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the measurements there")
    parser.add_argument("--commit", default=git_commit(), help="what the records name, if not git's answer")
    args = parser.parse_args()

    gpu = jax.default_backend() == "gpu"
    total = 2**22 if args.quick else 2**28 if gpu else 2**25
    repeats = 11 if args.quick else 15
    number = 20 if gpu else 1  # calls a sample: launching one takes long, but not while another runs
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jaxsoft")}
    context = {
        "device": f"{jax.devices()[0].device_kind} {platform.machine()}" if not gpu else jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": versions,
        "commit": args.commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(f"{context['device']}, {context['cores']} CPU cores, " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    print(f"softmax of {total} elements, median of {repeats} repeats of {number} calls")
    names = list(candidates())
    print("\n" + " " * 51 + "".join(f" | {name:^28s}" for name in names))
    print(f"{'':8s} {'dtype':8s} {'n':>7s} {'rows':>7s} {'copy ms':>8s} {'' if gpu else 'warm ms':>8s}", end="")
    print(f" | {'ms':>8s} {'copy':>5s} {'faster':>6s} {'error':>6s}" * len(names), flush=True)

    records = []
    for dtype, n in itertools.product(("float32", "bfloat16"), GPU_LENGTHS if gpu else CPU_LENGTHS):
        if sys.stderr.isatty():
            print(f"{dtype}, n = {n} ...", end="\r", file=sys.stderr, flush=True)
        dtype = jnp.dtype(dtype)
        for direction, (seconds, errors) in benchmark(n, total, dtype, repeats, number).items():
            print(table_line(direction, dtype, n, total // n, seconds, errors, names), flush=True)
            shape = {"op": f"softmax {direction}", "dtype": dtype.name, "n": n, "rows": total // n}
            for name, value in seconds.items():
                result = {"implementation": name, "milliseconds": value * 1e3, "error": errors.get(name)}
                records.append(shape | result | context)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
