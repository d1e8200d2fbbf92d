"""`head_operation`: a pass over the classes behind one function, with its rules for vmap and for a mesh.

This file is the layers between the loop over chunks and the derivatives, from the outside in: vmap adds rows, where
only rows are mapped; `partition` keeps shards where they are; and a primitive waits until it is lowered to become the
loop. The primitive itself has no rule for differentiation: `derivative` has the derivatives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.interpreters import mlir

from jaxsoft._core.batching import as_leading_dimension
from jaxsoft._core.mesh import can_partition
from jaxsoft._core.primitives import compiled, primitive
from jaxsoft._head.operation import Kind, Operation
from jaxsoft._head.partition import local, partitioned

type _Function = Callable[..., Sequence[jax.Array]]


def head_operation(operation: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of an operation, whose rows are the leading dimensions of hidden."""
    return _batched(operation)(*operands)


@functools.cache
def _batched(operation: Operation) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation with a rule for vmap."""

    def call(*operands):
        function = partitioned(operation, _bind) if can_partition() else functools.partial(_bind, operation)
        return function(*operands)

    function = custom_vmap(call)

    @function.def_vmap
    def vmap(size, batched, *operands):
        del size
        dims = [0 if is_batched else None for is_batched in batched]
        results = mapped(function, operation.operands, operation.results, operands, dims)
        return tuple(results), (True,) * len(results)

    return function


def mapped(
    function: _Function,
    kinds: Sequence[Kind],
    results: Sequence[Kind],
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
) -> Sequence[jax.Array]:
    """The results of a function for mapped operands, mapped along their first dimension.

    Args:
      function: any that is computed for each row by itself, but for results without rows.
      kinds: those of its operands.
      results: the kinds of its results.
      operands: what it is called with.
      dims: along which dimension each of the operands is mapped; None for one that is not.
    """
    given = list(zip(kinds, operands, dims, strict=True))
    if all(kind.has_rows for kind in results) and all(d is None or kind.has_rows for kind, _, d in given):
        return _of_more_rows(function, given)
    in_front = [None if d is None else jnp.moveaxis(v, d, 0) for _, v, d in given]

    def one(values):
        return function(*(whole if v is None else v for v, whole in zip(values, operands, strict=True)))

    return jax.lax.map(one, in_front)


def _of_more_rows(function: _Function, given: Sequence[tuple[Kind, jax.Array, int | None]]) -> Sequence[jax.Array]:
    """The results where rows alone are mapped: the mapped dimension is one more dimension of the rows."""
    by_row = [(v, d) for kind, v, d in given if kind.has_rows]
    more = iter(as_leading_dimension([v for v, _ in by_row], [d for _, d in by_row], len(by_row)))
    return function(*(next(more) if kind.has_rows else v for kind, v, _ in given))


def _bind(operation: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_head_p().bind(*operands, operation=operation))


@functools.cache
def _head_p():
    made = primitive("jaxsoft_head", _impl, _abstract_eval)
    mlir.register_lowering(made, _lower)
    # A rule of its own, which is another object, as only that lowers the loop for this platform alone where there are
    # several: Pallas kernels cannot be lowered for several at once.
    mlir.register_lowering(made, functools.partial(_lower), platform="cuda")
    return made


@functools.partial(compiled, static_argnames="operation")
def _impl(*operands, operation):
    return _head_p().bind(*operands, operation=operation)


def _abstract_eval(*operands, operation):
    return operation.types(*operands)


def _lower(ctx: mlir.LoweringRuleContext, *operands, operation):
    """Lowers the loop for operands whose types no longer name the axes of a mesh."""
    avals = [jax.core.ShapedArray(v.shape, v.dtype) for v in cast(Sequence[jax.core.ShapedArray], ctx.avals_in)]
    return mlir.lower_fun(local(operation), multiple_results=True)(ctx.replace(avals_in=avals), *operands)
