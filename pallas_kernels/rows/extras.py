"""What comes beside the rows of an operation: its operands by row, and what they do to the scores.

An extra may be broadcast along any of x's leading dimensions; it lies in memory as it was given. Neighbouring
dimensions along which the same extras are broadcast count as one, of which there are few.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft._rows.forms import groups


@dataclasses.dataclass(frozen=True)
class Extras:
    """The extras of a call.

    Attributes:
      names: which there are, as in a `jaxsoft._rows.forms.Form`, or a label's.
      sizes: x's leading dimensions, where neighbours are one that differ in nothing.
      strides: of each extra, for each of those: how far its rows are apart, 0 where it is broadcast.
      masked: elements whose y is 0 do not count.
    """

    names: str = ""
    sizes: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    masked: bool = False

    @staticmethod
    def of(names: str, masked: bool, leading: Sequence[int], shapes: Sequence[Sequence[int]]) -> "Extras":
        """Those of these shapes, beside x with these leading dimensions."""
        found = groups(leading, shapes)
        sizes = tuple(size for _, size in found)
        strides = []
        for k in range(len(names)):
            apart = [1]
            for broadcast, size in found[:0:-1]:
                apart.append(apart[-1] * (1 if broadcast[k] else size))
            from_outside = zip(found, reversed(apart), strict=False)  # one too many where there is no dimension
            strides.append(tuple(0 if broadcast[k] else stride for (broadcast, _), stride in from_outside))
        return Extras(names, sizes, tuple(strides), masked)

    @property
    def partial(self) -> bool:
        """Whether something of a row may not count."""
        return self.masked or "l" in self.names or "w" in self.names

    @property
    def together(self) -> int:
        """How many neighbouring rows have neighbouring or the same rows of every extra; 0 for all."""
        return self.sizes[-1] if len(self.sizes) > 1 else 0

    def place(self, name: str, row: jax.Array) -> tuple[jax.Array, bool]:
        """Which row of an extra is that of a row of x, and whether it is the next row's, too."""
        index, strides = jnp.int32(0), self.strides[self.names.index(name)]
        for size, stride in zip(self.sizes[::-1], strides[::-1], strict=True):
            index += lax.rem(row, jnp.int32(size)) * stride
            row = lax.div(row, jnp.int32(size))
        return index, not strides or strides[-1] == 0

    def first_row(self, block: jax.Array, rows: int) -> jax.Array:
        """The first row of a block of so many, in an order in which blocks that share what is large follow each other.

        Of a bias or a mask that is the same for many rows far from each other, little would be in the L2 when it comes
        to the next of them.
        """
        large = next((name for name in "bw" if name in self.names), None)
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
class Rules:
    """What the extras of some rows do to a chunk of them.

    Attributes:
      operation: which.
      scale: None, or the scale in a form that broadcasts with a chunk.
      counts: None, or a function of a chunk's place, and of the chunks of the row operands there, to what counts.
      bias: None, or a function of a chunk's place to the bias there.
      label: None, or a function of a chunk's place to which elements are a row's label, or of a row not to be read.
      instead: the result there.
    """

    operation: str
    scale: jax.Array | None = None
    counts: Callable | None = None
    bias: Callable | None = None
    label: Callable | None = None
    instead: jax.Array | float = 0.0

    def prepare(self, place, chunks: Sequence[jax.Array | None]) -> tuple[list[jax.Array | None], jax.Array | None]:
        """What the plain kernel is given of chunks, without those that it does not need here, and what of it counts."""
        counts = self.counts(place, chunks) if self.counts else None
        first, *others = chunks
        if first is not None and self.operation != "softmax_vjp":  # that has y, not scores
            first = first if self.scale is None else first * self.scale
            first = first if self.bias is None else first + self.bias(place)
            first = _select(counts, first, -jnp.inf)
        return [first, *(_select(counts, g, 0.0) for g in others)], counts

    def conclude(self, counts: jax.Array | None, result: jax.Array) -> jax.Array:
        """The result, from the plain kernel's."""
        if self.scale is not None and self.operation.endswith("_vjp"):
            result = result * self.scale
        return _select(counts, result, self.nothing)

    def without_label(self, place, scores: jax.Array) -> jax.Array:
        """What the fold is given of the scores of a chunk."""
        return scores if self.label is None else jnp.where(self.label(place), -jnp.inf, scores)

    def with_label(self, place, result: jax.Array) -> jax.Array:
        """The result of a chunk, with that at the label."""
        return result if self.label is None else jnp.where(self.label(place), self.instead, result)

    @property
    def nothing(self) -> float:
        """The result where nothing counts."""
        return -math.inf if self.operation == "log_softmax" else 0.0


def _select(counts, x, other):
    return x if counts is None else jnp.where(counts, x, other)
