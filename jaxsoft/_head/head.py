"""A linear head: the record of a linear layer and of what is wanted of its scores, and the definition of that.

The scores are z = scale * (hidden @ weight + bias), capped if asked to, one for each row and class. A loss needs to
know a few numbers a row of them: with the label's score t, the logsumexp of the others, "others", and others - t, the
log-odds against the label; and for label smoothing some sums. `formula` computes them from all scores at once, and is
what forward mode and derivatives of higher order are made of. `forward` and `pullback` compute the same, and its
transposed derivative, from chunks of the classes or rows, without all scores in memory. `total` computes the sum of the
losses with its gradients, from chunks of the rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._core.rounding import rounded
from jaxsoft._head.operation import HeadArray
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm, softcap
from jaxsoft._rows.losses import is_summed, weighted_sums
from jaxsoft._rows.operations.labels import label_entropy_of_rows, label_state_of_rows, label_sums_of_rows
from jaxsoft._rows.spec import RowFunction

type Parameters = Mapping[HeadArray, jax.Array]


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear layer and what is computed of its scores.

    Attributes:
      parameters: which operands there are: HIDDEN, WEIGHT, and where there are such BIAS and CLASS_WEIGHTS, in this
        order.
      summed: whether the sums of label smoothing are wanted.
      entropy: whether the entropy is wanted.
      scale: the factor of what the layer computes.
      cap: the scores become cap * tanh(z / cap); None leaves them as they are.
      precision: of the products, as `jnp.dot` takes it.
      recompute: whether the pullback computes the scores again. Else they are kept, in the dtype of the products.
      chunk_size: how many classes are taken at a time; None for the default of `chunks`.
    """

    parameters: tuple[HeadArray, ...]
    summed: bool = False
    entropy: bool = False
    scale: float = 1.0
    cap: float | None = None
    precision: str | None = None
    recompute: bool = True
    chunk_size: int | None = None

    def named[T](self, operands: Sequence[T]) -> dict[HeadArray, T]:
        """The parameters, which are the first operands of every operation, by kind."""
        return dict(zip(self.parameters, operands, strict=False))

    @property
    def weighted(self) -> bool:
        """Whether the sums are weighted."""
        return self.summed and HeadArray.CLASS_WEIGHTS in self.parameters

    @property
    def composed(self) -> bool:
        """Whether plain JAX computes the sums: no function of rows has weighted ones, nor sums and the entropy."""
        return self.summed and (self.weighted or self.entropy)

    @property
    def sums(self) -> tuple[HeadArray, ...]:
        """The kinds of the sums: of the scores' distances from a number of their row; of the weights, if weighted; and
        the number of the summed scores.
        """
        return (HeadArray.STATISTIC,) * (2 * self.summed + self.weighted)

    @property
    def statistics(self) -> tuple[HeadArray, ...]:
        """The kinds of what `formula` gives."""
        return *(HeadArray.STATISTIC,) * (3 + self.entropy), *self.sums

    @property
    def cotangents(self) -> tuple[HeadArray, ...]:
        """The statistics that have a derivative of their own: all but the log-odds and the last sum."""
        return *(HeadArray.STATISTIC,) * (2 + self.entropy), *self.sums[:-1]

    @property
    def residuals(self) -> tuple[HeadArray, ...]:
        """The kinds of what the pullback needs to know of the rows: the label's score where the sums are weighted; of
        the other scores the state (m, s), which tells the sum s from 1 beside an m of any size, as their logsumexp does
        not; and where the entropy is wanted the sum for that.
        """
        return (HeadArray.STATISTIC,) * (self.weighted + 2 + self.entropy)

    @property
    def function(self) -> RowFunction:
        """The function of rows that reduces the scores."""
        if self.entropy:
            return label_entropy_of_rows
        return label_sums_of_rows if self.summed and not self.composed else label_state_of_rows


