"""The loss of each row from what a linear head computes of its scores, and their weighted sum as what is minimised."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._head.derivative import statistics
from jaxsoft._head.head import Head, formula
from jaxsoft._head.operation import HeadArray
from jaxsoft._rows.losses import Options, Sums, row_entropy, row_loss

# The options of a loss that may be operands, by name.
OPTIONS = {"label_smoothing": HeadArray.LABEL_SMOOTHING, "z_loss": HeadArray.Z_LOSS}


def losses_that_count(factors: jax.Array, loss: jax.Array) -> jax.Array:
    """The losses of rows, but 0 for an infinite or undefined one whose factor is 0: 0 times it would be NaN."""
    return jnp.where((factors == 0) & ~jnp.isfinite(loss), 0, loss)


def weighted(factors: jax.Array, loss: jax.Array) -> jax.Array:
    """The losses of rows times their factors: 0 for a factor of 0, whatever the label of its row is."""
    return factors * losses_that_count(factors, loss)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The sum of the rows' losses, each with a factor.

    Attributes:
      head: the layer.
      options: of the loss.
      weighted: whether the label's classes have weights.
      chunk_size: how many rows are taken at a time, where they are taken in chunks; None for `default_row_chunk`.
      sum_dtype: in which the gradient of weight is summed over chunks of rows; None for weight's own.
    """

    head: Head
    options: Options
    weighted: bool = False
    chunk_size: int | None = None
    sum_dtype: np.dtype | None = None

    @property
    def operands(self) -> tuple[HeadArray, ...]:
        """The kinds of the operands: the head's parameters, the labels, the factors, the weights of the labels, and the
        options that are operands.
        """
        return (
            *self.head.parameters,
            HeadArray.LABEL,
            HeadArray.ROW_WEIGHTS,
            *(HeadArray.LABEL_WEIGHTS,) * self.weighted,
            *(OPTIONS[name] for name in self.options.operands),
        )

    def named[T](self, operands: Sequence[T]) -> dict[HeadArray, T]:
        """The first operands of every operation by kind."""
        return dict(zip(self.operands, operands, strict=False))

    def of_options[T](self, given: Mapping[HeadArray, T]) -> list[T]:
        """Those of the operands by kind that are options of the loss."""
        return [given[OPTIONS[name]] for name in self.options.operands]

    def losses(
        self, label: jax.Array, found: Sequence[jax.Array], weights: jax.Array | None, options: Sequence[jax.Array]
    ):
        """The loss of each row and its logsumexp, and the entropy if it is wanted, else None.

        Args:
          label: of each row.
          found: what `statistics` has found.
          weights: those of the labels.
          options: those that are operands.
        """
        (others, t, log_odds, *of_others), sums = found[: 3 + self.head.entropy], found[3 + self.head.entropy :]
        of_scores = Sums(sums[0], sums[1], sums[-1]) if sums else None  # without weights the mass is the number
        filled = self.options.with_operands(options, others.dtype)
        loss, lse = row_loss(filled, label, others, t, log_odds, of_scores, weight=weights)
        return loss, lse, row_entropy(label, t, log_odds, *of_others) if self.head.entropy else None

    def by_classes(self, *operands: jax.Array) -> jax.Array:
        """The sum by chunks of the classes, which has all its derivatives in chunks, too."""
        return self._total(statistics(self.head), operands)

    def formula(self, *operands: jax.Array) -> jax.Array:
        """The sum in plain JAX, by way of all scores."""
        return self._total(lambda *operands: formula(self.head, *operands), operands)

    def _total(self, function, operands: Sequence[jax.Array]) -> jax.Array:
        given = self.named(operands)
        parameters = [given[kind] for kind in self.head.parameters]
        label = given[HeadArray.LABEL]
        found, weights = function(*parameters, label), given.get(HeadArray.LABEL_WEIGHTS)
        loss, *_ = self.losses(label, found, weights, self.of_options(given))
        return jnp.sum(weighted(given[HeadArray.ROW_WEIGHTS], loss))
