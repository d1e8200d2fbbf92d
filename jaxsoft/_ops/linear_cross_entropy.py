"""`linear_softmax_cross_entropy`, the public function: its checks, and the loss from what a linear head computes."""

import functools
from typing import Literal, Never, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxsoft import fold
from jaxsoft._core.mesh import sharded_like, varying_alike
from jaxsoft._head.derivative import statistics
from jaxsoft._head.head import Head, product_dtype
from jaxsoft._head.loss import Objective, weighted
from jaxsoft._head.operation import HeadArray
from jaxsoft._head.total import Total
from jaxsoft._ops.arguments import (
    as_dtype,
    as_kernel_scores,
    as_scale,
    broadcastable,
    check_flag,
    check_options,
    known_integer,
    refuse_old_names,
    without_old_names,
)
from jaxsoft._rows.losses import (
    LossOptions,
    check_labels,
    check_weights,
    returned,
    weight_at,
    with_labels,
)
from jaxsoft._rows.spec import NO_ROW


class _LinearOptions(LossOptions, total=False):
    """The arguments of the overloads."""

    ignore_index: int | None
    reduction: Literal["mean", "sum"] | None
    row_weights: ArrayLike | None
    scale: ArrayLike
    chunk_size: int | None
    recompute: bool
    accumulator_dtype: DTypeLike | None


