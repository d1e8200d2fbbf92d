"""softmax_kl_divergence: the public function."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxsoft._core.implementations import Implementation, as_names
from jaxsoft._core.mesh import sharded_like
from jaxsoft._ops.arguments import Axis, as_kernel_scores, check_extras, merged, normalize_axis, to_rows
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operations.kl_divergence import kl_divergence_of_rows
from jaxsoft._rows.spec import SCALES
from jaxsoft.fold import accumulator


def softmax_kl_divergence(
    p_logits: ArrayLike,
    q_logits: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    r"""The Kullback-Leibler divergence of one softmax from another, both given by their logits, as in distillation.

    .. math::
      \mathrm{KL}(p \,\|\, q) = \sum_i p_i (\log p_i - \log q_i), \qquad p = \mathrm{softmax}(scale \cdot p\_logits),
      \quad q = \mathrm{softmax}(scale \cdot q\_logits)

    It is computed as the sum of terms none of which is negative, p (exp(d) - 1 - d) with d = log(q / p), so that
    nothing cancels: where the logits differ by a thousandth, the difference of a cross-entropy and an entropy in
    float32 has no digit right but the first. Each array is read once.

    Args:
      p_logits: of any shape; f16, bf16, f32 and f64 have kernels. They compute in f32 (f64 for f64).
      q_logits: of a shape that broadcasts with that of p_logits, in any of these dtypes.
      axis: the axis or axes of the classes; None for all.
      where: booleans or integers, broadcastable to the logits. Classes where it is False are masked, for either of
        both.
      scale: a number; or one for each row, in an array of the shape of the result, or broadcastable to the logits with
        length 1 along the classes. Both are multiplied by it: a temperature is 1 / scale.
      implementation: None for the fastest that serves the call, or one or a tuple of "ffi", "pallas", "triton", "xla"
        and "reference"; see `jaxsoft.implementations`.

    Returns:
      The divergence of each row in natural units, of the logits' shape without the classes, in f32 (f64 if either are
      f64). It is 0 for a row that is wholly masked, +inf where q is 0 and p is not, and NaN where logits hold NaN or
      +inf.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or a named implementation cannot serve the call.

    Derivatives by both logits and by scale, of every order, in forward and reverse mode, for every implementation. What
    is masked has the gradient 0. Reverse mode keeps the logits and five numbers a row. If p is a fixed target, use
    `jax.lax.stop_gradient`, or differentiate by q_logits alone: its gradient is then neither computed nor written.

    It is optax's `kl_divergence(log_softmax(q_logits), softmax(p_logits))`, which takes the logarithms of q first.

    Source: Kullback and Leibler, "On information and sufficiency" (1951); Hinton, Vinyals and Dean, "Distilling the
    knowledge in a neural network" (arXiv:1503.02531).

    >>> teacher, student = jnp.array([2.0, 1.0, 0.0]), jnp.array([1.0, 1.0, 0.0])
    >>> softmax_kl_divergence(teacher, student).round(4)
    Array(0.1196, dtype=float32)

    As a loss of distillation at a temperature of 2, which Hinton et al. multiply by its square:

    >>> loss = lambda student: 4 * softmax_kl_divergence(teacher, student, scale=1 / 2)
    >>> jax.grad(loss)(student).round(1)
    Array([-0.2,  0.2,  0.1], dtype=float32)
    """
    names = as_names(implementation)
    x, y = as_kernel_scores("p_logits", p_logits), as_kernel_scores("q_logits", q_logits)
    if x.shape != y.shape:
        try:
            x, y = jnp.broadcast_arrays(x, y)
        except ValueError:
            raise ValueError(
                f"q_logits must have a shape that broadcasts with that of p_logits, {x.shape}; got {y.shape}"
            ) from None
    if accumulator(x.dtype) != accumulator(y.dtype):  # f64 beside another dtype
        x, y = (v.astype(jnp.float64) for v in (x, y))
    axes = normalize_axis(axis, x.ndim)
    where, scale, _ = check_extras(x, axes, where, scale, None, False)
    return _kl_divergence(x, y, axes, where, scale, names)


# --8<-- [start:function]
@functools.partial(jax.jit, static_argnames=("axes", "implementation"))
def _kl_divergence(x, y, axes, where, scale, implementation):
    rows, extras, trailing = to_rows(x, axes, where, scale, None, False)
    others = sharded_like(y, x) if trailing else merged(sharded_like(y, x), axes, x.shape)
    if scale is not None:
        extras[SCALES[1]] = extras[SCALES[0]]
    form = RowForm(x.dtype, tuple(extras), trailing, other_dtype=y.dtype)
    return differentiable(kl_divergence_of_rows, form, implementation)(rows, others, *extras.values())[0]
    # --8<-- [end:function]
