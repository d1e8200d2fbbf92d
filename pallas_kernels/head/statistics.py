"""What a loss needs to know of a linear layer's scores, from hidden and weight, without the scores in memory.

Each tile leaves for each of its rows the maximum of the scores but the label's, the sum of exp(z - m) of these, the
label's score, which is 0 if it is not in the tile, and where the entropy is wanted the sum of exp(z - m) * (z - m). XLA
combines them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft import fold
from jaxsoft._rows.operation import NO_ROW
from jaxsoft._rows.operations.entropy import products_from

from ..rows.memory import store
from . import products
from .products import LEAST, LOG2E, PLAN, Scores, Tile


def statistics(
    scores: Scores, hidden: jax.Array, weight: jax.Array, label: jax.Array, entropy: bool
) -> tuple[fold.State, jax.Array, jax.Array | None]:
    """The state of the scores but the label's; the label's score, 0 if it is none of these classes'; and the products.

    The products are the sum for the entropy of the other scores' softmax, see `jaxsoft._rows.operations.entropy`.

    Args:
      scores: how products become scores.
      hidden: (rows, width).
      weight: (width, classes).
      label: the index of each row's label, which may be none of these classes, or NO_ROW: then the row has no scores.
      entropy: whether the products are wanted, else they are None.
    """
    plan, rows = PLAN, len(hidden)
    tiles = -(-weight.shape[1] // plan.classes)
    result = jax.ShapeDtypeStruct((tiles, plan.whole_rows(rows)), jnp.float32)
    finish = functools.partial(_finish, scores, weight.shape[1])
    numbers, results = [products.to_whole(plan, label, NO_ROW)], [result] * (3 + entropy)
    found = products.kernel("statistics", plan, _load, finish, hidden, weight, numbers, results)
    none = label == NO_ROW
    m, s, t, *u = (v[:, :rows] for v in found)
    total = jnp.where(none, -jnp.inf, jnp.max(m, axis=0))
    s_total = jnp.where(none, 0, jnp.sum(s * fold.weight(m, total[None]), axis=0))
    part = None
    if entropy:
        part = jnp.where(none, 0, jnp.sum(products_from(total[None], fold.State(m, s), u[0]), axis=0))
    return fold.State(total, s_total), jnp.where(none, 0, jnp.sum(t, axis=0)), part


def _load(tile: Tile, numbers: Sequence[Any]) -> jax.Array:
    return products.of_rows(numbers[0], tile)


def _finish(
    scores: Scores,
    classes: int,
    tile: Tile,
    label: jax.Array,
    found: jax.Array,
    results: Sequence[Any],
    memory: Any,
) -> None:
    del memory
    plan = PLAN

    def of_others(z: jax.Array, piece: int) -> jax.Array:
        counts = ~products.is_label(plan, tile, label, piece)
        if classes % plan.classes:  # the last tile reaches past the end
            counts &= products.columns(plan) < classes - tile.begin - piece * plan.piece
        return jnp.where(counts, z, -jnp.inf)

    z = [scores.of(piece)[0] for piece in products.pieces(plan, found)]
    m = functools.reduce(jnp.maximum, (jnp.max(of_others(x, i), axis=1) for i, x in enumerate(z)))
    reference = jnp.where(jnp.abs(m) < jnp.inf, m, 0.0)
    s = t = u = jnp.zeros_like(m)
    for i, x in enumerate(z):
        above = of_others(x, i) - lax.broadcast_in_dim(reference, x.shape, [0])
        e = jnp.exp2(above * LOG2E)
        s += jnp.sum(e, axis=1)
        t += jnp.sum(jnp.where(products.is_label(plan, tile, label, i), x, 0), axis=1)
        if len(results) > 3:
            u += jnp.sum(e * jnp.maximum(above, LEAST), axis=1)
    for result, v in zip(results, (m, s, t, u), strict=False):
        store(result.at[tile.index, tile.rows], v)
