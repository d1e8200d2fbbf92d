"""Attention as JAX differentiates it: both modes, every order.

The derivative at a point is a linear map (see `jaxsoft._core.linear_map`). Forward mode evaluates it by the formula,
block by block, and reverse mode transposes it to a kernel for the gradients.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jaxsoft import fold
from jaxsoft._attention.batching import mapped
from jaxsoft._attention.form import BASE, SEGMENTS, AttentionForm, Extra
from jaxsoft._attention.operation import AttentionOperation, attention_operation
from jaxsoft._attention.spec import AttentionForward, AttentionPullback
from jaxsoft._core.implementations import Names
from jaxsoft._core.linear_map import LinearMap
from jaxsoft._core.mesh import automatically
from jaxsoft._core.operation import Function, is_perturbed, jvp_along, zero_tangent

_DIFFERENTIATED = ("output", "lse")  # the results that have derivatives
_KEPT = "jaxsoft_attention"  # what results are called that gradients keep, for policies of `jax.checkpoint`


@functools.cache
def attention(form: AttentionForm, implementation: Names, residual: bool = False) -> Function:
    """(query, key, value, *extras) -> the output, the log-sum-exp and its residual, and the largest scores if they are
    asked for, as a differentiable function.

    Derivatives use the log-sum-exp and the output's residual, so they keep the results with these, which are constants.
    """
    values = dataclasses.replace(form.without_block, rounded=False)  # without what is for gradients alone
    forward = AttentionForward(form) if residual else AttentionForward(values, form.returns_lse)

    @jax.custom_jvp
    def function(*operands):
        return LinearInValue(forward, implementation)(*operands)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        assert not form.has_state, "what folds blocks of keys is differentiated as a whole, not by the state of one"
        # All of them have the name: were one not saved, the whole operation would be computed again.
        results = tuple(checkpoint_name(x, _KEPT) for x in attention(form, implementation, residual=True)(*primals))
        perturbed = {name: t for name, t in zip(form.names, tangents, strict=True) if is_perturbed(t)}
        names = AttentionForward(form).results
        known = [x for name, x in zip(names, results, strict=True) if name != "max_logits"]
        derivative = _Derivative(form.of_gradients, implementation, tuple(perturbed))
        tangents_out = derivative(*primals, *known, *perturbed.values())
        results = results[: len(forward.results)]
        # They are known to be zero, as what combines the largest scores of devices, `jax.lax.pmax`, has no derivative.
        return results, (*tangents_out, *map(zero_tangent, results[len(_DIFFERENTIATED) :]))

    return function


@dataclasses.dataclass(frozen=True)
class LinearInValue(AttentionOperation):
    """A forward operation that is called directly, and so has a transpose."""

    def differentiable(self) -> Function:
        """The operation with derivatives."""
        return attention(self.operation.form, self.implementation)

    def cotangents(self, of_results: Sequence, operands: Sequence) -> Sequence:
        """The output is linear in value, and nothing else depends on it: so it is the gradient by value, at 0."""
        names, place = self.operation.operands, BASE - 1
        unknown = [name for name, v in zip(names, operands, strict=True) if ad.is_undefined_primal(v)]
        if unknown != [names[place]]:
            raise NotImplementedError(f"attention is linear in value alone, and has no transpose by {unknown}")
        found = value = ad.Zero(operands[place].aval)
        if not isinstance(of_results[0], ad.Zero):
            function, before, after = self.differentiable(), operands[:place], operands[BASE:]
            pullback = jax.vjp(lambda v: function(*before, v, *after)[0], ad.instantiate_zeros(value))[1]
            (found,) = pullback(of_results[0])
        return [found if i == place else None for i in range(len(operands))]


@dataclasses.dataclass(frozen=True)
class _Derivative(LinearMap):
    """The derivative of attention along some operands, or its transpose.

    Its operands are those of the call, its results, and then the tangents of the differentiated operands, or
    transposed the cotangents of the results.
    """

    form: AttentionForm
    implementation: Names
    wrt: tuple[str, ...]
    transposed: bool = False

    @property
    def linear(self) -> range:
        """The operands after the results."""
        begin = len(self.form.names) + len(AttentionForward(self.form).results)
        return range(begin, begin + len(_DIFFERENTIATED if self.transposed else self.wrt))

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
        perturbed = dict(zip(self.wrt, operands[self.linear.start :], strict=True))
        tangents = [perturbed.get(name, zero_tangent(x)) for name, x in zip(self.form.names, given, strict=True)]

        def along(*varied):
            return AttentionForward(self.form).formula()(*varied)[: len(_DIFFERENTIATED)]

        return jvp_along(along, given, tangents)[1]

    def _gradients(self, operands: Sequence[jax.Array], run: Function) -> tuple[jax.Array, ...]:
        """The gradients by the differentiated operands. `run` calls the pullback.

        The sum over the output's cotangent is of the rounded numbers that the pullback gets, times the output as it was
        before it was rounded. Were it of others, the gradients of a row would not add up to 0. The cotangent of the
        log-sum-exp joins it at no cost. A cotangent of a wider range than the query's dtype has is not rounded here:
        that of a part of the keys is as small as the weight of the part, and f16 ends at 6e-8.
        """
        *operands, d_output, d_lse = operands
        given = operands[: len(self.form.names)]
        output, lse, lse_residual, *more = operands[len(given) :]
        output_residual, block = more[: self.form.rounded], more[self.form.rounded :]
        wide = lse.dtype
        # Where no key is valid, cotangents may be infinite, as those of lse**2 or of the output's norm.
        empty = jnp.isneginf(lse)
        if _may_be_empty(self.form, *given[:2]):
            d_output = jnp.where(jnp.moveaxis(empty, 1, 2)[..., None], 0, d_output)
        narrow = given[0].dtype
        fits = jnp.finfo(d_output.dtype).nexp <= jnp.finfo(narrow).nexp
        d_output = jax.lax.optimization_barrier(d_output.astype(narrow if fits else wide))
        exact = sum((x.astype(wide) for x in output_residual), output.astype(wide))
        delta = jnp.moveaxis(jnp.sum(exact * d_output.astype(wide), axis=-1), 2, 1) - d_lse
        delta = jnp.where(empty, 0, delta)
        of_kernel = tuple(name for name in self.wrt if name != Extra.SINKS.value)
        found = {}
        if of_kernel:
            results = run(
                AttentionPullback(self.form, of_kernel), *given, output, lse, lse_residual, delta, d_output, *block
            )
            found = dict(zip(of_kernel, results, strict=True))
        if Extra.SINKS.value in self.wrt:
            found[Extra.SINKS.value] = _of_sinks(given[self.form.place(Extra.SINKS.value)], lse, lse_residual, delta)
        return tuple(found[name] for name in self.wrt)

    def transpose(self, dtypes: Sequence[np.dtype], wanted: Sequence[int]) -> "_Derivative":
        """The transpose, whose results have the dtypes of the operands."""
        del dtypes, wanted
        return dataclasses.replace(self, transposed=not self.transposed)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """A mapped dimension joins the batch."""
        names = (
            *self.form.names,
            *AttentionForward(self.form).results,
            *(_DIFFERENTIATED if self.transposed else self.wrt),
        )
        results = self.wrt if self.transposed else _DIFFERENTIATED
        return mapped(self, names, results, operands, dims, self.wrt)


def _may_be_empty(form: AttentionForm, query: jax.Array, key: jax.Array) -> bool:
    """Whether there may be queries without a valid key."""
    alike = query.shape[1] == key.shape[1]
    harmless = {Extra.SINKS, *(SEGMENTS if alike and form.own_key_counts else ())}
    return (form.left is not None and not alike) or not harmless.issuperset(form.extras)


def _of_sinks(sinks: jax.Array, lse: jax.Array, lse_residual: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient by the sinks, which are scores whose values are 0."""

    def gradient(sinks, lse, lse_residual, delta):
        weight = fold.weight(sinks.astype(lse.dtype)[..., None], lse) * jnp.exp(-lse_residual)
        found = -jnp.sum(weight * delta, axis=-1)
        return (jnp.sum(found, axis=0, keepdims=True) if sinks.shape[0] == 1 else found).astype(sinks.dtype)

    return automatically(gradient, jax.typeof(sinks).sharding, sinks, lse, lse_residual, delta)
