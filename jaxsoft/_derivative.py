"""Derivatives in both modes for a `jax.custom_vjp` function.

Training goes through `custom_vjp`: its forward rule saves what its backward rule needs, and both call kernels. But
JAX refuses forward mode (`jax.jvp`, `jax.linearize`, `jax.hessian`) to such a function, as it cannot know how to push
a tangent through it. `with_forward_mode` adds that knowledge: the derivative at a point becomes one linear operation,
which forward mode evaluates by the given formula and reverse mode transposes to the backward rule of the custom_vjp.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxsoft._batching import as_leading_dimension


def with_forward_mode(f: jax.custom_vjp, tangent: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function of one array that is `f`, with `f`'s rules in reverse mode and `tangent` in forward mode.

    Args:
      f: a custom_vjp function of rows (..., n), whose residuals are a tuple of arrays with the same leading dimensions.
      tangent: (*residuals, t) -> the directional derivative along t, in differentiable JAX code.
    """
    fwd, bwd = f.fwd, f.bwd
    if fwd is None or bwd is None:
        raise ValueError("f has no rules yet: call f.defvjp first")
    derivative = _Derivative(
        lambda operands: tangent(*operands), lambda operands: bwd(tuple(operands[:-1]), operands[-1])[0]
    )

    @jax.custom_jvp
    def function(x):
        return f(x)

    @function.defjvp
    def function_jvp(primals, tangents):
        y, residuals = fwd(*primals)
        return y, derivative(*residuals, *tangents)

    return function


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """A map that is linear in its last operand, and its transpose there. The other operands are residuals."""

    apply: Callable[[Sequence[jax.Array]], jax.Array]
    apply_transpose: Callable[[Sequence[jax.Array]], jax.Array]

    def __call__(self, *operands: jax.Array) -> jax.Array:
        # The primitive holds its computation as a jaxpr, where JAX looks for what needs to know devices when lowered.
        call = jax.make_jaxpr(lambda *operands: self.apply(operands))(*operands)
        (out,) = linear_p.bind(*operands, derivative=self, call=call)
        return out

    @property
    def transpose(self) -> "_Derivative":
        """The transpose, as a map of its own."""
        return _Derivative(self.apply_transpose, self.apply)


linear_p = Primitive("jaxsoft_derivative")
linear_p.multiple_results = True


@linear_p.def_impl
def _impl(*operands, derivative, call):
    del call
    return [_compiled(derivative, *operands)]


@functools.partial(jax.jit, static_argnums=0)
def _compiled(derivative, *operands):
    return derivative.apply(operands)


@linear_p.def_abstract_eval
def _abstract_eval(*operands, derivative, call):
    del operands, derivative
    return call.out_avals


def _jvp(primals, tangents, *, derivative, call):
    del call
    *residuals, t = primals
    *residuals_dot, t_dot = tangents
    moving = [i for i, r in enumerate(residuals_dot) if not isinstance(r, ad.Zero)]
    terms = []
    if moving:

        def along(*values):
            varied = list(residuals)
            for i, value in zip(moving, values, strict=True):
                varied[i] = value
            return derivative.apply([*varied, t])

        terms.append(jax.jvp(along, [residuals[i] for i in moving], [residuals_dot[i] for i in moving])[1])
    if not isinstance(t_dot, ad.Zero):
        terms.append(derivative(*residuals, t_dot))
    return [derivative(*primals)], [sum(terms[1:], terms[0])]


def _transpose(cotangents, *operands, derivative, call):
    del call
    *residuals, t = operands
    assert ad.is_undefined_primal(t) and not any(map(ad.is_undefined_primal, residuals))
    (g,) = cotangents
    out = ad.Zero(t.aval) if isinstance(g, ad.Zero) else derivative.transpose(*residuals, g)
    return [None] * len(residuals) + [out]


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, derivative, call):
    del call
    return [derivative(*as_leading_dimension(operands, dims))], [0]


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(
    linear_p,
    lambda ctx, *operands, derivative, call: mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *operands),
)
