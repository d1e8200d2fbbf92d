"""`logsumexp`, the public function, and its factors `b`, for which there are no kernels."""

import functools
import math
from typing import Literal, Never, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxsoft import fold
from jaxsoft._core.implementations import Implementation, as_names
from jaxsoft._core.mesh import sharded_like
from jaxsoft._core.numbers import as_float, as_numbers
from jaxsoft._core.rounding import stored
from jaxsoft._ops.arguments import (
    Axis,
    check_dtype,
    check_extras,
    is_left_to_jax,
    normalize_axis,
    plain_scores,
    refuse_old_names,
    to_rows,
    without_old_names,
)
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.formulas import nan_where
from jaxsoft._rows.operations.logsumexp import logsumexp_of_rows

_jax_logsumexp = jax.nn.logsumexp  # looked up at import, as a user may later put jaxsoft's function in its place


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]: ...
@without_old_names
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
    **old: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The logarithm of a sum of exponentials, a drop-in for `jax.nn.logsumexp` and `jax.scipy.special.logsumexp`.

    .. math::
      \mathrm{logsumexp}(a) = m + \log \sum_j b_j e^{z_j - m}, \qquad z = a \cdot scale + bias,
      \quad m = \max_j z_j

    Args:
      a: scores of any shape. f16, bf16, f32 and f64 have kernels, which compute in f32 (f64 for f64) and round once.
      axis: the axis or axes that are reduced; None for all.
      b: factors of the exponentials, broadcastable with a; 1 if None. Only "xla" has them. A factor of 0
        leaves its element out, even one of inf or NaN.
      keepdims: keep the reduced axes, with length 1.
      return_sign: return the logarithm of the sum's absolute value, and its sign.
      where: booleans or integers, broadcastable to a. Elements where it is False are masked.
      scale: a number; or one for each row, in an array of the shape of the rows, those of a without the reduced axes,
        or broadcastable to a with length 1 along these. A temperature is 1 / scale.
      bias: an array broadcastable to a. Neither it nor where takes memory of a's size.
      is_causal: count element j of row i only if j <= i, where i is the index along the axis before the last, and the
        last axis is reduced.
      dtype: of the result: f16, bf16, f32 or f64; None for that of a.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "triton", "xla" and
        "reference"; see `jaxsoft.implementations`.

    Returns:
      Natural logarithms, of a's dtype or the given one; with return_sign, also the signs: -1, 0 or 1. The logarithm of
      a sum of nothing, or of nothing but exp(-inf), is -inf; that of a negative sum is NaN unless return_sign is set.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by a, b, scale and bias, of every order, in forward and reverse mode, for every implementation. Unlike
    JAX's, the gradient of a row that is all -inf is 0, not NaN, and so are those by a and b where the sum is 0. At a
    factor of 0 the derivative by it is that of the formula, where JAX has 0: it is about the largest number of the
    dtype, and finite, if it is out of range, and 0 if the element is NaN.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> logsumexp(jnp.log(jnp.array([1.0, 2.0, 5.0]))).round(4) == jnp.log(8.0).round(4)
    Array(True, dtype=bool)

    In f32 for scores in bf16, in which the rounding of the result would show:

    >>> logsumexp(jnp.full(1000, 10.0, jnp.bfloat16), dtype=jnp.float32).round(3)
    Array(16.908, dtype=float32)
    """
    if old:
        refuse_old_names(logsumexp, old, causal="is_causal")
    implementation = as_names(implementation)
    a = as_numbers("a", a)
    if where is not None and a.dtype == jnp.bool_:
        a = a.astype(int)  # jax.nn puts 0 in the place of masked elements, which makes integers of booleans
    a, b = (as_float("a", a), None) if b is None else _with_factors(a, as_numbers("b", b))
    axes, out_dtype = normalize_axis(axis, a.ndim), check_dtype(dtype, a)
    extras = check_extras(a, axes, where, scale, bias, is_causal)
    if is_left_to_jax(a, implementation):
        z, valid = plain_scores(a, *extras, is_causal)
        result = _jax_logsumexp(z, axes, b, keepdims, return_sign, valid)
        if jnp.issubdtype(out_dtype, jnp.complexfloating):
            return result  # the logarithm of an absolute value is real, and keeps its dtype
        return jax.tree.map(lambda v: v.astype(out_dtype), result)
    if b is not None and implementation not in (None, "xla"):
        raise ValueError(
            f"implementation={implementation!r} cannot serve this call: it has no factors b. "
            "implementation=None and 'xla' have them"
        )
    return _logsumexp(a, b, axes, *extras, is_causal, bool(keepdims), bool(return_sign), out_dtype, implementation)


def _with_factors(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores a and factors b in one dtype, to which both promote: a with their shape, b with as many dimensions."""
    promoted = jnp.result_type(a, b)
    a, b = (as_float(name, v.astype(promoted)) for name, v in (("a", a), ("b", b)))
    try:
        shape = jax.lax.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ValueError(f"b must broadcast with a, of shape {a.shape}; got shape {b.shape}") from None
    return jnp.broadcast_to(a, shape), jax.lax.broadcast_to_rank(b, len(shape))


