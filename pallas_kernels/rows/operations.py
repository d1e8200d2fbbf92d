"""What the kernels compute, whatever holds a row: what an operation folds, and its result from the row's total.

All of it follows from the record of an operation but the arithmetic of the result, which is in `_FINISH`: an operation
that is new here needs a function there, and nothing else.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX, LOG_SOFTMAX_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_VJP
from jaxsoft._rows.spec import SUM, Reduction, RowKind, RowSpec

from . import fold
from .fold import Fold, State, reference


class Signature(NamedTuple):
    """How many operands and results of each shape an operation has.

    Attributes:
      rows: operands of shape (rows, n).
      numbers: operands of one number a row.
      row_results: results of shape (rows, n).
      number_results: results of one number a row.
    """

    rows: int
    numbers: int
    row_results: int
    number_results: int

    @staticmethod
    def of(operation: RowSpec) -> "Signature":
        """The signature of an operation."""
        rows = sum(kind.whole_rows for kind in operation.kinds)
        row_results = sum(kind.whole_rows for kind in operation.result_kinds)
        return Signature(rows, len(operation.kinds) - rows, row_results, len(operation.results) - row_results)


class References(NamedTuple):
    """The references that a kernel is given, by what they are to the operation."""

    rows: Sequence[Any]
    numbers: Sequence[Any]
    extras: Sequence[Any]
    row_results: Sequence[Any]
    number_results: Sequence[Any]

    @staticmethod
    def of(operation: RowSpec, refs: Sequence[Any]) -> "References":
        """Sorts references to operands, extras and results, which come in this order."""
        sizes = list(Signature.of(operation))
        sizes.insert(2, len(refs) - sum(sizes))
        rest = iter(refs)
        return References(*(tuple(itertools.islice(rest, size)) for size in sizes))


def fold_of(operation: RowSpec) -> Fold | None:
    """How an operation reduces a row, if it does."""
    if operation.reduces is Reduction.NOTHING:
        return None
    return fold.SCORES if operation.reduces is Reduction.STATE else fold.SUM


def folded(operation: RowSpec) -> tuple[int, ...]:
    """The indices, among the row operands, of those that an operation's fold needs."""
    if operation.reduces is Reduction.NOTHING:
        return ()
    kinds = [kind for kind in operation.kinds if kind.whole_rows]
    return tuple(
        i for i, kind in enumerate(kinds) if operation.reduces is not Reduction.SUM or kind is RowKind.COTANGENT
    )


def terms(operation: RowSpec, chunks: Sequence[jax.Array]) -> jax.Array:
    """What an operation folds, given a chunk of each of its row operands."""
    return functools.reduce(operator.mul, [chunks[i] for i in folded(operation)])


@functools.cache
def reduction_of(operation: RowSpec) -> RowSpec:
    """The operation that gives the total of another's fold, and nothing else."""
    if operation.reduces is Reduction.STATE:
        return STATE
    rows = tuple(operand for operand in operation.operands if operand.kind.whole_rows)
    return dataclasses.replace(operation, name=f"{operation.name}_sum", operands=rows, results=(SUM,))


type Broadcast = Callable[[jax.Array], jax.Array]
type Finished = Callable[..., jax.Array]


def finish(operation: RowSpec, total: State, numbers: State, broadcast: Broadcast) -> Finished:
    """The function that makes the result of a chunk from a chunk of each row operand.

    Args:
      operation: which.
      total: what the operation's fold gave for the row; nothing if it has no fold.
      numbers: its operands of one number a row.
      broadcast: makes a chunk of a number a row.
    """
    return _FINISH[operation](total, numbers, broadcast)


def _softmax(total: State, numbers: State, broadcast: Broadcast) -> Finished:
    m, s = total
    ref = broadcast(reference(m))
    scale = broadcast(jnp.where(m == jnp.inf, jnp.nan, 1 / s))  # inf / inf has no value
    return lambda x: jnp.exp(x - ref) * scale


def _softmax_vjp(total: State, numbers: State, broadcast: Broadcast) -> Finished:
    product = broadcast(total[0])
    return lambda y, g: y * (g - product)


def _log_softmax(total: State, numbers: State, broadcast: Broadcast) -> Finished:
    m, s = total
    finite = jnp.abs(m) < jnp.inf
    ref = broadcast(reference(m))
    log_s = broadcast(jnp.where(finite, jnp.log(s), jnp.nan))
    return lambda x: x - ref - log_s


def _log_softmax_vjp(total: State, numbers: State, broadcast: Broadcast) -> Finished:
    m, s = numbers
    finite = jnp.abs(m) < jnp.inf
    ref = broadcast(reference(m))
    factor = broadcast(jnp.where(finite, _inverse(s) * total[0], jnp.nan))
    return lambda x, g: g - jnp.exp(x - ref) * factor


def _logsumexp_vjp(total: State, numbers: State, broadcast: Broadcast) -> Finished:
    m, s, g = numbers
    ref = broadcast(reference(m))
    scale = broadcast(_inverse(s) * g)
    return lambda x: jnp.exp(x - ref) * scale


def _inverse(s: jax.Array) -> jax.Array:
    """1 / s; 0 for a row without scores."""
    return jnp.where(s == 0, 0.0, 1 / s)


_FINISH: dict[RowSpec, Callable[[State, State, Broadcast], Finished]] = {
    SOFTMAX: _softmax,
    SOFTMAX_VJP: _softmax_vjp,
    LOG_SOFTMAX: _log_softmax,
    LOG_SOFTMAX_VJP: _log_softmax_vjp,
    LOGSUMEXP_VJP: _logsumexp_vjp,
}
# The operations that have kernels of this arithmetic. To the kernels, those with labels are some of these, with extras.
KERNELS = frozenset((*_FINISH, STATE))
