"""What the row operations should give, in float64, and comparisons with it.

References are numpy in float64 (or wider) of the scores as their dtype holds them, and every comparison is relative to
the true value: y is about 1e-6 in a long row, where an absolute tolerance of 1e-5 would pass zeros.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from common import as_usual, ours


def wide(x) -> np.ndarray:
    """`x` as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float64)


def in_float64(f: Callable, *operands):
    """A definition's results for the same numbers in float64.

    Few operands are constants of the program, of which XLA then computes all that it can while it compiles: that takes
    half as long as making code for it. Of many it would compute slowly.
    """
    with jax.enable_x64(True), as_usual():
        given = jax.tree.map(wide, operands)
        few = sum(v.size for v in jax.tree.leaves(given)) < 10_000
        results = jax.jit(lambda: f(*jax.tree.map(jnp.asarray, given)))() if few else jax.jit(f)(*given)
        return jax.tree.map(np.asarray, results)


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
