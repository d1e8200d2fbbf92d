"""The gradients of a linear layer's scores, from hidden and weight, without the scores in memory.

Of a row whose other scores than the label's have the maximum m and the sum s, they are p * g with p = exp(z - m) / s,
and h at the label; with an entropy, of which k is the cotangent, p * (g - k * ((z - m) - u / s)); and with the sum of
all scores, of which v is the cotangent, v more. That is what the pullbacks in `jaxsoft._rows.operations.labels` compute
of scores.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._rows.spec import NO_ROW
from jaxsoft.fold import reference

from ..blocks import ROWS, tiled
from . import products
from .plan import HeadPlan, head_plan
from .products import LEAST, LOG2E, HeadScores, HeadTile

_LEAST_SIZE = 128  # of the dimensions of the result


def gradients(
    scores: HeadScores,
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    label: jax.Array,
    state: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    rows: int,
    begin: jax.Array | int,
    classes: int,
) -> jax.Array:
    """The gradients by hidden @ weight of some classes, in the dtype of these.

    Args:
      scores: how products become scores.
      hidden: (rows, width).
      weight: (width, all classes).
      bias: of these classes, in f32; None for none.
      label: the index of each row's label among these classes, or out of range, or NO_ROW: then all is 0.
      state: m and s of the other scores, and u with an entropy.
      cotangents: g and h, k with an entropy, and v with the sum.
      rows: how many rows the result has, at least hidden's. What is in rows that hidden has not is undefined.
      begin: the first class, a multiple of 64.
      classes: how many there are.
    """
    plan, dtype = head_plan(), hidden.dtype
    (m, s, *u), (g, h, *more) = state, [v * scores.scale for v in cotangents]
    some = jnp.where(s == 0, 1, s)
    of_others = [g]
    if scores.entropy:
        k = more.pop(0)
        of_others = [g + k * (u[0] / some), -k]
    of_others = [jnp.where(s == 0, 0, v / some) for v in of_others]
    numbers = [
        products.to_whole(label, plan.block_rows, NO_ROW),
        *(products.to_whole(v, plan.block_rows) for v in (reference(m), h, *of_others, *more)),
    ]
    # Tiles reach past the end of an array, where copies write nothing. But a copy as large as a dimension, of 64 rows
    # or columns, has no index along it to be past the end with, and would write to the beginning.
    shape = max(-(-rows // ROWS) * ROWS, _LEAST_SIZE), max(classes, _LEAST_SIZE)
    result = jax.ShapeDtypeStruct(shape, dtype)
    # While one piece of the gradients is copied to memory, the next one is computed.
    staging = tiled((plan.groups, 2, plan.rows, plan.piece), dtype)
    finish = functools.partial(_finish, plan, scores)
    (dx,) = products.kernel(
        "gradients", plan, finish, hidden, weight, numbers, bias, [result], [staging], begin, classes
    )
    return dx[:rows, :classes]


def _finish(
    plan: HeadPlan,
    scores: HeadScores,
    tile: HeadTile,
    numbers: Sequence[jax.Array],
    bias: Any,
    found: jax.Array,
    results: Sequence[Any],
    memory: Any,
) -> None:
    (result,), (staging,) = results, memory
    label, *others = numbers
    group = lax.axis_index("warp_group")

    for i, piece in enumerate(products.pieces(plan, found)):
        m, of_label, *of_others = (lax.broadcast_in_dim(v, piece.shape, [0]) for v in others)
        of_sum = of_others.pop() if scores.summed else None
        z, slope = scores.of(piece, None if bias is None else products.bias_of(plan, bias, tile, i))
        above, factor = z - m, of_others[0]
        if scores.entropy:
            factor += of_others[1] * jnp.maximum(above, LEAST)
        dx = jnp.where(products.is_label(plan, tile, label, i), of_label, jnp.exp2(above * LOG2E) * factor)
        if of_sum is not None:
            dx += jnp.where(z != -jnp.inf, of_sum, 0)
        if slope is not None:
            dx *= slope
        dx = jnp.where(lax.broadcast_in_dim(label == NO_ROW, piece.shape, [0]), 0, dx)
        stage = staging.at[group, i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy of the last piece but one
        stage[...] = dx.astype(result.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, result.at[tile.rows, pl.ds(tile.begin + i * plan.piece, plan.piece)])
