"""What the cross-entropies share: their options, the checks of their arrays, and a row's loss.

With p the softmax of the scores z, the loss of a row is

    -sum_c w_c q_c log(p_c) + z_loss * logsumexp(z)^2,    q = (1 - label_smoothing) * labels + label_smoothing / k

where k is the number of classes whose score is above -inf; the other classes have no part of label_smoothing. The row
operations of `jaxsoft._rows.operations.labels` read whole rows, and give a few numbers a row. The loss is a formula of
these numbers, which JAX differentiates, and so is the entropy of p.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxsoft import fold
from jaxsoft._core.mesh import sharded_like, sharding_over
from jaxsoft._core.numbers import as_array, holds
from jaxsoft._rows.formulas import nan_where
from jaxsoft._rows.spec import NO_ROW


class Options(NamedTuple):
    """The options of a loss that are numbers.

    Attributes:
      ignore_index: rows with this label have loss 0 and gradient 0.
      label_smoothing: the share of the target that all classes get alike.
      z_loss: the factor of logsumexp(z)^2.
      logits_soft_cap: the scores are cap * tanh(logits / cap).
      operands: which of label_smoothing and z_loss are arrays of one number, and so operands of a program, whose
        constants the others are. The record has them after `with_operands`.
    """

    ignore_index: int | None = None
    label_smoothing: float | jax.Array = 0.0
    z_loss: float | jax.Array = 0.0
    logits_soft_cap: float | None = None
    operands: tuple[str, ...] = ()

    @property
    def smooths(self) -> bool:
        """Whether there may be label smoothing: of an operand it is not known whether it is 0."""
        return "label_smoothing" in self.operands or bool(self.label_smoothing)

    @property
    def has_z_loss(self) -> bool:
        """Whether there may be a z-loss, likewise."""
        return "z_loss" in self.operands or bool(self.z_loss)

    def with_operands(self, given: Sequence[jax.Array], dtype: np.dtype) -> "Options":
        """The options with their operands, in this dtype, that of the losses."""
        arrays: dict[str, Any] = {name: v.astype(dtype) for name, v in zip(self.operands, given, strict=True)}
        return self._replace(**arrays)


class LossOptions(TypedDict, total=False):
    """The arguments of every cross-entropy that do not decide what it returns, for the types of its overloads."""

    label_smoothing: ArrayLike
    z_loss: ArrayLike
    logits_soft_cap: float | None
    class_weights: ArrayLike | None


def returned(loss: jax.Array, lse: jax.Array | None, entropy: jax.Array | None) -> jax.Array | tuple[jax.Array, ...]:
    """What a cross-entropy returns: the losses, and beside them what else is asked for."""
    beside = [v for v in (lse, entropy) if v is not None]
    return (loss, *beside) if beside else loss


def check_weights(class_weights: ArrayLike | None, classes: int, dtype: np.dtype) -> jax.Array | None:
    """The class weights as an array in the dtype of the losses, after checking that there is one for each class."""
    if class_weights is None:
        return None
    weights = as_array("class_weights", class_weights)
    if weights.shape != (classes,):
        raise ValueError(f"class_weights must have one number for each of the {classes} classes; got {weights.shape}")
    if not holds(weights.dtype, np.floating, np.integer):
        raise TypeError(f"class_weights must hold real numbers; got dtype {weights.dtype.name}")
    return weights.astype(fold.accumulator(dtype))


def weight_at(weights: jax.Array, index: jax.Array) -> jax.Array:
    """The weight of the class of each label; any number for a label out of range.

    Over explicit mesh axes it is sharded as the labels are.
    """
    if weights.size == 0:
        return jnp.ones_like(index, weights.dtype)
    index = jnp.clip(index, 0, weights.size - 1)
    given, wanted = jax.typeof(weights).sharding.spec, jax.typeof(index).sharding.spec
    if all(axis is None for axis in (*given, *wanted)):
        return weights[index]
    return weights.at[index].get(out_sharding=sharding_over(wanted, index, weights))


def check_labels(labels: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """The labels as an array, after checking that they fit rows of this shape."""
    labels = as_array("labels", labels)
    if not holds(labels.dtype, np.integer):
        raise TypeError(f"labels must hold integers; got dtype {labels.dtype.name}")
    try:
        if labels.ndim != len(shape):
            raise ValueError
        jax.lax.broadcast_shapes(labels.shape, shape)
    except ValueError:
        raise ValueError(
            f"labels must have the shape of the logits without the classes, {shape}, or one of as many dimensions that "
            f"broadcasts with it; got shape {labels.shape}"
        ) from None
    return labels


def with_labels(labels: jax.Array, x: jax.Array, classes: int, options: Options) -> tuple[jax.Array, jax.Array]:
    """The rows x (..., n), and their labels, which `check_labels` has checked, as the row operations take them.

    Returns:
      x and the labels, each of as many rows as both broadcast to, and sharded alike over explicit mesh axes. Labels are
      int32: -1 for those that are out of range, NO_ROW for those ignored.
    """
    labels = jnp.broadcast_to(labels, jax.lax.broadcast_shapes(labels.shape, x.shape[:-1]))
    if labels.dtype.itemsize < 4:  # the number of classes may be out of the range of the labels' dtype
        labels = labels.astype(jnp.int32)
    index = jnp.where((labels >= 0) & (labels < classes), labels, -1).astype(jnp.int32)
    info, ignored = jnp.iinfo(labels.dtype), options.ignore_index
    if ignored is not None and info.min <= ignored <= info.max:
        index = jnp.where(labels == jnp.asarray(ignored, labels.dtype), NO_ROW, index)
    x = jnp.broadcast_to(x, (*index.shape, x.shape[-1]))
    return x, sharded_like(index, x)


class Sums(NamedTuple):
    """The sums of label smoothing, over the valid classes whose score z is above -inf.

    Attributes:
      total: sum(w (z - r)), with the class weights w, or 1, and r a constant of each row.
      mass: sum(w).
      number: how many classes these are.
    """

    total: jax.Array
    mass: jax.Array
    number: jax.Array


def is_summed(z: jax.Array, label: jax.Array) -> jax.Array:
    """Which scores the sums of label smoothing are over: those above -inf, but none of a row that is not to be read."""
    return (z != -jnp.inf) & (label != NO_ROW)[..., None]


def weighted_sums(z: jax.Array, valid: jax.Array, weights: jax.Array, ref: jax.Array) -> Sums:
    """The sums of scores z over the valid classes, none of which has the score -inf, with r = ref."""
    weights = jax.lax.broadcast_to_rank(weights, z.ndim)
    total = jnp.sum(jnp.where(valid, weights * (jnp.where(valid, z, 0) - ref[..., None]), 0), axis=-1)
    mass = jnp.sum(jnp.where(valid, weights, 0), axis=-1)
    return Sums(total, mass, jnp.sum(valid, axis=-1, dtype=total.dtype))


def row_loss(
    options: Options,
    label: jax.Array,
    others: jax.Array,
    t: jax.Array,
    log_odds: jax.Array,
    sums: Sums | None = None,
    label_valid: jax.Array | bool = True,
    weight: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The loss of rows, and the logsumexp of their scores.

    Args:
      options: those of the call.
      label: of each row, as `with_labels` has it.
      others, t, log_odds: the first results of `label_state_of_rows`: the logsumexp of the scores but the label's, the
        label's score, and the former minus the latter.
      sums: those of label smoothing, if there is any, with r = reference(t).
      label_valid: whether the label's class is valid, if not all classes are.
      weight: that of the label's class.
    """
    # A label out of range poisons the value alone: where the loss of its row is masked afterwards, NaN in the gradient
    # would stay NaN. What is differentiated is the logsumexp, as in optax.
    invalid = label == -1
    label_valid = _adds_label(label, t, label_valid)
    t, log_odds = jnp.where(invalid, 0, t), jnp.where(invalid, others, log_odds)
    weight = weight if weight is None else jnp.where(invalid, 1, weight)
    # Without a valid score there is nothing to learn from. What is not chosen below must have finite derivatives.
    empty = (label == NO_ROW) | ((others == -jnp.inf) & ~label_valid)
    others, t, log_odds = (jnp.where(empty, 0, v) for v in (others, t, log_odds))
    nll = jnp.where(label_valid, jnp.logaddexp(log_odds, 0), log_odds)
    lse = jnp.where(label_valid, _logaddexp(others, t, log_odds), others)
    loss = nll if weight is None else weight * nll
    if sums is not None:
        smooth = _mean_nll(nll, lse, t, sums)
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing * smooth
    if options.has_z_loss:
        loss = loss + options.z_loss * lse**2
    loss = jnp.where(empty, 0, loss) + nan_where(invalid & ~empty, jnp.zeros_like(loss))
    return loss, jnp.where(empty, -jnp.inf, lse)


