"""The bytes that the kernels read from a GPU's memory and write to it, counted by the GPU, beside what they must move.

`report` runs this file twice: first to compile every case of CASES[which] into a folder, which takes long under Nsight
Compute, and then under Nsight Compute, to call every case once. A launch of tanh before each call and one after it mark
the kernels of that case, as Nsight Compute lists kernels in the order of their launches. The kernels between two cases
make the input.

Each kernel begins with an empty cache, and what it leaves in it at its end, up to the size of the cache, is not counted
as written.
"""

import concurrent.futures
import csv
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

import decode_cases
import jax
import jax.numpy as jnp
import programs
import row_cases

type AnyCase = row_cases.Case | decode_cases.Case

CASES = {"softmax": row_cases.traffic, "decode": decode_cases.traffic}
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")


def report(which: str) -> list[dict]:
    """Prints counted and measured bytes by case, of `which` of CASES, and returns them."""
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("--traffic needs Nsight Compute: there is no ncu on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "ncu.csv")
        profile = [ncu, "--clock-control", "none", "--metrics", ",".join(METRICS), "--csv", "--page", "raw"]
        profile += ["--print-units", "base", "--kernel-name-base", "demangled", "--log-file", str(log)]
        profile += ["--target-processes", "application-only"]  # not the assemblers that it starts
        cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        call, environment = [sys.executable, __file__, which], os.environ | cache
        subprocess.run([*call, "compile"], env=environment, check=True)
        status = subprocess.run([*profile, *call, "launch"], env=environment).returncode
        text = log.read_text() if log.exists() else ""
    listed = [*CASES[which]()]
    kernels = by_case(text)
    if len(kernels) != len(listed):
        last = "\n".join(text.splitlines()[-20:])
        sys.exit(f"ncu ended with status {status} and told {len(kernels)} of {len(listed)} cases apart:\n{last}")

    return _decode(listed, kernels) if which == "decode" else _softmax(listed, kernels)


def _softmax(listed: list[row_cases.Case], kernels: list[list[dict]]) -> list[dict]:
    """Of softmax: what is read and written, beside what must be."""
    titles = f"{'softmax':8s} {'by':8s} {'dtype':8s} {'n':>8s} {'rows':>8s} {'counted MB':>11s}"
    print(titles + f" {'read':>8s} {'written':>8s} {'measured / counted':>19s} {'us':>9s} kernels")
    found = []
    for case, launched in zip(listed, kernels, strict=True):
        read, written, nanoseconds = (sum(kernel[metric] for kernel in launched) for metric in METRICS)
        ratio = (read + written) / case.bytes
        (name,) = case.implementations
        line = f"{case.direction:8s} {name:8s} {case.dtype:8s} {case.n:8d} {case.rows:8d} {case.bytes / 1e6:11.1f}"
        line += f" {read / 1e6:8.1f} {written / 1e6:8.1f} {ratio:19.3f} {nanoseconds / 1e3:9.1f} {len(launched)}"
        print(line)
        found.append(
            {
                "direction": case.direction,
                "implementation": name,
                "dtype": case.dtype,
                "n": case.n,
                "rows": case.rows,
                "bytes": case.bytes,
                "read": read,
                "written": written,
                "microseconds": nanoseconds / 1e3,
                "kernels": [kernel["name"] for kernel in launched],
            }
        )
    return found


def _decode(listed: list[decode_cases.Case], kernels: list[list[dict]]) -> list[dict]:
    """Of decoding: what is read, beside the keys and values that count."""
    print(f"{'decode':56s} {'keys and values, MB':>20s} {'read':>8s} {'written':>8s} {'read / them':>12s} {'us':>9s}")
    found = []
    for case, launched in zip(listed, kernels, strict=True):
        read, written, nanoseconds = (sum(kernel[metric] for kernel in launched) for metric in METRICS)
        size = case.bytes()
        line = f"{case!s:56s} {size / 1e6:20.1f} {read / 1e6:8.1f} {written / 1e6:8.1f} {read / size:12.3f}"
        print(f"{line} {nanoseconds / 1e3:9.1f}")
        found.append(
            decode_cases.record(case)
            | {
                "read": read,
                "written": written,
                "microseconds": nanoseconds / 1e3,
                "kernels": [kernel["name"] for kernel in launched],
            }
        )
    return found


def by_case(text: str) -> list[list[dict]]:
    """The kernels of each case, from ncu's table: a line of names, a line of units, and a line a kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = csv.DictReader(lines)
    groups: list[list[dict]] = [[]]
    for number, row in enumerate(table):
        if number == 0:  # the units
            continue
        if "tanh" in row["Kernel Name"]:  # a mark
            groups.append([])
        else:
            values = {metric: float(row[metric].replace(",", "")) for metric in METRICS}
            groups[-1].append({"name": row["Kernel Name"]} | values)
    return groups[1:-1:2]  # between the first mark and the second, the third and the fourth ...


def lowered(case: AnyCase) -> list[jax.stages.Lowered]:
    """The program that makes its input, and its calls."""
    if isinstance(case, decode_cases.Case):
        types = jax.eval_shape(lambda: decode_cases.operands(case))
        make = jax.jit(lambda: decode_cases.operands(case)).lower()
        return [make, jax.jit(decode_cases.chain(case, "jaxsoft", 1)).lower(types)]
    return [*programs.lower_fill(case.dtype, case.shape), *programs.lower_calls(case, *case.implementations)]


def compile_all(listed: Iterable[AnyCase]) -> None:
    """Compiles every case, into JAX's persistent cache."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = itertools.chain.from_iterable(map(lowered, listed))
        list(pool.map(lambda program: program.compile(), programs))


def launch(listed: Iterable[AnyCase]) -> None:
    """Calls every case once, between two marks."""
    mark, operand = jax.jit(jnp.tanh), jnp.ones(1024)
    for case in listed:
        fill, *functions = [program.compile() for program in lowered(case)]
        if isinstance(case, decode_cases.Case):
            arguments = (fill(),)
        else:
            arguments = (fill(programs.random(0, case.dtype)), {})
        if not isinstance(case, decode_cases.Case) and case.direction == "backward":
            arguments = functions[0](*arguments), fill(programs.random(1, case.dtype))
        jax.block_until_ready((arguments, mark(operand)))
        jax.block_until_ready(functions[-1](*arguments))
        jax.block_until_ready(mark(operand))
        del arguments  # before the next case's are made


if __name__ == "__main__":
    if jax.default_backend() != "gpu":
        sys.exit("--traffic needs a GPU")
    {"compile": compile_all, "launch": launch}[sys.argv[2]](CASES[sys.argv[1]]())
