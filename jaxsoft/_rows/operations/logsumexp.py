"""logsumexp: m + log(s), from the state (m, s) of a row."""

from jaxsoft._rows.formulas import probabilities, wide
from jaxsoft._rows.spec import (
    COTANGENT,
    INNER_PRODUCT,
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
from jaxsoft.fold import State, lse


def _vjp(reductions, x, m, s, g):
    return ((probabilities(x, m, s) * g[..., None]).astype(x.dtype),)


def _jvp(reductions, x, m, s, t):
    return (reductions.total(probabilities(x, m, s) * wide(t)),)


STATE = RowSpec(  # x -> m, s
    "state",
    operands=(SCORES,),
    results=(MAXIMUM, SUM),
    formula=lambda reductions, x: tuple(reductions.state(x)),
    reduces=Reduction.STATE,
    extras=(RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE, RowExtra.BIAS),
)
LOGSUMEXP_VJP = RowSpec(  # x, m, s, g -> scale * p * g, with p = exp(z - m) / s
    "logsumexp_vjp",
    operands=(SCORES, MAXIMUM, SUM, COTANGENT),
    results=(RESULT,),
    formula=_vjp,
    extras=(RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE, RowExtra.BIAS),
)
LOGSUMEXP_JVP = RowSpec(  # x, m, s, t -> <p, scale * t>
    "logsumexp_jvp",
    operands=(SCORES, MAXIMUM, SUM, TANGENT),
    results=(INNER_PRODUCT,),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)

logsumexp_of_rows = RowFunction(
    STATE,
    tangent=LOGSUMEXP_JVP,
    pullback=LOGSUMEXP_VJP,
    values=lambda operands, results: (lse(State(*results)),),
    residuals=lambda operands, results: (operands[0], *results),
)