def row_entropy(
    label: jax.Array,
    t: jax.Array,
    log_odds: jax.Array,
    of_others: jax.Array,
    label_valid: jax.Array | bool = True,
) -> jax.Array:
    """The entropy of the softmax of rows, given that of the scores but the label's.

    Args:
      label, t, log_odds, label_valid: as `row_loss` has them.
      of_others: the last result of `label_entropy_of_rows`.
    """
    label_valid = _adds_label(label, t, label_valid)
    # Beyond this, one of both has the probability 0.
    log_odds = jnp.clip(jnp.where(label_valid, log_odds, 0), -1e4, 1e4)
    return jnp.where(label_valid, _with_label(log_odds, of_others), of_others)


@jax.custom_jvp
def _with_label(log_odds: jax.Array, of_others: jax.Array) -> jax.Array:
    """q * (of_others - log(q)) - r * log(r), with q the probability of all classes but the label, and r the label's.

    No term is negative, so nothing cancels. The derivative by log_odds is q * r * (of_others - log_odds), which JAX
    would take from differences of the terms'.
    """
    q, r = _shares(log_odds)
    rest = jnp.log1p(jnp.exp(-jnp.abs(log_odds)))
    return q * (of_others + (rest - jnp.minimum(log_odds, 0))) + r * (rest + jnp.maximum(log_odds, 0))


