"""kl_divergence: the Kullback-Leibler divergence of the softmax q of one array of scores from the softmax p of another.

With d = log(q / p), the sum of p * expm1(d) is 0. So the divergence, the sum of -p * d, is that of p * h(d), where
h(d) = expm1(d) - d: no term is negative, and nothing cancels however near p and q are.

Here d = ((y - o) - (x - m)) - c, where c is the logsumexp of y - o less that of x - m. Of arrays that are near each
other, o is m, and y - x is computed as it is, without m. Of others y - x would have lost digits, and o is a number near
the largest of y. An error e of c adds e^2 / 2 to the sum, so a rounded c will do; the gradients, which are as small as
d, take one that is corrected by what the sum of p * expm1(d) differs from 0.

Beside the letters of `jaxsoft._rows.spec`, x and y are the scores of p and of q, c is that ratio, and k the divergence.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._core.mesh import Axes, exchanged
from jaxsoft._rows.formulas import nan_where, probabilities, wide
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
from jaxsoft.fold import reference, weight

# --8<-- [start:operands]
OTHER_SCORES = RowOperand("other_scores", RowKind.SCORES, input=1)
OTHER_TANGENT = RowOperand("other_tangent", RowKind.TANGENT, linear=True, input=1)
OTHER_RESULT = RowOperand("other_result", RowKind.ROW, input=1)
# --8<-- [end:operands]
# o, within some tens of the logsumexp of y; -inf where y has no scores.
OTHER_REFERENCE = RowOperand("other_reference", RowKind.STATISTIC)
# c; the logsumexp of y - o where x has no scores, as parts of rows may; -inf where y has none.
RATIO = RowOperand("ratio", RowKind.STATISTIC)
DIVERGENCE = RowOperand("divergence", RowKind.STATISTIC)

_SMALL = 0.5  # up to here h is a series
_NEAR = 8  # so far from each other are maxima at most for o to be m


def _beyond_linear(d: jax.Array) -> jax.Array:
    """h(d) = expm1(d) - d, with all its digits where d is small."""
    small = jnp.abs(d) < _SMALL
    near = jnp.where(small, d, 0)
    series = jnp.zeros_like(near)
    for i in range(10 if d.dtype == jnp.float32 else 18, 1, -1):  # d^2 / 2! + d^3 / 3! + ...
        series = near / i * (1 + series) if i > 2 else near * near / 2 * (1 + series)
    far = jnp.where(small, 0, d)
    return jnp.where(small, series, jnp.expm1(far) - far)


def _beyond_log(a: jax.Array) -> jax.Array:
    """log1p(a) - a, with all its digits where a is small."""
    small = jnp.abs(a) < 1e-2
    near, far = jnp.where(small, a, 0), jnp.where(small, 0, a)
    series = -near * near * (1 / 2 - near * (1 / 3 - near * (1 / 4 - near * (1 / 5 - near * (1 / 6 - near / 7)))))
    return jnp.where(small, series, jnp.log1p(far) - far)


def _log(s: jax.Array) -> jax.Array:
    """log(s), but 0 where there are no scores."""
    return jnp.log(jnp.where(s == 0, 1, s))


def _distances(x, y, m, s, o, c):
    """p, q, and d, which is 0 where p is 0 or d is too large for its exponential to be taken of it."""
    p = probabilities(x, m, s)
    of_q = wide(y) - reference(o)[..., None]
    q = jnp.exp(jnp.minimum(of_q - reference(c + _log(s))[..., None], 88))
    q = jnp.where(jnp.isneginf(c)[..., None], 0, q)
    valid, same = p != 0, (o == m)[..., None]
    of_p, of_q = wide(x) - jnp.where(same, 0, reference(m)[..., None]), jnp.where(same, wide(y), of_q)
    d = jnp.where(valid, of_q, 0) - jnp.where(valid, of_p, 0) - jnp.where(valid, reference(c)[..., None], 0)
    return p, q, d


# --8<-- [start:formula]
def _kl_divergence(reductions, x, y):
    m, s = reductions.state(x)
    of_y, sum_of_y = reductions.state(y)
    empty, none = s == 0, sum_of_y == 0
    apart = reference(of_y) - reference(m)
    near = jnp.isfinite(m) & jnp.isfinite(of_y) & (jnp.abs(apart) <= _NEAR)
    o = jnp.where(near, m, of_y)
    rough = jnp.where(near, apart, 0) + (_log(sum_of_y) - _log(s))
    p, q, d = _distances(x, y, m, s, o, jnp.where(none, -jnp.inf, rough))
    small = (jnp.abs(d) < _SMALL) & (p != 0)
    small_d = jnp.where(small, d, 0)
    excess = reductions.total(jnp.where(small, p * jnp.expm1(small_d), q - p))
    finite = jnp.where(jnp.isneginf(d), 0, d)
    terms = jnp.where(small, p * _beyond_linear(small_d), q - p - p * finite)
    found = reductions.total(terms) + _beyond_log(jnp.maximum(excess, -0.5))
    lost = reductions.total(jnp.isneginf(d).astype(p.dtype)) > 0  # q is 0 where p is not
    undefined = ~(jnp.isfinite(m) | empty) | jnp.isnan(s) | jnp.isnan(sum_of_y) | (of_y == jnp.inf)
    k = jnp.where(empty, 0, jnp.where(lost, jnp.inf, jnp.maximum(found, 0)))
    c = jnp.where(none, -jnp.inf, jnp.where(empty, rough, rough + jnp.log1p(excess)))
    return m, s, o, c, nan_where(undefined, k)
    # --8<-- [end:formula]


# --8<-- [start:parts]
def _of_parts(axes: Axes, results: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The results of a row, given those of its parts.

    By the chain rule, the divergence is the mean of those of the parts, and the one of the parts' shares. That is as in
    a part, with the ratios c of the parts in the place of those of elements. Parts where p has nothing, or as good as
    nothing, add to q alone.
    """

    def of_maxima(m, s, o, c, k):
        return m, o, jnp.where((s != 0) & (o == m), c, -jnp.inf)

    def references(m, o, c):
        """What d of parts is taken relative to: of near arrays m and the largest c, else the largest o and 0."""
        near = jnp.isfinite(m) & (jnp.abs(reference(o) - reference(m)) <= 2 * _NEAR)
        return jnp.where(near, m, o), jnp.where(near & (jnp.abs(c) <= 4 * _NEAR), reference(c), 0)

    def of_sums(maxima, m, s, o, c, k):
        most, (ref, ratio) = reference(maxima[0]), references(*maxima)
        share = s * weight(m, maxima[0])
        none = share < 1e-30
        moved = reference(o) - reference(ref)
        d = jnp.where(none, 0, c + (moved - (reference(m) - most)) - ratio)
        undefined = jnp.where(jnp.isnan(k), k, 0)
        of_q = jnp.where(jnp.isneginf(c), 0, jnp.exp(reference(c) + _log(s) + moved - ratio))
        small = jnp.minimum(d, 1)  # beyond, exp(d) may be too large without its share, with which it is of_q
        excess = jnp.where(none, 0, jnp.where(d > 1, of_q - share, share * jnp.expm1(small)))
        beyond = jnp.where(d > 1, of_q - share * (1 + d), share * _beyond_linear(small))
        terms = jnp.where(none, undefined, share * k + beyond)
        plain = jnp.where(none, undefined, share * (k - d))
        return share, excess, terms, plain, jnp.where(none, 0, of_q), jnp.where(none, of_q, 0)

    maxima, (s, excess, terms, plain, grown, alone) = exchanged(axes, results, of_maxima, of_sums)
    m, (o, c) = maxima[0], references(*maxima)
    empty, total = s == 0, jnp.where(s == 0, 1, s)
    beside = jnp.where(empty, 0, alone / total)
    excess, grown = excess / total + beside, jnp.where(empty, 1, grown / total + beside)
    close = jnp.abs(excess) < 1 / 2  # else parts are far from each other, and nothing cancels in the plain sum
    excess, log = jnp.where(close, excess, 0), jnp.log(jnp.maximum(grown, 1e-37))
    k = jnp.where(close, terms / total + beside + _beyond_log(excess), plain / total + log)
    k = jnp.where(empty, terms, jnp.maximum(k, 0))
    log = jnp.where(close, jnp.log1p(excess), log)
    return m, s, o, jnp.where(jnp.isneginf(o), -jnp.inf, jnp.where(empty, _log(alone), c + log)), k
    # --8<-- [end:parts]


