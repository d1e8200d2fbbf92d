"""What a loss needs to know of a linear layer's scores, from hidden and weight, without the scores in memory.

Each tile leaves for each of its rows the maximum of the scores but the label's, the sum of exp(z - m) of these, the
label's score, which is 0 if it is not in the tile; where the entropy is wanted the sum of exp(z - m) * (z - m); and
where the sum of all scores is wanted that of their distances from m, and their number. XLA combines them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft import fold
from jaxsoft._rows.operations.entropy import products_from
from jaxsoft._rows.spec import NO_ROW

from ..rows.fold import reference
from ..rows.memory import store
from . import products
from .plan import HeadPlan, head_plan
from .products import LEAST, LOG2E, HeadScores, HeadTile


def statistics(
    scores: HeadScores, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, label: jax.Array
) -> list[jax.Array]:
    """m and s of the scores but the label's, the label's, 0 if it is none of these classes', and what else is wanted.

    That is u for the entropy, see `jaxsoft._rows.operations.entropy`; and of the scores above -inf the sum of their
    distances from reference(m), and their number.

    Args:
      scores: how products become scores.
      hidden: (rows, width).
      weight: (width, classes).
      bias: of the classes, in f32; None for none.
      label: the index of each row's label, which may be none of these classes, or NO_ROW: then the row has no scores.
    """
    plan, rows, classes = head_plan(), len(hidden), weight.shape[1]
    numbers = [products.to_whole(label, plan.block_rows, NO_ROW)]
    result = jax.ShapeDtypeStruct((-(-classes // plan.classes), len(numbers[0])), jnp.float32)
    results = [result] * (3 + scores.entropy + 2 * scores.summed)
    finish = functools.partial(_finish, plan, scores, classes)
    found = products.kernel("statistics", plan, finish, hidden, weight, numbers, bias, results)
    m, s, *others = (v[:, :rows] for v in found)
    total, none = jnp.max(m, axis=0), label == NO_ROW
    s_parts = s * fold.weight(m, total[None])
    if scores.entropy:
        others[1] = products_from(total[None], fold.State(m, s), others[1])
    if scores.summed:
        others[-2] += others[-1] * (fold.reference(m) - fold.reference(total)[None])
    sums = (jnp.where(none, 0, jnp.sum(v, axis=0)) for v in (s_parts, *others))
    return [jnp.where(none, -jnp.inf, total), *sums]


def _finish(
    plan: HeadPlan,
    scores: HeadScores,
    classes: int,
    tile: HeadTile,
    numbers: Sequence[jax.Array],
    bias: Any,
    found: jax.Array,
    results: Sequence[Any],
    memory: Any,
) -> None:
    del memory
    (label,) = numbers

    def of_classes(valid: jax.Array, piece: int) -> jax.Array:
        """Which of the elements of a piece that are valid are classes, and not past the last one."""
        if classes % plan.classes == 0:
            return valid
        return valid & (products.columns(plan) < classes - tile.begin - piece * plan.piece)

    def of_others(z: jax.Array, piece: int) -> jax.Array:
        return jnp.where(of_classes(~products.is_label(plan, tile, label, piece), piece), z, -jnp.inf)

    def score(piece: jax.Array, i: int) -> jax.Array:
        return scores.of(piece, None if bias is None else products.bias_of(plan, bias, tile, i))[0]

    z = [score(piece, i) for i, piece in enumerate(products.pieces(plan, found))]
    m = functools.reduce(jnp.maximum, (jnp.max(of_others(x, i), axis=1) for i, x in enumerate(z)))
    shift = reference(m)
    s = t = u = total = count = jnp.zeros_like(m)
    for i, x in enumerate(z):
        above = of_others(x, i) - lax.broadcast_in_dim(shift, x.shape, [0])
        e = jnp.exp2(above * LOG2E)
        s += jnp.sum(e, axis=1)
        t += jnp.sum(jnp.where(products.is_label(plan, tile, label, i), x, 0), axis=1)
        if scores.entropy:
            u += jnp.sum(e * jnp.maximum(above, LEAST), axis=1)
        if scores.summed:
            valid = of_classes(x != -jnp.inf, i)
            total += jnp.sum(jnp.where(valid, x - lax.broadcast_in_dim(shift, x.shape, [0]), 0), axis=1)
            count += jnp.sum(jnp.where(valid, 1.0, 0.0), axis=1)
    wanted = [m, s, t, *[u] * scores.entropy, *[total, count] * scores.summed]
    for result, v in zip(results, wanted, strict=True):
        store(result.at[tile.index, tile.rows], v)
