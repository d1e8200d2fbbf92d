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
from jax.interpreters import ad

from jaxsoft._core.tangents import jvp_along, moves, zero_tangent
from jaxsoft._core.whole import Whole, whole_primitive


class LinearMap(Whole):
    """A map that is linear in some of its operands, which are neighbours. Hashable."""

    @property
    @abc.abstractmethod
    def linear(self) -> range:
        """The indices of the linear operands."""

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map as a function that JAX can differentiate by the other operands."""
        return self.apply(operands)

    @abc.abstractmethod
    def transpose(self, dtype: np.dtype) -> "LinearMap":
        """The transpose, for linear operands of this dtype."""

    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """By the linear operands the map itself, and by the others that of the formula."""
        fixed = [zero_tangent(primals[i]) if i in self.linear else t for i, t in enumerate(tangents)]
        terms = []
        if any(map(moves, fixed)):
            terms.append(jvp_along(lambda *operands: self.formula(operands), primals, fixed)[1])
        if any(moves(tangents[i]) for i in self.linear):
            varied = [ad.instantiate_zeros(tangents[i]) if i in self.linear else v for i, v in enumerate(primals)]
            terms.append(self(*varied))
        return [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]

    def cotangents(self, of_results: Sequence, operands: Sequence) -> Sequence:
        """Those of the linear operands, by the transpose."""
        linear = self.linear
        unknown = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
        assert all(i in linear for i in unknown)  # where only some of them are unknown, the others are 0
        types = [operands[i].aval if i in unknown else jax.typeof(operands[i]) for i in linear]
        results: Sequence = [ad.Zero(t) for t in types]
        if not all(isinstance(g, ad.Zero) for g in of_results):
            given = map(ad.instantiate_zeros, of_results)
            transposed = self.transpose(types[0].dtype)
            results = transposed(*operands[: linear.start], *given, *operands[linear.stop :])
        return [results[linear.index(i)] if i in unknown else None for i in range(len(operands))]

    @staticmethod
    def _primitive():
        return _linear_p()


@functools.cache
def _linear_p():
    return whole_primitive("jaxsoft_linear_map")
