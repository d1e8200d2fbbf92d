"""softmax, log_softmax and logsumexp of rows as functions that JAX can differentiate: both modes, every order.

The derivative at a point becomes one linear operation, which forward mode evaluates by a formula and reverse mode
transposes to a kernel for the pullback. (A `jax.custom_vjp` alone would refuse forward mode.) The operation maps a
tangent of x, with the scale in it, where x alone moves, as in training with a fixed scale. Where scale or bias move
too, it maps a tangent of the scores z = x * scale + bias, which JAX derives from theirs, and whose cotangent JAX takes
back to them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxsoft import fold
from jaxsoft._core.batching import as_leading_dimension
from jaxsoft._core.primitives import compiled, primitive
from jaxsoft._core.tangents import jvp_along, moves, zero_tangent
from jaxsoft._rows import formulas, xla
from jaxsoft._rows.forms import OPERATIONS, Form, compose, counted, scores
from jaxsoft._rows.primitive import row_operation


@functools.cache
def differentiable(operation: str, form: Form, implementation: str | None) -> Callable[..., jax.Array]:
    """softmax, log_softmax or logsumexp as a function of x and the form's extras.

    logsumexp comes in the accumulator's dtype.
    """

    @jax.custom_jvp
    def function(x, *extras):
        return _forward(operation, form, implementation, x, *extras)[0]

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        x, *extras = primals
        y, residuals = _forward(operation, form, implementation, *primals)
        named = dict(zip(form.extras, extras, strict=True))
        masked = operation == "softmax" and ("l" in named or "w" in named)
        t = tangents[0]
        if any(map(moves, tangents[1:])):

            @functools.partial(jax.checkpoint, prevent_cse=False)  # keeps the operands, not masks of x's size
            def z(x, *extras):
                beside = dict(zip(form.extras, extras, strict=True))
                return scores(form, x, beside, fold.accumulator(x.dtype), counted(form, x, beside))

            values, t = jvp_along(z, primals, tangents)
            residuals = tuple(values if r is x else r for r in residuals)
            named = {name: v for name, v in named.items() if name not in "sb"}
        if operation == "softmax":  # y is 0 where the others say that an element does not count
            named = {name: v for name, v in named.items() if name in "sl"}
        derivative = _Derivative(operation, Form(y.dtype, "".join(named), form.trailing, masked), implementation)
        return y, derivative(*residuals, t, *named.values())[0]

    return function


@functools.cache
def label_statistics(form: Form, summed: bool, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
    """What a loss needs to know of x, given the label i of each row, as a function of (x, i) and the form's extras.

    Returns, in the accumulator's dtype: the logsumexp of the scores but the label's; the label's score t; the former
    minus the latter, without the rounding of either; and if `summed`, of the scores z > -inf, sum(z - reference(t)),
    where the reference counts as a constant, and their number.
    """
    operation = "label_sums" if summed else "label_state"

    @jax.custom_jvp
    def function(x, i, *extras):
        return forward(x, i, *extras)[0]

    def forward(x, i, *extras):
        m, s, t, *sums = row_operation(operation, form, implementation, x, i, *extras)
        others, apart = beside_label(fold.State(m, s), t)
        return (others, t, apart, *sums), (m, s)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        x, i, *extras = primals
        results, (m, s) = forward(*primals)
        derivative = _Derivative(operation, form, implementation)
        others, t, *sums = derivative(x, i, m, s, tangents[0], *extras)
        if summed:
            sums.append(jnp.zeros_like(results[-1]))
        return results, (others, t, others - t, *sums)

    return function


def beside_label(others: fold.State, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logsumexp of the scores but the label's, given their state, and that minus the label's score t."""
    m, s = others
    log_s = jnp.where(s == 0, -jnp.inf, jnp.log(jnp.where(s == 0, 1, s)))
    infinite = jnp.isinf(m) | jnp.isinf(t)
    apart = jnp.where(infinite, jnp.where((m == t) | (t == jnp.inf), jnp.nan, m - t), (m - t) + log_s)
    return jnp.where(jnp.isinf(m), m, m + log_s), apart


@functools.cache
def top_k(form: Form, implementation: str | None) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """The k largest scores of rows x, their softmax in the accumulator's dtype, and their indices, which are fixed."""

    @jax.custom_jvp
    def function(x):
        return forward(x)[0]

    def forward(x):
        values, i, m, s = row_operation("top_k", form, implementation, x)
        return (values, formulas.defined_probabilities(values, m, s), i), (m, s)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        results, (m, s) = forward(*primals)
        values, p, i = results
        others, t = _Derivative("top_k", form, implementation)(*primals, i, m, s, *tangents)
        dp = p * (t - (others + jnp.sum(p * t, axis=-1))[..., None])
        return results, (t.astype(values.dtype), dp, zero_tangent(i))

    return function


