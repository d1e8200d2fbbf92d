"""softmax: the public function, and its derivative."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxsoft import _xla
from jaxsoft._arguments import Axis, as_scores, check_where, from_rows, has_kernels, normalize_axis, to_rows
from jaxsoft._derivative import with_forward_mode
from jaxsoft._implementations import check_name
from jaxsoft._rows import row_operation


def softmax(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, implementation: str | None = None
) -> jax.Array:
    r"""Softmax, a drop-in for `jax.nn.softmax`.

    .. math::
      \mathrm{softmax}(x)_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \qquad m = \max_j x_j

    Args:
      x: scores of any shape; f16, bf16, f32 and f64 have kernels. 16-bit scores are computed in f32 and rounded once.
      axis: the axis or axes that sum to 1; None for all.
      where: boolean, broadcastable to x. Elements where it is False get 0 and do not count.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "xla" and "reference"; see
        `jaxsoft.implementations`.

    Returns:
      An array of x's shape and dtype. A row of which nothing is selected is 0. As in `jax.nn.softmax`, a row is NaN if
      it holds NaN or +inf, or nothing but -inf.

    Raises:
      ValueError: axis or where do not fit x, or the named implementation cannot serve the call.

    Derivatives of every order, in forward and reverse mode, for every implementation. Reverse mode keeps the result,
    not x.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> jnp.round(softmax(jnp.array([1.0, 2.0, 3.0])), 3)
    Array([0.09 , 0.245, 0.665], dtype=float32)
    """
    check_name(implementation)
    # Beside -inf, as where masked elements become -inf, integers turn into another float.
    x = as_scores("x", x) if where is None else as_scores("x", x, -jnp.inf)
    axes = normalize_axis(axis, x.ndim)
    where = check_where(where, x.shape)
    if not has_kernels(x) and implementation in (None, "xla"):
        return jax.nn.softmax(x, axes, where)
    return _softmax(x, where, axes, implementation)


@functools.partial(jax.jit, static_argnames=("axes", "implementation"))
def _softmax(x, where, axes, implementation):
    scores = x if where is None else jnp.where(where, x, -jnp.inf)
    y = from_rows(_rows(implementation)(to_rows(scores, axes)), x.shape, axes)
    return y if where is None else jnp.where(where, y, 0)


@functools.cache
def _rows(implementation: str | None) -> Callable[[jax.Array], jax.Array]:
    """softmax of rows (..., n). The pullback of g is y * (g - <y, g>), which is also the derivative along g."""

    @jax.custom_vjp
    def softmax(x):
        return row_operation("softmax", implementation, x)[0]

    def fwd(x):
        (y,) = row_operation("softmax", implementation, x)
        return y, (y,)

    def bwd(residuals, g):
        return row_operation("softmax_vjp", implementation, *residuals, g)

    softmax.defvjp(fwd, bwd)
    return with_forward_mode(softmax, lambda y, t: _xla.OPERATIONS["softmax_vjp"](y, t)[0])
