"""The functions of rows as JAX differentiates them: both modes, every order.

The derivative at a point is a linear map (see `jaxsoft._core.linear_map`), which forward mode evaluates by a formula
and reverse mode transposes to a kernel for the pullback. Where x alone is perturbed, as in training with a fixed scale,
it maps a tangent of x, and the scale is part of it. Where scale or bias are too, it maps a tangent of the scores
z = x * scale + bias, which JAX derives from theirs, and whose cotangent JAX takes back to them.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core.implementations import Names
from jaxsoft._core.linear_map import LinearMap
from jaxsoft._core.mesh import varying_alike
from jaxsoft._core.operation import Function, bdims_at_front, is_perturbed, jvp_along
from jaxsoft._core.rounding import stored
from jaxsoft._rows import plain
from jaxsoft._rows.forms import RowForm, compose, row_dtypes, scores, split, valid_elements
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.spec import RowExtra, RowFunction, RowKind
from jaxsoft.fold import accumulator


@functools.cache
def differentiable(function: RowFunction, form: RowForm, implementation: Names) -> Function:
    """A function of rows, of the operands of its operation and the form's extras.

    What it returns has the accumulator's dtype, but for what has x's shape, for elements of x, and for their softmax.
    """
    forward = RowOperation(function.forward, form, implementation)
    inputs = function.forward.inputs

    @jax.custom_jvp
    def call(*operands):
        given = stored(*operands)
        return function.values(given, forward(*given))

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def call_jvp(primals, tangents):
        # A cotangent varies over the axes of shard_map as the results do, so JAX must know where to sum it.
        primals = varying_alike(*stored(*primals))
        tangents = [varying_alike(t, *primals)[0] if is_perturbed(t) else t for t in tangents]
        results = forward(*primals)
        base, extras = split(function.forward, form, primals)
        of_inputs: Sequence = [tangents[i] for i in inputs]
        of_extras = tangents[len(base) :]
        others = [t for i, t in enumerate(tangents[: len(base)]) if i not in inputs]
        assert not any(map(is_perturbed, others)), "a function of rows has derivatives by its scores and extras alone"
        values, residuals = function.values(base, results), function.residuals(base, results)
        if any(map(is_perturbed, of_extras)):
            z, of_inputs = _scores_along(function, form, primals, tangents)
            varied = dict(zip(inputs, z, strict=True))
            residuals = function.residuals([varied.get(i, v) for i, v in enumerate(base)], results)
            extras = {name: v for name, v in extras.items() if name.decides}
        masked = False
        if function.tangent.kinds[0] is RowKind.PROBABILITIES:  # they are 0 where an element is masked
            masked = any(name.decides for name in extras)
            extras = {name: v for name, v in extras.items() if name in (RowExtra.SCALE, RowExtra.LIMIT)}
        along = dataclasses.replace(form, extras=tuple(extras), masked=masked)
        differentiated = tuple(i for i, t in enumerate(of_inputs) if is_perturbed(t))
        derivative = _RowDerivative(function, along, implementation, differentiated)
        found = derivative(*residuals, *(of_inputs[i] for i in differentiated), *extras.values())
        return values, function.tangents(results, found)

    return call


def _scores_along(
    function: RowFunction, form: RowForm, primals: Sequence[jax.Array], tangents: Sequence
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """The scores of the inputs and their tangents, given all operands and theirs."""
    inputs, base = function.forward.inputs, len(function.forward.operands)
    places = [*inputs, *range(base, len(primals))]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # keeps the operands, not masks of x's size
    def z(*operands):
        given, named = operands[: len(inputs)], dict(zip(form.extras, operands[len(inputs) :], strict=True))
        valid = valid_elements(form, given[0], named)
        return [scores(form, x, named, accumulator(x.dtype), valid, i) for i, x in enumerate(given)]

    return jvp_along(z, [primals[i] for i in places], [tangents[i] for i in places])


@dataclasses.dataclass(frozen=True)
class _RowDerivative(LinearMap):
    """The derivative of a function of rows along some of its inputs, or its transpose.

    Its operands are those of the function's tangent, or of its pullback, and the extras.
    """

    function: RowFunction
    form: RowForm
    implementation: Names
    inputs: tuple[int, ...]
    transposed: bool = False

    @property
    def linear(self) -> range:
        """The last operands but the extras."""
        begin = self.function.tangent.linear.start
        return range(begin, begin + len(self.function.pullback.linear if self.transposed else self.inputs))

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """A formula forward, and a kernel for the transpose."""
        if not self.transposed:
            # The formula as one operation, so that reverse mode, which has no use for it, need not trace it.
            return RowOperation(self.function.tangent, self.form, "xla").on_device(*self._along_all(operands))
        pullback = self.function.pullback
        if len(self.inputs) == 1:  # then the one that has no other results, if there is one
            pullback = self.function.pullback_of.get(self.inputs[0], pullback)
        if pullback.made_of:
            plain = dataclasses.replace(self.form, k=0)
            return pullback.made_of(lambda other, *v: RowOperation(other, plain, self.implementation)(*v), *operands)
        if len(row_dtypes(pullback, operands)) > 1:  # as of log_softmax with another dtype: kernels take one dtype
            dtype, base = accumulator(operands[0].dtype), len(pullback.operands)
            kinds = zip(pullback.kinds, operands[:base], strict=True)
            operands = [*(v.astype(dtype) if kind.whole_rows else v for kind, v in kinds), *operands[base:]]
        results = RowOperation(pullback, self.form, self.implementation)(*operands)
        return results if len(results) == len(self.inputs) else tuple(results[i] for i in self.inputs)

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """What `apply` computes, by operations that have derivatives."""
        if self.transposed:
            return self.apply(operands)
        tangent = self.function.tangent
        return compose(tangent, self.form, plain.formula(tangent, self.form))(*self._along_all(operands))

    def _along_all(self, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The operands with tangents of all inputs: 0 for those along which there is no derivative."""
        count, linear = len(self.function.forward.inputs), self.linear
        if len(self.inputs) == count:
            return operands
        given = dict(zip(self.inputs, operands[linear.start : linear.stop], strict=True))
        of_all = (given[i] if i in given else jnp.zeros_like(operands[i]) for i in range(count))
        return [*operands[: linear.start], *of_all, *operands[linear.stop :]]

    def transpose(self, dtypes: Sequence[np.dtype], wanted: Sequence[int]) -> "_RowDerivative":
        """The transpose, whose results have these dtypes."""
        if self.transposed:
            return dataclasses.replace(self, form=dataclasses.replace(self.form, dtype=dtypes[0]), transposed=False)
        by_input = dict(zip(self.inputs, dtypes, strict=True))
        form = dataclasses.replace(self.form, dtype=by_input.get(0, dtypes[0]), other_dtype=by_input.get(1))
        return dataclasses.replace(self, form=form, inputs=tuple(self.inputs[i] for i in wanted), transposed=True)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """A mapped dimension is more rows."""
        return self(*bdims_at_front(operands, dims, self.linear.stop))
