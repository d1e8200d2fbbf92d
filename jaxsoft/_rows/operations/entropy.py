"""entropy: H = log(s) - u / s, from the state (m, s) of a row and one more sum, u = sum(exp(z - m) * (z - m)).

Both terms are at least 0, so nothing cancels. A score of -inf adds nothing to u.
"""

import jax.numpy as jnp

from jaxsoft._rows.formulas import probabilities, wide
from jaxsoft._rows.operands import COTANGENT, INNER_PRODUCT, MAXIMUM, RESULT, SCORES, SUM, TANGENT
from jaxsoft._rows.operation import Extra, Function, Kind, Operand, Operation, Reduction
from jaxsoft.fold import reference, weight

PRODUCTS = Operand("products", Kind.STATISTIC)  # u


def _below(x, m):
    """z - m, and 0 in the place of -inf, which has the weight 0: of scores of -inf, and where z - m is out of range."""
    below = wide(x) - reference(m)[..., None]
    return jnp.where(below == -jnp.inf, 0, below)


def _entropy(reductions, x):
    m, s = reductions.state(x)
    return m, s, reductions.total(weight(wide(x), m[..., None]) * _below(x, m))


def _slope(x, m, s, u):
    """The derivative by the scores, -p * (log(p) + H), where log(p) + H = (z - m) - u / s."""
    mean = jnp.where(s == 0, 0, u / jnp.where(s == 0, 1, s))
    return -probabilities(x, m, s) * (_below(x, m) - mean[..., None])


def _vjp(reductions, x, m, s, u, g):
    del reductions
    return ((_slope(x, m, s, u) * g[..., None]).astype(x.dtype),)


def _jvp(reductions, x, m, s, u, t):
    return (reductions.total(_slope(x, m, s, u) * wide(t)),)


ENTROPY = Operation(  # x -> m, s, u
    "entropy",
    operands=(SCORES,),
    results=(MAXIMUM, SUM, PRODUCTS),
    formula=_entropy,
    reduces=Reduction.STATE,
    extras=(Extra.SCALE, Extra.LIMIT, Extra.WHERE),
    any_axis=False,
    from_state=True,
)
ENTROPY_VJP = Operation(  # x, m, s, u, g -> scale * g * -p * ((z - m) - u / s), with p = exp(z - m) / s
    "entropy_vjp",
    operands=(SCORES, MAXIMUM, SUM, PRODUCTS, COTANGENT),
    results=(RESULT,),
    formula=_vjp,
    extras=(Extra.SCALE, Extra.LIMIT, Extra.WHERE, Extra.BIAS),
    any_axis=False,
    from_state=True,
)
ENTROPY_JVP = Operation(  # x, m, s, u, t -> <-p * ((z - m) - u / s), scale * t>
    "entropy_jvp",
    operands=(SCORES, MAXIMUM, SUM, PRODUCTS, TANGENT),
    results=(INNER_PRODUCT,),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)


def _values(operands, results):
    m, s, u = results
    empty = s == 0
    s = jnp.where(empty, 1, s)
    h = jnp.where(m == jnp.inf, jnp.nan, jnp.log(s) - u / s)
    return (jnp.where(empty, 0, h),)


entropy_of_rows = Function(
    ENTROPY,
    tangent=ENTROPY_JVP,
    pullback=ENTROPY_VJP,
    values=_values,
    residuals=lambda operands, results: (operands[0], *results),
)
