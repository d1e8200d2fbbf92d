"""logsumexp: the public function, and its derivative."""

import functools
from collections.abc import Callable
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxsoft import fold
from jaxsoft._arguments import Axis, as_scores, check_where, has_kernels, normalize_axis, to_rows
from jaxsoft._derivative import with_forward_mode
from jaxsoft._formulas import probabilities
from jaxsoft._implementations import check_name
from jaxsoft._rows import row_operation


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
    *,
    implementation: str | None = None,
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
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The logarithm of a sum of exponentials, a drop-in for `jax.nn.logsumexp` and `jax.scipy.special.logsumexp`.

    .. math::
      \mathrm{logsumexp}(a) = m + \log \sum_j b_j e^{a_j - m}, \qquad m = \max_j a_j

    Args:
      a: scores of any shape; f16, bf16, f32 and f64 have kernels. 16-bit scores are computed in f32 and rounded once.
      axis: the axis or axes that are reduced; None for all.
      b: factors of the exponentials, broadcastable with a; 1 if None. Served by "xla" alone.
      keepdims: keep the reduced axes, with length 1.
      return_sign: return the logarithm of the sum's absolute value, and its sign.
      where: boolean, broadcastable to a. Elements where it is False do not count.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "xla" and "reference"; see
        `jaxsoft.implementations`.

    Returns:
      Natural logarithms, of a's dtype; with return_sign, also the signs: -1, 0 or 1. A sum of nothing, or of nothing
      but exp(-inf), is -inf; a negative sum is NaN unless return_sign is set.

    Raises:
      ValueError: axis, b or where do not fit a, or the named implementation cannot serve the call.

    Derivatives of every order, in forward and reverse mode, for every implementation. Unlike JAX's, the gradient of a
    row that is all -inf is 0, not NaN.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> logsumexp(jnp.log(jnp.array([1.0, 2.0, 5.0]))).round(4) == jnp.log(8.0).round(4)
    Array(True, dtype=bool)
    """
    check_name(implementation)
    a, b = as_scores("a", a, *(() if b is None else (b,))), b if b is None else as_scores("b", b, a)
    if b is not None:
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise ValueError(f"b must broadcast with a, of shape {a.shape}; got shape {b.shape}") from None
        a = jnp.broadcast_to(a, shape)
    axes = normalize_axis(axis, a.ndim)
    where = check_where(where, a.shape)
    if not has_kernels(a) and implementation in (None, "xla"):
        return jax.nn.logsumexp(a, axes, b, keepdims, return_sign, where)
    if b is not None and implementation not in (None, "xla"):
        raise ValueError(
            f"implementation={implementation!r} cannot serve this call: it has no factors b. "
            "implementation=None and 'xla' have them"
        )
    out, sign = _logsumexp(a, b, where, axes, implementation)
    if keepdims:
        out, sign = jnp.expand_dims(out, axes), jnp.expand_dims(sign, axes)
    if return_sign:
        return out, sign
    return out if b is None else jnp.where(sign < 0, jnp.nan, out)


@functools.partial(jax.jit, static_argnames=("axes", "implementation"))
def _logsumexp(a, b, where, axes, implementation):
    scores = a if where is None else jnp.where(where, a, -jnp.inf)
    if b is not None:
        return _weighted(scores, b, axes)
    out = _rows(implementation)(to_rows(scores, axes)).astype(a.dtype)
    return out, jnp.where(jnp.isnan(out), out, jnp.where(out == -jnp.inf, 0, 1).astype(a.dtype))


def _weighted(a, b, axes):
    """log |sum b exp(a)| and the sum's sign, in plain JAX."""
    dtype = a.dtype
    a, b = a.astype(fold.accumulator(dtype)), b.astype(fold.accumulator(dtype))
    a = jnp.where(b == 0, -jnp.inf, a)
    ref = fold.reference(jax.lax.stop_gradient(jnp.max(a, axis=axes, initial=-jnp.inf, keepdims=True)))
    total = jnp.sum(jnp.exp(a - ref) * b, axis=axes)
    empty = total == 0
    out = jnp.where(empty, -jnp.inf, jnp.log(jnp.abs(jnp.where(empty, 1, total))) + ref.reshape(total.shape))
    return out.astype(dtype), jnp.sign(total).astype(dtype)


@functools.cache
def _rows(implementation: str | None) -> Callable[[jax.Array], jax.Array]:
    """logsumexp of rows (..., n), in the accumulator's dtype. The pullback of g is p * g, p the probabilities."""

    @jax.custom_vjp
    def logsumexp(x):
        return fold.lse(fold.State(*row_operation("state", implementation, x)))

    def fwd(x):
        m, s = row_operation("state", implementation, x)
        return fold.lse(fold.State(m, s)), (x, m, s)

    def bwd(residuals, g):
        return row_operation("logsumexp_vjp", implementation, *residuals, g)

    def tangent(x, m, s, t):
        p = probabilities(x, m, s)
        return jnp.sum(p * t.astype(p.dtype), axis=-1)

    logsumexp.defvjp(fwd, bwd)
    return with_forward_mode(logsumexp, tangent)
