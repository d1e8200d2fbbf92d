"""What the tests share: the operations and implementations they run over, float64 references, and comparisons.

References are numpy in float64 (or wider) of the scores as their dtype holds them, and every comparison is relative to
the true value: y is about 1e-6 in a long row, where an absolute tolerance of 1e-5 would pass zeros.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import jaxsoft

OPS = ("softmax", "log_softmax", "logsumexp")
# None, and by name whatever can run on the default device: on a GPU the list is longer.
IMPLEMENTATIONS = (None, *(name for name, reason in jaxsoft.implementations().items() if reason is None))
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)

each_op = pytest.mark.parametrize("op", OPS)
# Tests that compile much run the rest of the dtypes and implementations only when asked to: pytest -m "". So None,
# which is one of the others (test_arguments shows it), the reference, whose scans XLA compiles slowly, and xla.
slow = pytest.mark.slow
# log_softmax's derivatives are logsumexp's and one subtraction.
each_op_in_turn = pytest.mark.parametrize("op", ["softmax", pytest.param("log_softmax", marks=slow), "logsumexp"])
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name in (None, "xla", "reference") else (), id=str(name))
        for name in IMPLEMENTATIONS
    ],
)
# Without None and the reference even then.
each_fast_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name == "xla" else ())
        for name in IMPLEMENTATIONS
        if name not in (None, "reference")
    ],
)
each_dtype_in_turn = pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=slow if d in (jnp.float16, jnp.float64) else (), id=d.__name__) for d in DTYPES],
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="checks the CPU's kernels")
on_gpu = pytest.mark.skipif(jax.default_backend() == "cpu", reason="checks the strategies of a GPU's kernels")


def ours(op: str, implementation: str | None = None, **options) -> Callable[..., jax.Array]:
    """jaxsoft's operation, over the last axis unless told otherwise."""
    return functools.partial(getattr(jaxsoft, op), **{"axis": -1, "implementation": implementation, **options})


def theirs(op: str, **options) -> Callable[..., jax.Array]:
    """jax.nn's operation, likewise."""
    return functools.partial(getattr(jax.nn, op), **{"axis": -1, **options})


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """JAX's default promotion, for what is not jaxsoft's: the suite runs under the strictest (see conftest)."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def served(implementation: str | None) -> Iterator[None]:
    """Runs a block that a named kernel may refuse, for a dtype or a length that it does not take.

    A refusal ends the block, and must say why, and what else there is. The implementations that take everything may
    not refuse.
    """
    try:
        yield
    except ValueError as error:
        if implementation in (None, "ffi", "xla", "reference"):
            raise
        what = rf"implementation='{implementation}' cannot serve this call: \S.+implementation=None always works.+'xla'"
        if not re.search(what, str(error), re.DOTALL):
            raise


def precision(dtype) -> contextlib.AbstractContextManager:
    """JAX's 64-bit mode for float64, its default mode for the others."""
    return jax.enable_x64(jnp.dtype(dtype) == jnp.float64)


