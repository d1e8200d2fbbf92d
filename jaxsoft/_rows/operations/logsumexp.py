"""logsumexp: m + log(s), from the state (m, s) of a row."""

from jaxsoft._rows.formulas import probabilities, wide
from jaxsoft._rows.operands import COTANGENT, INNER_PRODUCT, MAXIMUM, RESULT, SCORES, SUM, TANGENT
from jaxsoft._rows.operation import Extra, Function, Operation, Reduction
from jaxsoft.fold import State, lse


def _state(reductions, x):
    return tuple(reductions.state(x))


def _vjp(reductions, x, m, s, g):
    return ((probabilities(x, m, s) * g[..., None]).astype(x.dtype),)


def _jvp(reductions, x, m, s, t):
    return (reductions.total(probabilities(x, m, s) * wide(t)),)


STATE = Operation(  # x -> m, s
    "state",
    operands=(SCORES,),
    results=(MAXIMUM, SUM),
    formula=_state,
    reduces=Reduction.STATE,
    extras=(Extra.SCALE, Extra.LIMIT, Extra.WHERE, Extra.BIAS),
)
LOGSUMEXP_VJP = Operation(  # x, m, s, g -> scale * p * g, with p = exp(z - m) / s
    "logsumexp_vjp",
    operands=(SCORES, MAXIMUM, SUM, COTANGENT),
    results=(RESULT,),
    formula=_vjp,
    extras=(Extra.SCALE, Extra.LIMIT, Extra.WHERE, Extra.BIAS),
)
LOGSUMEXP_JVP = Operation(  # x, m, s, t -> <p, scale * t>
    "logsumexp_jvp",
    operands=(SCORES, MAXIMUM, SUM, TANGENT),
    results=(INNER_PRODUCT,),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)

logsumexp_of_rows = Function(
    STATE,
    tangent=LOGSUMEXP_JVP,
    pullback=LOGSUMEXP_VJP,
    values=lambda operands, results: (lse(State(*results)),),
    residuals=lambda operands, results: (operands[0], *results),
)
