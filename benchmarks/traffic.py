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

    titles = f"{which:56s} {'counted MB':>11s} {'read':>8s} {'written':>8s}"
    print(f"{titles} {'measured / counted':>19s} {'us':>9s} kernels")
    found: dict[str, dict] = {}
    for case, launched in zip(listed, kernels, strict=True):
        read, written, nanoseconds = (sum(kernel[metric] for kernel in launched) for metric in METRICS)
        size = case.bytes() if isinstance(case, decode_cases.Case) else case.bytes
        line = f"{f'{case}, {implementation(case)}':56s} {size / 1e6:11.1f} {read / 1e6:8.1f} {written / 1e6:8.1f}"
        print(f"{line} {(read + written) / size:19.3f} {nanoseconds / 1e3:9.1f} {len(launched)}")
        names, own = [kernel["name"] for kernel in launched], implementation(case)
        values = {"seconds": nanoseconds / 1e9, "read": read, "written": written, "kernels": names}
        of_case = found.setdefault(str(record(case)), record(case) | {field: {} for field in values})
        for field, value in values.items():
            of_case[field][own] = value
    return list(found.values())


def implementation(case: AnyCase) -> str:
    """The one that is called."""
    return "jaxsoft" if isinstance(case, decode_cases.Case) else case.implementations[0]


def record(case: AnyCase) -> dict:
    """What is written of a case, beside what is counted."""
    if isinstance(case, decode_cases.Case):
        return decode_cases.record(case)
    fields = {"op": case.op, "direction": case.direction, "dtype": case.dtype, "shape": case.shape}
    return {"group": "traffic"} | fields


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
            if case.direction == "backward":
                arguments = functions[0](*arguments), fill(programs.random(1, case.dtype))
        jax.block_until_ready((arguments, mark(operand)))
        jax.block_until_ready(functions[-1](*arguments))
        jax.block_until_ready(mark(operand))
        del arguments  # before the next case's are made


if __name__ == "__main__":
    if jax.default_backend() != "gpu":
        sys.exit("--traffic needs a GPU")
    {"compile": compile_all, "launch": launch}[sys.argv[2]](CASES[sys.argv[1]]())
