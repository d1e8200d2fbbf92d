"""Derivatives in both modes for a `jax.custom_vjp` function.

Training goes through `custom_vjp`: its forward rule saves what its backward rule needs, and both call kernels. But
JAX refuses forward mode (`jax.jvp`, `jax.linearize`, `jax.hessian`) to such a function, as it cannot know how to push
a tangent through it. `with_forward_mode` adds that knowledge: the derivative at a point becomes one linear operation,
which forward mode evaluates by the given formula and reverse mode transposes to the backward rule of the custom_vjp.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Primitive
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
    derivative = _Derivative(tangent, bwd)

    @jax.custom_jvp
    def function(x):
        return f(x)

    @function.defjvp
    def function_jvp(primals, tangents):
        y, residuals = fwd(*primals)
        (y_dot,) = linear_p.bind(*residuals, *tangents, derivative=derivative)
        return y, y_dot

    return function


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The linear map t -> tangent(*residuals, t), and its transpose g -> pullback(residuals, g)."""

    tangent: Callable[..., jax.Array]
    pullback: Callable[..., tuple[jax.Array, ...]]


linear_p = Primitive("jaxsoft_derivative")
linear_p.multiple_results = True


@linear_p.def_impl
def _impl(*operands, derivative):
    return [jax.jit(derivative.tangent)(*operands)]


@linear_p.def_abstract_eval
def _abstract_eval(*operands, derivative):
    return jax.make_jaxpr(derivative.tangent)(*operands).out_avals


def _jvp(primals, tangents, *, derivative):
    *residuals, t = primals
    *residuals_dot, t_dot = tangents
    primal_out = linear_p.bind(*primals, derivative=derivative)
    moving = [i for i, r in enumerate(residuals_dot) if not isinstance(r, ad.Zero)]
    tangents_out = []
    if moving:

        def along(*values):
            varied = list(residuals)
            for i, value in zip(moving, values, strict=True):
                varied[i] = value
            return derivative.tangent(*varied, t)

        _, out = jax.jvp(along, [residuals[i] for i in moving], [residuals_dot[i] for i in moving])
        tangents_out.append(out)
    if not isinstance(t_dot, ad.Zero):
        tangents_out += linear_p.bind(*residuals, t_dot, derivative=derivative)
    return primal_out, [sum(tangents_out[1:], tangents_out[0])]


def _transpose(cotangents, *operands, derivative):
    *residuals, t = operands
    assert ad.is_undefined_primal(t) and not any(map(ad.is_undefined_primal, residuals))
    (g,) = cotangents
    (out,) = (ad.Zero(t.aval),) if isinstance(g, ad.Zero) else derivative.pullback(tuple(residuals), g)
    return [None] * len(residuals) + [out]


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, derivative):
    return linear_p.bind(*as_leading_dimension(operands, dims), derivative=derivative), [0]


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(
    linear_p,
    mlir.lower_fun(lambda *operands, derivative: [derivative.tangent(*operands)], multiple_results=True),
)
