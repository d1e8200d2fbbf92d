"""top_k: the k largest elements of a row and where they are, with the row's state for their softmax.

Beside the letters of `jaxsoft._rows.operands`, h is the cotangent of the elements.
"""

import jax.numpy as jnp

from jaxsoft._core.tangents import zero_tangent
from jaxsoft._rows.formulas import at, defined_probabilities, has_softmax, largest, probabilities, put, wide
from jaxsoft._rows.operands import COTANGENT, INNER_PRODUCT, MAXIMUM, RESULT, SCORES, SUM, TANGENT
from jaxsoft._rows.operation import Function, Kind, Operand, Operation, Reduction
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP

VALUES = Operand("values", Kind.VALUES)
INDICES = Operand("indices", Kind.INDICES)
VALUE_COTANGENTS = Operand("value_cotangents", Kind.VALUES, linear=True)


def _top_k(reductions, x, *, k):
    m, s = reductions.state(x)
    i = largest(x, k, has_softmax(m, s))
    return at(x, i), i, m, s


def _vjp(reductions, x, i, m, s, g, h, *, k):
    del k
    (dx,) = LOGSUMEXP_VJP.formula(reductions, x, m, s, g)
    return (put(dx, i, h.astype(dx.dtype)),)


def _vjp_by_kernel(call, x, i, m, s, g, h):
    """The pullback of logsumexp, but for k elements."""
    (dx,) = call(LOGSUMEXP_VJP, x, m, s, g)
    return (put(dx, i, h.astype(dx.dtype)),)


def _jvp(reductions, x, i, m, s, t, *, k):
    del k
    others = put(t, i, jnp.zeros_like(i, t.dtype))
    return reductions.total(probabilities(x, m, s) * wide(others)), wide(at(t, i))


TOP_K = Operation(  # x -> the k largest, in order, and their indices; m, s
    "top_k",
    operands=(SCORES,),
    results=(VALUES, INDICES, MAXIMUM, SUM),
    formula=_top_k,
    reduces=Reduction.STATE,
    any_axis=False,
    from_state=True,
)
TOP_K_VJP = Operation(  # x, i, m, s, g, h -> p * g, and h at the indices
    "top_k_vjp",
    operands=(SCORES, INDICES, MAXIMUM, SUM, COTANGENT, VALUE_COTANGENTS),
    results=(RESULT,),
    formula=_vjp,
    made_of=_vjp_by_kernel,
)
TOP_K_JVP = Operation(  # x, i, m, s, t -> <p, t> without the elements at the indices, and t at the indices
    "top_k_jvp",
    operands=(SCORES, INDICES, MAXIMUM, SUM, TANGENT),
    results=(INNER_PRODUCT, VALUES),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)


def _values(operands, results):
    values, i, m, s = results
    return values, defined_probabilities(values, m, s), i


def _tangents(values, linear):
    """Those of the elements, of their softmax, and of the indices, which are fixed."""
    x, p, i = values
    others, t = linear
    dp = p * (t - (others + jnp.sum(p * t, axis=-1))[..., None])
    return t.astype(x.dtype), dp, zero_tangent(i)


# The k largest scores, their softmax in the accumulator's dtype, and their indices.
top_k_of_rows = Function(
    TOP_K,
    tangent=TOP_K_JVP,
    pullback=TOP_K_VJP,
    values=_values,
    residuals=lambda operands, results: (operands[0], *results[1:]),
    tangents=_tangents,
)
