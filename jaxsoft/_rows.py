"""The row operations: every kernel of jaxsoft behind one function.

An operation takes operands of shape (..., n), x's or g's, and statistics of shape (...), one number a row; leading
dimensions are rows. This file is the layers between a kernel and the derivatives, from the outside in: vmap adds a
leading dimension, `_partition` keeps shards where they are, and a primitive waits until it is lowered, when the
platform is known, to pick the implementation. The derivative of an operation, which only forward mode and higher
orders ask for, is that of its formula.
"""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoft import _xla
from jaxsoft._implementations import check_operands, choose, is_opaque
from jaxsoft._partition import can_partition, partitioned

# The kinds of the operands of each operation: "x" for (..., n), "r" for a statistic of shape (...).
OPERATIONS = {
    "softmax": "x",  # -> y
    "softmax_vjp": "xx",  # y, g -> y * (g - <y, g>)
    "log_softmax": "x",  # -> y, m, s
    "log_softmax_vjp": "xrrx",  # x, m, s, g -> g - p * sum(g), with p = exp(x - m) / s
    "state": "x",  # -> m, s
    "logsumexp_vjp": "xrrr",  # x, m, s, g -> p * g
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def row_operation(operation: str, implementation: str | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Calls a row operation. Raises at once where the named implementation cannot take such operands."""
    check_operands(implementation, [jax.typeof(x) for x in operands])
    if implementation is None and not can_partition():
        implementation = "xla"
    return _batched(operation, implementation, is_opaque(implementation) and can_partition())(*operands)


@row_operation.defjvp
def _row_operation_jvp(operation, implementation, primals, tangents):
    _, tangents_out = jax.jvp(_xla.OPERATIONS[operation], primals, tangents)
    return row_operation(operation, implementation, *primals), tangents_out


@functools.cache
def _batched(operation: str, implementation: str | None, partition: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation with a rule for vmap: the mapped dimension comes first, and is more rows."""

    def kernel(*operands):
        return tuple(row_operation_p.bind(*operands, operation=operation, implementation=implementation))

    if partition:
        kernel = partitioned(operation, kernel, OPERATIONS[operation])
    function = custom_vmap(kernel)

    @function.def_vmap
    def vmap(size, batched, *operands):
        full = [
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip(operands, batched, strict=True)
        ]
        results = function(*full)
        return results, (True,) * len(results)

    return function


row_operation_p = Primitive("jaxsoft_row_operation")
row_operation_p.multiple_results = True


@row_operation_p.def_impl
@functools.partial(jax.jit, static_argnames=("operation", "implementation"))
def _impl(*operands, **params):
    return row_operation_p.bind(*operands, **params)


@row_operation_p.def_abstract_eval
def _abstract_eval(*operands, operation, implementation):
    """The types of the results are those of the formula, sharding and mesh axes included."""
    del implementation
    return jax.make_jaxpr(_xla.OPERATIONS[operation])(*operands).out_avals


def _lower(platform: str, ctx: mlir.LoweringRuleContext, *operands, operation, implementation):
    operands_in = cast(Sequence[jax.core.ShapedArray], ctx.avals_in)
    kernel = choose(operation, implementation, platform, operands_in)
    return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands)


mlir.register_lowering(row_operation_p, functools.partial(_lower, "other"))
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(row_operation_p, functools.partial(_lower, _platform), platform=_platform)