def target(kind: str) -> contextlib.AbstractContextManager:
    """Lowers for a GPU of this kind, which need not be here."""
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def operand(shape, dtype) -> jax.core.ShapedArray:
    """The type of an operand."""
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def wide(x) -> np.ndarray:
    """`x` as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float64)


def rows(n: int, dtype, seed: int = 0, count: int | None = None) -> np.ndarray:
    """Rows of n normal numbers in `dtype`: plain, spread out, offset by 1e4 and by -1e4; more of them if short."""
    rng = np.random.default_rng([n, seed])
    count = count or (3 if n > 100_000 else 4 if n > 2000 else 13)
    x = rng.standard_normal((count, n), np.float32)
    i = np.arange(count)[:, None] % 4
    x = x * np.where(i == 1, 10, 1) + np.where(i == 2, 1e4, 0) - np.where(i == 3, 1e4, 0)
    return x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the operations should give for rows x, in float64 (float64 rows of a moderate length: in long double).

    Attributes:
      d: |x - m|, which amplifies the rounding of x - m.
      p: the probabilities.
      log_p: their logarithms.
      m: the maximum of each row, as (..., 1).
      log_s: log(sum(exp(x - m))), likewise.
      lse: m + log_s, of shape (...); the maximum itself where that is infinite.
    """

    d: np.ndarray
    p: np.ndarray
    log_p: np.ndarray
    m: np.ndarray
    log_s: np.ndarray
    lse: np.ndarray

    @staticmethod
    def of(x: np.ndarray) -> "Truth":
        dtype = np.longdouble if x.dtype == np.float64 and x.size < 1_000_000 else np.float64
        with np.errstate(invalid="ignore", over="ignore"):
            x = x.astype(dtype)
            m = x.max(axis=-1, keepdims=True)
            e = np.exp(x - m)
            s = e.sum(axis=-1, keepdims=True)
            log_s = np.log(s)
            lse = np.where(np.isinf(m), m, m + log_s)[..., 0]
            return Truth(m - x, e / s, (x - m) - log_s, m, log_s, lse)


# The unit of every bound. XLA adds f64 rows one element after the other, so there it is 16 units in the last place.
EPS = {2: 2.0**-23, 4: 2.0**-23, 8: 2.0**-48}


def assert_values(op: str, x: np.ndarray, y, truth: Truth | None = None) -> None:
    """y is `op` of the rows x, within the bounds that every implementation keeps to."""
    y, what = np.asarray(y), f"{op} of {x.dtype} {x.shape}"
    truth = Truth.of(x) if truth is None else truth
    assert y.dtype == x.dtype, what
    d = np.minimum(truth.d, 150)  # past it, p is nothing
    if op == "softmax":
        scale, expected = (4 + d) * np.maximum(truth.p, 1e-30), truth.p
    elif op == "log_softmax":
        scale, expected = 4 + truth.d + truth.log_s, truth.log_p
    else:
        scale, expected = (4 + np.abs(truth.m) + truth.log_s)[..., 0], truth.lse
    if x.dtype.itemsize == 2:
        # Logarithms cross 0, where the last place of the result is far below that of its two terms: hence the floor.
        return assert_last_place(y, expected, 2 if op == "log_softmax" else 1, EPS[2] * scale, what)
    assert_within(y, expected, EPS[x.dtype.itemsize] * scale, what)
    if op == "softmax":
        tolerance = 1e-5 if x.dtype == np.float32 else 1e-12
        assert_within(wide(y).sum(-1), wide(truth.p).sum(-1), np.float64(tolerance), f"row sums of {what}")