def _forward(
    operation: str, form: Form, implementation: str | None, x: jax.Array, *extras: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The value, and what the derivative needs beside the extras: of softmax its result, of the others x and (m, s)."""
    if operation == "logsumexp":
        m, s = row_operation("state", form, implementation, x, *extras)
        return fold.lse(fold.State(m, s)), (x, m, s)
    y, *state = row_operation(operation, form, implementation, x, *extras)
    return y, (y,) if operation == "softmax" else (x, *state)


class Derivative(abc.ABC):
    """The derivative of a function, or its transpose: a map that is linear in some of its operands. Hashable."""

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        # The primitive holds its computation as a jaxpr, where JAX looks for what needs to know devices when lowered.
        call = jax.make_jaxpr(lambda *operands: self.apply(operands))(*operands)
        return _linear_p().bind(*operands, derivative=self, call=call)

    @property
    @abc.abstractmethod
    def linear(self) -> range:
        """The indices of the linear operands."""

    @abc.abstractmethod
    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map."""

    @abc.abstractmethod
    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map as a function that JAX can differentiate."""

    @abc.abstractmethod
    def transpose(self, dtype: np.dtype) -> "Derivative":
        """The transpose, for linear operands of this dtype."""

    @abc.abstractmethod
    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The results for operands that are mapped along some dimensions, mapped along the first."""


@dataclasses.dataclass(frozen=True)
class _Derivative(Derivative):
    """That of an operation on rows.

    Its operands are those of the operation's "_jvp" or "_vjp", of which the last but the extras are the linear ones.
    """

    operation: str
    form: Form
    implementation: str | None
    transposed: bool = False

    @property
    def name(self) -> str:
        """The row operation that it is."""
        return f"{self.operation}_{'vjp' if self.transposed else 'jvp'}"

    @property
    def linear(self) -> range:
        """The pullback has one for each result of the derivative."""
        end = len(OPERATIONS[self.name])
        return range(end - (_RESULTS.get(self.operation, 1) if self.transposed else 1), end)

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """A kernel for the transpose, else the formula."""
        if not self.transposed:
            return compose(self.name, self.form, xla.OPERATIONS[self.name])(*operands)
        x, g = operands[0], operands[self.linear[0]]
        if self.operation == "log_softmax" and x.dtype != g.dtype:  # as dtype=f32 has it: kernels take one dtype
            wide, place = fold.accumulator(x.dtype), self.linear[0]
            operands = [x.astype(wide), *operands[1:place], g.astype(wide), *operands[place + 1 :]]
        if self.operation == "top_k":  # logsumexp's, but for k elements
            *of_logsumexp, at_indices = operands
            x, i, *others = of_logsumexp
            form = dataclasses.replace(self.form, k=0)
            (dx,) = row_operation("logsumexp_vjp", form, self.implementation, x, *others)
            return (formulas.put(dx, i, at_indices.astype(dx.dtype)),)
        return row_operation(self.name, self.form, self.implementation, *operands)

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map itself: kernels have derivatives."""
        return self.apply(operands)

    def transpose(self, dtype: np.dtype) -> "_Derivative":
        """The transpose, whose result has this dtype."""
        form = dataclasses.replace(self.form, dtype=dtype)
        return dataclasses.replace(self, form=form, transposed=not self.transposed)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """More rows."""
        return self(*as_leading_dimension(operands, dims, self.linear.stop))


# How many results a derivative has, if not one.
_RESULTS = {"top_k": 2, "label_state": 2, "label_sums": 3}


@functools.cache
def _linear_p():
    made = primitive("jaxsoft_derivative", _impl, _abstract_eval)
    ad.primitive_jvps[made] = _jvp
    ad.primitive_transposes[made] = _transpose
    batching.primitive_batchers[made] = _batch
    mlir.register_lowering(made, _lower)
    return made


def _impl(*operands, derivative, call):
    del call
    return _compiled(*operands, derivative=derivative)


@functools.partial(compiled, static_argnames="derivative")
def _compiled(*operands, derivative):
    return derivative.apply(operands)


def _abstract_eval(*operands, derivative, call):
    del operands, derivative
    return call.out_avals


def _jvp(primals, tangents, *, derivative, call):
    del call
    linear = derivative.linear
    fixed = [zero_tangent(primals[i]) if i in linear else t for i, t in enumerate(tangents)]
    terms = []
    if any(map(moves, fixed)):
        terms.append(jvp_along(lambda *operands: derivative.formula(operands), primals, fixed)[1])
    if any(moves(tangents[i]) for i in linear):
        varied = [ad.instantiate_zeros(tangents[i]) if i in linear else v for i, v in enumerate(primals)]
        terms.append(derivative(*varied))
    return derivative(*primals), [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]


def _transpose(cotangents, *operands, derivative, call):
    del call
    linear = derivative.linear
    unknown = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
    assert all(i in linear for i in unknown)  # of several, those that are known are 0
    types = [operands[i].aval if i in unknown else jax.typeof(operands[i]) for i in linear]
    results = [ad.Zero(t) for t in types]
    if not all(isinstance(g, ad.Zero) for g in cotangents):
        given = map(ad.instantiate_zeros, cotangents)
        transposed = derivative.transpose(types[0].dtype)
        results = transposed(*operands[: linear.start], *given, *operands[linear.stop :])
    return [results[linear.index(i)] if i in unknown else None for i in range(len(operands))]


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, derivative, call):
    del call
    results = derivative.batch(operands, dims)
    return results, [0] * len(results)


def _lower(ctx: mlir.LoweringRuleContext, *operands, derivative, call):
    from jax.extend.core import jaxpr_as_fun

    del derivative
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *operands)
