"""entropy: the public function."""

import functools
from typing import Never

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.implementations import Implementation, as_names
from jaxsoft._ops.arguments import (
    Axis,
    as_kernel_scores,
    check_dtype,
    check_extras,
    normalize_axis,
    refuse_old_names,
    to_rows,
    without_old_names,
)
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operations.entropy import entropy_of_rows


@without_old_names
def entropy(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
    **old: Never,
) -> jax.Array:
    r"""The entropy of the softmax of scores, in nats, in one read of the scores.

    .. math::
      H = -\sum_i p_i \log p_i = \log s - \frac{1}{s} \sum_i e^{z_i - m} (z_i - m), \qquad
      p = \mathrm{softmax}(z), \quad z = x \cdot scale + bias, \quad m = \max_j z_j, \quad s = \sum_j e^{z_j - m}

    Args:
      x: scores of any shape; f16, bf16, f32 and f64. They are computed with in f32 (f64 for f64).
      axis: the axis or axes over which probabilities sum to 1; None for all.
      where: booleans or integers, broadcastable to x. Elements where it is False have the probability 0.
      scale: a number; or one for each row, in an array of the shape of the rows, those of x without the reduced axes,
        or broadcastable to x with length 1 along these. A temperature is 1 / scale.
      bias: an array broadcastable to x. It needs no memory of x's size, nor does where.
      is_causal: count element j of row i only if j <= i, where i is the index along the axis before the last, and the
        last axis is reduced.
      keepdims: keep the reduced axes, with length 1.
      dtype: of the result: f16, bf16, f32 or f64; None for f32, and f64 for f64.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "triton", "xla" and
        "reference"; see `jaxsoft.implementations`. Only "ffi" has kernels for the sum. The others read x once more:
        "pallas" and "triton" reduce it to its state, and XLA takes the sum.

    Returns:
      From 0 to the logarithm of the number of valid elements. A row that is wholly masked, or of nothing but
      -inf, has the entropy 0; one that holds NaN or +inf has NaN. Near 0, where one score dominates its row, the error
      is up to 1e-6 of 1 (1e-15 in f64), not of the entropy.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by x, scale and bias, of every order, in forward and reverse mode, for every implementation. Reverse
    mode keeps x and three numbers a row. An axis that is sharded over a mesh costs one exchange of three numbers a row.

    Source: Williams and Peng, "Function optimization using connectionist reinforcement learning algorithms" (1991), for
    the bonus that policy gradients give to it; the sum joins the fold of Milakov and Gimelshein (arXiv:1805.02867).

    >>> bool(jnp.allclose(entropy(jnp.zeros(8)), jnp.log(8.0)))
    True

    The bonus of a policy over four actions, of which one is not allowed:

    >>> logits, allowed = jnp.array([1.0, 2.0, 0.5, 3.0]), jnp.array([True, True, True, False])
    >>> f"{entropy(logits, where=allowed):.3f}"
    '0.906'
    """
    if old:
        refuse_old_names(entropy, old, causal="is_causal")
    implementation = as_names(implementation)
    x = as_kernel_scores("x", x)
    axes = normalize_axis(axis, x.ndim)
    extras = check_extras(x, axes, where, scale, bias, is_causal)
    dtype = None if dtype is None else check_dtype(dtype, x)
    return _entropy(x, axes, *extras, is_causal, bool(keepdims), dtype, implementation)


@functools.partial(jax.jit, static_argnames=("axes", "is_causal", "keepdims", "dtype", "implementation"))
def _entropy(x, axes, where, scale, bias, is_causal, keepdims, dtype, implementation):
    rows, extras, trailing = to_rows(x, axes, where, scale, bias, is_causal)
    form = RowForm(x.dtype, tuple(extras), trailing)
    (out,) = differentiable(entropy_of_rows, form, implementation)(rows, *extras.values())
    out = out if dtype is None else out.astype(dtype)
    return jnp.expand_dims(out, axes) if keepdims else out