def _slopes(x, y, m, s, o, c, k):
    """The derivatives by the scores: p * (-d - k) of x, and q - p of y; 0 where p has no scores.

    Where the divergence is infinite they are finite, as it may be masked afterwards.
    """
    p, q, d = _distances(x, y, m, s, o, c)
    there = (s != 0)[..., None]
    small = (jnp.abs(d) < _SMALL) & (p != 0)
    distance = jnp.where(jnp.isinf(d), 0, d) + jnp.where(jnp.isinf(k), 0, k)[..., None]
    by_x = jnp.where(p == 0, 0, -p * distance)
    by_y = jnp.where(small, p * jnp.expm1(jnp.where(small, d, 0)), q - p)
    return jnp.where(there, by_x, 0), jnp.where(there, by_y, 0)


def _vjp(reductions, x, y, m, s, o, c, k, g):
    del reductions
    by_x, by_y = _slopes(x, y, m, s, o, c, k)
    return (by_x * g[..., None]).astype(x.dtype), (by_y * g[..., None]).astype(y.dtype)


def _vjp_other(reductions, *operands):
    return _vjp(reductions, *operands)[1:]


def _jvp(reductions, x, y, m, s, o, c, k, t, u):
    by_x, by_y = _slopes(x, y, m, s, o, c, k)
    return (reductions.total(by_x * wide(t) + by_y * wide(u)),)


