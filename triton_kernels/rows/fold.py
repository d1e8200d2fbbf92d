"""The fold over (m, s) in Triton, with the rules of `jaxsoft.fold`. Whole-row and two-pass kernels reduce by it.

A tile of rows is a tuple of its units, each of shape (rows, packs, lanes, vector), which gives every lane a few
vectors. What a lane holds of a row is reduced within a thread, to (rows, lanes), and the lanes are combined once a row.

A maximum ignores NaN here, and a sum does not: a row with NaN has the sum NaN.
"""

import triton
import triton.language as tl


@triton.jit
def wide(x):
    """`x` in the dtype of the arithmetic."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


# --8<-- [start:reference]
@triton.jit
def reference(m):
    """The number that exp subtracts: m where it is finite, else 0, so that no exponent is inf - inf."""
    return tl.where(tl.abs(m) < float("inf"), m, 0.0)
    # --8<-- [end:reference]


@triton.jit
def inverse(s):
    """1 / s, correctly rounded, which `/` in float32 is not."""
    if s.dtype == tl.float64:
        return 1.0 / s
    else:
        return tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)


@triton.jit
def state(xs):
    """The state of rows that are one tile."""
    m = tl.max(_maximum(xs), axis=1)
    return m, row_sum(*lane_sum(_exponentials(xs, reference(m)[:, None])))


@triton.jit
def identity(ptr, lanes: tl.constexpr):
    """The state of nothing, in every lane of one row: the maximum, the reference of the sum, the sum and its error."""
    zero = wide(tl.zeros([1, lanes], ptr.dtype.element_ty))
    return zero - float("inf"), zero - float("inf"), zero, zero


@triton.jit
def accumulate(m, ref, s, error, xs):
    """Folds a tile into the lanes' states.

    The reference of a sum follows the maximum only when it falls behind by more than 1. A slowly rising row would
    otherwise rescale the sum with every tile, each time with a rounding error, and these add up. The additions are
    compensated for the same reason: a lane of a long row makes thousands.
    """
    m = tl.maximum(m, _maximum(xs))
    new = tl.where(m > ref + 1.0, m, ref)
    shift = reference(new)
    scale = tl.exp(ref - shift)  # 0 for the identity
    part, part_error = lane_sum(_exponentials(xs, shift))
    s, error = add(s * scale, error * scale, part, part_error)
    return m, new, s, error


@triton.jit
def combine(m, ref, s, error):
    """The rows' states from their lanes'."""
    top = tl.max(m, axis=1)
    weight = tl.exp(ref - reference(top)[:, None])
    return top, row_sum(s * weight, error * weight)


@triton.jit
def lane_sum(xs):
    """The sum of the elements that each lane holds of a tile, and its rounding error."""
    s = tl.sum(tl.sum(xs[0], axis=3), axis=1)
    error = tl.zeros_like(s)
    for i in tl.static_range(1, len(xs)):
        s, error = add(s, error, tl.sum(tl.sum(xs[i], axis=3), axis=1), 0.0)
    return s, error


@triton.jit
def add(a, a_error, b, b_error):
    """The sum of two sums with errors, by Knuth's two-sum, which holds whichever of them is larger."""
    s = a + b
    virtual = s - a
    return s, (a_error + b_error) + ((a - (s - virtual)) + (b - virtual))


@triton.jit
def row_sum(s, error):
    """The sums of rows, from those of their lanes. The error of an infinite sum is NaN, so it is left out."""
    return tl.sum(tl.where(tl.abs(s) < float("inf"), s + error, s), axis=1)


@triton.jit
def _maximum(xs):
    """The maximum of the elements that each lane holds of a tile."""
    m = tl.max(tl.max(wide(xs[0]), axis=3), axis=1)
    for i in tl.static_range(1, len(xs)):
        m = tl.maximum(m, tl.max(tl.max(wide(xs[i]), axis=3), axis=1))
    return m


@triton.jit
def _exponentials(xs, shift):
    es = ()
    for i in tl.static_range(len(xs)):
        es += (tl.exp(wide(xs[i]) - shift[:, None, :, None]),)
    return es
