"""Linear maps as a primitive: the derivative of a function at a point, in forward mode and transposed for reverse mode.

A `jax.custom_vjp` would refuse forward mode. Here the derivative of a function is one operation that is linear in some
of its operands. Forward mode evaluates it, and reverse mode transposes it to another operation of the same kind, which
may be a kernel. Both can be differentiated again, by their formula.
"""

import abc
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxsoft._core.primitives import compiled, primitive
from jaxsoft._core.tangents import jvp_along, moves, zero_tangent


class LinearMap(abc.ABC):
    """A map that is linear in some of its operands, which are neighbours. Hashable."""

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """The results of the map, as one operation that JAX can transpose."""
        # The primitive holds its computation as a jaxpr. JAX searches the jaxprs of a program for operations that need
        # to know the devices when they are lowered, as custom_partitioning does.
        call = jax.make_jaxpr(lambda *operands: self.apply(operands))(*operands)
        return _linear_p().bind(*operands, linear_map=self, call=call)

    @property
    @abc.abstractmethod
    def linear(self) -> range:
        """The indices of the linear operands."""

    @abc.abstractmethod
    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map."""

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map as a function that JAX can differentiate by the other operands."""
        return self.apply(operands)

    @abc.abstractmethod
    def transpose(self, dtype: np.dtype) -> "LinearMap":
        """The transpose, for linear operands of this dtype."""

    @abc.abstractmethod
    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The results for operands that are mapped along some dimensions, mapped along the first."""


@functools.cache
def _linear_p():
    made = primitive("jaxsoft_linear_map", _impl, _abstract_eval)
    ad.primitive_jvps[made] = _jvp
    ad.primitive_transposes[made] = _transpose
    batching.primitive_batchers[made] = _batch
    mlir.register_lowering(made, _lower)
    return made


def _impl(*operands, linear_map, call):
    del call
    return _compiled(*operands, linear_map=linear_map)


@functools.partial(compiled, static_argnames="linear_map")
def _compiled(*operands, linear_map):
    return linear_map.apply(operands)


def _abstract_eval(*operands, linear_map, call):
    del operands, linear_map
    return call.out_avals


def _jvp(primals, tangents, *, linear_map, call):
    del call
    linear = linear_map.linear
    fixed = [zero_tangent(primals[i]) if i in linear else t for i, t in enumerate(tangents)]
    terms = []
    if any(map(moves, fixed)):
        terms.append(jvp_along(lambda *operands: linear_map.formula(operands), primals, fixed)[1])
    if any(moves(tangents[i]) for i in linear):
        varied = [ad.instantiate_zeros(tangents[i]) if i in linear else v for i, v in enumerate(primals)]
        terms.append(linear_map(*varied))
    return linear_map(*primals), [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]


def _transpose(cotangents, *operands, linear_map, call):
    del call
    linear = linear_map.linear
    unknown = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
    assert all(i in linear for i in unknown)  # where only some of them are unknown, the others are 0
    types = [operands[i].aval if i in unknown else jax.typeof(operands[i]) for i in linear]
    results = [ad.Zero(t) for t in types]
    if not all(isinstance(g, ad.Zero) for g in cotangents):
        given = map(ad.instantiate_zeros, cotangents)
        transposed = linear_map.transpose(types[0].dtype)
        results = transposed(*operands[: linear.start], *given, *operands[linear.stop :])
    return [results[linear.index(i)] if i in unknown else None for i in range(len(operands))]


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, linear_map, call):
    del call
    results = linear_map.batch(operands, dims)
    return results, [0] * len(results)


def _lower(ctx: mlir.LoweringRuleContext, *operands, linear_map, call):
    from jax.extend.core import jaxpr_as_fun

    del linear_map
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *operands)
