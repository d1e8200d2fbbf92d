"""Cross-entropies of logits, the public functions: with integer labels, and with probabilities as labels."""

import functools
import math
from typing import Literal, Never, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxsoft import fold
from jaxsoft._core.implementations import Implementation, as_names
from jaxsoft._core.numbers import as_array, as_mask, holds
from jaxsoft._core.operation import compiled
from jaxsoft._core.rounding import stored
from jaxsoft._ops.arguments import (
    Axis,
    as_kernel_scores,
    broadcastable,
    check_flag,
    check_options,
    merged,
    normalize_axis,
    refuse_old_names,
    without_old_names,
)
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm, scores, softcap, valid_elements
from jaxsoft._rows.formulas import positions
from jaxsoft._rows.losses import (
    LossOptions,
    Options,
    Sums,
    check_labels,
    check_weights,
    returned,
    row_entropy,
    row_loss,
    weight_at,
    weighted_sums,
    with_labels,
)
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations.entropy import below, entropy_of
from jaxsoft._rows.operations.labels import (
    LABEL_ENTROPY,
    LABEL_STATE,
    label_entropy_of_rows,
    label_state_of_rows,
    label_sums_of_rows,
)
from jaxsoft._rows.spec import NO_ROW, RowExtra


class _Options(LossOptions, total=False):
    """The arguments of the overloads of `softmax_cross_entropy`."""

    implementation: Implementation


class _IntegerOptions(_Options, total=False):
    """The arguments of the overloads of `softmax_cross_entropy_with_integer_labels`."""

    ignore_index: int | None


