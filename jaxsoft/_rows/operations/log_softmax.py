"""log_softmax: y = (z - m) - log(s)."""

import jax.numpy as jnp

from jaxsoft._rows.formulas import defined_probabilities, wide
from jaxsoft._rows.spec import (
    COTANGENTS,
    MAXIMUM,
    RESULT,
    SCORES,
    SUM,
    TANGENT,
    Reduction,
    RowExtra,
    RowFunction,
    RowSpec,
)
from jaxsoft.fold import reference


def _log_softmax(reductions, x):
    m, s = reductions.state(x)
    log_s = jnp.where(jnp.isfinite(m), jnp.log(s), jnp.nan)
    return ((wide(x) - reference(m)[..., None]) - log_s[..., None]).astype(x.dtype), m, s


def _vjp(reductions, x, m, s, g):
    p, g_wide = defined_probabilities(x, m, s), wide(g)
    return ((g_wide - p * reductions.total(g_wide)[..., None]).astype(x.dtype),)


def _jvp(reductions, x, m, s, t):
    p, t_wide = defined_probabilities(x, m, s), wide(t)
    return ((t_wide - reductions.total(p * t_wide)[..., None]).astype(x.dtype),)


LOG_SOFTMAX = RowSpec(  # x -> y, m, s
    "log_softmax",
    operands=(SCORES,),
    results=(RESULT, MAXIMUM, SUM),
    formula=_log_softmax,
    reduces=Reduction.STATE,
    extras=(RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE, RowExtra.BIAS),
    masked_result=-jnp.inf,
)
LOG_SOFTMAX_VJP = RowSpec(  # x, m, s, g -> scale * (g - p * sum(g)), with p = exp(z - m) / s
    "log_softmax_vjp",
    operands=(SCORES, MAXIMUM, SUM, COTANGENTS),
    results=(RESULT,),
    formula=_vjp,
    reduces=Reduction.SUM,
    extras=(RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE),
)
LOG_SOFTMAX_JVP = RowSpec(  # x, m, s, t -> scale * t - <p, scale * t>
    "log_softmax_jvp",
    operands=(SCORES, MAXIMUM, SUM, TANGENT),
    results=(RESULT,),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)

log_softmax_of_rows = RowFunction(
    LOG_SOFTMAX,
    tangent=LOG_SOFTMAX_JVP,
    pullback=LOG_SOFTMAX_VJP,
    values=lambda operands, results: tuple(results[:1]),
    residuals=lambda operands, results: (operands[0], *results[1:]),
)
