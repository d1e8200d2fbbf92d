"""`row_operation`: every kernel for rows behind one function.

This file is the layers between a kernel and the derivatives, from the outside in: to JAX a call is one operation, whose
rule for vmap adds a leading dimension, `partition` keeps shards where they are, and a primitive waits until it is
lowered, when the platform is known, to pick the implementation. The derivative of an operation, which only forward mode
and higher orders ask for, is that of its formula.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxsoft._core.batching import as_leading_dimension
from jaxsoft._core.carriers import is_opaque
from jaxsoft._core.mesh import can_partition
from jaxsoft._core.primitives import compiled, primitive
from jaxsoft._core.tangents import jvp_along, zero_tangent
from jaxsoft._core.whole import Whole
from jaxsoft._rows import xla
from jaxsoft._rows.choice import check_operands, choose, takes
from jaxsoft._rows.forms import Form, compose, result_types
from jaxsoft._rows.operation import Operation, RowFunction
from jaxsoft._rows.partition import partitioned


def row_operation(
    operation: Operation, form: Form, implementation: str | None, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Calls a row operation. Raises at once where the named implementation cannot take such operands.

    Args:
      operation: which.
      form: what else is done to the scores.
      implementation: None, or the name of one.
      operands: those of the operation, and then the extras of the form. Leading dimensions are rows.
    """
    check_operands(operation, form, implementation, [jax.typeof(x) for x in operands])
    if implementation is None and not can_partition():
        implementation = "xla"
    return _Call(operation, form, implementation, is_opaque(implementation) and can_partition())(*operands)


@dataclasses.dataclass(frozen=True)
class _Call(Whole):
    """An operation in some form by an implementation, which a mesh may partition or not."""

    operation: Operation
    form: Form
    implementation: str | None
    partition: bool

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The operation."""
        kernels = OneDevice(self.implementation)
        of = partitioned(self.operation, self.form, kernels) if self.partition else kernels(self.operation, self.form)
        return of(*operands)

    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """Those of the formula. Integers have none."""
        results, along = jvp_along(_formula(self.operation, self.form), primals, tangents)
        return [
            t if jnp.issubdtype(y.dtype, jnp.floating) else zero_tangent(y) for y, t in zip(results, along, strict=True)
        ]

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The mapped dimension comes first, and is more rows."""
        return self(*as_leading_dimension(operands, dims, len(self.operation.operands)))


def _formula(operation: Operation, form: Form) -> RowFunction:
    return compose(operation, form, xla.formula(operation, form))


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """The `Kernels` of whole rows, or of parts. XLA serves a part that a named implementation does not take."""

    implementation: str | None

    def __call__(self, operation: Operation, form: Form) -> RowFunction:
        """The operation in this form."""

        def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
            taken = takes(operation, form, self.implementation, [jax.typeof(x) for x in operands])
            return kernel(operation, form, self.implementation if taken else "xla", *operands)

        return function


def kernel(operation: Operation, form: Form, implementation: str | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """`row_operation` within code for one device that is neither mapped nor differentiated."""
    return tuple(_row_operation_p().bind(*operands, operation=operation, form=form, implementation=implementation))


@functools.cache
def _row_operation_p():
    made = primitive("jaxsoft_row_operation", _impl, _abstract_eval)
    mlir.register_lowering(made, functools.partial(_lower, "other"))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(made, functools.partial(_lower, platform), platform=platform)
    return made


@functools.partial(compiled, static_argnames=("operation", "form", "implementation"))
def _impl(*operands, **params):
    return _row_operation_p().bind(*operands, **params)


def _abstract_eval(*operands, operation, form, implementation):
    """The types of the results are those of the formula, which over a mesh gives them their shardings."""
    del implementation
    if jax.sharding.get_abstract_mesh().empty and all(v.sharding.mesh.empty for v in operands):
        types = result_types(operation, form, operands[0])
        return [jax.core.ShapedArray(t.shape, t.dtype) for t in types]
    return jax.make_jaxpr(_formula(operation, form))(*operands).out_avals


def _lower(platform: str, ctx: mlir.LoweringRuleContext, *operands, operation, form, implementation):
    operands_in = cast(Sequence[jax.core.ShapedArray], ctx.avals_in)
    kernel = choose(operation, form, implementation, platform, operands_in)
    return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands)
