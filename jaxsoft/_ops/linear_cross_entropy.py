"""`linear_softmax_cross_entropy`, the public function: its checks, and the loss from what a linear head computes."""

import functools
import operator
from typing import Literal, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxsoft import fold
from jaxsoft._core.mesh import varying_alike
from jaxsoft._head.derivative import statistics
from jaxsoft._head.head import Head, product_dtype
from jaxsoft._head.operation import Kind
from jaxsoft._ops.arguments import as_kernel_scores
from jaxsoft._rows.losses import Sums, check_labels, check_options, check_weights, row_loss, weight_at


@overload
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    class_weights: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    chunk_size: int | None = None,
    recompute: bool = True,
) -> jax.Array: ...
@overload
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    class_weights: ArrayLike | None = None,
    return_lse: Literal[True],
    chunk_size: int | None = None,
    recompute: bool = True,
) -> tuple[jax.Array, jax.Array]: ...
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    class_weights: ArrayLike | None = None,
    return_lse: bool = False,
    chunk_size: int | None = None,
    recompute: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Cross-entropy of the logits hidden @ weight + bias, which are never in memory all at once.

    .. math::
      \ell = -\sum_c w_c q_c \log p_c + \zeta \log^2 \sum_c e^{z_c}, \quad p = \mathrm{softmax}(z),
      \quad z = h W + b

    with q and the options those of `softmax_cross_entropy_with_integer_labels`, which has the same loss on logits in
    memory.

    Args:
      hidden: h, of shape (..., d), in f16, bf16, f32 or f64.
      weight: W, of shape (d, classes). The products are taken in the dtype that JAX promotes hidden and weight to, and
        summed in f32 (f64 for f64); products of f32 have JAX's default precision, `jax.default_matmul_precision`.
      labels: integers, of shape (...), or of one that broadcasts with it.
      bias: b, of shape (classes,).
      ignore_index: rows with this label have loss 0 and gradient 0. Their hidden must still be finite.
      label_smoothing: epsilon, from 0 to 1.
      z_loss: zeta, the factor of the logsumexp's square.
      logit_softcap: z = cap * tanh((h W + b) / cap), with a cap from 1e-30 to 1e30.
      class_weights: w, one number a class; 1 if None.
      return_lse: return the logsumexp of z beside the losses.
      chunk_size: how many classes are taken at a time; None for 2048, or as many as give 2^20 logits if these are more.
        For rows of d numbers, a chunk of c classes takes 6 * rows * c bytes in bf16, and 2 * d * c for its weights.
      recompute: compute the logits again in reverse mode: four matrix products, and no memory but for a chunk and the
        gradient of hidden in f32. False keeps the logits, rounded to the dtype of the products, and the gradients are
        those of the rounded ones, as they are with all logits in memory: three products, and 2 * rows * classes bytes
        in bf16.

    Returns:
      One loss a row, of the shape of the labels, in f32 for operands of 16 bits and else in the dtype of the products;
      no mean is taken. Labels out of range, rows without a finite logit and the like have the losses that they have in
      `softmax_cross_entropy_with_integer_labels`.

    Raises:
      TypeError, ValueError: an argument does not fit the others.

    Derivatives by hidden, weight, bias and class weights, in their dtypes. Reverse mode goes over the chunks, and
    computes no gradient that is not asked for; forward mode and derivatives of higher order work too, with all logits
    in memory. Over a mesh, rows may be sharded as hidden has them and classes as weight has them: the forward pass then
    costs all-reduces of a few numbers a row, and the backward pass those of the gradients that are sums over devices.

    Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), for the fold;
    Wijmans et al., "Cut your losses in large-vocabulary language models" (arXiv:2411.09009), and Hsu et al., "Liger
    Kernel" (arXiv:2410.10989), for the logits that are not stored.

    >>> hidden, weight = jnp.array([[1.0, 2.0], [0.0, 1.0]]), jnp.array([[0.5, -1.0, 0.0], [0.0, 1.0, 2.0]])
    >>> loss = linear_softmax_cross_entropy(hidden, weight, jnp.array([2, 1]))
    >>> [f"{value:.4f}" for value in loss]
    ['0.0769', '1.4076']
    >>> bool(jnp.allclose(loss, softmax_cross_entropy_with_integer_labels(hidden @ weight, jnp.array([2, 1]))))
    True
    """
    options = check_options(ignore_index, label_smoothing, z_loss, logit_softcap)
    operands = _layer(hidden, weight, bias)
    hidden, weight = operands[Kind.HIDDEN], operands[Kind.WEIGHT]
    classes = weight.shape[1]
    weights = check_weights(class_weights, classes, product_dtype(hidden, weight))
    if weights is not None and options.label_smoothing:
        operands[Kind.CLASS_WEIGHTS] = weights
    operands[Kind.HIDDEN], index = check_labels(labels, hidden, classes, options)
    chunk_size = _check_chunk_size(chunk_size)
    if not isinstance(recompute, bool | np.bool_):
        raise TypeError(f"recompute must be True or False; got {recompute!r}")
    head = Head(
        tuple(operands),
        summed=options.label_smoothing > 0,
        cap=options.logit_softcap,
        precision=jax.config.jax_default_matmul_precision,
        recompute=bool(recompute),
        chunk_size=chunk_size,
    )
    loss, lse = _with_integer_labels(tuple(operands.values()), index, weights, options, head)
    return (loss, lse) if return_lse else loss


def _layer(hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None) -> dict[Kind, jax.Array]:
    """The operands of a linear layer, each checked, by kind."""
    hidden, weight = as_kernel_scores("hidden", hidden), as_kernel_scores("weight", weight)
    if hidden.ndim < 1:
        raise ValueError(f"hidden must have the shape (..., d); got shape {hidden.shape}")
    if weight.ndim != 2 or weight.shape[0] != hidden.shape[-1]:
        raise ValueError(f"weight must have the shape ({hidden.shape[-1]}, classes); got shape {weight.shape}")
    classes = weight.shape[1]
    if not isinstance(classes, int):
        raise ValueError(
            f"weight must have a known number of classes, as they are taken in chunks; got shape {weight.shape}"
        )
    if bias is None:
        return {Kind.HIDDEN: hidden, Kind.WEIGHT: weight}
    bias = as_kernel_scores("bias", bias)
    if bias.shape != (classes,):
        raise ValueError(f"bias must have the shape ({classes},), one number a class; got shape {bias.shape}")
    return {Kind.HIDDEN: hidden, Kind.WEIGHT: weight, Kind.BIAS: bias}


def _check_chunk_size(chunk_size: int | None) -> int | None:
    """The chunk size as a Python integer, or None."""
    if chunk_size is None:
        return None
    try:
        chunk_size = operator.index(chunk_size)
    except TypeError:
        raise TypeError(f"chunk_size must be an integer or None; got {chunk_size!r}") from None
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, or None; got {chunk_size}")
    return chunk_size


@functools.partial(jax.jit, static_argnames=("options", "head"))
def _with_integer_labels(operands, index, weights, options, head):
    *parameters, index = varying_alike(*operands, index)
    others, t, apart, *of_scores = statistics(head)(*parameters, index)
    sums = None
    if of_scores:
        total, mass, count = of_scores if head.weighted else (*of_scores, of_scores[1])
        sums = Sums(total - mass * jax.lax.stop_gradient(fold.reference(t)), mass, count)
    weight = None if weights is None else weight_at(weights, index)
    return row_loss(options, index, others, t, apart, sums, weight=weight)
