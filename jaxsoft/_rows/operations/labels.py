"""What a loss needs to know of a row with a label: the state of the other scores, the label's score, and sums.

`label_state` is that. `label_sums` also has the sums of label smoothing: of the scores above -inf, the sum of their
distance from the label's score, and their number. `label_entropy` has the sum for the entropy of the other scores, u as
in `jaxsoft._rows.operations.entropy`. The label's score is kept apart from the state of the others, so that the loss
and its gradient keep all their digits where the label is nearly certain.

Beside the letters of `jaxsoft._rows.spec`, t is the label's score in a forward pass, h the cotangent of that score,
v the cotangent of the sum of distances, and k the cotangent of the entropy of the other scores.
"""

import functools

import jax
import jax.numpy as jnp

from jaxsoft._rows.formulas import label_places, nan_where, probabilities, wide
from jaxsoft._rows.operations.entropy import PRODUCTS, entropy_of, products, slope
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
    RowKind,
    RowOperand,
    RowSpec,
)
from jaxsoft.fold import State, lse, reference

LABEL = RowOperand("label", RowKind.LABEL)
LABEL_SCORE = RowOperand("label_score", RowKind.STATISTIC)
DISTANCES = RowOperand("distances", RowKind.STATISTIC)
COUNT = RowOperand("count", RowKind.STATISTIC)
LABEL_COTANGENT = RowOperand("label_cotangent", RowKind.STATISTIC, linear=True)
DISTANCE_COTANGENT = RowOperand("distance_cotangent", RowKind.STATISTIC, linear=True)
OTHERS_ENTROPY = RowOperand("others_entropy", RowKind.STATISTIC)
ENTROPY_COTANGENT = RowOperand("entropy_cotangent", RowKind.STATISTIC, linear=True)


def _label_state(reductions, x, i):
    none, label = label_places(x, i)
    m, s = reductions.state(jnp.where(none | label, -jnp.inf, x))
    return m, s, jnp.where(none[..., 0], 0, reductions.take(x, i))


def _others(x, i):
    """The scores, with -inf in the label's place, and in all places of a row that is not to be read."""
    none, label = label_places(x, i)
    return jnp.where(none | label, -jnp.inf, x)


def _label_state_vjp(reductions, x, i, m, s, g, h):
    dx = probabilities(_others(x, i), m, s) * g[..., None]
    none, label = label_places(x, i)
    return (jnp.where(none, 0, jnp.where(label, h[..., None], dx)).astype(x.dtype),)


def _label_state_jvp(reductions, x, i, m, s, t):
    none, label = label_places(x, i)
    t = jnp.where(none, 0, wide(t))
    total = reductions.total
    return total(probabilities(_others(x, i), m, s) * t), total(jnp.where(label, t, 0))


def _is_summed(x, i):
    """Which scores are above -inf, in rows that are to be read."""
    return ~label_places(x, i)[0] & (x != -jnp.inf)


def _label_sums(reductions, x, i):
    m, s, t = _label_state(reductions, x, i)
    summed = _is_summed(x, i)
    ref = jax.lax.stop_gradient(reference(t))  # a constant, as the derivative has it
    above = jnp.where(summed, wide(x) - ref[..., None], 0)
    return m, s, t, reductions.total(above), reductions.total(summed.astype(t.dtype))


def _label_sums_vjp(reductions, x, i, m, s, g, h, v):
    (dx,) = _label_state_vjp(reductions, wide(x), i, m, s, g, h)
    return ((wide(dx) + jnp.where(_is_summed(x, i), v[..., None], 0)).astype(x.dtype),)


def _label_sums_jvp(reductions, x, i, m, s, t):
    total = reductions.total(jnp.where(_is_summed(x, i), wide(t), 0))
    return *_label_state_jvp(reductions, x, i, m, s, t), total


def _label_entropy(reductions, x, i):
    m, s, t = _label_state(reductions, x, i)
    return m, s, t, reductions.total(products(_others(x, i), m))


def _label_entropy_vjp(reductions, x, i, m, s, u, g, h, k):
    z, label = _others(x, i), label_places(x, i)[1]
    dx = probabilities(z, m, s) * g[..., None] + slope(z, m, s, u) * k[..., None]
    return (jnp.where(label, h[..., None], dx).astype(x.dtype),)


def _label_entropy_jvp(reductions, x, i, m, s, u, t):
    along = jnp.where(label_places(x, i)[0], 0, wide(t))
    return *_label_state_jvp(reductions, x, i, m, s, t), reductions.total(slope(_others(x, i), m, s, u) * along)


# What those have in common that kernels serve.
_served = functools.partial(
    RowSpec, extras=(RowExtra.LIMIT, RowExtra.WHERE), may_be_capped=True, any_axis=False, from_state=True
)