@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_IntegerOptions],
) -> jax.Array: ...
@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[False] = False,
    **options: Unpack[_IntegerOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[_IntegerOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[True],
    **options: Unpack[_IntegerOptions],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[_IntegerOptions],
) -> jax.Array | tuple[jax.Array, ...]: ...
@without_old_names
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    logits_soft_cap: float | None = None,
    class_weights: ArrayLike | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    implementation: Implementation = None,
    **old: Never,
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Cross-entropy of softmax, a drop-in for optax's function of this name that reads the logits once.

    .. math::
      \ell = -\sum_c w_c q_c \log p_c + \zeta \log^2 \sum_c e^{z_c}, \quad p = \mathrm{softmax}(z),
      \quad q_c = (1 - \epsilon) [c = label] + \epsilon / k

    with z the logits, capped if asked to, and k the number of classes that `where` selects and whose logit is above
    -inf.

    Args:
      logits: of shape (..., classes, ...), in f16, bf16, f32 or f64.
      labels: integers, of the shape of the logits without axis, or of one that broadcasts with it. With several axes a
        label is the index into them flattened, in the order given.
      axis: the axis or axes of the classes.
      where: booleans or integers: valid classes, broadcastable to the logits; or, without the axes of the classes,
        valid rows. As in optax, a label that is masked keeps its logit: its loss is the logsumexp of the others minus
        its logit.
      ignore_index: rows with this label have loss 0 and gradient 0, and are not read.
      label_smoothing: epsilon, a number from 0 to 1. Python's and NumPy's numbers are constants of the program, and
        another one compiles again. An array of JAX, traced or not, is an operand: it has derivatives, its range is not
        checked, and it costs what smoothing costs even where it is 0.
      z_loss: zeta, the factor of the logsumexp's square (Chowdhery et al., "PaLM", arXiv:2204.02311): a number of at
        least 0, a constant or an operand likewise. As an operand it costs nothing.
      logits_soft_cap: z = cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118), where -inf becomes -cap. The cap
        is a number from 1e-30 to 1e30, and not traced: kernels are compiled for it.
      class_weights: w, one number a class; 1 if None.
      return_lse: return the logsumexp of z beside the losses. It is -inf in a row that is wholly masked, or that is
        ignored.
      return_entropy: return the entropy of p as well, in nats, after the losses and what return_lse adds: see below.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "triton", "xla" and
        "reference"; see `jaxsoft.implementations`.

    Returns:
      One loss a row, of the shape of the labels, in f32 for logits of 16 bits and else in their dtype; no mean is
      taken. A row that is wholly masked, or of nothing but -inf, has loss 0, whatever its label. Else a label that
      is out of range, as every negative one is, has the loss NaN, and nothing is read out of bounds. Its gradient is
      finite, that of the logsumexp, so that it is 0 where the loss is masked afterwards. A label whose logit is -inf
      has loss inf, and finite gradients.

      With return_lse, also the logsumexps, and with return_entropy the entropies, in a tuple (loss, lse, entropy)
      without what is not asked for.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by the logits, the class weights, and label_smoothing and z_loss where these are arrays, of every order,
    in forward and reverse mode. The gradient at the label is that of log(1 + exp(d)), with d the logsumexp of all other
    classes minus the label's logit, so it has all its digits where the label is nearly certain. Reverse mode keeps the
    logits and a few numbers a row. An axis of classes that is sharded over a mesh costs one exchange of a few numbers a
    row (vocabulary-parallel cross-entropy: Shoeybi et al., "Megatron-LM", arXiv:1909.08053).

    The entropy is that of `jaxsoft.entropy`,

    .. math::
      H = -\sum_c p_c \log p_c

    over the classes that `where` selects. It does not depend on the label, nor on label_smoothing, z_loss and
    class_weights. In a row that is ignored, or wholly masked, it is 0, and so is its gradient; in one that
    holds NaN or +inf it is NaN. It has all its digits where the label is nearly certain. Loss and entropy together take
    one read of the logits, and their gradient one read and one write, by the kernels of "ffi". With "pallas" and
    "triton", and with label_smoothing, XLA reads the logits once more.

    >>> logits, labels = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]]), jnp.array([0, 1])
    >>> softmax_cross_entropy_with_integer_labels(logits, labels).round(2)
    Array([0.28, 2.95], dtype=float32)
    >>> softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, -100]), ignore_index=-100).round(2)
    Array([0.28, 0.  ], dtype=float32)

    A policy gradient, with the action as the label: the loss is minus the log of its probability, and the entropy is
    the bonus that keeps the policy from choosing too early (Mnih et al., arXiv:1602.01783).

    >>> def policy_loss(logits, actions, advantages):
    ...     nll, entropy = softmax_cross_entropy_with_integer_labels(logits, actions, return_entropy=True)
    ...     return jnp.mean(advantages * nll - 0.01 * entropy)
    >>> jax.grad(policy_loss)(logits, labels, jnp.array([1.0, -0.5])).round(2)
    Array([[-0.12,  0.05,  0.07],
           [-0.11,  0.24, -0.13]], dtype=float32)
    """
    if old:
        refuse_old_names(softmax_cross_entropy_with_integer_labels, old, logit_softcap="logits_soft_cap")
    implementation = as_names(implementation)
    options, numbers = check_options(ignore_index, label_smoothing, z_loss, logits_soft_cap)
    asked = check_flag("return_lse", return_lse), check_flag("return_entropy", return_entropy)
    x = as_kernel_scores("logits", logits)
    axes = _class_axes(axis, x.ndim)
    weights = check_weights(class_weights, _classes(x.shape, axes), x.dtype)
    labels = check_labels(labels, tuple(size for a, size in enumerate(x.shape) if a not in axes))
    valid = None if where is None else _where_of(where, _shape_with_rows(x.shape, labels.shape, axes), axes)
    return returned(*_with_integer_labels(x, labels, valid, weights, numbers, axes, options, asked, implementation))


# What is not asked for is no result: in a row that is wholly masked the logsumexp is infinite, at which
# jax_debug_infs would stop.
@functools.partial(jax.jit, static_argnames=("axes", "options", "asked", "implementation"))
def _with_integer_labels(x, labels, valid, weights, numbers, axes, options, asked, implementation):
    return_lse, entropy = asked
    options = options.with_operands(numbers, fold.accumulator(x.dtype))
    x, index = with_labels(labels, merged(x, axes, x.shape), _classes(x.shape, axes), options)
    (x,) = stored(x)  # the sums of smoothing may be taken beside the operation
    extras, label_valid = _extras(x, index, valid)
    smoothed = options.smooths
    summed = smoothed and weights is None and not entropy  # no operation has weighted sums, nor sums and the entropy
    form = RowForm(x.dtype, tuple(extras), cap=options.logits_soft_cap)
    function = label_entropy_of_rows if entropy else label_sums_of_rows if summed else label_state_of_rows
    others, t, log_odds, *of_row = differentiable(function, form, implementation)(x, index, *extras.values())
    sums = None
    if summed:
        total, count = of_row
        sums = _without_masked_label(total, count, index, t, label_valid)
    elif smoothed:
        read = (index != NO_ROW)[..., None] & (True if valid is None else valid)
        z, ref = _scores(x, options, read), jax.lax.stop_gradient(fold.reference(t))
        adds = read & (z != -jnp.inf)
        sums = weighted_sums(z, adds, jnp.ones(x.shape[-1], z.dtype) if weights is None else weights, ref)
    weight = None if weights is None else weight_at(weights, index)
    loss, lse = row_loss(options, index, others, t, log_odds, sums, label_valid, weight)
    of_entropy = row_entropy(index, t, log_odds, of_row[0], label_valid) if entropy else None
    return loss, lse if return_lse else None, of_entropy


def _extras(
    x: jax.Array, index: jax.Array, valid: jax.Array | None
) -> tuple[dict[RowExtra, jax.Array], jax.Array | bool]:
    """The extras of the row operation, and whether the class of each row's label is valid, given which classes are."""
    if valid is None:
        return {}, True
    if valid.shape[-1] == 1:  # whole rows are valid or masked
        label_valid = jnp.broadcast_to(valid[..., 0], x.shape[:-1])
        return {RowExtra.LIMIT: jnp.where(label_valid, jnp.int32(x.shape[-1]), 0)}, label_valid
    return {RowExtra.WHERE: valid}, jnp.any(valid & (positions(x) == index[..., None]), axis=-1)


