"""The derivative of the weighted sum of the rows' losses (see `total`): both modes, every order.

Where something is differentiated, the pass over chunks of rows computes the gradients as well, and the derivative is a
linear map that has them: forward mode takes inner products of the tangents with them, and its transpose multiplies
them by the cotangent of the sum, which is 1 in training, and then costs nothing. Derivatives of higher order are those
of the formula. What is mapped before it is differentiated is taken by chunks of the classes instead: its gradients
would be kept for each element.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core.linear_map import LinearMap
from jaxsoft._head.head import product_dtype
from jaxsoft._head.loss import Objective
from jaxsoft._head.operation import HeadArray, mapped
from jaxsoft.fold import accumulator


@dataclasses.dataclass(frozen=True)
class SumDerivative(LinearMap):
    """The derivative of the sum along some of the operands, or its transpose.

    Its operands are those of the objective, the gradients, and then the tangents of the operands that are perturbed, or
    transposed the cotangent of the sum.
    """

    objective: Objective
    wrt: tuple[HeadArray, ...]
    transposed: bool = False

    @property
    def residuals(self) -> tuple[HeadArray, ...]:
        """The kinds of the operands before the linear ones."""
        return self.objective.operands + self.wrt

    @property
    def sides(self) -> tuple[tuple[HeadArray, ...], tuple[HeadArray, ...]]:
        """The kinds of the linear operands, and those of the results."""
        return ((HeadArray.TOTAL,), self.wrt) if self.transposed else (self.wrt, (HeadArray.TOTAL,))

    @property
    def linear(self) -> range:
        """The operands after the residuals."""
        begin = len(self.residuals)
        return range(begin, begin + len(self.sides[0]))

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Inner products with the gradients forward, and multiples of them for the transpose."""
        gradients, linear = operands[len(self.objective.operands) : self.linear.start], operands[self.linear.start :]
        if self.transposed:
            (factor,) = linear
            return tuple((factor * g.astype(factor.dtype)).astype(g.dtype) for g in gradients)
        wide = accumulator(product_dtype(*operands[:2]))
        products = [jnp.sum(g.astype(wide) * t.astype(wide)) for g, t in zip(gradients, linear, strict=True)]
        return (sum(products[1:], products[0]),)

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map by way of all scores."""
        given, linear = self.objective.named(operands), tuple(operands[self.linear.start :])

        def along(*values):
            return self.objective.formula(*(given | dict(zip(self.wrt, values, strict=True))).values())

        primals = tuple(given[kind] for kind in self.wrt)
        if self.transposed:
            return jax.vjp(along, *primals)[1](*linear)
        return (jax.jvp(along, primals, linear)[1],)

    def transpose(self, dtypes: Sequence[np.dtype], wanted: Sequence[int]) -> "SumDerivative":
        """The transpose, whose results have the dtypes of the operands."""
        del dtypes, wanted
        return dataclasses.replace(self, transposed=not self.transposed)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The elements are taken one after the other."""
        given, results = self.sides
        return mapped(self, self.residuals + given, results, operands, dims)
