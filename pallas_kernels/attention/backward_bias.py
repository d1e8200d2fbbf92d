"""The kernel of a bias's gradient, which is dz, summed where the bias is the same along a dimension.

Each warp group has 64 rows of scores and loops over what is summed: entries of the batch and heads that share the bias,
and the tiles of keys if the bias is the same for all keys, or of queries if it is the same for all queries. In the last
case rows are keys, so that all sums go along rows. Scores are computed once more; every sum has a fixed order.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import versions
from ..blocks import Ring, kernel_of_blocks, roles, tiled
from ..rows.memory import store
from . import backward_plan
from .backward_call import WGMMA, BackwardCall, broadcast, probabilities, to_whole
from .backward_plan import ROWS, BiasPlan
from .ranges import Shape, borders
from .schedule import indices
from .scores import Scores, prepare


def bias_gradient(call: BackwardCall, bias: tuple[int, ...]):
    """The kernel for a call.

    Args:
      call: the numbers of the call.
      bias: the shape of the bias.

    Returns:
      A function of the padded query, key, value and cotangent, the extras by name, and the numbers of every query
      (`numbers_of`), that returns the gradient in f32, in the shape of the bias.
    """
    plan = backward_plan.bias_plan(call.head, call.value)
    over_queries = bias[2] == 1 and call.queries > 1 and bias[3] != 1
    axis = int(over_queries)  # of the queries in a tile
    rows, columns = (call.keys, call.queries) if over_queries else (call.queries, call.keys)
    summed = bias[2 + 1 - axis] == 1  # along the rows of tiles
    tiles = (plan.columns, ROWS) if over_queries else (ROWS, plan.columns)
    shape = Shape(call.queries, call.keys, *tiles)
    count = -(-columns // plan.columns)
    axes = {"batch": bias[0], "head": bias[1], "block": -(-rows // plan.block), "column": 1 if summed else count}
    result = bias[0], bias[1], axes["block"] * plan.block, *(() if summed else (count * plan.columns,))
    query_rows, key_rows = (plan.columns, plan.block) if over_queries else (plan.block, plan.columns)
    kernel = kernel_of_blocks(
        functools.partial(_body, call, bias, plan, shape, axis, summed, axes, count),
        "attention_bias_gradient",
        plan.warp_groups,
        {"item": math.prod(axes.values())},  # which may be more than CUDA allows along any but the first axis
        out_type=jax.ShapeDtypeStruct(result, jnp.float32),
        scratch_types=(
            tiled((plan.slots, query_rows, call.head), call.dtype),
            tiled((plan.slots, key_rows, call.head), call.dtype),
            tiled((plan.slots, key_rows, call.value), call.dtype),
            tiled((plan.slots, query_rows, call.value), call.dtype),
            Ring.barrier_types(4, plan.slots, plan.warp_groups),
        ),
    )

    def gradient(query, key, value, cotangent, extras, numbers):
        whole = plan.columns if over_queries else plan.block
        prepared = prepare(call.form, extras, shape)
        found = kernel(query, key, value, cotangent, to_whole(numbers, whole), [*prepared.values()])
        if over_queries:
            return found[:, :, None, :rows]
        if summed:
            found = found[:, :, :rows, None]
            return found if bias[2] == call.queries else found.sum(axis=2, keepdims=True)
        return found[:, :, :rows, :columns]

    return gradient


def _body(
    call: BackwardCall,
    bias: tuple[int, ...],
    plan: BiasPlan,
    shape: Shape,
    axis: int,
    summed: bool,
    axes: Mapping[str, int],
    count: int,
    *refs,
):
    query_ref, key_ref, value_ref, cotangent_ref, number_refs, extra_refs, result_ref, *memory_refs, barriers = refs
    extras = dict(zip(call.form.extras, extra_refs, strict=True))
    ring, scores = Ring(memory_refs, plan.slots, *barriers), Scores(call.form, shape, extras, axis)
    index = indices(lax.axis_index("item"), axes)
    entry, one_head, block, column = (index[name] for name in ("batch", "head", "block", "column"))
    batches, heads = (n if bias[i] == 1 else 1 for i, n in ((0, call.batch), (1, call.query_heads)))
    along = count if summed else 1
    steps = batches * heads * along

    def place(step):
        """The entry of the batch, the head, and where rows and columns begin."""
        sequence, tile = lax.div(step, jnp.int32(along)), lax.rem(step, jnp.int32(along))
        batch = lax.div(sequence, jnp.int32(heads)) if bias[0] == 1 else entry
        head = lax.rem(sequence, jnp.int32(heads)) if bias[1] == 1 else one_head
        return batch, head, (tile if summed else column) * plan.columns

    def memory():
        def bring(step, _):
            batch, head, begin = place(step)
            row, column = pl.ds(block * plan.block, plan.block), pl.ds(begin, plan.columns)
            queries, keys = (row, column) if axis == 0 else (column, row)
            of_query, of_key = (batch, queries, head), (batch, keys, call.key_head(head))
            ring.fill(
                step, [query_ref.at[of_query], key_ref.at[of_key], value_ref.at[of_key], cotangent_ref.at[of_query]]
            )

        lax.fori_loop(0, steps, bring, None)

    def compute():
        index = lax.axis_index("warp_group")
        row_begin = block * plan.block + index * ROWS
        ring.open()

        def step(number, total):
            batch, head, column_begin = place(number)
            query, key, value, cotangent = ring.wait(number)
            own = pl.ds(index * ROWS, ROWS)
            if axis == 0:
                query, cotangent, query_begin, key_begin = query.at[own], cotangent.at[own], row_begin, column_begin
                pairs = (query, key), (cotangent, value)
            else:
                key, value, query_begin, key_begin = key.at[own], value.at[own], column_begin, row_begin
                pairs = (key, query), (value, cotangent)

            def products(score_acc, rise_acc):
                for acc, (left, right) in zip((score_acc, rise_acc), pairs, strict=True):
                    plgpu.wgmma(acc, left, right.transpose((1, 0)))
                return score_acc[...], rise_acc[...]

            accumulator = plgpu.WGMMAAccumulatorRef((ROWS, plan.columns), jnp.float32)
            score, rise = pl.run_scoped(products, accumulator, accumulator)
            ring.free(number)
            lse, delta, *lse_residual = (
                versions.load(
                    ref.at[batch, head, pl.ds(query_begin, shape.query_tile)],
                    layout=WGMMA.reduce(1 - axis),
                    optimized=False,
                )
                for ref in number_refs
            )
            masked = any(borders(call.form, shape, of_keys=True))
            where = {"query_begin": query_begin, "key_begin": key_begin, "batch": batch, "head": head}
            p, _ = probabilities(scores, score, (lse, *lse_residual), masked=masked, **where)
            return total + p * (rise - broadcast(delta, rise.shape, axis))

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, plan.columns), jnp.float32), WGMMA)
        total = lax.fori_loop(0, steps, step, zeros)
        row = pl.ds(row_begin, ROWS)
        if summed:
            store(result_ref.at[entry, one_head, row], total.sum(axis=1))
        else:
            store(result_ref.at[entry, one_head, row, pl.ds(column * plan.columns, plan.columns)], total)

    roles(plan.warp_groups, compute, memory)