def _without_masked_label(
    total: jax.Array, count: jax.Array, index: jax.Array, t: jax.Array, label_valid: jax.Array | bool
) -> Sums:
    """The sums that smoothing takes, from those of the row operation, which takes in a masked label too."""
    masked = ~jnp.asarray(label_valid) & (t != -jnp.inf) & (index >= 0)
    here = fold.reference(t)
    total = jnp.where(masked, total - (here - jax.lax.stop_gradient(here)), total)
    count = jnp.where(masked, count - 1, count)
    return Sums(total, count, count)


@overload
def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, ...]: ...
@without_old_names
def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    logits_soft_cap: float | None = None,
    class_weights: ArrayLike | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    implementation: Implementation = None,
    **old: Never,
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Cross-entropy of softmax and a distribution over the classes, a drop-in for optax's function of this name.

    .. math::
      \ell = -\sum_c w_c q_c \log p_c + \zeta \log^2 \sum_c e^{z_c}, \quad p = \mathrm{softmax}(z),
      \quad q_c = (1 - \epsilon) \, labels_c + \epsilon / k

    with z the logits, capped if asked to, the sum over the classes that `where` selects, and k the number of those
    whose logit is above -inf, which alone get a part of epsilon.

    Args:
      logits: of shape (..., classes, ...), in f16, bf16, f32 or f64.
      labels: the probability of each class, or any other numbers, of a shape that broadcasts with that of the logits.
      axis: the axis or axes of the classes; None for all.
      where: booleans or integers: valid classes, broadcastable to the logits; or, without the axes of the classes,
        valid rows.
      label_smoothing, z_loss, logits_soft_cap, class_weights, return_lse, return_entropy, implementation: as of
        `softmax_cross_entropy_with_integer_labels`.

    Returns:
      One loss a row, in f32 for logits of 16 bits and else in their dtype; no mean is taken. Where a logit is -inf, a
      label of 0 adds nothing, where optax has NaN, and any other makes the loss infinite. A row that is wholly
      masked, or of nothing but -inf, has loss 0. With return_lse and return_entropy a tuple, as there.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by the logits, the labels, the class weights, and label_smoothing and z_loss where these are arrays, of
    every order, in forward and reverse mode. The implementation reduces the rows to their state, with the entropy's sum
    if that is asked for, and XLA fuses the rest: its forward pass reads the logits once more, and its backward pass the
    logits and the labels once.

    >>> logits, labels = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]]), jnp.array([[1.0, 0, 0], [0, 1.0, 0]])
    >>> softmax_cross_entropy(logits, labels).round(2)
    Array([0.28, 2.95], dtype=float32)
    """
    if old:
        refuse_old_names(softmax_cross_entropy, old, logit_softcap="logits_soft_cap")
    implementation = as_names(implementation)
    options, numbers = check_options(None, label_smoothing, z_loss, logits_soft_cap)
    asked = check_flag("return_lse", return_lse), check_flag("return_entropy", return_entropy)
    x, q = as_kernel_scores("logits", logits), as_array("labels", labels)
    if not holds(q.dtype, np.floating, np.integer, np.bool_):
        raise TypeError(f"labels must hold real numbers; got dtype {q.dtype.name}")
    axes = _class_axes(axis, x.ndim)
    try:
        shape = _shape_with_labels(x.shape, q.shape, axes)
    except ValueError:
        raise ValueError(f"labels must broadcast with the logits, of shape {x.shape}; got shape {q.shape}") from None
    weights = check_weights(class_weights, _classes(x.shape, axes), x.dtype)
    valid = _where_of(where, shape, tuple(a - x.ndim + len(shape) for a in axes))
    return returned(*_with_labels(x, q, valid, weights, numbers, axes, options, asked, implementation))


def _shape_with_labels(shape: tuple[int, ...], labels: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """What logits and labels of these shapes broadcast to, with as many classes as the logits have along some axes."""
    both = jax.lax.broadcast_shapes(shape, labels)
    before = len(both) - len(shape)
    return tuple(shape[a - before] if a - before in axes else size for a, size in enumerate(both))


def _side_by_side(x: jax.Array, q: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Rows of logits x, of which some axes are the classes, and the label of each, of as many rows as both have."""
    shape = _shape_with_labels(x.shape, q.shape, axes)
    axes = tuple(a - x.ndim + len(shape) for a in axes)
    x, q = (jax.lax.broadcast_to_rank(v, len(shape)) for v in (x, q))
    # Where the logits have one class and the labels several, all of these are labels of that class, and are added up.
    several = tuple(a for a in axes if x.shape[a] == 1 and q.shape[a] != 1)
    q = jnp.sum(q.astype(fold.accumulator(x.dtype)), axis=several, keepdims=True) if several else q
    x, q = (merged(jnp.broadcast_to(v, shape), axes, shape) for v in (x, q))
    return x, q


