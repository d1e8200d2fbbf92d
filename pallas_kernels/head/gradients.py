"""The gradients of a linear layer's scores, from hidden and weight, without the scores in memory.

Of a row whose other scores than the label's have the maximum m and the sum s, they are p * g with p = exp(z - m) / s,
and h at the label; and with an entropy, of which k is the cotangent, p * (g - k * ((z - m) - u / s)). That is what
`label_state_vjp` and `label_entropy_vjp` compute of scores (see `jaxsoft._rows.operations.labels`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft import fold
from jaxsoft._rows.operation import NO_ROW

from ..tiles import tiled
from . import products
from .products import LEAST, LOG2E, PLAN, Scores, Tile


def gradients(
    scores: Scores,
    hidden: jax.Array,
    weight: jax.Array,
    label: jax.Array,
    state: fold.State,
    of_others: jax.Array,
    of_label: jax.Array,
    entropy: tuple[jax.Array, jax.Array] | None,
    rows: int,
) -> jax.Array:
    """The gradients by hidden @ weight, in the dtype of these.

    Args:
      scores: how products become scores.
      hidden: (rows, width).
      weight: (width, classes).
      label: the index of each row's label, which may be none of these classes, or NO_ROW: then all is 0.
      state: of the other scores.
      of_others: g.
      of_label: h.
      entropy: u and k, where the entropy has a cotangent.
      rows: how many rows the result has, a multiple of 8 and at least hidden's. What is in rows that hidden has not is
        undefined.
    """
    plan, dtype = PLAN, hidden.dtype
    m, s = state
    scale = jnp.where(s == 0, 0, scores.scale / jnp.where(s == 0, 1, s))
    factors = [of_others * scale]
    if entropy is not None:
        u, k = entropy
        factors = [factors[0] + k * (u * scale) / jnp.where(s == 0, 1, s), -k * scale]
    given = [(label, NO_ROW), (fold.reference(m), 0), (of_label * scores.scale, 0), *((v, 0) for v in factors)]
    numbers = [products.to_whole(plan, v, fill) for v, fill in given]
    result = jax.ShapeDtypeStruct((rows, weight.shape[1]), dtype)
    # While one piece of the gradients is copied to memory, the next one is computed.
    staging = tiled((plan.groups, 2, plan.rows, plan.piece), dtype)
    finish = functools.partial(_finish, scores)
    (dx,) = products.kernel("gradients", plan, _load, finish, hidden, weight, numbers, [result], [staging])
    return dx


def _load(tile: Tile, numbers: Sequence[Any]) -> list[jax.Array]:
    return [products.of_rows(ref, tile) for ref in numbers]


def _finish(
    scores: Scores, tile: Tile, numbers: Sequence[jax.Array], found: jax.Array, results: Sequence[Any], memory: Any
) -> None:
    plan, (result,), (staging,) = PLAN, results, memory
    group = lax.axis_index("warp_group")
    label, m, of_label, *factors = numbers

    def spread(v: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(v, (plan.rows, plan.piece), [0])

    for i, piece in enumerate(products.pieces(plan, found)):
        z, slope = scores.of(piece)
        above = z - spread(m)
        factor = spread(factors[0])
        if len(factors) > 1:
            factor += spread(factors[1]) * jnp.maximum(above, LEAST)
        dx = jnp.exp2(above * LOG2E) * factor
        dx = jnp.where(products.is_label(plan, tile, label, i), spread(of_label), dx)
        if slope is not None:
            dx = dx * slope
        dx = jnp.where(spread(label == NO_ROW), 0, dx)
        stage = staging.at[group, i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy of the last piece but one
        stage[...] = dx.astype(result.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, result.at[tile.rows, pl.ds(tile.begin + i * plan.piece, plan.piece)])
