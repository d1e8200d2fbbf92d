"""What one pass over a linear head's scores computes: an operation, with the kinds of its operands and its results.

There are three, each in a file of its own: the forward pass and the pullback, mostly over chunks of the classes, and
the sum of the losses with its gradients over chunks of the rows. vmap and the mesh read in these records which operands
have rows and which have classes.
"""

import abc
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Dimension(enum.Enum):
    """What a dimension of an operand or a result counts."""

    ROWS = enum.auto()  # the hidden states: one dimension or several, or none
    WIDTH = enum.auto()  # the numbers of a hidden state
    CLASSES = enum.auto()  # always the last dimension


class Kind(enum.Enum):
    """What an operand or a result is, which decides its dimensions."""

    HIDDEN = enum.auto()  # the hidden states
    WEIGHT = enum.auto()  # the layer's matrix
    BIAS = enum.auto()  # the layer's bias
    CLASS_WEIGHTS = enum.auto()  # the weight of each class in weighted sums
    STATISTIC = enum.auto()  # one number a row, in the accumulator's dtype
    ROW_WEIGHTS = enum.auto()  # likewise: the factor of each row's loss in their sum
    LABEL_WEIGHTS = enum.auto()  # likewise: the weight of the class of each row's label
    TOTAL = enum.auto()  # one number in the accumulator's dtype: the weighted sum of the rows' losses
    LABEL = enum.auto()  # one int32 a row: the index of the label, -1 for none, or NO_ROW
    SCORES = enum.auto()  # all scores before the cap, in the dtype of the products

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The dimensions of such an array."""
        return _DIMENSIONS[self]

    @property
    def has_rows(self) -> bool:
        """Whether such an array has a part for each row. The dimensions of the rows are its first ones."""
        return Dimension.ROWS in self.dimensions


_DIMENSIONS = {
    Kind.HIDDEN: (Dimension.ROWS, Dimension.WIDTH),
    Kind.WEIGHT: (Dimension.WIDTH, Dimension.CLASSES),
    Kind.BIAS: (Dimension.CLASSES,),
    Kind.CLASS_WEIGHTS: (Dimension.CLASSES,),
    Kind.STATISTIC: (Dimension.ROWS,),
    Kind.ROW_WEIGHTS: (Dimension.ROWS,),
    Kind.LABEL_WEIGHTS: (Dimension.ROWS,),
    Kind.TOTAL: (),
    Kind.LABEL: (Dimension.ROWS,),
    Kind.SCORES: (Dimension.ROWS, Dimension.CLASSES),
}


class Shards(NamedTuple):
    """The axes of a mesh over which the rows and the classes of an operation are sharded."""

    rows: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def first_class(self, classes: int) -> Any:
        """The index of the first class of this device, traced or 0, where each device has this number of classes."""
        return jax.lax.axis_index(self.classes).astype(jnp.int32) * classes if self.classes else 0


class Operation(abc.ABC):
    """What one pass over the scores computes. Hashable. The first two operands are hidden and weight."""

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[Kind, ...]:
        """The kinds of the operands."""

    @property
    @abc.abstractmethod
    def results(self) -> tuple[Kind, ...]:
        """The kinds of the results."""

    @abc.abstractmethod
    def types(self, *operands: jax.core.ShapedArray) -> Sequence[jax.core.ShapedArray]:
        """The types of the results, given those of the operands."""

    @abc.abstractmethod
    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results on one device, which has these shards of the operands. The rows are one dimension."""
