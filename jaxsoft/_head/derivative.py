"""What a loss needs to know of a linear head's scores, as JAX differentiates it: both modes, every order.

The derivative at a point is a linear map (see `jaxsoft._core.linear_map`). Forward mode evaluates it by the formula, on
all scores, and reverse mode transposes it to the pullback over chunks.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core.linear_map import LinearMap
from jaxsoft._core.operation import Function, is_perturbed
from jaxsoft._head.forward import HeadForward
from jaxsoft._head.head import Head, formula
from jaxsoft._head.operation import HeadArray, mapped
from jaxsoft._head.pullback import HeadPullback


@functools.cache
def statistics(head: Head, residual: bool = False, before_weight: bool = False) -> Function:
    """What a loss needs to know, as a differentiable function of the parameters and the label of each row.

    Its results are those of `head.formula`, and if `residual` what is for the pullback alone: that counts as constant.
    `before_weight` says that the gradient of weight may be computed next.
    """

    @jax.custom_jvp
    def function(*operands):
        return HeadForward(head, residual, before_weight)(*operands)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        perturbed = {kind: tangent for kind, tangent in head.named(tangents).items() if is_perturbed(tangent)}
        results = statistics(head, True, HeadArray.WEIGHT in perturbed)(*primals)
        residuals = results[len(head.statistics) :]
        d_others, d_t, *d_rest = HeadDerivative(head, tuple(perturbed))(*primals, *residuals, *perturbed.values())
        results = results if residual else results[: len(head.statistics)]
        constant = map(jnp.zeros_like, results[3 + len(d_rest) :])
        return results, (d_others, d_t, d_others - d_t, *d_rest, *constant)

    return function


@dataclasses.dataclass(frozen=True)
class HeadDerivative(LinearMap):
    """The derivative of `statistics` along some of the parameters, or its transpose.

    Its operands are the residuals of `HeadPullback`, and then the tangents of the parameters that are perturbed, or
    transposed the cotangents of the statistics that have a derivative of their own.
    """

    head: Head
    wrt: tuple[HeadArray, ...]
    transposed: bool = False

    @property
    def pullback(self) -> HeadPullback:
        """The transpose as an operation over chunks."""
        return HeadPullback(self.head, self.wrt)

    @property
    def linear(self) -> range:
        """The operands after the residuals."""
        begin = len(self.pullback.residuals)
        return range(begin, begin + len(self.head.cotangents if self.transposed else self.wrt))

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The formula forward, and chunks for the transpose."""
        return self.pullback(*operands) if self.transposed else self.formula(operands)

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map by way of all scores."""
        parameters, label = self.head.named(operands), operands[len(self.head.parameters)]
        linear = tuple(operands[self.linear.start :])

        def along(*values):
            varied = parameters | dict(zip(self.wrt, values, strict=True))
            others, t, _, *rest = formula(self.head, *varied.values(), label)
            return (others, t, *rest)[: len(self.head.cotangents)]

        primals = tuple(parameters[kind] for kind in self.wrt)
        if self.transposed:
            return jax.vjp(along, *primals)[1](linear)
        return jax.jvp(along, primals, linear)[1]

    def transpose(self, dtypes: Sequence[np.dtype], wanted: Sequence[int]) -> "HeadDerivative":
        """The transpose, whose results have the dtypes of the parameters."""
        del dtypes, wanted
        return dataclasses.replace(self, transposed=not self.transposed)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """Mapped rows are more rows; where more than rows is mapped, the elements are taken one after the other."""
        pullback = self.pullback
        if self.transposed:
            return mapped(self, pullback.operands, pullback.results, operands, dims)
        return mapped(self, pullback.residuals + self.wrt, self.head.cotangents, operands, dims)
