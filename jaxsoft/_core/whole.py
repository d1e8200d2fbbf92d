"""Functions as one operation each, for JAX to stage, differentiate and map as a whole.

`jax.custom_jvp` would do, but that JAX 0.11 forgets it where the function is in the body of a loop that is
differentiated, and then second derivatives reach what has none, as the kernels. A primitive stays what it is.
"""

import abc
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jaxsoft._core.primitives import compiled, primitive


class Whole(abc.ABC):
    """A function of arrays. Hashable."""

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results, as of one operation."""
        # As in linear_map.py, the computation is a jaxpr, in which JAX finds what has to know the devices.
        call = jax.make_jaxpr(self.apply)(*operands)
        return tuple(_whole_p().bind(*operands, function=self, call=call))

    @abc.abstractmethod
    def apply(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The function."""

    @abc.abstractmethod
    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """The tangents of the results, of tangents that may be known to be zero."""

    @abc.abstractmethod
    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The results for operands that are mapped along their first dimension, or not, mapped along the first."""


@functools.cache
def _whole_p():
    made = primitive("jaxsoft_operation", _impl, _abstract_eval)
    ad.primitive_jvps[made] = _jvp
    batching.primitive_batchers[made] = _batch
    mlir.register_lowering(made, _lower)
    return made


def _impl(*operands, function, call):
    del call
    return _compiled(*operands, function=function)


@functools.partial(compiled, static_argnames="function")
def _compiled(*operands, function):
    return function.apply(*operands)


def _abstract_eval(*operands, function, call):
    del operands, function
    return call.out_avals


def _jvp(primals, tangents, *, function, call):
    del call
    found = function.tangents(primals, tangents)
    return function(*primals), [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in found]


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, function, call):
    del call
    in_front = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    results = function.batch(in_front, [None if d is None else 0 for d in dims])
    return results, [0] * len(results)


def _lower(ctx: mlir.LoweringRuleContext, *operands, function, call):
    from jax.extend.core import jaxpr_as_fun

    del function
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *operands)
