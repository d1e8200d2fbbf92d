"""One case, from its input to its times: every result is checked before anything is timed."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator

import jax
import numpy as np
import programs
import timing
from check import Reference, rows_of
from programs import Programs
from row_cases import Case

numbers = functools.cache(programs.random)


@dataclasses.dataclass
class Measured:
    """What came of a case."""

    copy: float = float("nan")  # seconds of a copy that moves as many bytes
    warm: float | None = None  # likewise of one into memory in use, on a CPU
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by implementation
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # likewise
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # why an implementation has no time


def run(case: Case, compiled: Programs, repeats: int) -> Measured:
    """Checks, then times. A wrong result of jaxsoft's ends the process."""
    measured = Measured()
    with _noting(measured, *case.implementations, "copy"):  # no memory for the input, say
        measure = _chain if case.chain else _backward if case.direction == "backward" else _forward
        times = measure(case, compiled, repeats, measured)
        for name, value in times.items():
            with _noting(measured, name):
                if isinstance(value, Exception):
                    raise value
                if name in ("copy", "warm"):
                    setattr(measured, name, value)
                else:
                    measured.seconds[name] = value
    return measured


@contextlib.contextmanager
def _noting(measured: Measured, *names: str) -> Iterator[None]:
    """Notes an error that is raised here as the reason why these implementations have no time."""
    try:
        yield
    except Exception as error:  # jaxsoft has not got this case, or there is not the memory
        first = (str(error).strip().splitlines() or [""])[0]
        measured.failed |= dict.fromkeys(names, f"{type(error).__name__}: {first[:300]}")


# Each of these checks jaxsoft first. Memory is used again, so after another implementation's check an element that
# jaxsoft does not write could hold that one's right result.


def _forward(case: Case, compiled: Programs, repeats: int, measured: Measured) -> timing.Times:
    x, extra = _array(case, compiled, 0), programs.operands(case)
    reference = Reference(case, _rows(case, compiled, x), extra, None)
    xs = [x, *(_array(case, compiled, 0) for _ in range(1, timing.buffers(x.nbytes, case.bytes, repeats)))]
    calls = {}
    for name in case.implementations:
        with _noting(measured, name):
            (forward,) = compiled.get(programs.lower_calls, case, name)
            _check(case, name, reference, _rows(case, compiled, forward(x, extra)), measured)
            calls[name] = forward, [(x, extra) for x in xs]
    return _times(calls, case, compiled, repeats)


def _backward(case: Case, compiled: Programs, repeats: int, measured: Measured) -> timing.Times:
    x, g, extra = _array(case, compiled, 0), _array(case, compiled, 1), programs.operands(case)
    reference = Reference(case, _rows(case, compiled, x), extra, _rows(case, compiled, g))
    calls = {}
    for name in case.implementations:
        with _noting(measured, name):
            keep, backward = compiled.get(programs.lower_calls, case, name)
            pullbacks = [keep(x, extra)]
            _check(case, name, reference, _rows(case, compiled, backward(pullbacks[0], g)), measured)
            for _ in range(1, timing.buffers(x.nbytes, case.bytes, repeats)):
                pullbacks.append(keep(_array(case, compiled, 0), extra))
            calls[name] = backward, [(pullback, g) for pullback in pullbacks]
    del x  # large, and the pullbacks have kept what they need of it
    return _times(calls, case, compiled, repeats)


def _chain(case: Case, compiled: Programs, repeats: int, measured: Measured) -> timing.Times:
    x, extra = _array(case, compiled, 0), programs.operands(case)
    reference = Reference(case, _rows(case, compiled, x), extra, None)
    chains = {}
    for name in case.implementations:
        with _noting(measured, name):
            once, chain = compiled.get(programs.lower_calls, case, name)
            _check(case, name, reference, _rows(case, compiled, once(x, extra)), measured)
            chains[name] = lambda x, chain=chain: chain(x, extra)
    with _noting(measured, "copy"):
        (copies,) = compiled.get(programs.lower_copy_chain, case.dtype, case.shape, case.chain)
        if copies.as_text().count("negate") < case.chain:
            raise RuntimeError("XLA found that -(-x) is x")
        chains["copy"] = copies
    return timing.measure_chains(chains, lambda: _array(case, compiled, 0), case.chain, repeats)


def _array(case: Case, compiled: Programs, seed: int) -> jax.Array:
    """A new array: x for seed 0, and the cotangent for seed 1."""
    shape = programs.result_shape(case) if seed else case.shape
    (fill,) = compiled.get(programs.lower_fill, case.dtype, shape)
    return fill(numbers(seed, case.dtype))


def _rows(case: Case, compiled: Programs, array: jax.Array) -> np.ndarray:
    """The rows that are checked, in float64; or one number of each, where the operation reduces them."""
    if array.shape == case.shape:
        (some,) = compiled.get(programs.lower_some_rows, case.dtype, case.shape, case.axis)
        return np.asarray(some(array)).astype(np.float64)
    return rows_of(np.expand_dims(np.asarray(array), case.axis), case.shape, case.axis)[:, 0]


def _check(case: Case, name: str, reference: Reference, result: np.ndarray, measured: Measured) -> None:
    error = measured.errors[name] = reference.error(result)
    if name != "jax.nn" and not error <= 1:  # NaN is an error too
        sys.exit(f"{name}, {case}: wrong, {error:.3g} times the allowed error")


def _times(calls: dict[str, timing.Call], case: Case, compiled: Programs, repeats: int) -> timing.Times:
    """The times of these, and of a copy beside them."""
    shape = programs.copy_shape(case)
    (copy,) = compiled.get(programs.lower_copy, shape)
    (fill,) = compiled.get(programs.lower_fill, "float32", shape)
    count = timing.buffers(case.bytes // 2, case.bytes, repeats)
    sources = [fill(numbers(0, "float32")) for _ in range(count)]
    calls["copy"] = copy, [(source,) for source in sources]
    if jax.default_backend() == "cpu":
        calls["warm"] = np.copyto, [(np.zeros(shape, np.float32), np.asarray(sources[0]))]
    times = timing.measure(calls, case.bytes, repeats)
    for name in ("copy", "warm"):
        time = times.get(name)
        if isinstance(time, float):
            times[name] = time * case.bytes / (8 * shape[0])
    return times
