"""The k most probable elements: the public function."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.implementations import Implementation, as_names
from jaxsoft._core.numbers import as_axis
from jaxsoft._ops.arguments import as_kernel_scores, check_dtype, check_flag, known_integer
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.formulas import wide
from jaxsoft._rows.operations.top_k import top_k_of_rows
from jaxsoft.fold import accumulator


def top_k_softmax(
    x: ArrayLike,
    k: int,
    axis: int = -1,
    *,
    renormalize: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""The k largest scores along an axis, their softmax and their indices, in one read of the scores.

    .. math::
      v_j = x_{i_j}, \qquad p_j = \frac{e^{v_j - m}}{\sum_l e^{x_l - m}}, \qquad m = \max_l x_l

    Args:
      x: scores of any shape; f16, bf16, f32 and f64 have kernels. Probabilities are computed in f32 (f64 for f64) and
        rounded once.
      k: how many, from 1 to the length of the axis. The C++ and CUDA kernels find up to 256, but those of CUDA none of
        f64. Otherwise XLA serves the call, or if "ffi" is named, XLA finds the elements and the kernels their softmax.
      axis: of x, in whose place the results have one of length k. One before the last is transposed first.
      renormalize: whether the probabilities are relative to the k elements alone, so that they sum to 1, as those of
        experts do in many routers. They are then the softmax of the values.
      dtype: of the probabilities: f16, bf16, f32 or f64; None for x's.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "triton", "xla" and
        "reference", of which all but ffi take XLA's top_k; see `jaxsoft.implementations`.

    Returns:
      (values, probabilities, indices): the scores, largest first, in x's dtype; their softmax over the whole axis, or
      over the k of them; and their int32 indices along it. Of equal scores, which -0.0 and 0.0 are, the one of the
      lowest index comes first. The order is that of the scores: of two that differ, the larger comes first, even where
      their probabilities are rounded to the same number and `jax.lax.top_k(jax.nn.softmax(x), k)` would take the lower
      index. A row whose softmax has no value, as it holds NaN or +inf, or nothing but -inf, has the probabilities NaN,
      so that its gradient is NaN, too, and its first k elements.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives of the values and of the probabilities by x, of every order, in forward and reverse mode, with the
    indices held fixed. Reverse mode keeps x, and no other array of its size. Where the axis is sharded over a mesh,
    each device finds the k largest of its part, and gathers k values and indices a row from each of the others.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), section 4.

    >>> values, probabilities, indices = top_k_softmax(jnp.log(jnp.array([1.0, 4.0, 1.0, 2.0])), 2)
    >>> probabilities.round(3), indices
    (Array([0.5 , 0.25], dtype=float32), Array([1, 3], dtype=int32))
    """
    implementation = as_names(implementation)
    x = as_kernel_scores("x", x)
    axis = as_axis(axis, x.ndim)
    k = known_integer("k", k)
    if not 1 <= k <= x.shape[axis]:
        raise ValueError(f"k must be from 1 to the length of the axis, {x.shape[axis]}; got {k}")
    renormalize = check_flag("renormalize", renormalize)
    return _top_k_softmax(x, k, axis, renormalize, check_dtype(dtype, x), implementation)


@functools.partial(jax.jit, static_argnames=("k", "axis", "renormalize", "dtype", "implementation"))
def _top_k_softmax(x, k, axis, renormalize, dtype, implementation):
    rows = jnp.moveaxis(x, axis, -1)
    values, p, indices = differentiable(top_k_of_rows, RowForm(dtype, k=k), implementation)(rows)
    if renormalize:
        undefined = jnp.where(jnp.isnan(p[..., :1]), jnp.nan, 1).astype(accumulator(x.dtype))
        p = (jax.nn.softmax(wide(values), axis=-1) * undefined).astype(dtype)
    return tuple(jnp.moveaxis(v, -1, axis) for v in (values, p, indices))
