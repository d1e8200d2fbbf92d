"""top_k: the k largest elements of a row and where they are, with the row's state for their softmax.

Beside the letters of `jaxsoft._rows.spec`, h is the cotangent of the elements.
"""

import jax.numpy as jnp

from jaxsoft._core.operation import zero_tangent
from jaxsoft._rows.formulas import at, defined_probabilities, has_softmax, largest, probabilities, put, wide
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP
from jaxsoft._rows.spec import (
    COTANGENT,
    INNER_PRODUCT,
    MAXIMUM,
    RESULT,
    SCORES,
    SUM,
    TANGENT,
    Reduction,
    RowFunction,
    RowKind,
    RowOperand,
    RowSpec,
)

VALUES = RowOperand("values", RowKind.VALUES)
CHOSEN_PROBABILITIES = RowOperand("chosen_probabilities", RowKind.CHOSEN_PROBABILITIES)
INDICES = RowOperand("indices", RowKind.INDICES)
VALUE_COTANGENTS = RowOperand("value_cotangents", RowKind.VALUES, linear=True)


def _top_k(reductions, x, *, k, dtype):
    m, s = reductions.state(x)
    i = largest(x, k, has_softmax(m, s))
    values = at(x, i)
    return values, defined_probabilities(values, m, s).astype(dtype), i, m, s


def _vjp(reductions, x, i, m, s, g, h, *, k, dtype):
    del k, dtype
    (dx,) = LOGSUMEXP_VJP.formula(reductions, x, m, s, g)
    return (put(dx, i, h.astype(dx.dtype)),)


def _vjp_by_kernel(call, x, i, m, s, g, h):
    """The pullback of logsumexp, but for k elements."""
    (dx,) = call(LOGSUMEXP_VJP, x, m, s, g)
    return (put(dx, i, h.astype(dx.dtype)),)


def _jvp(reductions, x, i, m, s, t, *, k, dtype):
    del k, dtype
    others = put(t, i, jnp.zeros_like(i, t.dtype))
    return reductions.total(probabilities(x, m, s) * wide(others)), wide(at(t, i))


TOP_K = RowSpec(  # x -> the k largest, in order, their p, and their indices; m, s
    "top_k",
    operands=(SCORES,),
    results=(VALUES, CHOSEN_PROBABILITIES, INDICES, MAXIMUM, SUM),
    formula=_top_k,
    reduces=Reduction.STATE,
    any_axis=False,
    from_state=True,
)
TOP_K_VJP = RowSpec(  # x, i, m, s, g, h -> p * g, and h at the indices
    "top_k_vjp",
    operands=(SCORES, INDICES, MAXIMUM, SUM, COTANGENT, VALUE_COTANGENTS),
    results=(RESULT,),
    formula=_vjp,
    made_of=_vjp_by_kernel,
)
TOP_K_JVP = RowSpec(  # x, i, m, s, t -> <p, t> without the elements at the indices, and t at the indices
    "top_k_jvp",
    operands=(SCORES, INDICES, MAXIMUM, SUM, TANGENT),
    results=(INNER_PRODUCT, VALUES),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)


def _tangents(results, linear):
    """Those of the elements, of their softmax, and of the indices, which are fixed."""
    values, rounded, i, m, s = results
    others, t = linear
    p = defined_probabilities(values, m, s)
    dp = p * (t - (others + jnp.sum(p * t, axis=-1))[..., None])
    return t.astype(values.dtype), dp.astype(rounded.dtype), zero_tangent(i)


# The k largest scores, their softmax, and their indices.
top_k_of_rows = RowFunction(
    TOP_K,
    tangent=TOP_K_JVP,
    pullback=TOP_K_VJP,
    values=lambda operands, results: tuple(results[:3]),
    residuals=lambda operands, results: (operands[0], *results[2:]),
    tangents=_tangents,
)