_EXTRAS = (RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE, RowExtra.OTHER_SCALE)
_RESIDUALS = (SCORES, OTHER_SCORES, MAXIMUM, SUM, OTHER_REFERENCE, RATIO, DIVERGENCE)

# --8<-- [start:record]
KL_DIVERGENCE = RowSpec(  # x, y -> m, s of x; o; c; k
    "kl_divergence",
    operands=(SCORES, OTHER_SCORES),
    results=(MAXIMUM, SUM, OTHER_REFERENCE, RATIO, DIVERGENCE),
    formula=_kl_divergence,
    reduces=Reduction.STATE,
    extras=_EXTRAS,
    any_axis=False,
    from_state=True,
    of_parts=_of_parts,
)
# --8<-- [end:record]
# --8<-- [start:pullbacks]
KL_DIVERGENCE_VJP = RowSpec(  # x, y, m, s, o, c, k, g -> g * p * (-d - k), g * (q - p), times the scales
    "kl_divergence_vjp",
    operands=(*_RESIDUALS, COTANGENT),
    results=(RESULT, OTHER_RESULT),
    formula=_vjp,
    extras=_EXTRAS,
    any_axis=False,
    from_state=True,
)
KL_DIVERGENCE_VJP_OTHER = RowSpec(  # likewise -> g * (q - p), where p is a fixed target
    "kl_divergence_vjp_other",
    operands=(*_RESIDUALS, COTANGENT),
    results=(OTHER_RESULT,),
    formula=_vjp_other,
    extras=_EXTRAS,
    any_axis=False,
    from_state=True,
)
# --8<-- [end:pullbacks]
KL_DIVERGENCE_JVP = RowSpec(  # x, y, m, s, o, c, k, t, u -> <p * (-d - k), t> + <q - p, u>
    "kl_divergence_jvp",
    operands=(*_RESIDUALS, TANGENT, OTHER_TANGENT),
    results=(INNER_PRODUCT,),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)

# --8<-- [start:function]
kl_divergence_of_rows = RowFunction(
    KL_DIVERGENCE,
    tangent=KL_DIVERGENCE_JVP,
    pullback=KL_DIVERGENCE_VJP,
    values=lambda operands, results: (results[4],),
    residuals=lambda operands, results: (*operands, *results),
    pullback_of={1: KL_DIVERGENCE_VJP_OTHER},
)
# --8<-- [end:function]
