"""Functions as one operation each, for JAX to stage, differentiate and map as a whole.

`jax.custom_jvp` would do, but that JAX 0.11 forgets it where the function is in the body of a loop that is
differentiated, and then second derivatives reach what has none, as the kernels. A primitive stays what it is.
"""

import abc
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jaxsoft._core.primitives import compiled, primitive

if TYPE_CHECKING:
    from jax.extend.core import Primitive


class Whole(abc.ABC):
    """A function of arrays. Hashable."""

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results, as of one operation."""
        # The primitive holds its computation as a jaxpr. JAX searches the jaxprs of a program for operations that need
        # to know the devices when they are lowered, as custom_partitioning does.
        call = jax.make_jaxpr(lambda *operands: self.apply(operands))(*operands)
        return tuple(self._primitive().bind(*operands, function=self, call=call))

    @abc.abstractmethod
    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The function."""

    @abc.abstractmethod
    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """The tangents of the results, of tangents that may be known to be zero."""

    def along(self, primals: Sequence[jax.Array], tangents: Sequence) -> tuple[Sequence[jax.Array], Sequence]:
        """The results and their tangents, for a function that computes something for both at once."""
        return self(*primals), self.tangents(primals, tangents)

    @abc.abstractmethod
    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The results for operands that are mapped along some dimensions, mapped along the first."""

    def cotangents(self, of_results: Sequence, operands: Sequence) -> Sequence:
        """The cotangents of the operands in which the function is linear, where JAX transposes it by these alone.

        Args:
          of_results: those of the results.
          operands: of which those are `ad.UndefinedPrimal`. The cotangents of others are None.
        """
        del of_results, operands
        raise NotImplementedError(f"{self} is not linear in its operands, so it has no transpose")

    @staticmethod
    def _primitive() -> "Primitive":
        return _operation_p()


@functools.cache
def _operation_p():
    return whole_primitive("jaxsoft_operation")


def whole_primitive(name: str) -> "Primitive":
    """A primitive of which functions of one kind are parameters."""
    made = primitive(name, _impl, _abstract_eval)
    ad.primitive_jvps[made] = _jvp
    ad.primitive_transposes[made] = _transpose
    batching.primitive_batchers[made] = _batch
    mlir.register_lowering(made, _lower)
    return made


def _impl(*operands, function, call):
    del call
    return _compiled(*operands, function=function)


@functools.partial(compiled, static_argnames="function")
def _compiled(*operands, function):
    return function.apply(operands)


def _abstract_eval(*operands, function, call):
    del operands, function
    return call.out_avals


def _jvp(primals, tangents, *, function, call):
    del call
    results, found = function.along(primals, tangents)
    return results, [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in found]


def _transpose(cotangents, *operands, function, call):
    del call
    return function.cotangents(cotangents, operands)


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, function, call):
    del call
    results = function.batch(operands, dims)
    return results, [0] * len(results)


def _lower(ctx: mlir.LoweringRuleContext, *operands, function, call):
    del function
    computed = functools.partial(jax.core.eval_jaxpr, call.jaxpr, call.consts)
    return mlir.lower_fun(computed, multiple_results=True)(ctx, *operands)
