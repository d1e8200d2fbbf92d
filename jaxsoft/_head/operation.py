"""What one pass over a linear head's scores computes: an operation, with the kinds of its operands and its results.

There are three, each in a file of its own: the forward pass and the pullback, mostly over chunks of the classes, and
the sum of the losses with its gradients over chunks of the rows. vmap and the mesh read in these records which operands
have rows and which have classes.
"""

import abc
import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxsoft.pallas_kernels as pallas_kernels
from jaxsoft._core.implementations import Choice, Names
from jaxsoft._core.mesh import axes_of, if_even, refined
from jaxsoft._core.operation import Function, Served, Types, bdims_at_front


class HeadArray(enum.Enum):
    """What an operand or a result is, which decides its dimensions."""

    HIDDEN = enum.auto()  # the hidden states
    WEIGHT = enum.auto()  # the layer's matrix
    BIAS = enum.auto()  # the layer's bias
    CLASS_WEIGHTS = enum.auto()  # the weight of each class in weighted sums
    STATISTIC = enum.auto()  # one number a row, in the accumulator's dtype
    ROW_WEIGHTS = enum.auto()  # likewise: the factor of each row's loss in their sum
    LABEL_WEIGHTS = enum.auto()  # likewise: the weight of the class of each row's label
    LABEL_SMOOTHING = enum.auto()  # one number: that of the loss, where it is an operand
    Z_LOSS = enum.auto()  # likewise
    TOTAL = enum.auto()  # one number in the accumulator's dtype: the weighted sum of the rows' losses
    LABEL = enum.auto()  # one int32 a row: the index of the label, -1 for none, or NO_ROW
    SCORES = enum.auto()  # all scores before the cap, in the dtype of the products

    @property
    def has_rows(self) -> bool:
        """Whether such an array has a part for each row. The dimensions of the rows are its first ones."""
        return _ROWS in _DIMENSIONS[self]


# What a dimension counts: the hidden states, which have one dimension or several, or none; the numbers of one; or the
# classes, which are always the last dimension.
_ROWS, _WIDTH, _CLASSES = "rows", "width", "classes"
_DIMENSIONS = {
    HeadArray.HIDDEN: (_ROWS, _WIDTH),
    HeadArray.WEIGHT: (_WIDTH, _CLASSES),
    HeadArray.BIAS: (_CLASSES,),
    HeadArray.CLASS_WEIGHTS: (_CLASSES,),
    HeadArray.STATISTIC: (_ROWS,),
    HeadArray.ROW_WEIGHTS: (_ROWS,),
    HeadArray.LABEL_WEIGHTS: (_ROWS,),
    HeadArray.LABEL_SMOOTHING: (),
    HeadArray.Z_LOSS: (),
    HeadArray.TOTAL: (),
    HeadArray.LABEL: (_ROWS,),
    HeadArray.SCORES: (_ROWS, _CLASSES),
}


class Shards(NamedTuple):
    """The axes of a mesh over which the rows and the classes of an operation are sharded."""

    rows: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def first_class(self, classes: int) -> Any:
        """The index of the first class of this device, traced or 0, where each device has this number of classes."""
        return jax.lax.axis_index(self.classes).astype(jnp.int32) * classes if self.classes else 0


