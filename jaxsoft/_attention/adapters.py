"""What is done in plain JAX around a kernel that does not do it itself: the state of other keys is combined with the
results of a call, gradients become wide and are added to others, and a cotangent that f16 may not hold is brought into
its range.

So ring attention, which calls an operation for each block of keys that arrives, is served by every implementation.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._attention import xla
from jaxsoft._attention.form import BASE, STATE
from jaxsoft._attention.spec import AttentionPullback, AttentionSpec
from jaxsoft._core.operation import Function
from jaxsoft.fold import accumulator


def continues(operation: AttentionSpec) -> bool:
    """Whether an operation goes on from what other blocks of keys gave."""
    return operation.wide if isinstance(operation, AttentionPullback) else operation.form.has_state


def without_state[T: AttentionSpec](operation: T, dtype: jax.typing.DTypeLike) -> T:
    """The operation, for queries of a dtype, of this block of keys alone, whose operands are the first of its own."""
    if isinstance(operation, AttentionPullback):
        return dataclasses.replace(operation, wide=False, sums=())
    form = operation.form
    extras = tuple(extra for extra in form.extras if extra not in STATE)
    return dataclasses.replace(
        operation, form=dataclasses.replace(form, extras=extras, dtype=accumulator(dtype), rounded=False)
    )


def continued(operation: AttentionSpec, function: Function) -> Function:
    """The function of an operation, given that of the operation alone."""

    def wide(*operands: jax.Array) -> tuple[jax.Array, ...]:
        dtype = accumulator(operands[0].dtype)
        return tuple(gradient.astype(dtype) for gradient in function(*operands))

    def folded(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *given, state_output, state_lse = operands
        output, lse, lse_residual = function(*given)
        st = xla.with_residual(xla.before(output, lse), lse_residual)
        return xla.of_state(operation.form, given[0].dtype, fold.combine(xla.before(state_output, state_lse), st))

    if isinstance(operation, AttentionPullback):
        return xla.with_sums(operation.wrt, operation.sums, wide)
    return folded


_EXPONENTS = (-120, 120)  # powers of 2 that are normal numbers of f32, and so are the inverse ones
_LEAST_SHARE, _FURTHEST_DELTA = 2.0**-12, 2.0**-10


def narrowed(operation: AttentionPullback, pullback: Function) -> Function:
    """The function of a pullback whose cotangent is in the accumulator's dtype, given one with wide gradients and no
    sums, which takes the cotangent in the dtype of query.

    Gradients are linear in cotangent and delta, and in the weights. So those of each query are divided by a power of 2
    of their size, and the query's weights multiplied by it, which their log-sum-exp does. Relative to the largest of
    the queries that share keys, no weight is then above 1: that is the unit of the gradients. A query whose cotangent
    is small beside others has small weights, and its share of the gradients of keys and values the digits that f16 has
    for these.
    """

    def wide(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *given, output, lse, lse_residual, delta, cotangent = operands
        query, key = given[: BASE - 1]
        of_queries, of_group, of_unit = _exponents(operation, key.shape[2], delta, cotangent)
        small = cotangent * _power(-jnp.moveaxis(of_queries, 1, 2))[..., None]
        # The barrier, as XLA may take a number that was rounded and widened for the number itself.
        rounded = jax.lax.optimization_barrier(small.astype(query.dtype))
        lost = jnp.sum(output.astype(small.dtype) * (rounded.astype(small.dtype) - small), axis=-1)
        delta = delta * _power(-of_queries) + jnp.moveaxis(lost, 2, 1)
        shift = (of_group - of_queries).astype(lse.dtype) * math.log(2)
        shifted = lse + shift
        lse_residual = lse_residual + fold.reference(shift - (shifted - fold.reference(lse)))
        found = dict(zip(operation.wrt, pullback(*given, output, shifted, lse_residual, delta, rounded), strict=True))
        units = {"query": of_group[:, None, :, :], "bias": of_unit[:1, :1, None, None]}
        return tuple(x * _power(units.get(name, of_unit[:, None, :, None])) for name, x in found.items())

    def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
        found = xla.with_sums(operation.wrt, operation.sums, wide)(*operands)
        if operation.wide:
            return found
        places = (operation.form.place(name) for name in operation.wrt)
        return tuple(x.astype(operands[place].dtype) for place, x in zip(places, found, strict=True))

    return function


def _exponents(
    operation: AttentionPullback, groups: int, delta: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The exponents of the sizes of the queries' cotangents (B, N, T); of the units of their gradients (B, N, 1); and
    of these by heads of keys (B, K). A bias may be shared by batch and heads: with its gradient, there is one unit.

    A unit is no less than 2^-12 of the sum of the sizes, so that no sum over many queries is out of range.
    """
    of_output = jnp.moveaxis(jnp.max(jnp.abs(cotangent), axis=-1, initial=0), 2, 1)
    size = jnp.maximum(of_output, jnp.abs(delta) * _FURTHEST_DELTA)
    size = jnp.where(jnp.isfinite(size), size, 0)
    batch, heads, _ = size.shape
    by_group = size.reshape((1, 1, -1) if "bias" in operation.wrt else (batch, groups, -1))
    unit = jnp.maximum(jnp.max(by_group, axis=-1), jnp.sum(by_group * _LEAST_SHARE, axis=-1))
    of_unit = jnp.broadcast_to(_exponent(unit), (batch, groups))
    of_group = jnp.repeat(of_unit, heads // groups, axis=1)[..., None]
    return jnp.where(size == 0, of_group, _exponent(size)), of_group, of_unit


def _exponent(x: jax.Array) -> jax.Array:
    """The exponents of powers of 2 that are above finite numbers, of at most twice their size."""
    return jnp.clip(jnp.frexp(x)[1], *_EXPONENTS)


def _power(exponent: jax.Array) -> jax.Array:
    """Powers of 2 in f32, the accumulator's dtype of f16."""
    return jnp.ldexp(jnp.ones_like(exponent, jnp.float32), exponent)