LABEL_STATE = _served(  # x, i -> m, s of the scores but the label's; t, the label's
    "label_state",
    operands=(SCORES, LABEL),
    results=(MAXIMUM, SUM, LABEL_SCORE),
    formula=_label_state,
    reduces=Reduction.STATE,
)
LABEL_STATE_VJP = _served(  # x, i, m, s, g, h -> p * g, and h at the label
    "label_state_vjp",
    operands=(SCORES, LABEL, MAXIMUM, SUM, COTANGENT, LABEL_COTANGENT),
    results=(RESULT,),
    formula=_label_state_vjp,
)
LABEL_STATE_JVP = RowSpec(  # x, i, m, s, t -> <p, t> without the label; t at the label
    "label_state_jvp",
    operands=(SCORES, LABEL, MAXIMUM, SUM, TANGENT),
    results=(INNER_PRODUCT, LABEL_SCORE),
    formula=_label_state_jvp,
    reduces=Reduction.PRODUCT,
)
LABEL_SUMS = _served(  # x, i -> m, s, t; and of the scores z > -inf: sum(z - reference(t)), and their number
    "label_sums",
    operands=(SCORES, LABEL),
    results=(MAXIMUM, SUM, LABEL_SCORE, DISTANCES, COUNT),
    formula=_label_sums,
    reduces=Reduction.STATE,
)
LABEL_SUMS_VJP = _served(  # x, i, m, s, g, h, v -> p * g, and h at the label; plus v where z > -inf
    "label_sums_vjp",
    operands=(SCORES, LABEL, MAXIMUM, SUM, COTANGENT, LABEL_COTANGENT, DISTANCE_COTANGENT),
    results=(RESULT,),
    formula=_label_sums_vjp,
)
LABEL_SUMS_JVP = RowSpec(  # x, i, m, s, t -> those of label_state_jvp; sum(t) where z > -inf
    "label_sums_jvp",
    operands=(SCORES, LABEL, MAXIMUM, SUM, TANGENT),
    results=(INNER_PRODUCT, LABEL_SCORE, DISTANCES),
    formula=_label_sums_jvp,
    reduces=Reduction.PRODUCT,
)
LABEL_ENTROPY = _served(  # x, i -> m, s of the scores but the label's; t, the label's; u of the others
    "label_entropy",
    operands=(SCORES, LABEL),
    results=(MAXIMUM, SUM, LABEL_SCORE, PRODUCTS),
    formula=_label_entropy,
    reduces=Reduction.STATE,
)
LABEL_ENTROPY_VJP = _served(  # x, i, m, s, u, g, h, k -> p * (g - k * ((z - m) - u / s)), and h at the label
    "label_entropy_vjp",
    operands=(SCORES, LABEL, MAXIMUM, SUM, PRODUCTS, COTANGENT, LABEL_COTANGENT, ENTROPY_COTANGENT),
    results=(RESULT,),
    formula=_label_entropy_vjp,
)
LABEL_ENTROPY_JVP = RowSpec(  # x, i, m, s, u, t -> those of label_state_jvp; <-p * ((z - m) - u / s), t>
    "label_entropy_jvp",
    operands=(SCORES, LABEL, MAXIMUM, SUM, PRODUCTS, TANGENT),
    results=(INNER_PRODUCT, LABEL_SCORE, OTHERS_ENTROPY),
    formula=_label_entropy_jvp,
    reduces=Reduction.PRODUCT,
)


def beside_label(others: State, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logsumexp of the scores but the label's, given their state, and that minus the label's score t.

    The difference is taken before anything is rounded to the size of the logsumexp. Of a row of nothing but -inf it is
    any number.
    """
    m, s = others
    # What has no difference is replaced before it is taken, as checks for NaN see every step.
    none = jnp.isnan(t) | (jnp.isinf(t) & (m == t))
    distance = jnp.where(none, 0, m) - jnp.where(none, 0, t)
    log_odds = nan_where(jnp.isnan(t) | (t == jnp.inf), distance + jnp.log(jnp.where(s == 0, 1, s)))
    return lse(others), log_odds


def _values(operands, results):
    m, s, t, *sums = results
    others, log_odds = beside_label(State(m, s), t)
    return others, t, log_odds, *sums


def _tangents(results, linear):
    others, t, *total = linear
    count = map(jnp.zeros_like, results[4:])
    return others, t, others - t, *total, *count


_of_rows = functools.partial(
    RowFunction,
    values=_values,
    residuals=lambda operands, results: (*operands, *results[:2]),
    tangents=_tangents,
)
# The logsumexp of the scores but the label's; the label's score t; the former minus the latter.
label_state_of_rows = _of_rows(LABEL_STATE, LABEL_STATE_JVP, LABEL_STATE_VJP)
# Likewise; and of the scores z > -inf, sum(z - reference(t)), where the reference counts as a constant; their number.
label_sums_of_rows = _of_rows(LABEL_SUMS, LABEL_SUMS_JVP, LABEL_SUMS_VJP)


def _values_with_entropy(operands, results):
    m, s, t, u = results
    return *_values(operands, (m, s, t)), entropy_of(m, s, u)


# What `label_state_of_rows` has; and the entropy of the softmax of the scores but the label's.
label_entropy_of_rows = _of_rows(
    LABEL_ENTROPY,
    LABEL_ENTROPY_JVP,
    LABEL_ENTROPY_VJP,
    values=_values_with_entropy,
    residuals=lambda operands, results: (*operands, *results[:2], results[3]),
)