@overload
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_LinearOptions],
) -> jax.Array: ...
@overload
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[False] = False,
    **options: Unpack[_LinearOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[_LinearOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[True],
    **options: Unpack[_LinearOptions],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[_LinearOptions],
) -> jax.Array | tuple[jax.Array, ...]: ...
@without_old_names
def linear_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    logits_soft_cap: float | None = None,
    class_weights: ArrayLike | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    reduction: Literal["mean", "sum"] | None = None,
    row_weights: ArrayLike | None = None,
    scale: ArrayLike = 1.0,
    chunk_size: int | None = None,
    recompute: bool = True,
    accumulator_dtype: DTypeLike | None = None,
    **old: Never,
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Cross-entropy of the logits scale * (hidden @ weight + bias), in the memory of a chunk or of a gradient.

    .. math::
      \ell = -\sum_c w_c q_c \log p_c + \zeta \log^2 \sum_c e^{z_c}, \quad p = \mathrm{softmax}(z),
      \quad z = a (h W + b)

    with q and the options those of `softmax_cross_entropy_with_integer_labels`, which has the same loss on logits in
    memory. With a reduction, and the row weights u,

    .. math::
      L_\mathrm{sum} = \sum_i u_i \ell_i, \quad L_\mathrm{mean} = L_\mathrm{sum} / \sum_i u_i

    over the rows that are not ignored.

    There are two ways to compute it. *By rows*, which a reduction makes possible: its gradient is known up to one
    factor before there is a cotangent, so one pass over chunks of rows computes the loss and the gradients by three
    matrix products, in the memory of a chunk's logits, or in that of the gradient of weight. *By classes*: four
    products, as the backward pass computes the logits again, or three with all logits kept.

    On a Hopper GPU, by classes and in 16 bits, Pallas kernels compute the logits tile by tile and leave nothing of them
    in memory but the logits' gradients. They serve at least 17 rows where d and the number of classes are multiples of
    64, on each device of a mesh; and not class_weights beside label_smoothing, label_smoothing beside return_entropy
    (where it is an array, even of 0), chunk_size, or recompute=False.

    Args:
      hidden: h, of shape (..., d), in f16, bf16, f32 or f64.
      weight: W, of shape (d, classes). The products are taken in the dtype that JAX promotes hidden and weight to, and
        summed in f32 (f64 for f64); products of f32 have JAX's default precision, `jax.default_matmul_precision`.
      labels: integers, of shape (...), or of one that broadcasts with it.
      bias: b, of shape (classes,).
      ignore_index: rows with this label have loss 0 and gradient 0. Their hidden must still be finite.
      label_smoothing, z_loss: epsilon and zeta, numbers as `softmax_cross_entropy_with_integer_labels` has them: arrays
        of JAX are operands, with derivatives, and others are constants of the program.
      logits_soft_cap: z = cap * tanh(a (h W + b) / cap), with a cap from 1e-30 to 1e30 that is not traced.
      class_weights: w, one number a class; 1 if None.
      return_lse: return the logsumexp of z beside the losses. With a reduction, this takes the way by classes.
      return_entropy: return the entropy of p as well, in nats, after the losses and what return_lse adds; as
        `softmax_cross_entropy_with_integer_labels` does. With a reduction, this takes the way by classes.
      reduction: "mean" or "sum", or None for one loss a row.
      row_weights: u, real numbers of the shape of the losses, or of one that broadcasts to it; 1 if None. Without a
        reduction each loss is multiplied by its row's. A row with weight 0 adds 0, even where its own loss is inf or
        NaN, as for a label out of range, and then the derivative by its weight is 0. Its hidden must still be finite.
      scale: a, a number that is finite in f32. By rows, and where it is traced, a * hidden is rounded to the dtype of
        the products; else it is a constant of the program, and another one compiles again.
      chunk_size: by rows, how many rows are taken at a time; None for about 1024, or about as many as have 2^28 bytes
        of logits if these are more: all of them, or a multiple of 256. A chunk of r rows takes 2 * r * classes bytes in
        bf16. With more than d rows in all, each reads and writes the gradient of weight once. For d rows, or up to
        d / 32 less, None is all: their logits are computed in the memory of the gradient of weight, if that is asked
        for and has the dtype of the products. By classes, how many classes; None for 2048, or as many as give 2^20
        logits if these are more. For rows of d numbers, a chunk of c classes takes 6 * rows * c bytes in bf16, and
        2 * d * c for its weights. Where the logits are computed again for the gradient of weight, None mostly lets the
        forward pass of a GPU take chunks of rows, in half the memory which that gradient will have: no more, where one
        `jax.jit` computes both. The kernels take no chunks forward, nor where gradients of logits fit into the memory
        of the gradient of weight, of d rows or up to d / 32 less; else 4096 classes or more, which take 2 * rows * c
        bytes, and 2 * d * c for their weights.
      recompute: by classes, compute the logits again in reverse mode: four matrix products, and no memory but for a
        chunk and the gradient of hidden in f32, which d rows do without on a GPU. False keeps the logits, rounded to
        the dtype of the products, and the gradients are those of the rounded ones, as they are with all logits in
        memory: three products, and 2 * rows * classes bytes in bf16. Where loss and gradients are computed in one
        `jax.jit`, the logits of d rows become the gradient of weight in place, and take no memory beside it.
      accumulator_dtype: by rows, with more than d of them, the dtype in which the gradient of weight is summed over the
        chunks, a float dtype; None for weight's own, in which each chunk rounds it once. Another takes memory for one
        more gradient. With no more than d rows in all, or with one chunk, it is rounded once in any case, if weight has
        the dtype of the products.

    Returns:
      One loss a row, of the shape of the labels, or with a reduction one number, and beside it the logsumexp and the
      entropy of each row if asked for: in f32 for operands of 16 bits and else in the dtype of the products. Labels out
      of range, rows without a finite logit and the like have the losses that they have in
      `softmax_cross_entropy_with_integer_labels`. A mean over rows whose weights sum to 0, as where all are ignored, is
      0, and so are its gradients.

    Raises:
      TypeError, ValueError: an argument does not fit the others.

    Derivatives by hidden, weight, bias, class weights and row weights, in their dtypes, and by traced label_smoothing,
    z_loss and scale. No gradient is computed that is not asked for: by rows, two products are enough where weight has
    none. Forward mode and derivatives of higher order work too, the latter with all logits in memory. By rows, loss and
    gradients are those of logits that are rounded to the dtype of the products, as they are in memory, and the
    gradients are what is kept from the forward pass to the backward pass. Where a loop is differentiated as a whole,
    each of its steps would keep the gradient of weight: leave the reduction out there, or let `jax.checkpoint` compute
    the step again. A call with f16 products is computed by classes, as gradients before the cotangent could be too
    small for f16. So are one with a bias of a wider dtype than the products, whose digits logits of the products' dtype
    would lose; one that `jax.vmap` maps before it is differentiated; and one whose number of rows is symbolic. Over a
    mesh, rows may be sharded as hidden has them and classes as weight has them: the devices then exchange a few numbers
    a row, once, and the gradients that are sums over devices cost all-reduces of their size, that of hidden in the
    accumulator's dtype.

    Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), for the fold;
    Wijmans et al., "Cut your losses in large-vocabulary language models" (arXiv:2411.09009), and Hsu et al., "Liger
    Kernel" (arXiv:2410.10989), for the logits that are not stored, the latter for gradients in the forward pass, too.

    >>> hidden, weight = jnp.array([[1.0, 2.0], [0.0, 1.0]]), jnp.array([[0.5, -1.0, 0.0], [0.0, 1.0, 2.0]])
    >>> loss = linear_softmax_cross_entropy(hidden, weight, jnp.array([2, 1]))
    >>> [f"{value:.4f}" for value in loss]
    ['0.0769', '1.4076']
    >>> bool(jnp.allclose(loss, softmax_cross_entropy_with_integer_labels(hidden @ weight, jnp.array([2, 1]))))
    True
    >>> mean = functools.partial(linear_softmax_cross_entropy, labels=jnp.array([2, 1]), reduction="mean")
    >>> value, (to_hidden, to_weight) = jax.value_and_grad(mean, (0, 1))(hidden, weight)
    >>> f"{value:.4f}"
    '0.7423'
    """
    if old:
        refuse_old_names(linear_softmax_cross_entropy, old, logit_softcap="logits_soft_cap")
    options, numbers = check_options(ignore_index, label_smoothing, z_loss, logits_soft_cap)
    scale = as_scale(scale)
    if reduction is not None and not (isinstance(reduction, str) and reduction in ("mean", "sum")):
        raise ValueError(f"reduction must be None, 'mean' or 'sum'; got {reduction!r}")
    operands = _layer(hidden, weight, bias)
    hidden, weight = operands[HeadArray.HIDDEN], operands[HeadArray.WEIGHT]
    classes, dtype = weight.shape[1], product_dtype(hidden, weight)
    weights = check_weights(class_weights, classes, dtype)
    if weights is not None and options.smooths:
        operands[HeadArray.CLASS_WEIGHTS] = weights
    labels = check_labels(labels, hidden.shape[:-1])
    operands[HeadArray.HIDDEN], index = with_labels(labels, hidden, classes, options)
    factors = _check_row_weights(row_weights, index, dtype)
    chunk_size = _check_chunk_size(chunk_size)
    recompute = check_flag("recompute", recompute)
    return_lse, return_entropy = check_flag("return_lse", return_lse), check_flag("return_entropy", return_entropy)
    sum_dtype = None if accumulator_dtype is None else as_dtype("accumulator_dtype", accumulator_dtype)
    bias_fits = bias is None or jnp.finfo(operands[HeadArray.BIAS].dtype).nmant <= jnp.finfo(dtype).nmant
    plain = not return_lse and not return_entropy and dtype != jnp.float16 and bias_fits
    by_rows = reduction is not None and plain and isinstance(index.size, int)
    if isinstance(scale, jax.Array):
        operands |= _scaled(scale, dtype, operands)
        scale = 1.0
    head = Head(
        tuple(operands),
        summed=options.smooths,
        entropy=return_entropy,
        scale=scale,
        cap=options.logits_soft_cap,
        precision=jax.config.jax_default_matmul_precision,
        recompute=recompute,
        chunk_size=None if by_rows else chunk_size,
    )
    objective = Objective(head, options, weights is not None, chunk_size if by_rows else None, sum_dtype)
    return returned(
        *_loss(tuple(operands.values()), index, factors, weights, numbers, objective, reduction, return_lse, by_rows)
    )


def _layer(hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None) -> dict[HeadArray, jax.Array]:
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
        return {HeadArray.HIDDEN: hidden, HeadArray.WEIGHT: weight}
    bias = as_kernel_scores("bias", bias)
    if bias.shape != (classes,):
        raise ValueError(f"bias must have the shape ({classes},), one number a class; got shape {bias.shape}")
    return {HeadArray.HIDDEN: hidden, HeadArray.WEIGHT: weight, HeadArray.BIAS: bias}


def _scaled(scale: jax.Array, dtype: np.dtype, operands: dict[HeadArray, jax.Array]) -> dict[HeadArray, jax.Array]:
    """Hidden and bias times a traced scale, the former rounded to the products' dtype, the latter not at all."""
    wide = fold.accumulator(dtype)
    scale = scale.astype(wide)
    found = {HeadArray.HIDDEN: (operands[HeadArray.HIDDEN].astype(wide) * scale).astype(dtype)}
    return found | {kind: operands[kind].astype(wide) * scale for kind in operands.keys() & {HeadArray.BIAS}}


