"""What is done in plain JAX around a kernel that does not do it itself: the state of other keys is combined with the
results of a call, and gradients become wide and are added to others.

So ring attention, which calls an operation for each block of keys that arrives, is served by every implementation.
"""

import dataclasses

import jax

from jaxsoft import fold
from jaxsoft._attention import xla
from jaxsoft._attention.form import STATE
from jaxsoft._attention.operation import Operation, Pullback
from jaxsoft.fold import accumulator


def continues(operation: Operation) -> bool:
    """Whether an operation goes on from what other blocks of keys gave."""
    return operation.wide if isinstance(operation, Pullback) else operation.form.has_state


def alone[T: Operation](operation: T, dtype: jax.typing.DTypeLike) -> T:
    """The operation, for queries of a dtype, of this block of keys alone, whose operands are the first of its own."""
    if isinstance(operation, Pullback):
        return dataclasses.replace(operation, wide=False, sums=())
    form = operation.form
    extras = tuple(extra for extra in form.extras if extra not in STATE)
    return dataclasses.replace(
        operation, form=dataclasses.replace(form, extras=extras, dtype=accumulator(dtype), rounded=False)
    )


def continued(operation: Operation, function: xla.Function) -> xla.Function:
    """The function of an operation, given that of the operation alone."""
    return _gradients(operation, function) if isinstance(operation, Pullback) else _folded(operation, function)


def _gradients(operation: Pullback, pullback: xla.Function) -> xla.Function:
    def wide(*operands: jax.Array) -> tuple[jax.Array, ...]:
        dtype = accumulator(operands[0].dtype)
        return tuple(gradient.astype(dtype) for gradient in pullback(*operands))

    return xla.with_sums(operation.moving, operation.sums, wide)


def _folded(operation: Operation, forward: xla.Function) -> xla.Function:
    def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *given, state_output, state_lse = operands
        output, lse, rest = forward(*given)
        st = xla.with_rest(xla.before(output, lse), rest)
        return xla.of_state(operation.form, given[0].dtype, fold.combine(xla.before(state_output, state_lse), st))

    return function
