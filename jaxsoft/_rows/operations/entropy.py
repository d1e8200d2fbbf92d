"""entropy: H = log(s) - u / s, from the state (m, s) of a row and one more sum, u = sum(exp(z - m) * (z - m)).

Both terms are at least 0, so nothing cancels. A score of -inf adds nothing to u.
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
from jaxsoft.fold import State, reference, weight

PRODUCTS = RowOperand("products", RowKind.STATISTIC)  # u


def below(x: jax.Array, m: jax.Array) -> jax.Array:
    """z - m, and 0 in the place of -inf, which has the weight 0: of scores of -inf, and where z - m is out of range."""
    distance = wide(x) - reference(m)[..., None]
    return jnp.where(distance == -jnp.inf, 0, distance)


def products(x: jax.Array, m: jax.Array) -> jax.Array:
    """The terms of u, of the scores' shape."""
    return weight(wide(x), m[..., None]) * below(x, m)


def products_from(m: jax.Array, part: State, u: jax.Array) -> jax.Array:
    """The u of a part of a row relative to m, the row's maximum, given the part's state and its u relative to its own.

    The sum over parts is the row's.
    """
    factor = weight(part.m, m)
    distance = jnp.where((part.s == 0) | (factor == 0), 0, reference(part.m) - reference(m))
    return factor * (u + distance * part.s)


def entropy_of(m: jax.Array, s: jax.Array, u: jax.Array) -> jax.Array:
    """H; 0 for a row without scores, and NaN where the softmax has no value."""
    empty = s == 0
    s = jnp.where(empty, 1, s)
    return jnp.where(empty, 0, nan_where(m == jnp.inf, jnp.log(s) - u / s))


def _entropy(reductions, x):
    m, s = reductions.state(x)
    return m, s, reductions.total(products(x, m))


def _of_parts(axes: Axes, results: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The results of a row, given those of its parts."""

    def of_sums(maxima, m, s, u):
        return s * weight(m, *maxima), products_from(maxima[0], State(m, s), u)

    maxima, sums = exchanged(axes, results, lambda m, s, u: [m], of_sums)
    return *maxima, *sums


def slope(x: jax.Array, m: jax.Array, s: jax.Array, u: jax.Array) -> jax.Array:
    """The derivative by the scores, -p * (log(p) + H), where log(p) + H = (z - m) - u / s."""
    mean = jnp.where(s == 0, 0, u / jnp.where(s == 0, 1, s))
    return -probabilities(x, m, s) * (below(x, m) - mean[..., None])


def _vjp(reductions, x, m, s, u, g):
    del reductions
    return ((slope(x, m, s, u) * g[..., None]).astype(x.dtype),)


def _jvp(reductions, x, m, s, u, t):
    return (reductions.total(slope(x, m, s, u) * wide(t)),)


ENTROPY = RowSpec(  # x -> m, s, u
    "entropy",
    operands=(SCORES,),
    results=(MAXIMUM, SUM, PRODUCTS),
    formula=_entropy,
    reduces=Reduction.STATE,
    extras=(RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE),
    any_axis=False,
    from_state=True,
    of_parts=_of_parts,
)
ENTROPY_VJP = RowSpec(  # x, m, s, u, g -> scale * g * -p * ((z - m) - u / s), with p = exp(z - m) / s
    "entropy_vjp",
    operands=(SCORES, MAXIMUM, SUM, PRODUCTS, COTANGENT),
    results=(RESULT,),
    formula=_vjp,
    extras=(RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE, RowExtra.BIAS),
    any_axis=False,
    from_state=True,
)
ENTROPY_JVP = RowSpec(  # x, m, s, u, t -> <-p * ((z - m) - u / s), scale * t>
    "entropy_jvp",
    operands=(SCORES, MAXIMUM, SUM, PRODUCTS, TANGENT),
    results=(INNER_PRODUCT,),
    formula=_jvp,
    reduces=Reduction.PRODUCT,
)


entropy_of_rows = RowFunction(
    ENTROPY,
    tangent=ENTROPY_JVP,
    pullback=ENTROPY_VJP,
    values=lambda operands, results: (entropy_of(*results),),
    residuals=lambda operands, results: (operands[0], *results),
)
