"""The operands that come beside the rows of an operation, and what they do to the scores.

An extra may be broadcast along any of the leading dimensions of x; it lies in memory as it was given. Neighbouring
dimensions along which the same extras are broadcast count as one, so that there are few.
"""

import abc
import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft._core.rounding import rounded
from jaxsoft._rows.forms import groups
from jaxsoft._rows.spec import RowExtra, RowKind, RowSpec


class LabelExtra(enum.Enum):
    """An extra that an operation with labels has, as the kernels see it: before those of the form."""

    LABEL = enum.auto()  # int32, one a row: the index of the label, or NO_ROW
    RESULT = enum.auto()  # one number a row: the result at the label


type Name = RowExtra | LabelExtra


@dataclasses.dataclass(frozen=True)
class Extras:
    """The extras of a call.

    Attributes:
      names: which there are, in the order of the operands.
      sizes: the leading dimensions of x, where neighbours along which the same extras are broadcast are one.
      strides: for each extra and each of these dimensions: how far apart the rows of the extra are, 0 where it is
        broadcast.
      masked: whether elements whose first operand, a softmax, is 0 are masked.
    """

    names: tuple[Name, ...] = ()
    sizes: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    masked: bool = False

    @staticmethod
    def of(names: Sequence[Name], masked: bool, leading: Sequence[int], shapes: Sequence[Sequence[int]]) -> "Extras":
        """The extras of these names and shapes, beside x with these leading dimensions."""
        found = groups(leading, shapes)
        sizes = tuple(size for _, size in found)
        strides = []
        for k in range(len(names)):
            apart = [1]
            for broadcast, size in found[:0:-1]:
                apart.append(apart[-1] * (1 if broadcast[k] else size))
            from_outside = zip(found, reversed(apart), strict=False)  # without dimensions, the 1 belongs to none
            strides.append(tuple(0 if broadcast[k] else stride for (broadcast, _), stride in from_outside))
        return Extras(tuple(names), sizes, tuple(strides), masked)

    @property
    def partial(self) -> bool:
        """Whether some elements of a row may be masked."""
        return self.masked or RowExtra.LIMIT in self.names or RowExtra.WHERE in self.names

    @property
    def together(self) -> int:
        """How many neighbouring rows have neighbouring or the same rows of every extra; 0 for all."""
        return self.sizes[-1] if len(self.sizes) > 1 else 0

    def place(self, name: Name, row: jax.Array | int) -> tuple[jax.Array, bool]:
        """The row of an extra that belongs to a row of x, and whether it belongs to the next row, too."""
        index, strides = jnp.int32(0), self.strides[self.names.index(name)]
        for size, stride in zip(self.sizes[::-1], strides[::-1], strict=True):
            index += lax.rem(row, jnp.int32(size)) * stride
            row = lax.div(row, jnp.int32(size))
        return index, not strides or strides[-1] == 0

    def first_row(self, block: jax.Array, rows: int) -> jax.Array:
        """The first row of a block of `rows` rows, ordered so that blocks that share a large extra are neighbours.

        Otherwise, where a bias or a mask belongs to rows that are far apart, little of it would be left in the L2 when
        the next of these rows needs it.
        """
        large = next((name for name in (RowExtra.BIAS, RowExtra.WHERE) if name in self.names), None)
        if large is None or len(self.sizes) < 2:
            return block * rows
        counts = *self.sizes[:-1], self.sizes[-1] // rows
        apart = *(math.prod(self.sizes[k:]) for k in range(1, len(self.sizes))), rows
        shared = [stride == 0 for stride in self.strides[self.names.index(large)]]
        first = jnp.int32(0)
        for k in sorted(range(len(counts)), key=lambda k: (not shared[k], -k)):
            first += lax.rem(block, jnp.int32(counts[k])) * apart[k]
            block = lax.div(block, jnp.int32(counts[k]))
        return first


@dataclasses.dataclass(frozen=True)
class Rules(abc.ABC):
    """What the extras of some rows do to a chunk of these.

    A kernel says where a chunk's place is in memory and in the row; the rest is the same for all.

    Attributes:
      operation: which.
      extras: which there are.
      refs: the references to them, by name.
      scale: the scale in a form that broadcasts with a chunk, if there is one.
      limit: likewise, the limit.
    """

    operation: RowSpec
    extras: Extras
    refs: dict[Name, Any]
    scale: jax.Array | None
    limit: jax.Array | None

    @abc.abstractmethod
    def chunk(self, name: RowExtra, place: Any) -> jax.Array:
        """An extra that has an element for each of x, at a chunk's place."""

    @abc.abstractmethod
    def columns(self, place: Any) -> jax.Array:
        """The columns of a chunk's elements in the row."""

    def prepare(self, place: Any, chunks: Sequence[Any]) -> "Prepared":
        """Applies the extras to chunks of the row operands, or None for those that are not needed here."""
        valid = self._valid(place, chunks) if self.extras.partial else None
        first, *others = chunks
        if first is not None and self.operation.kinds[0] is RowKind.SCORES:
            first = first if self.scale is None else rounded(first * self.scale)
            first = first + self.chunk(RowExtra.BIAS, place) if RowExtra.BIAS in self.extras.names else first
            first = _select(valid, first, -jnp.inf)
        return Prepared([first, *(_select(valid, g, 0.0) for g in others)], valid)

    def conclude(self, valid: jax.Array | None, result: jax.Array) -> jax.Array:
        """Applies the extras to the result of a chunk, given which of its elements count."""
        if self.scale is not None and self.operation.is_pullback:
            result = result * self.scale
        return _select(valid, result, self.operation.masked_result)

    def _valid(self, place: Any, chunks: Sequence[Any]) -> jax.Array:
        """Which elements of a chunk count."""
        conditions = [self.chunk(RowExtra.WHERE, place) != 0] if RowExtra.WHERE in self.extras.names else []
        if self.limit is not None:
            conditions.append(self.columns(place) < self.limit)
        if self.extras.masked:
            conditions.append(chunks[0] != 0)
        return functools.reduce(jnp.logical_and, conditions)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Chunks of the row operands as the plain operation takes them.

    Attributes:
      chunks: one for each row operand; None for one that is not needed here.
      valid: which elements are; None for all.
    """

    chunks: Sequence[Any]
    valid: jax.Array | None


def _select(valid: jax.Array | None, x: Any, other: float) -> Any:
    return x if valid is None else jnp.where(valid, x, other)
