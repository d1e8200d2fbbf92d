"""What a row operation is: a record of its operands, its results, its formula, and what kernels need to know of it.

An operation takes scores x of shape (..., n), or several such arrays, and reduces them along their last axis to a few
numbers a row, or writes arrays of x's shape. The records themselves are in `operations`, one file for each function
that they belong to. All else in this folder reads them: the choice of a kernel, the derivatives, vmap, the mesh and the
FFI.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxsoft._core.operation import Function
from jaxsoft.fold import State

# The label of a row that is not to be read, and is wholly masked. Any other label that is out of range makes
# the label's score NaN.
NO_ROW = -(2**31)


class RowKind(enum.Enum):
    """What an operand or a result is, which decides its shape and its dtype."""

    SCORES = enum.auto()  # (..., n): what the form scales, biases and masks
    PROBABILITIES = enum.auto()  # (..., n): a softmax
    TANGENT = enum.auto()  # (..., n): a tangent of the scores
    COTANGENT = enum.auto()  # (..., n): a cotangent of a result of this shape
    ROW = enum.auto()  # (..., n): a result
    STATISTIC = enum.auto()  # (...): one number a row, in the accumulator's dtype
    LABEL = enum.auto()  # (...): one int32 a row, the index of the label, or NO_ROW
    VALUES = enum.auto()  # (..., k): some elements of a row
    INDICES = enum.auto()  # (..., k): int32, where they are
    CHOSEN_PROBABILITIES = enum.auto()  # (..., k): their softmax, a result in the form's dtype

    @property
    def whole_rows(self) -> bool:
        """Whether the array has the shape of the scores."""
        return self in (RowKind.SCORES, RowKind.PROBABILITIES, RowKind.TANGENT, RowKind.COTANGENT, RowKind.ROW)


class RowExtra(enum.Enum):
    """An operand that may follow those of an operation, by its letter in the attribute of an FFI call.

    Extras have x's leading dimensions, or length 1 where they are the same for all rows. Their order is this one. Which
    elements of a row count is the same for all inputs of an operation; a scale belongs to one of them.
    """

    SCALE = "s"  # (...), in the accumulator's dtype: the scores are multiplied by it
    LIMIT = "l"  # (...), int32: elements before it count
    WHERE = "w"  # (..., n), bool: elements where it is True count
    BIAS = "b"  # (..., n): is added to the scores
    OTHER_SCALE = "S"  # as SCALE, for the second input

    @property
    def whole_rows(self) -> bool:
        """Whether the array has an element for each score."""
        return self in (RowExtra.WHERE, RowExtra.BIAS)

    @property
    def decides(self) -> bool:
        """Whether it says which elements count."""
        return self in (RowExtra.LIMIT, RowExtra.WHERE)


SCALES = (RowExtra.SCALE, RowExtra.OTHER_SCALE)  # by input


class Reduction(enum.Enum):
    """What an operation computes of a whole row before it writes anything."""

    STATE = enum.auto()  # (m, s) of the scores
    PRODUCT = enum.auto()  # the sum of the first operand times the cotangent
    SUM = enum.auto()  # the sum of the cotangent
    NOTHING = enum.auto()


class RowOperand(NamedTuple):
    """An operand or a result.

    Attributes:
      name: as the FFI has it.
      kind: what it is.
      linear: whether the operation is linear in it.
      input: which of the inputs it belongs to: the arrays of scores of an operation, the first of which is 0.
    """

    name: str
    kind: RowKind
    linear: bool = False
    input: int = 0


class Reductions(NamedTuple):
    """The ways to reduce a row that formulas are written with.

    Attributes:
      state: of x, the state of the last axis in the accumulator's dtype.
      total: of x, the sum over the last axis.
      take: of x and an index a row, the elements there in the accumulator's dtype; NaN for an index out of range.
    """

    state: Callable[[jax.Array], State]
    total: Callable[[jax.Array], jax.Array]
    take: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class RowSpec:
    """A row operation. Two are equal if they are the same record, so that JAX finds a compiled call of one fast.

    Attributes:
      name: of the operation; the FFI's target is "jaxsoft_" + name.
      operands: in the order of every kernel. The first has the shape (..., n).
      results: likewise.
      formula: (reductions, *operands) -> results in plain JAX, for the plain form; for an operation with results of
        kind VALUES also (k=, dtype=), how many elements, and the dtype of their probabilities.
      reduces: what has to be known of a row before the results can be written.
      extras: those that kernels may take as they are.
      may_be_masked: whether elements whose first operand is 0 may be declared masked.
      may_be_capped: whether the scores may be capped.
      any_axis: whether kernels may reduce an axis that other dimensions follow.
      masked_result: the result of an element that is masked.
      from_state: whether a kernel for the state of the scores is all that the formula needs to be fast.
      of_parts: (mesh axes, results of the part of a row that each device has) -> those of the row, for an operation
        whose results can be combined.
      made_of: for an operation without kernels of its own: (call, *operands) -> results by means of another's, where
        call(operation, *operands) calls that.
    """

    name: str
    operands: tuple[RowOperand, ...]
    results: tuple[RowOperand, ...]
    formula: Function
    reduces: Reduction = Reduction.NOTHING
    extras: tuple[RowExtra, ...] = ()
    may_be_masked: bool = False
    may_be_capped: bool = False
    any_axis: bool = True
    masked_result: float = 0.0
    from_state: bool = False
    of_parts: Function | None = None
    made_of: Function | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def kinds(self) -> tuple[RowKind, ...]:
        """The kinds of the operands."""
        return tuple(operand.kind for operand in self.operands)

    @property
    def result_kinds(self) -> tuple[RowKind, ...]:
        """The kinds of the results."""
        return tuple(result.kind for result in self.results)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The indices of the operands that are scores."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind is RowKind.SCORES)

    @property
    def linear(self) -> range:
        """The indices of the operands in which the operation is linear: the last ones."""
        first = next((i for i, operand in enumerate(self.operands) if operand.linear), len(self.operands))
        return range(first, len(self.operands))

    @property
    def is_tangent(self) -> bool:
        """Whether the operation maps tangents of the scores forward. No implementation has kernels for that."""
        return RowKind.TANGENT in self.kinds

    @property
    def is_pullback(self) -> bool:
        """Whether the operation maps cotangents of results back to the scores."""
        return len(self.linear) > 0 and not self.is_tangent

    @property
    def has_kernels(self) -> bool:
        """Whether implementations have kernels for the operation by this name."""
        return not self.is_tangent and self.made_of is None

    @property
    def has_label(self) -> bool:
        """Whether each row has a label. It counts, whatever the extras say."""
        return RowKind.LABEL in self.kinds

    @property
    def selects(self) -> bool:
        """Whether the operation selects k elements of a row."""
        return RowKind.VALUES in self.result_kinds


@dataclasses.dataclass(frozen=True, eq=False)
class RowFunction:
    """A function of rows that JAX can differentiate: an operation, and the operations that are its derivative.

    It has derivatives by each of its inputs, the operands of forward that are scores. Two are equal if they are the
    same record.

    Attributes:
      forward: what computes it.
      tangent: the derivative at a point as a map of tangents of the scores, its last operands, one of each input.
      pullback: its transpose, with the same operands before the linear ones, and a result for each input.
      values: (operands of forward, its results) -> what the function returns.
      residuals: (operands of forward, its results) -> the operands of the derivative that are not linear.
      tangents: (results of forward, results of tangent) -> the tangents of the values, which mostly are the results
        themselves.
      pullback_of: for some of several inputs, the pullback by this one alone.
    """

    forward: RowSpec
    tangent: RowSpec
    pullback: RowSpec
    values: Callable[[Sequence[jax.Array], Sequence[jax.Array]], tuple[jax.Array, ...]]
    residuals: Callable[[Sequence[jax.Array], Sequence[jax.Array]], tuple[jax.Array, ...]]
    tangents: Callable[[Sequence[jax.Array], Sequence[jax.Array]], tuple] = lambda results, tangents: tuple(tangents)
    pullback_of: Mapping[int, RowSpec] = dataclasses.field(default_factory=dict)


# The operands and results that several operations have. ffi/rows/operations.h has the same names. Formulas write them
# as letters: x the scores, y the probabilities, m the maximum, s the sum, i a label or indices, t a tangent, and g a
# cotangent. A file of `operations` says which other letters it uses.
SCORES = RowOperand("scores", RowKind.SCORES)
PROBABILITIES = RowOperand("probabilities", RowKind.PROBABILITIES)
RESULT = RowOperand("result", RowKind.ROW)
# The state of a row's scores.
MAXIMUM = RowOperand("maximum", RowKind.STATISTIC)
SUM = RowOperand("sum", RowKind.STATISTIC)
# A tangent of the scores, and what a map forward takes of it: its product with the gradient, summed over the row.
TANGENT = RowOperand("tangent", RowKind.TANGENT, linear=True)
INNER_PRODUCT = RowOperand("inner_product", RowKind.STATISTIC)
# Cotangents: of a result of the scores' shape, and of a number a row.
COTANGENTS = RowOperand("cotangents", RowKind.COTANGENT, linear=True)
COTANGENT = RowOperand("cotangent", RowKind.STATISTIC, linear=True)
