"""softmax: y = exp(z - m) / s."""

import jax.numpy as jnp

from jaxsoft._rows.formulas import exp_above, wide
from jaxsoft._rows.operands import COTANGENTS, PROBABILITIES, RESULT, SCORES, TANGENT
from jaxsoft._rows.operation import Extra, Function, Operation, Reduction


def _softmax(reductions, x):
    m, s = reductions.state(x)
    scale = jnp.where(m == jnp.inf, jnp.nan, 1 / s)  # inf / inf has no value
    return ((exp_above(x, m) * scale[..., None]).astype(x.dtype),)


def _jacobian(reductions, y, g):
    """y * (g - <y, g>): the Jacobian is symmetric, so this serves tangents as well as cotangents."""
    y_wide, g_wide = wide(y), wide(g)
    return ((y_wide * (g_wide - reductions.total(y_wide * g_wide)[..., None])).astype(y.dtype),)


SOFTMAX = Operation(
    "softmax",
    operands=(SCORES,),
    results=(RESULT,),
    formula=_softmax,
    reduces=Reduction.STATE,
    extras=(Extra.SCALE, Extra.LIMIT, Extra.WHERE, Extra.BIAS),
)
SOFTMAX_VJP = Operation(  # y, g -> scale * y * (g - <y, g>)
    "softmax_vjp",
    operands=(PROBABILITIES, COTANGENTS),
    results=(RESULT,),
    formula=_jacobian,
    reduces=Reduction.PRODUCT,
    extras=(Extra.SCALE, Extra.LIMIT),
    may_be_masked=True,
)
SOFTMAX_JVP = Operation(  # y, t -> y * (scale * t - <y, scale * t>)
    "softmax_jvp",
    operands=(PROBABILITIES, TANGENT),
    results=(RESULT,),
    formula=_jacobian,
    reduces=Reduction.PRODUCT,
)

softmax_of_rows = Function(
    SOFTMAX,
    tangent=SOFTMAX_JVP,
    pullback=SOFTMAX_VJP,
    values=lambda operands, results: tuple(results),
    residuals=lambda operands, results: tuple(results),
)