@functools.partial(jax.jit, static_argnames=("axes", "options", "asked", "implementation"))
def _with_labels(x, q, valid, weights, numbers, axes, options, asked, implementation):
    return_lse, entropy = asked
    x, q = _side_by_side(x, q, axes)
    wide, (x,) = fold.accumulator(x.dtype), stored(x)
    options = options.with_operands(numbers, wide)
    extras = {}
    if valid is not None:
        extras[RowExtra.WHERE] = jnp.broadcast_to(valid, (*valid.shape[:-1], x.shape[-1]))
    form = RowForm(x.dtype, tuple(extras), cap=options.logits_soft_cap)
    m, s, *u = _fused_state(form, implementation, entropy, x, *extras.values())
    empty = s == 0
    z, shown = _scores(x, options, valid), True if valid is None else valid
    q = jnp.where(shown & ~empty[..., None], q.astype(wide), 0)  # NaN times 0 would go on to gradients
    finite = shown & (z > -jnp.inf)
    if options.smooths:
        k = jnp.maximum(jnp.sum(finite, axis=-1, keepdims=True, dtype=wide), 1)
        q = (1 - options.label_smoothing) * q + jnp.where(finite, options.label_smoothing / k, 0)
    if weights is not None:
        q = q * jax.lax.broadcast_to_rank(weights, q.ndim)
    adds = shown & ~empty[..., None] & ((z != -jnp.inf) | (q != 0))
    # -log(p), where an offset of the row cancels first. What does not add is replaced before: -inf - -inf is NaN.
    above = jnp.where(empty, 0, m)[..., None] - jnp.where(adds, z, 0)
    nll = above + jnp.log(jnp.where(empty, 1, s))[..., None]
    loss = jnp.sum(jnp.where(adds, q * jnp.where(adds, nll, 0), 0), axis=-1)
    lse = fold.lse(fold.State(m, s))
    if options.has_z_loss:
        loss = loss + options.z_loss * jnp.where(empty, 0, lse) ** 2
    return loss, lse if return_lse else None, entropy_of(m, s, *u) if entropy else None


