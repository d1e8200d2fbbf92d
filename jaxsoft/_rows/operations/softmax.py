"""softmax: y = exp(z - m) / s."""

import jax.numpy as jnp

from jaxsoft._rows.formulas import exp_above, wide
from jaxsoft._rows.spec import (
    COTANGENTS,
    PROBABILITIES,
    RESULT,
    SCORES,
    TANGENT,
    Reduction,
    RowExtra,
    RowFunction,
    RowSpec,
)


def _softmax(reductions, x):
    m, s = reductions.state(x)
    scale = jnp.where(m == jnp.inf, jnp.nan, 1 / s)  # inf / inf has no value
    return ((exp_above(x, m) * scale[..., None]).astype(x.dtype),)


def _jacobian(reductions, y, g):
    """y * (g - <y, g>): the Jacobian is symmetric, so this serves tangents as well as cotangents."""
    y_wide, g_wide = wide(y), wide(g)
    return ((y_wide * (g_wide - reductions.total(y_wide * g_wide)[..., None])).astype(y.dtype),)


# --8<-- [start:record]
SOFTMAX = RowSpec(
    "softmax",
    operands=(SCORES,),
    results=(RESULT,),
    formula=_softmax,
    reduces=Reduction.STATE,
    extras=(RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE, RowExtra.BIAS),
)
# --8<-- [end:record]
SOFTMAX_VJP = RowSpec(  # y, g -> scale * y * (g - <y, g>)
    "softmax_vjp",
    operands=(PROBABILITIES, COTANGENTS),
    results=(RESULT,),
    formula=_jacobian,
    reduces=Reduction.PRODUCT,
    extras=(RowExtra.SCALE, RowExtra.LIMIT),
    may_be_masked=True,
)
SOFTMAX_JVP = RowSpec(  # y, t -> y * (scale * t - <y, scale * t>)
    "softmax_jvp",
    operands=(PROBABILITIES, TANGENT),
    results=(RESULT,),
    formula=_jacobian,
    reduces=Reduction.PRODUCT,
)

# --8<-- [start:function]
softmax_of_rows = RowFunction(
    SOFTMAX,
    tangent=SOFTMAX_JVP,
    pullback=SOFTMAX_VJP,
    values=lambda operands, results: tuple(results),
    residuals=lambda operands, results: tuple(results),
)
# --8<-- [end:function]
