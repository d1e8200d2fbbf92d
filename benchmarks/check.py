"""Whether a result is right: a few of its rows against float64.

An error is measured in units of what is allowed: what follows from rounding z and exp(z) to f32, from sums that are as
exact as their terms, and from rounding the result to its dtype once. Where z is large, so is the rounding of exp's
argument, which is exp's relative error.
"""

import math

import jax.numpy as jnp
import numpy as np
from row_cases import Case

_F32 = 2.0**-23
_MOST_ELEMENTS = 2**21  # that are checked; at least one row is


def some_rows(shape: tuple[int, ...], axis: int) -> list[tuple[int | slice, ...]]:
    """The indices of the first row, the last, and one between, or of fewer where rows are long."""
    axis %= len(shape)
    others = shape[:axis] + shape[axis + 1 :]
    rows = math.prod(others)
    places = np.unique([rows - 1, 0, rows // 3][: max(1, _MOST_ELEMENTS // shape[axis])])
    indices: list[tuple[int | slice, ...]] = []
    for place in places:
        index = [int(i) for i in np.unravel_index(place, others)]
        indices.append((*index[:axis], slice(None), *index[axis:]))
    return indices


def rows_of(array, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Those rows in float64, of an array on the host that broadcasts to the shape."""
    full = np.broadcast_to(np.asarray(array), shape)
    return np.stack([full[index] for index in some_rows(shape, axis)]).astype(np.float64)


def unit(value: np.ndarray, dtype: str) -> np.ndarray:
    """One unit in the last place of a 16-bit number; 0 for f32, whose rounding the errors of the arithmetic include."""
    if dtype == "float32":
        return np.zeros_like(value)
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(value), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


class Reference:
    """The results of a case for a few rows, in float64."""

    def __init__(self, case: Case, x: np.ndarray, extra: dict[str, np.ndarray], g: np.ndarray | None):
        """x and g: rows in float64, g of the cotangent, if there is one; extra: the operands beside x, whole."""
        rows = {name: rows_of(value, case.shape, case.axis) for name, value in extra.items()}
        scale = case.scale if isinstance(case.scale, float) else rows.get("scale", 1.0)
        counts = rows.get("where", np.ones_like(x)) > 0
        if case.causal:
            limits = np.array([index[-2] for index in some_rows(case.shape, case.axis)])
            counts &= np.arange(case.n) <= limits[:, None]
        self.expected, error = _reference(case, x * scale, rows.get("bias", 0.0), counts, g)
        if g is not None:  # the derivative of z to x
            self.expected, error = self.expected * scale, error * scale
        self.allowed = error + unit(self.expected, case.dtype) + 1e-30  # what is smaller may be 0

    def error(self, result: np.ndarray) -> float:
        """The largest error of the result's rows, in units of what is allowed."""
        return float(np.max(np.abs(result - self.expected) / self.allowed))


def _reference(case: Case, scaled, bias, counts, g) -> tuple[np.ndarray, np.ndarray]:
    """The result, of dz in the backward direction, and its error in f32."""
    z = scaled + bias
    m = np.max(z, axis=-1, keepdims=True, where=counts, initial=-np.inf)
    e = np.exp(z - m, where=counts, out=np.zeros_like(z))
    s = np.sum(e, axis=-1, keepdims=True)
    p, log_s = e / s, np.log(s)
    # Of z, in units of f32's last place. A product and a sum are rounded only where there are any.
    error_z = np.abs(z - m) + (np.abs(scaled) + np.abs(z) if case.extras else 0)
    error_p = p * (4 + error_z) * _F32

    match case.op, case.direction:
        case "softmax", "forward":
            return p, error_p
        case "log_softmax", "forward":
            return z - m - log_s, (4 + error_z + log_s) * _F32
        case "logsumexp", "forward":
            y = m + log_s
            return y[:, 0], (4 + np.abs(m) + np.abs(y))[:, 0] * _F32
        case "softmax", "backward":
            # What the errors of y, which was rounded, make of dz: once through the factor y, and once through the sum.
            error_y = np.where(counts, error_p + unit(p, case.dtype), 0)
            total = np.sum(p * np.abs(g), axis=-1, keepdims=True)
            error = error_y * (np.abs(g) + total) + p * np.sum(error_y * np.abs(g), axis=-1, keepdims=True)
            return p * (g - np.sum(p * g, axis=-1, keepdims=True)), error
        case "log_softmax", "backward":
            total = np.sum(g, axis=-1, keepdims=True)
            error_total = 4 * np.sum(np.abs(g), axis=-1, keepdims=True) * _F32
            return g - p * total, error_p * np.abs(total) + p * error_total + np.abs(g) * _F32
        case "logsumexp", "backward":
            return p * g[:, None], error_p * np.abs(g[:, None])
    raise AssertionError(f"no reference for {case}")