@functools.partial(jax.jit, static_argnames=("axes", "is_causal", "keepdims", "return_sign", "dtype", "implementation"))
def _logsumexp(a, b, axes, where, scale, bias, is_causal, keepdims, return_sign, dtype, implementation):
    if b is None:
        out, sign = _of_rows(a, axes, where, scale, bias, is_causal, dtype, implementation)
    else:
        (a,) = stored(a)
        z, valid = plain_scores(a, where, scale, bias, is_causal)
        out, sign = _weighted(z, valid, b, axes, dtype)
        out = out if return_sign else nan_where(sign < 0, out)
    if keepdims:
        out, sign = jnp.expand_dims(out, axes), jnp.expand_dims(sign, axes)
    return (out, sign) if return_sign else out


def _of_rows(a, axes, where, scale, bias, is_causal, dtype, implementation):
    """The logarithms of sums without factors, and their signs."""
    rows, extras, trailing = to_rows(a, axes, where, scale, bias, is_causal)
    form = RowForm(a.dtype, tuple(extras), trailing)
    (out,) = differentiable(logsumexp_of_rows, form, implementation)(rows, *extras.values())
    out = out.astype(dtype)
    return out, jnp.where(jnp.isnan(out), out, jnp.where(out == -jnp.inf, 0, 1).astype(dtype))


def _weighted(a, valid, b, axes, dtype):
    """The logarithm of |sum b exp(a)| and the sign of the sum, in plain JAX."""
    a, b = (v.astype(fold.accumulator(a.dtype)) for v in (a, b))
    b = sharded_like(jnp.broadcast_to(b, a.shape), a)
    if valid is not None:
        valid = sharded_like(jnp.broadcast_to(valid, a.shape), a)
        a, b = jnp.where(valid, a, -jnp.inf), jnp.where(valid, b, 0)
    m = jnp.max(jnp.where(b == 0, -jnp.inf, a), axis=axes, initial=-jnp.inf, keepdims=True)
    ref = fold.reference(jax.lax.stop_gradient(m))
    total = _sum(axes, ref, a, b)
    empty = total == 0
    out = jnp.where(empty, -jnp.inf, jnp.log(jnp.abs(jnp.where(empty, 1, total))) + ref.reshape(total.shape))
    return out.astype(dtype), jnp.sign(total).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum(axes, ref, a, b):
    """The sum of b exp(a - ref). A factor of 0 leaves its element out; to derivatives ref is a constant."""
    return jnp.sum(b * jnp.exp(jnp.where(b == 0, -jnp.inf, a) - ref), axis=axes)


@_sum.defjvp
def _sum_jvp(axes, primals, tangents):
    """The derivative by a factor of 0 is its exponential, which may be far above those that ref is the maximum of.

    But it is finite, and so is it over the sum: a factor that is 0 times a number may be what left the element out, and
    then the number's derivative is 0 times this one.
    """
    ref, a, b = primals
    total = _sum(axes, *primals)
    size = jnp.expand_dims(jnp.abs(jax.lax.stop_gradient(total)), axes)
    most = 0.99 * math.log(jnp.finfo(total.dtype).max) + jnp.log(jnp.where((size > 0) & (size < 1), size, 1))

    def with_hidden(a, b):
        above = jnp.where((b == 0) & jnp.isnan(a), -jnp.inf, a) - ref
        return jnp.sum(b * jnp.exp(jnp.where(b == 0, jnp.minimum(above, most), above)), axis=axes)

    return total, jax.jvp(with_hidden, (a, b), tangents[1:])[1]
