"""`attention_operation`: every kernel for attention behind one function.

This file is the layers between a kernel and the derivatives, from the outside in: to JAX a call is one operation, whose
rule for vmap joins the batch, `partition` keeps shards of batch and heads where they are, and a primitive waits until
it is lowered, when the platform is known, to pick the implementation. The derivative of an operation, which only
forward mode and higher orders ask for, is that of its formula.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
from jax.interpreters import ad, mlir

from jaxsoft._attention.batching import mapped, paged_mapped
from jaxsoft._attention.choice import check_operands, choose
from jaxsoft._attention.form import BASE
from jaxsoft._attention.operation import Forward, Operation, Paged, Pullback
from jaxsoft._attention.partition import partitioned
from jaxsoft._core.carriers import is_opaque
from jaxsoft._core.mesh import Axes, can_partition, on_one_device
from jaxsoft._core.primitives import compiled, primitive
from jaxsoft._core.tangents import jvp_along
from jaxsoft._core.whole import Whole


def attention_operation(
    operation: Operation, implementation: str | None, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Calls an operation. Raises at once where the named implementation cannot take such operands.

    Args:
      operation: which.
      implementation: None, or the name of one.
      operands: those of the operation.
    """
    check_operands(operation, implementation, [jax.typeof(x) for x in operands])
    if implementation is None and not can_partition():
        implementation = "xla"
    splits = is_opaque(implementation) or operation.form.shards is not None
    return _Call(operation, implementation, splits and can_partition())(*operands)


@dataclasses.dataclass(frozen=True)
class _Call(Whole):
    """An operation by an implementation, which a mesh may partition or not."""

    operation: Operation
    implementation: str | None
    partition: bool

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The operation."""
        on_shards = _on_shards(self.operation, self.implementation)
        shards = self.operation.form.shards
        if shards is not None and shards.inside:
            return on_shards((shards.axis,))(*operands)
        kernel = _kernel(self.operation, self.implementation)
        return (partitioned(self.operation, kernel, on_shards) if self.partition else kernel)(*operands)

    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """Those of the formula."""
        return jvp_along(self.operation.formula(), primals, tangents)[1]

    def cotangents(self, of_results: Sequence, operands: Sequence) -> Sequence:
        """The output is linear in value, and nothing else depends on it: so it is the gradient by value, at 0."""
        from jaxsoft._attention.derivative import attention  # which calls this file
        from jaxsoft._attention.paged import paged_attention

        names, place = self.operation.operands, BASE - 1
        unknown = [name for name, v in zip(names, operands, strict=True) if ad.is_undefined_primal(v)]
        if unknown != [names[place]] or not isinstance(self.operation, Forward):
            raise NotImplementedError(f"attention is linear in value alone, and has no transpose by {unknown}")
        value = ad.Zero(operands[place].aval)
        found = value
        if not isinstance(of_results[0], ad.Zero):
            of_form = paged_attention if isinstance(self.operation, Paged) else attention
            function = of_form(self.operation.form, self.implementation)
            given = operands[:place], operands[BASE:]
            pullback = jax.vjp(lambda v: function(*given[0], v, *given[1])[0], ad.instantiate_zeros(value))[1]
            (found,) = pullback(of_results[0])
        return [found if i == place else None for i in range(len(operands))]

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """A mapped dimension joins the batch."""
        operation = self.operation
        if isinstance(operation, Paged):
            return paged_mapped(self, operation.operands, operation.results, operands, dims)
        moving = operation.moving if isinstance(operation, Pullback) else ()
        return mapped(self, operation.operands, operation.results, operands, dims, moving)


@functools.cache
def _kernel(operation: Operation, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation on one device, the same function for each call."""
    return functools.partial(_bind, operation, implementation)


@functools.cache
def _on_shards(operation: Operation, implementation: str | None) -> Callable[..., Callable[..., tuple]]:
    """The operation on one device that has a part of each sequence, for the axes of a mesh; likewise the same."""

    def run(operation: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
        check_operands(operation, implementation, [jax.typeof(x) for x in operands])
        return _bind(operation, implementation, *operands)

    def on_shards(axes: Axes, fresh: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
        return operation.on_shards(axes, run, implementation, fresh)

    return on_shards


def _bind(operation: Operation, implementation: str | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_attention_p().bind(*operands, operation=operation, implementation=implementation))


@functools.cache
def _attention_p():
    made = primitive("jaxsoft_attention", _impl, _abstract_eval)
    mlir.register_lowering(made, functools.partial(_lower, "other"))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(made, functools.partial(_lower, platform), platform=platform)
    return made


@functools.partial(compiled, static_argnames=("operation", "implementation"))
def _impl(*operands, **params):
    return _attention_p().bind(*operands, **params)


def _abstract_eval(*operands, operation, implementation):
    del implementation
    return operation.types(*operands)


def _chosen(operation, implementation, platform, operands):
    """The function for an operation, which may have whole sequences in a layout."""
    if operation.form.shards is None:
        return choose(operation, implementation, platform, operands)

    def function(*given):
        plain = [jax.core.ShapedArray(v.shape, v.dtype) for v in given]
        return choose(operation.whole, implementation, platform, plain)(*given)

    return operation.alone(function)


def _lower(platform: str, ctx: mlir.LoweringRuleContext, *operands, operation, implementation):
    """Lowers the kernel for operands whose types no longer name the axes of a mesh."""
    operands_in = cast(Sequence[jax.core.ShapedArray], ctx.avals_in)
    avals = [jax.core.ShapedArray(v.shape, v.dtype) for v in operands_in]
    kernel = on_one_device(_chosen(operation, implementation, platform, avals))
    return mlir.lower_fun(kernel, multiple_results=True)(ctx.replace(avals_in=avals), *operands)
