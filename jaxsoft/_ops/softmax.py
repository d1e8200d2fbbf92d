"""softmax: the public function."""

from typing import Never

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.implementations import Implementation
from jaxsoft._ops.arguments import Axis, is_left_to_jax, refuse_old_names, without_old_names
from jaxsoft._ops.normalize import by_jax, checked, normalize
from jaxsoft._rows.operations.softmax import softmax_of_rows

_of_jax = jax.nn.softmax  # looked up at import, as a user may later put jaxsoft's function in its place


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
      where: boolean, broadcastable to x. Elements where it is False get 0 and are left out.
      scale: a number, or an array broadcastable to x with length 1 along the reduced axes: a temperature is 1 / scale.
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
    x, axes, extras, dtype, names = checked(x, axis, where, scale, bias, is_causal, dtype, implementation)
    if is_left_to_jax(x, names):
        return by_jax(_of_jax, x, axes, extras, dtype, is_causal)
    return normalize(softmax_of_rows, x, axes, extras, dtype, names, is_causal)