def _check_chunk_size(chunk_size: int | None) -> int | None:
    """The chunk size as a Python integer, or None."""
    if chunk_size is None:
        return None
    chunk_size = known_integer("chunk_size", chunk_size, "None or an integer")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, or None; got {chunk_size}")
    return chunk_size


def _check_row_weights(row_weights: ArrayLike | None, index: jax.Array, dtype: np.dtype) -> jax.Array | None:
    """The row weights in the dtype of the losses, one for each row and sharded as its label is, after checking them."""
    if row_weights is None:
        return None
    weights = broadcastable("row_weights", row_weights, index.shape, beside="losses")
    if not (jnp.issubdtype(weights.dtype, jnp.floating) or jnp.issubdtype(weights.dtype, jnp.integer)):
        raise TypeError(f"row_weights must hold real numbers; got dtype {weights.dtype.name}")
    return sharded_like(jnp.broadcast_to(weights.astype(fold.accumulator(dtype)), index.shape), index)


@functools.partial(jax.jit, static_argnames=("objective", "reduction", "return_lse", "by_rows"))
def _loss(operands, index, factors, weights, numbers, objective, reduction, return_lse, by_rows):
    """The loss, and by classes the logsumexp of each row and the entropy, if they are wanted."""
    dtype = fold.accumulator(product_dtype(*operands[:2]))
    if factors is None:
        factors = jnp.ones_like(index, dtype)
    factors = jnp.where(index == NO_ROW, 0, factors)
    if reduction == "mean":
        # In units of about the largest, the sum is in range. The mean does not depend on them, nor do its derivatives.
        info = jnp.finfo(dtype)
        unit = jnp.clip(jnp.max(jnp.abs(factors), initial=0), 16 * info.tiny, info.max / 16)  # 1 / unit is normal
        # The barrier keeps XLA from dividing once, by the product of the unit and the sum, which may be infinite.
        factors = jax.lax.optimization_barrier(factors / jax.lax.stop_gradient(unit))
        total = jnp.sum(factors)
        factors = jnp.where(total == 0, 0, factors / jnp.where(total == 0, 1, total))
    numbers = [number.astype(dtype) for number in numbers]
    count = len(operands)
    *varying, index, factors = varying_alike(*operands, *numbers, index, factors)
    operands, numbers = varying[:count], varying[count:]
    of_label = () if weights is None else varying_alike(weight_at(weights, index), index)[:1]
    if by_rows:
        return Total(objective)(*operands, index, factors, *of_label, *numbers)[0], None, None
    found = statistics(objective.head)(*operands, index)
    loss, lse, entropy = objective.losses(index, found, *(of_label or (None,)), numbers)
    loss = weighted(factors, loss)
    return loss if reduction is None else jnp.sum(loss), lse if return_lse else None, entropy
