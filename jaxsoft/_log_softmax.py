"""log_softmax: the public function, and its derivative."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxsoft._arguments import Axis, as_scores, check_where, from_rows, has_kernels, normalize_axis, to_rows
from jaxsoft._derivative import with_forward_mode
from jaxsoft._formulas import log_softmax_probabilities
from jaxsoft._implementations import check_name
from jaxsoft._rows import row_operation


def log_softmax(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, implementation: str | None = None
) -> jax.Array:
    r"""The logarithm of softmax, a drop-in for `jax.nn.log_softmax`.

    .. math::
      \mathrm{log\_softmax}(x)_i = (x_i - m) - \log \sum_j e^{x_j - m}, \qquad m = \max_j x_j

    Args:
      x: scores of any shape; f16, bf16, f32 and f64 have kernels. 16-bit scores are computed in f32 and rounded once.
      axis: the axis or axes over which probabilities sum to 1; None for all.
      where: boolean, broadcastable to x. Elements where it is False get -inf and do not count.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "xla" and "reference"; see
        `jaxsoft.implementations`.

    Returns:
      Natural logarithms, of x's shape and dtype. A row of which nothing is selected is -inf. As in
      `jax.nn.log_softmax`, a row is NaN if it holds NaN or +inf, or nothing but -inf.

    Raises:
      ValueError: axis or where do not fit x, or the named implementation cannot serve the call.

    Derivatives of every order, in forward and reverse mode, for every implementation. Reverse mode keeps x and two
    numbers a row, so the probabilities in the gradient are not those of the rounded result.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> jnp.exp(log_softmax(jnp.array([1.0, 2.0, 3.0]))).round(3)
    Array([0.09 , 0.245, 0.665], dtype=float32)
    """
    check_name(implementation)
    # Beside -inf, as where masked elements become -inf, integers turn into another float.
    x = as_scores("x", x) if where is None else as_scores("x", x, -jnp.inf)
    axes = normalize_axis(axis, x.ndim)
    where = check_where(where, x.shape)
    if not has_kernels(x) and implementation in (None, "xla"):
        return jax.nn.log_softmax(x, axes, where)
    return _log_softmax(x, where, axes, implementation)


@functools.partial(jax.jit, static_argnames=("axes", "implementation"))
def _log_softmax(x, where, axes, implementation):
    scores = x if where is None else jnp.where(where, x, -jnp.inf)
    y = from_rows(_rows(implementation)(to_rows(scores, axes)), x.shape, axes)
    return y if where is None else jnp.where(where, y, -jnp.inf)


@functools.cache
def _rows(implementation: str | None) -> Callable[[jax.Array], jax.Array]:
    """log_softmax of rows (..., n). With p the probabilities, the pullback of g is g - p * sum(g)."""

    @jax.custom_vjp
    def log_softmax(x):
        return row_operation("log_softmax", implementation, x)[0]

    def fwd(x):
        y, m, s = row_operation("log_softmax", implementation, x)
        return y, (x, m, s)

    def bwd(residuals, g):
        return row_operation("log_softmax_vjp", implementation, *residuals, g)

    def tangent(x, m, s, t):
        p = log_softmax_probabilities(x, m, s)
        t32 = t.astype(p.dtype)
        return (t32 - jnp.sum(p * t32, axis=-1, keepdims=True)).astype(t.dtype)

    log_softmax.defvjp(fwd, bwd)
    return with_forward_mode(log_softmax, tangent)
