"""softmax and log_softmax: the public functions, and what they have in common."""

import functools
from typing import Never

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.implementations import Implementation, Names, as_names
from jaxsoft._core.numbers import as_array, as_float, holds
from jaxsoft._ops.arguments import (
    Axis,
    check_dtype,
    check_extras,
    from_rows,
    is_left_to_jax,
    normalize_axis,
    plain_scores,
    refuse_old_names,
    to_rows,
    without_old_names,
)
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operations.log_softmax import log_softmax_of_rows
from jaxsoft._rows.operations.softmax import softmax_of_rows

# Looked up at import, as a user may later put jaxsoft's functions in their place.
_softmax_of_jax, _log_softmax_of_jax = jax.nn.softmax, jax.nn.log_softmax


@without_old_names
def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
    **old: Never,
) -> jax.Array:
    r"""Softmax, a drop-in for `jax.nn.softmax`, of scores that may be scaled, biased and masked on the way.

    .. math::
      \mathrm{softmax}(x)_i = \frac{e^{z_i - m}}{\sum_j e^{z_j - m}}, \qquad z = x \cdot scale + bias,
      \quad m = \max_j z_j

    Args:
      x: scores of any shape; f16, bf16, f32 and f64 have kernels. They compute in f32 (f64 for f64) and
        round once.
      axis: the axis or axes that sum to 1; None for all.
      where: booleans or integers, broadcastable to x. Elements where it is False get 0 and are left out.
      scale: a number; or one for each row, in an array of the shape of the rows, those of x without the reduced axes,
        or broadcastable to x with length 1 along these. A temperature is 1 / scale.
      bias: an array broadcastable to x. It needs no memory of x's size, nor does where.
      is_causal: count element j of row i only if j <= i, where i is the index along the axis before the last, and the
        last axis is reduced: the mask of attention, with the first query at the first key.
      dtype: of the result: f16, bf16, f32 or f64; None for x's.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "triton", "xla" and
        "reference"; see `jaxsoft.implementations`.

    Returns:
      An array of x's shape, and of its dtype or the given one. A row of which nothing is selected is 0. As in
      `jax.nn.softmax`, a row is NaN if its z holds NaN or +inf, or nothing but -inf.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by x, scale and bias, of every order, in forward and reverse mode, for every implementation. What is
    masked has the gradient 0. Reverse mode keeps the result, and x only for the gradient by scale.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> jnp.round(softmax(jnp.array([1.0, 2.0, 3.0])), 3)
    Array([0.09 , 0.245, 0.665], dtype=float32)

    Attention's weights, of scores in bf16 without a mask or scaled scores in memory:

    >>> scores = jnp.ones((2, 2), jnp.bfloat16)
    >>> softmax(scores, scale=0.125, is_causal=True, dtype=jnp.float32)
    Array([[1. , 0. ],
           [0.5, 0.5]], dtype=float32)
    """
    if old:
        refuse_old_names(softmax, old, causal="is_causal")
    x, axes, extras, dtype, names = _checked(x, axis, where, scale, bias, is_causal, dtype, implementation)
    if is_left_to_jax(x, names):
        return _by_jax(_softmax_of_jax, x, axes, extras, dtype, is_causal)
    return _normalize(softmax_of_rows, x, axes, extras, dtype, names, is_causal)


@without_old_names
def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
    **old: Never,
) -> jax.Array:
    r"""The logarithm of softmax, a drop-in for `jax.nn.log_softmax`, of scores that may be scaled, biased and masked.

    .. math::
      \mathrm{log\_softmax}(x)_i = (z_i - m) - \log \sum_j e^{z_j - m}, \qquad z = x \cdot scale + bias,
      \quad m = \max_j z_j

    Args:
      x: scores of any shape; f16, bf16, f32 and f64 have kernels. They compute in f32 (f64 for f64) and
        round once.
      axis: the axis or axes over which probabilities sum to 1; None for all.
      where: booleans or integers, broadcastable to x. Elements where it is False get -inf and are left out.
      scale: a number; or one for each row, in an array of the shape of the rows, those of x without the reduced axes,
        or broadcastable to x with length 1 along these. A temperature is 1 / scale.
      bias: an array broadcastable to x. It needs no memory of x's size, nor does where.
      is_causal: count element j of row i only if j <= i, where i is the index along the axis before the last, and the
        last axis is reduced.
      dtype: of the result: f16, bf16, f32 or f64; None for x's.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "triton", "xla" and
        "reference"; see `jaxsoft.implementations`.

    Returns:
      Natural logarithms, of x's shape, and of its dtype or the given one. A row of which nothing is selected is -inf.
      As in `jax.nn.log_softmax`, a row is NaN if its z holds NaN or +inf, or nothing but -inf.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by x, scale and bias, of every order, in forward and reverse mode, for every implementation. What is
    masked has the gradient 0. Reverse mode keeps x, the other arguments and two numbers a row, so the probabilities
    in the gradient are not those of the rounded result; for the gradient by scale or bias it keeps z.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> jnp.exp(log_softmax(jnp.array([1.0, 2.0, 3.0]))).round(3)
    Array([0.09 , 0.245, 0.665], dtype=float32)

    Logits at a temperature of 2, with a token that is ruled out:

    >>> logits = jnp.array([2.0, 4.0, 6.0])
    >>> log_softmax(logits, where=jnp.array([True, True, False]), scale=1 / 2)[2]
    Array(-inf, dtype=float32)
    """
    if old:
        refuse_old_names(log_softmax, old, causal="is_causal")
    x, axes, extras, dtype, names = _checked(x, axis, where, scale, bias, is_causal, dtype, implementation)
    if is_left_to_jax(x, names):
        return _by_jax(_log_softmax_of_jax, x, axes, extras, dtype, is_causal)
    return _normalize(log_softmax_of_rows, x, axes, extras, dtype, names, is_causal)


type _Extras = tuple[jax.Array | None, jax.Array | None, jax.Array | None]  # where, scale and bias


def _checked(
    x: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    is_causal: bool,
    dtype: DTypeLike | None,
    implementation: Implementation,
) -> tuple[jax.Array, tuple[int, ...], _Extras, np.dtype, Names]:
    """The arguments of a public function, after checking them: x, its axes, where, scale and bias, the dtype of the
    result, and the implementations.
    """
    names = as_names(implementation)
    given, x = x, as_float("x", x)
    if where is not None and not holds(as_array("x", given).dtype, np.inexact):
        x = x.astype(float)  # jax.nn puts -inf in the place of masked elements, which makes this of integers
    axes, out_dtype = normalize_axis(axis, x.ndim), check_dtype(dtype, x)
    return x, axes, check_extras(x, axes, where, scale, bias, is_causal), out_dtype, names


@functools.partial(jax.jit, static_argnames=("function", "axes", "is_causal", "dtype", "names"))
def _normalize(function, x, axes, extras, dtype, names, is_causal):
    """A function of rows, softmax or log_softmax, of arguments as `_checked` has them."""
    where, scale, bias = extras
    rows, extras, trailing = to_rows(x, axes, where, scale, bias, is_causal)
    (y,) = differentiable(function, RowForm(dtype, tuple(extras), trailing), names)(rows, *extras.values())
    return from_rows(y, x, axes, trailing)


def _by_jax(function, x, axes, extras, dtype, is_causal):
    """jax.nn's function, for the dtypes that have no kernels."""
    where, scale, bias = extras
    z, valid = plain_scores(x, where, scale, bias, is_causal)
    return function(z, axes, valid).astype(dtype)