@_with_label.defjvp
def _with_label_jvp(primals, tangents):
    log_odds, of_others = primals
    q, r = _shares(log_odds)
    return _with_label(*primals), q * r * (of_others - log_odds) * tangents[0] + q * tangents[1]


@jax.custom_jvp
def _shares(log_odds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1 / (1 + exp(-log_odds)) and 1 / (1 + exp(log_odds)), both with all their digits."""
    less = jnp.exp(-jnp.abs(log_odds))
    high, low = 1 / (1 + less), less / (1 + less)
    return jnp.where(log_odds > 0, high, low), jnp.where(log_odds > 0, low, high)


@_shares.defjvp
def _shares_jvp(primals, tangents):
    q, r = _shares(*primals)
    return (q, r), (q * r * tangents[0], -q * r * tangents[0])


def _adds_label(label: jax.Array, t: jax.Array, label_valid: jax.Array | bool) -> jax.Array:
    """Whether the label's score t is one of those of its row: it is valid, above -inf, and there is such a label."""
    return label_valid & (t != -jnp.inf) & (label != -1)


def _logaddexp(others: jax.Array, t: jax.Array, log_odds: jax.Array) -> jax.Array:
    """logaddexp(others, t), given others - t. JAX would take its derivatives from rounded differences."""
    high, low = jnp.where(log_odds > 0, log_odds, 0), jnp.where(log_odds > 0, 0, log_odds)
    return jnp.where(log_odds > 0, others + jnp.logaddexp(-high, 0), t + jnp.logaddexp(low, 0))


def _mean_nll(nll: jax.Array, lse: jax.Array, t: jax.Array, sums: Sums) -> jax.Array:
    """The mean of -w log(p) over the summed classes, given the label's -log(p), the logsumexp and the label's score."""
    ref = jax.lax.stop_gradient(fold.reference(t))
    finite = jnp.isfinite(t)
    above = jnp.where(finite, nll, lse) + (jnp.where(finite, t, 0) - ref)  # lse - ref
    return (sums.mass * above - sums.total) / jnp.maximum(sums.number, 1)