class HeadOperation(Served):
    """What one pass over the scores computes. The first two operands are hidden and weight."""

    implementation = None
    kernel = ""  # that of Pallas

    def by(self, implementation: Names) -> Self:
        """Itself: what serves it is made of operations that have implementations."""
        del implementation
        return self

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[HeadArray, ...]:
        """The kinds of the operands."""

    @property
    @abc.abstractmethod
    def results(self) -> tuple[HeadArray, ...]:
        """The kinds of the results."""

    @abc.abstractmethod
    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results on one device, which has these shards of the operands. The rows are one dimension."""

    @abc.abstractmethod
    def refusal(self, hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
        """None, or why Pallas's kernels do not compute the scores of the rows of hidden, on a GPU."""

    def choose(self, platform: str, operands: Types) -> Choice:
        """A loop over chunks, which on a GPU may be of Pallas's kernels."""
        hidden, weight = operands[:2]
        if platform != "cuda":
            return Choice(self.name, "xla", self.local())
        rows = math.prod(hidden.shape[:-1])
        reason = self.refusal(hidden.update(shape=(rows, hidden.shape[-1])), weight)
        if reason is None:
            return Choice(self.name, "pallas", self.local(), pallas_kernels.describe_head(self.kernel))
        return Choice(self.name, "xla", self.local(), reasons={"pallas": reason})

    def local(self, shards: Shards = Shards()) -> Function:
        """The function of a device that has these shards of the operands."""

        def function(*operands):
            leading = operands[0].shape[:-1]
            rows, given = math.prod(leading), zip(self.operands, operands, strict=True)
            flat = (v.reshape(rows, *v.shape[len(leading) :]) if kind.has_rows else v for kind, v in given)
            found = zip(self.results, self.on_rows(shards, *flat), strict=True)
            return tuple(v.reshape(*leading, *v.shape[1:]) if kind.has_rows else v for kind, v in found)

        return function

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """Mapped rows are more rows."""
        return mapped(self, self.operands, self.results, operands, dims)

    def partition(self, mesh, operands, results):
        """Rows lie as hidden has them, classes as weight has them, and neither moves.

        Each device takes its classes for its rows in chunks. Where classes are sharded, the devices' numbers a row are
        combined, and the gradient of hidden is summed over them (see `chunks`); where rows are sharded, the gradients
        of the other parameters are.
        """
        del results
        hidden, weight = operands[:2]
        rows, mesh = _row_names(hidden), refined(mesh, hidden)
        of_hidden = zip(rows, axes_of(hidden, mesh), hidden.shape, strict=False)
        axes = {name: if_even(given, size, mesh) for name, given, size in of_hidden}
        taken = {axis for row_axes in axes.values() for axis in row_axes}
        of_classes = tuple(axis for axis in axes_of(weight, mesh)[1] if axis not in taken)
        axes[_CLASSES] = if_even(of_classes, weight.shape[1], mesh)
        shards = Shards(tuple(axis for axis in mesh.axis_names if axis in taken), axes[_CLASSES])

        def shardings(kinds: Iterable[HeadArray]):
            specs = (PartitionSpec(*(axes.get(name) or None for name in _names(kind, rows))) for kind in kinds)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, self.local(shards), shardings(self.results), shardings(self.operands)

    def rule(self, operands: Sequence, results: Sequence) -> tuple[str, dict]:
        """Rows are sharded alike, and so are classes."""
        del results
        rows = _row_names(operands[0])
        sides = (self.operands, self.results)
        named = " -> ".join(", ".join(" ".join(_names(kind, rows)) for kind in side) for side in sides)
        return named, {"need_replication_factors": (_WIDTH,)}


def _row_names(hidden: jax.ShapeDtypeStruct) -> list[str]:
    """A name for each dimension of the rows of hidden."""
    return [f"rows{i}" for i in range(len(hidden.shape) - 1)]


def _names(kind: HeadArray, rows: list[str]) -> list[str]:
    """The names of the dimensions of such an array, which are sharded alike where they are the same."""
    return [name for dimension in _DIMENSIONS[kind] for name in (rows if dimension == _ROWS else [dimension])]


def mapped(
    function: Callable[..., Sequence[jax.Array]],
    kinds: Sequence[HeadArray],
    results: Sequence[HeadArray],
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
) -> Sequence[jax.Array]:
    """The results of a function for mapped operands, mapped along their first dimension.

    Where rows alone are mapped, the mapped dimension is one more dimension of the rows. Else the elements are taken one
    after the other.

    Args:
      function: any that is computed for each row by itself, but for results without rows.
      kinds: those of its operands.
      results: the kinds of its results.
      operands: what it is called with.
      dims: along which dimension each of the operands is mapped; None for one that is not.
    """
    given = list(zip(kinds, operands, dims, strict=True))
    if all(kind.has_rows for kind in results) and all(d is None or kind.has_rows for kind, _, d in given):
        by_row = [(v, d) for kind, v, d in given if kind.has_rows]
        more = iter(bdims_at_front([v for v, _ in by_row], [d for _, d in by_row], len(by_row)))
        return function(*(next(more) if kind.has_rows else v for kind, v, _ in given))
    in_front = [None if d is None else jnp.moveaxis(v, d, 0) for _, v, d in given]

    def one(values):
        return function(*(whole if v is None else v for v, whole in zip(values, operands, strict=True)))

    return jax.lax.map(one, in_front)
