"""The functions of rows as JAX differentiates them: both modes, every order.

The derivative at a point is a linear map (see `jaxsoft._core.linear_map`), which forward mode evaluates by a formula
and reverse mode transposes to a kernel for the pullback. Where x alone moves, as in training with a fixed scale, it
maps a tangent of x, and the scale is part of it. Where scale or bias move too, it maps a tangent of the scores
z = x * scale + bias, which JAX derives from theirs, and whose cotangent JAX takes back to them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxsoft._core.batching import as_leading_dimension
from jaxsoft._core.linear_map import LinearMap
from jaxsoft._core.rounding import stored
from jaxsoft._core.tangents import jvp_along, moves
from jaxsoft._rows import xla
from jaxsoft._rows.forms import Form, compose, counted, row_dtypes, scores, split
from jaxsoft._rows.operation import Extra, Function, Kind
from jaxsoft._rows.primitive import kernel, row_operation
from jaxsoft.fold import accumulator


@functools.cache
def differentiable(function: Function, form: Form, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of rows, of the operands of its operation and the form's extras.

    What it returns has the accumulator's dtype, but for what has x's shape, for elements of x, and for their softmax.
    """
    forward = functools.partial(row_operation, function.forward, form, implementation)

    @jax.custom_jvp
    def call(*operands):
        return function.values(operands, forward(*operands))

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def call_jvp(primals, tangents):
        results = forward(*primals)
        base, extras = split(function.forward, form, primals)
        values, residuals = function.values(base, results), function.residuals(base, results)
        t = tangents[0]
        if any(map(moves, tangents[len(base) :])):
            z, t = _scores_along(form, primals, tangents)
            residuals = function.residuals((z, *base[1:]), results)
            extras = {name: v for name, v in extras.items() if name not in (Extra.SCALE, Extra.BIAS)}
        masked = False
        if function.tangent.kinds[0] is Kind.PROBABILITIES:  # they are 0 where an element does not count
            masked = Extra.LIMIT in extras or Extra.WHERE in extras
            extras = {name: v for name, v in extras.items() if name in (Extra.SCALE, Extra.LIMIT)}
        derivative = _Derivative(
            function, dataclasses.replace(form, extras=tuple(extras), masked=masked), implementation
        )
        return values, function.tangents(results, derivative(*residuals, t, *extras.values()))

    return lambda *operands: call(*stored(*operands))


def _scores_along(form: Form, primals: Sequence[jax.Array], tangents: Sequence) -> tuple[jax.Array, jax.Array]:
    """The scores z and their tangent, given x and the extras and theirs."""

    @functools.partial(jax.checkpoint, prevent_cse=False)  # keeps the operands, not masks of x's size
    def z(x, *extras):
        named = dict(zip(form.extras, extras, strict=True))
        return scores(form, x, named, accumulator(x.dtype), counted(form, x, named))

    return jvp_along(z, primals, tangents)


@dataclasses.dataclass(frozen=True)
class _Derivative(LinearMap):
    """The derivative of a function of rows, or its transpose.

    Its operands are those of the function's tangent, or of its pullback, and the extras.
    """

    function: Function
    form: Form
    implementation: str | None
    transposed: bool = False

    @property
    def linear(self) -> range:
        """The last operands but the extras."""
        return (self.function.pullback if self.transposed else self.function.tangent).linear

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """A formula forward, and a kernel for the transpose."""
        if not self.transposed:
            # The formula as one operation, so that reverse mode, which has no use for it, need not trace it.
            return kernel(self.function.tangent, self.form, "xla", *operands)
        pullback = self.function.pullback
        if pullback.made_of:
            plain = dataclasses.replace(self.form, k=0)
            return pullback.made_of(lambda other, *v: row_operation(other, plain, self.implementation, *v), *operands)
        if len(row_dtypes(pullback, operands)) > 1:  # as of log_softmax with another dtype: kernels take one dtype
            dtype, base = accumulator(operands[0].dtype), len(pullback.operands)
            kinds = zip(pullback.kinds, operands[:base], strict=True)
            operands = [*(v.astype(dtype) if kind.whole_rows else v for kind, v in kinds), *operands[base:]]
        return row_operation(pullback, self.form, self.implementation, *operands)

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """What `apply` computes, by operations that have derivatives."""
        if self.transposed:
            return self.apply(operands)
        return compose(self.function.tangent, self.form, xla.formula(self.function.tangent, self.form))(*operands)

    def transpose(self, dtype: np.dtype) -> "_Derivative":
        """The transpose, whose result has this dtype."""
        form = dataclasses.replace(self.form, dtype=dtype)
        return dataclasses.replace(self, form=form, transposed=not self.transposed)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """A mapped dimension is more rows."""
        return self(*as_leading_dimension(operands, dims, self.linear.stop))
