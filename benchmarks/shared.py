"""What the benchmarks share: their arguments and records, and how the implementations of a case are compared."""

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Executor, Future

import jax
import plot
import timing
from jax.stages import Compiled, Lowered
from records import Record

# The packages of what is compared. cuDNN comes with JAX for CUDA 12 or 13.
COMPARED = ("jax", "jaxlib", "jaxsoft", "jax-triton", "optax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
COMPARED += ("dew-flash-attn-cu13", "flash-attn-4", "torch")  # FlashAttention-3 and -4


def git_commit() -> str | None:
    """The git commit of the benchmark, with "-dirty" if the working tree differs from it; None outside git."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("-dirty" if changes.strip() else "")


def header(commit: str | None) -> dict:
    """The circumstances, which hold for every record."""
    kind, cpu = jax.devices()[0].device_kind, jax.default_backend() == "cpu"
    versions = {}
    for package in COMPARED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "device": f"{kind} {platform.machine()}" if cpu else kind,
        "cores": os.cpu_count(),
        "versions": versions,
        "flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def parser_of_cases(
    doc: str | None,
    groups: Iterable[str],
    *,
    quick: str | None = "fewer cases",
    having: str | None = None,
    drawn: bool = False,
) -> argparse.ArgumentParser:
    """The arguments of a benchmark whose cases are in groups.

    Args:
      doc: what the benchmark says of itself.
      groups: their names.
      quick: what it does to be quick, if it can.
      having: what a case may have in it, as an example or several, in quotes, if cases can be chosen so.
      drawn: whether there is a plot.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--only", nargs="+", choices=groups, metavar="GROUP", help=f"of {', '.join(groups)}")
    if having:
        parser.add_argument("--having", default="", metavar="TEXT", help=f"only cases with this, as in {having}")
    parser.add_argument("--record", type=pathlib.Path, metavar="FILE", help="also write what is found there, as .jsonl")
    if drawn:
        parser.add_argument("--plot", type=_picture, metavar="FILE", help="also draw them there, as SVG, by matplotlib")
    parser.add_argument("--commit", default=git_commit(), metavar="HASH", help="what the file names")
    return parser


def _picture(path: str) -> pathlib.Path:
    """The path of a plot. What keeps it from being drawn is said before anything is measured."""
    if why_not := plot.why_not(pathlib.Path(path)):
        raise argparse.ArgumentTypeError(why_not)
    return pathlib.Path(path)


def begin(args: argparse.Namespace) -> Record:
    """The record of this run, in the file that the command line names, if it does. Prints the circumstances."""
    found = header(args.commit)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    print(f"{jax.device_count()} x {found['device']}, {found['cores']} CPU cores, {versions}", flush=True)
    return Record(found, path=args.record)


def lacks_memory(problem: Exception) -> bool:
    """Whether it is that memory lacks."""
    return isinstance(problem, MemoryError) or "RESOURCE_EXHAUSTED" in str(problem)


def reason(problem: Exception) -> str:
    """Why there is no time, in one line. What XLA says where memory lacks is long."""
    first = (str(problem).strip().splitlines() or [""])[0][:300]
    if isinstance(problem, MemoryError):
        return first
    return "out of memory" if lacks_memory(problem) else f"{type(problem).__name__}: {first}"


def progress(text: str) -> None:
    """One line on a terminal, which the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def compiling(pool: Executor, lower: Callable[[], Sequence[Lowered]]) -> Future[list[Compiled]]:
    """Traces here, as that is Python's work, and compiles on another thread. What fails is raised by the result."""
    try:
        lowered = lower()
    except Exception as error:  # an implementation that does not serve the call
        future: Future[list[Compiled]] = Future()
        future.set_exception(error)
        return future
    return pool.submit(lambda: [program.compile() for program in lowered])


def compare[C](
    case: object,
    names: Sequence[str],
    peers: Container[str],
    prepare: Callable[[str], tuple[C, float | None]],
    measure: Callable[[dict[str, C]], timing.Times],
) -> dict[str, dict]:
    """Checks the implementations of a case, then times them. A wrong result of jaxsoft's ends the process.

    Args:
      case: which one, in words.
      names: of the implementations.
      peers: those of them that are not jaxsoft's.
      prepare: of a name, makes the call, and its result's error in units of what is allowed, None where there is none
        to check. Raises where the implementation does not serve the case, or has not the memory.
      measure: takes the times.

    Returns:
      By implementation, "seconds", their "spread", "errors", and in "failed" why there is no time.
    """
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    calls: dict[str, C] = {}
    # Memory is used again: after a peer's check, what jaxsoft does not write could hold the peer's right result.
    for name in sorted(names, key=lambda name: name in peers):
        progress(f"checking {name}, {case}")
        try:
            calls[name], error = prepare(name)
        except Exception as problem:
            failed[name] = reason(problem)
            if name not in peers and not isinstance(problem, ValueError) and not lacks_memory(problem):
                raise  # a fault of jaxsoft's, which serves the case
            continue
        if error is not None:
            errors[name] = error
            if name not in peers and not error <= 1:  # NaN is an error too
                sys.exit(f"{name}, {case}: wrong, {error:.3g} times the allowed error")
    progress(f"timing {case}")
    times = measure({name: calls[name] for name in names if name in calls})
    progress("")
    failed |= {name: reason(time) for name, time in times.items() if isinstance(time, Exception)}
    samples = {name: taken for name, taken in times.items() if isinstance(taken, list)}
    seconds = {name: statistics.median(taken) for name, taken in samples.items()}
    spread = {name: round(timing.spread(taken), 4) for name, taken in samples.items()}
    return {"seconds": seconds, "spread": spread, "errors": errors, "failed": failed}