def formula(head: Head, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """What a loss needs to know, in plain JAX, by way of all scores.

    Args:
      head: which layer.
      operands: the parameters, and the label of each row.

    Returns:
      In the accumulator's dtype: others, the label's score t, the log-odds; the entropy of the softmax of the scores
      but the label's, if the entropy is wanted; and if summed, over the scores z above -inf, sum(z - r) and their
      number, or weighted sum(w (z - r)), sum(w) and their number, with the constant r = reference(t).
    """
    *given, label = operands
    parameters = head.named(given)
    x = scores(head, parameters)
    found = differentiable(head.function, RowForm(x.dtype, cap=head.cap), None)(x, label)
    if not head.composed:
        return found
    ref = jax.lax.stop_gradient(fold.reference(found[1]))
    return *found, *composed_sums(head, x, label, ref, parameters.get(HeadArray.CLASS_WEIGHTS))


def product_dtype[T: (jax.Array, jax.core.ShapedArray)](hidden: T, weight: T) -> jnp.dtype:
    """The dtype in which hidden and weight are multiplied."""
    return jnp.promote_types(hidden.dtype, weight.dtype)


def product(head: Head, a: jax.Array, b: jax.Array, over: tuple[int, int], dtype: jax.typing.DTypeLike) -> jax.Array:
    """The product of two matrices, in this dtype.

    Args:
      head: whose precision it has.
      a: a matrix.
      b: a matrix.
      over: the dimensions of a and b over which the products are summed.
      dtype: of the result.
    """
    dims = ((over[0],), (over[1],)), ((), ())
    return jax.lax.dot_general(a, b, dims, precision=head.precision, preferred_element_type=dtype)


def scores(head: Head, parameters: Parameters) -> jax.Array:
    """scale * (hidden @ weight + bias) in the accumulator's dtype, before the cap."""
    hidden, weight, bias = parameters[HeadArray.HIDDEN], parameters[HeadArray.WEIGHT], parameters.get(HeadArray.BIAS)
    dtype = product_dtype(hidden, weight)
    wide = fold.accumulator(dtype)
    x = jnp.dot(hidden.astype(dtype), weight.astype(dtype), precision=head.precision, preferred_element_type=wide)
    x = x if head.scale == 1 else rounded(scaled(head.scale, x))
    return x if bias is None else x + jax.lax.broadcast_to_rank(scaled(head.scale, bias.astype(wide)), x.ndim)


def rounded_scores(head: Head, parameters: Parameters) -> jax.Array:
    """`scores` in the dtype of the products, as they are in memory; the scale, too, is part of hidden and bias."""
    hidden, weight, bias = parameters[HeadArray.HIDDEN], parameters[HeadArray.WEIGHT], parameters.get(HeadArray.BIAS)
    dtype = product_dtype(hidden, weight)
    hidden = scaled(head.scale, hidden.astype(dtype))
    x = jnp.dot(hidden, weight.astype(dtype), precision=head.precision, preferred_element_type=dtype)
    if bias is None:
        return x
    return x + jax.lax.broadcast_to_rank(scaled(head.scale, bias.astype(fold.accumulator(dtype))).astype(dtype), x.ndim)


def scaled(scale: float, x: jax.Array) -> jax.Array:
    """x times a number, rounded to x's dtype."""
    return x if scale == 1 else (scale * x.astype(fold.accumulator(x.dtype))).astype(x.dtype)


def capped(head: Head, x: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The capped scores in the accumulator's dtype, and which of them are summed.

    Args:
      head: which layer.
      x: scores before the cap.
      label: of each row.
    """
    x = x.astype(fold.accumulator(x.dtype))
    z = softcap(x, head.cap)
    return z, is_summed(z, label)


def composed_sums(
    head: Head, x: jax.Array, label: jax.Array, ref: jax.Array, weights: jax.Array | None
) -> list[jax.Array]:
    """The sums of some classes' scores.

    Args:
      head: which layer.
      x: the scores before the cap.
      label: of each row.
      ref: a number of each row, from which the distances of the scores are summed.
      weights: of the classes, where the sums are weighted.
    """
    z, summed = capped(head, x, label)
    weights = jnp.ones(z.shape[-1], z.dtype) if weights is None else weights
    total, mass, count = weighted_sums(z, summed, weights, ref)
    return [total, mass, count] if head.weighted else [total, count]
