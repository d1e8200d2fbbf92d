"""Linear maps as operations: the derivative of a function at a point, in forward mode and transposed for reverse mode.

A `jax.custom_vjp` would refuse forward mode. Here the derivative of a function is one operation that is linear in some
of its operands. Forward mode evaluates it, and reverse mode transposes it to another operation of the same kind, which
may be a kernel. Both can be differentiated again, by their formula.
"""

import abc
from collections.abc import Sequence

import jax
import numpy as np
from jax.interpreters import ad

from jaxsoft._core.operation import Operation, is_perturbed, jvp_along, zero_tangent


class LinearMap(Operation):
    """A map that is linear in some of its operands, which are neighbours. Hashable."""

    @property
    @abc.abstractmethod
    def linear(self) -> range:
        """The indices of the linear operands."""

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map as a function that JAX can differentiate by the other operands."""
        return self.apply(operands)

    @abc.abstractmethod
    def transpose(self, dtypes: Sequence[np.dtype], wanted: Sequence[int]) -> "LinearMap":
        """The transpose.

        Args:
          dtypes: of the linear operands.
          wanted: of which of them, counted from the first linear one, there are to be results. There may be of all.
        """

    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """By the linear operands the map itself, and by the others that of the formula."""
        fixed = [zero_tangent(primals[i]) if i in self.linear else t for i, t in enumerate(tangents)]
        terms = []
        if any(map(is_perturbed, fixed)):
            terms.append(jvp_along(lambda *operands: self.formula(operands), primals, fixed)[1])
        if any(is_perturbed(tangents[i]) for i in self.linear):
            varied = [ad.instantiate_zeros(tangents[i]) if i in self.linear else v for i, v in enumerate(primals)]
            terms.append(self(*varied))
        return [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]

    def cotangents(self, of_results: Sequence, operands: Sequence) -> Sequence:
        """Those of the linear operands, by the transpose."""
        linear = self.linear
        unknown = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
        assert all(i in linear for i in unknown)  # where only some of them are unknown, the others are 0
        found: list = [None] * len(operands)
        if all(isinstance(g, ad.Zero) for g in of_results):
            for i in unknown:
                found[i] = ad.Zero(operands[i].aval)
            return found
        given = map(ad.instantiate_zeros, of_results)
        types = [operands[i].aval if i in unknown else jax.typeof(operands[i]) for i in linear]
        wanted = [i - linear.start for i in unknown]
        transposed = self.transpose([t.dtype for t in types], wanted)
        results: Sequence[jax.Array] = transposed(*operands[: linear.start], *given, *operands[linear.stop :])
        results = results if len(results) == len(unknown) else [results[i] for i in wanted]
        for i, v in zip(unknown, results, strict=True):
            found[i] = v
        return found
