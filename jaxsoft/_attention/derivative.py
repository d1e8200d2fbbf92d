"""Attention as JAX differentiates it: both modes, every order.

The derivative at a point is a linear map (see `jaxsoft._core.linear_map`). Forward mode evaluates it by the formula,
block by block, and reverse mode transposes it to a kernel for the gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft import fold
from jaxsoft._attention.batching import mapped
from jaxsoft._attention.form import Extra, Form
from jaxsoft._attention.operation import Forward, Pullback
from jaxsoft._attention.primitive import attention_operation
from jaxsoft._core.implementations import Names
from jaxsoft._core.linear_map import LinearMap
from jaxsoft._core.mesh import automatically
from jaxsoft._core.operation import moves

_MOVING = ("output", "lse")  # the results that have derivatives


@functools.cache
def attention(form: Form, implementation: Names, residual: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
    """(query, key, value, *extras) -> the output, the log-sum-exp and its rest, as a differentiable function.

    Derivatives use the log-sum-exp and the output's rest, so they take the results with these as a residual. The rests
    are constants.
    """
    forward = Forward(form) if residual else Forward(form.of_values, form.returns_lse)

    @jax.custom_jvp
    def function(*operands):
        return attention_operation(forward, implementation, *operands)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        assert not form.has_state, "what folds blocks of keys is differentiated as a whole, not by the state of one"
        results = attention(form, implementation, residual=True)(*primals)
        moved = {name: t for name, t in zip(form.names, tangents, strict=True) if moves(t)}
        tangents_out = _Derivative(form, implementation, tuple(moved))(*primals, *results, *moved.values())
        results = results[: len(forward.results)]
        return results, (*tangents_out, *map(jnp.zeros_like, results[len(_MOVING) :]))

    return function


@dataclasses.dataclass(frozen=True)
class _Derivative(LinearMap):
    """The derivative of attention along some operands, or its transpose.

    Its operands are those of the call, its results, and then the tangents of the operands that move, or transposed the
    cotangents of the results.
    """

    form: Form
    implementation: Names
    moving: tuple[str, ...]
    transposed: bool = False

    @property
    def linear(self) -> range:
        """The operands after the results."""
        begin = len(self.form.names) + len(Forward(self.form).results)
        return range(begin, begin + len(_MOVING if self.transposed else self.moving))

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """A formula forward, and a kernel for the transpose."""
        if not self.transposed:
            return self._along(operands)
        return self._gradients(operands, lambda pullback, *v: attention_operation(pullback, self.implementation, *v))

    def formula(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The map in plain JAX."""
        if not self.transposed:
            return self._along(operands)
        return self._gradients(operands, lambda pullback, *v: pullback.formula()(*v))

    def _along(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The tangents of the output and the log-sum-exp."""
        given = operands[: len(self.form.names)]
        places = [self.form.place(name) for name in self.moving]

        def along(*moved):
            varied = list(given)
            for place, value in zip(places, moved, strict=True):
                varied[place] = value
            return Forward(self.form).formula()(*varied)[: len(_MOVING)]

        return jax.jvp(along, [given[place] for place in places], list(operands[self.linear.start :]))[1]

    def _gradients(self, operands: Sequence[jax.Array], run: Callable[..., tuple]) -> tuple[jax.Array, ...]:
        """The gradients by the operands that move. `run` calls the pullback.

        The sum over the output's cotangent is of the rounded numbers that the pullback gets, times the output as it was
        before it was rounded. Were it of others, the gradients of a row would not add up to 0. The cotangent of the
        log-sum-exp joins it at no cost. A cotangent of a wider range than the query's dtype has is not rounded here:
        that of a part of the keys is as small as the weight of the part, and f16 ends at 6e-8.
        """
        *operands, d_output, d_lse = operands
        given = operands[: len(self.form.names)]
        output, lse, rest, *more = operands[len(given) :]
        output_rest, block = more[: self.form.rounded], more[self.form.rounded :]
        wide = lse.dtype
        # Where nothing counts, cotangents may be infinite, as those of lse**2 or of the output's norm.
        empty = jnp.isneginf(lse)
        if _may_be_empty(self.form, *given[:2]):
            d_output = jnp.where(jnp.moveaxis(empty, 1, 2)[..., None], 0, d_output)
        narrow = given[0].dtype
        fits = jnp.finfo(d_output.dtype).nexp <= jnp.finfo(narrow).nexp
        d_output = jax.lax.optimization_barrier(d_output.astype(narrow if fits else wide))
        exact = sum((x.astype(wide) for x in output_rest), output.astype(wide))
        delta = jnp.moveaxis(jnp.sum(exact * d_output.astype(wide), axis=-1), 2, 1) - d_lse
        delta = jnp.where(empty, 0, delta)
        of_kernel = tuple(name for name in self.moving if name != Extra.SINKS.value)
        found = {}
        if of_kernel:
            results = run(Pullback(self.form, of_kernel), *given, output, lse, rest, delta, d_output, *block)
            found = dict(zip(of_kernel, results, strict=True))
        if Extra.SINKS.value in self.moving:
            found[Extra.SINKS.value] = _of_sinks(given[self.form.place(Extra.SINKS.value)], lse, rest, delta)
        return tuple(found[name] for name in self.moving)

    def transpose(self, dtypes: Sequence[np.dtype], wanted: Sequence[int]) -> "_Derivative":
        """The transpose, whose results have the dtypes of the operands."""
        del dtypes, wanted
        return dataclasses.replace(self, transposed=not self.transposed)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """A mapped dimension joins the batch."""
        names = (*self.form.names, *Forward(self.form).results, *(_MOVING if self.transposed else self.moving))
        results = self.moving if self.transposed else _MOVING
        return mapped(self, names, results, operands, dims, self.moving)


def _may_be_empty(form: Form, query: jax.Array, key: jax.Array) -> bool:
    """Whether there may be queries for which no key counts."""
    beyond = form.left is not None and query.shape[1] != key.shape[1]
    return beyond or any(extra is not Extra.SINKS for extra in form.extras)


def _of_sinks(sinks: jax.Array, lse: jax.Array, rest: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient by the sinks, which are scores whose values are 0."""

    def gradient(sinks, lse, rest, delta):
        weight = fold.weight(sinks.astype(lse.dtype)[..., None], lse) * jnp.exp(-rest)
        found = -jnp.sum(weight * delta, axis=-1)
        return (jnp.sum(found, axis=0, keepdims=True) if sinks.shape[0] == 1 else found).astype(sinks.dtype)

    return automatically(gradient, jax.typeof(sinks).sharding, sinks, lse, rest, delta)