# Compiled, as jax.debug_nans would else stop at the score of a label that is none, under jax.disable_jit.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@functools.partial(compiled, static_argnames=("form", "implementation", "entropy"))
def _fused_state(form, implementation, entropy, x, *extras):
    """The state (m, s) of rows, and for the entropy also its sum u.

    m counts as a constant, as what is computed of them does not depend on its choice. The derivatives of s and u are
    formulas, which XLA fuses with the rest of the gradient. Of the operations that reduce a row to its state, only
    those with labels take a cap. So rows get the label -1, which is none of their elements.
    """
    no_label = jnp.full(x.shape[:-1], -1, jnp.int32)
    operation = LABEL_ENTROPY if entropy else LABEL_STATE
    m, s, _, *u = RowOperation(operation, form, implementation)(x, no_label, *extras)
    return m, s, *u


@_fused_state.defjvp
def _fused_state_jvp(form, implementation, entropy, primals, tangents):
    x, *extras = primals
    m, *sums = _fused_state(form, implementation, entropy, *primals)
    beside = dict(zip(form.extras, extras, strict=True))
    valid = valid_elements(form, x, beside)
    z, t = jax.jvp(lambda x: scores(form, x, beside, m.dtype, valid), (x,), tangents[:1])
    along = fold.weight(z, m[..., None]) * t
    terms = [along, along * (1 + below(z, m))]
    return (m, *sums), (jnp.zeros_like(m), *(jnp.sum(v, axis=-1) for v in terms[: len(sums)]))


def _scores(x: jax.Array, options: Options, valid: jax.Array | None) -> jax.Array:
    """The capped logits, in the accumulator's dtype; any finite numbers where they are masked.

    Of a NaN that is masked, the derivative of the cap would be NaN, and 0 times it as well.
    """
    x = x.astype(fold.accumulator(x.dtype))
    return softcap(x if valid is None else jnp.where(valid, x, 0), options.logits_soft_cap)


def _class_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as a tuple of at least one number from 0 to ndim - 1."""
    if ndim == 0:
        raise ValueError("logits must have at least one axis, that of the classes; got shape ()")
    if axes := normalize_axis(axis, ndim):
        return axes
    raise ValueError(f"axis must name at least one axis of the classes; got {axis!r}")


def _where_of(where: ArrayLike | None, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array | None:
    """Which logits of this shape count, with the classes last: (..., classes), or (..., 1) where whole rows count."""
    if where is None:
        return None
    valid = as_mask("where", where)
    if valid.ndim != len(shape) and valid.ndim == len(shape) - len(axes):
        valid = jnp.expand_dims(valid, axes)
    valid = merged(broadcastable("where", valid, shape, beside="logits"), axes, shape)
    return valid if valid.shape[-1] == 1 else jnp.broadcast_to(valid, (*valid.shape[:-1], _classes(shape, axes)))


def _shape_with_rows(shape: tuple[int, ...], rows: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of logits and of the labels of rows together: with the classes of the logits, and the rows of both."""
    beside = iter(rows)
    return jax.lax.broadcast_shapes(shape, tuple(1 if a in axes else next(beside) for a in range(len(shape))))


def _classes(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """How many classes there are along some axes."""
    return math.prod(shape[a] for a in axes)