def pullback(op: str, x: np.ndarray, g: np.ndarray, truth: Truth) -> tuple[np.ndarray, np.ndarray]:
    """What the pullback of g gives at the rows x, and how far dx may be from it.

    softmax keeps its result, so for 16 bits the probabilities may be rounded; XLA may also leave that out.
    """
    g = wide(g)
    eps, info = EPS[x.dtype.itemsize], jnp.finfo(x.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        p = wide(truth.p)
        error = eps * (8 + np.minimum(wide(truth.d), 150)) * np.maximum(p, 1e-30)
        if op == "softmax" and x.dtype.itemsize == 2:
            error = error + 0.51 * (float(info.eps) * p + float(info.smallest_subnormal))
        if op == "softmax":
            dx = p * (g - np.sum(p * g, axis=-1, keepdims=True))
            bound = error * (np.abs(g) + np.abs(dx) / np.maximum(p, 1e-30)) + p * np.sum(
                error * np.abs(g), -1, keepdims=True
            )
        elif op == "log_softmax":
            total, size = g.sum(axis=-1, keepdims=True), np.abs(g).sum(axis=-1, keepdims=True)
            dx = g - p * total
            bound = eps * (np.abs(g) + 8 * p * size) + error * np.abs(total)
        else:
            dx = p * g[..., None]
            bound = error * np.abs(g[..., None])
        if x.dtype.itemsize == 2:
            bound = bound + 0.51 * (float(info.eps) * np.abs(dx) + float(info.smallest_subnormal))
        return dx, bound + 1e-36


def beside_float64(
    op: str, x: jax.Array, g: jax.Array, some: np.ndarray, implementation: str = "ffi", **options
) -> list[tuple[np.ndarray, ...]]:
    """An implementation's value and its pullback of g, each beside XLA's in float64, of the leading indices `some`.

    For arrays that are too large for `Truth`: what is compiled has all of x, what is compared has not.
    """

    def both(x, g, implementation):
        y, pull = jax.vjp(ours(op, implementation, **options), x)
        return y, pull(g)[0]

    actual = [wide(v[some]) for v in jax.jit(lambda *v: both(*v, implementation))(x, g)]
    with jax.enable_x64(True):
        expected = jax.jit(lambda *v: both(*v, "xla"))(*(wide(v[some]) for v in (x, g)))
        return list(zip(actual, map(wide, expected), strict=True))


def assert_within(actual, expected: np.ndarray, bound: np.ndarray, what: str) -> None:
    """|actual - expected| <= bound, elementwise; NaN and infinities are in the same places."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = np.where(np.abs(expected) > float(jnp.finfo(actual.dtype).max), np.sign(expected) * np.inf, expected)
        bound = np.where(np.isfinite(bound), bound, 0)
        error = np.abs(actual.astype(expected.dtype) - expected)
        ok = (error <= bound) | (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        excess = np.where(ok, -1, np.nan_to_num(error - bound, nan=np.inf))
    if not ok.all():
        i = tuple(int(k) for k in np.unravel_index(np.argmax(excess), ok.shape))
        raise AssertionError(
            f"{what}: {np.sum(~ok)} of {ok.size} elements are out of bounds, the worst at {i}: {actual[i]} should be "
            f"{expected[i]} within {np.broadcast_to(bound, ok.shape)[i]}"
        )


def assert_last_place(actual: np.ndarray, expected: np.ndarray, units: int, floor: np.ndarray, what: str) -> None:
    """16-bit `actual` is within `units` in the last place of `expected` rounded correctly, or within `floor` of it."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        places = np.abs(_ordinal(actual) - _ordinal(expected.astype(actual.dtype)))
        ok = (places <= units) | (np.abs(wide(actual) - expected) <= np.where(np.isfinite(floor), floor, 0))
    if not ok.all():
        i = tuple(int(k) for k in np.unravel_index(np.argmax(np.where(ok, -1, places)), ok.shape))
        raise AssertionError(
            f"{what}: {np.sum(~ok)} of {ok.size} elements are more than {units} places off, the worst at {i}: "
            f"{actual[i]} should be {expected[i]}"
        )


def _ordinal(x: np.ndarray) -> np.ndarray:
    """Numbers whose differences count places: the bits of a 16-bit float, made monotonic. NaN is far from all else."""
    bits = x.view(np.int16).astype(np.int64)
    return np.where(np.isnan(x), 10**6, np.where(bits < 0, -(bits & 0x7FFF), bits))


def cotangent(op: str, x: np.ndarray) -> np.ndarray:
    """Normal numbers of the shape and dtype of op(x), for rows x."""
    shape = x.shape[:-1] if op == "logsumexp" else x.shape
    return np.random.default_rng(x.shape[-1]).standard_normal(shape).astype(x.dtype)


def loss(f: Callable[..., jax.Array], **options) -> Callable[[jax.Array], jax.Array]:
    """A scalar function of f's result, of which no derivative vanishes."""

    def total(x):
        y = f(x, **options)
        return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7))

    return total


def same_bits(a, b) -> bool:
    """Whether two pytrees of arrays hold the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
