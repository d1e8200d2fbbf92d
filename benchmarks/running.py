"""One case, from its input to its times: every result is checked before anything is timed."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import programs
import timing
from check import Reference, rows_of
from programs import Programs
from row_cases import Case
from shared import compare, lacks_memory, reason

numbers = functools.cache(programs.random)

type Prepare = Callable[[str], tuple]  # an implementation's call, and the error of its result
type Measure = Callable[[dict], timing.Times]


def run(case: Case, compiled: Programs, repeats: int) -> dict[str, dict]:
    """Checks, then times the implementations, "copy" and, on a CPU, "warm", a copy into memory in use."""
    kind = _chain if case.chain else _backward if case.direction == "backward" else _forward
    names = (*case.implementations, "copy") if case.chain else case.implementations
    try:
        return compare(case, names, ("jax.nn", "copy"), *kind(case, compiled, repeats))
    except Exception as problem:
        if not lacks_memory(problem):  # for the input
            raise
        failed = dict.fromkeys((*case.implementations, "copy"), reason(problem))
        return {"seconds": {}, "spread": {}, "errors": {}, "failed": failed}


def _forward(case: Case, compiled: Programs, repeats: int) -> tuple[Prepare, Measure]:
    x, extra = _array(case, compiled, 0), programs.operands(case)
    reference = Reference(case, _rows(case, compiled, x), extra, None)
    xs = [x, *(_array(case, compiled, 0) for _ in range(1, timing.buffers(x.nbytes, case.bytes, repeats)))]

    def prepare(name):
        (forward,) = compiled.get(programs.lower_calls, case, name)
        error = reference.error(_rows(case, compiled, forward(x, extra)))
        return (forward, [(x, extra) for x in xs]), error

    return prepare, lambda calls: _times(calls, case, compiled, repeats)


def _backward(case: Case, compiled: Programs, repeats: int) -> tuple[Prepare, Measure]:
    x, g, extra = _array(case, compiled, 0), _array(case, compiled, 1), programs.operands(case)
    reference = Reference(case, _rows(case, compiled, x), extra, _rows(case, compiled, g))
    count = timing.buffers(x.nbytes, case.bytes, repeats)

    def prepare(name):
        keep, backward = compiled.get(programs.lower_calls, case, name)
        pullbacks = [keep(_array(case, compiled, 0), extra)]
        error = reference.error(_rows(case, compiled, backward(pullbacks[0], g)))
        pullbacks += [keep(_array(case, compiled, 0), extra) for _ in range(1, count)]
        return (backward, [(pullback, g) for pullback in pullbacks]), error

    return prepare, lambda calls: _times(calls, case, compiled, repeats)


def _chain(case: Case, compiled: Programs, repeats: int) -> tuple[Prepare, Measure]:
    x, extra = _array(case, compiled, 0), programs.operands(case)
    reference = Reference(case, _rows(case, compiled, x), extra, None)

    def prepare(name):
        if name == "copy":
            (copies,) = compiled.get(programs.lower_copy_chain, case.dtype, case.shape, case.chain)
            if copies.as_text().count("negate") < case.chain:
                raise RuntimeError("XLA found that -(-x) is x")
            return copies, None
        once, chain = compiled.get(programs.lower_calls, case, name)
        return lambda x: chain(x, extra), reference.error(_rows(case, compiled, once(x, extra)))

    return prepare, lambda chains: timing.measure_chains(chains, lambda: _array(case, compiled, 0), case.chain, repeats)


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
        taken = times.get(name)
        if isinstance(taken, list):
            times[name] = [time * case.bytes / (8 * shape[0]) for time in taken]
    return times
