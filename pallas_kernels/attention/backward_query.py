"""The kernel of the queries' gradient.

Each warp group has 64 queries, with their cotangents, and loops over the tiles of keys and values, and of a bias and
mask, that a memory warp group brings. It computes the scores once more, P = exp(score - lse), dz = P * (cotangent .
value - delta), and adds dz . keys to the gradient, which stays in registers until the end.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._attention.form import Extra

from .. import versions
from ..blocks import Ring, kernel_of_blocks, roles, tiled
from . import backward_plan
from .backward_call import (
    WGMMA,
    BackwardCall,
    broadcast,
    for_tiles,
    multiply,
    probabilities,
    select,
    staging,
    to_whole,
    union,
)
from .backward_plan import ROWS, QueryPlan
from .extra_tiles import ExtraRings
from .ranges import Range, Shape, borders, key_tiles, segment_ranges, within
from .schedule import ordered
from .scores import Scores, prepare


def query_gradient(call: BackwardCall):
    """The kernel for a call.

    Returns:
      A function of the padded query, key, value and cotangent, the extras by name, and the numbers of every query
      (`numbers_of`), that returns the gradient, padded.
    """
    plan = backward_plan.query_plan(call.head, call.value)
    shape = Shape(call.queries, call.keys, ROWS, plan.key_tile)
    blocks = -(-call.queries // plan.block)

    def kernel(arrays: Mapping[Extra, jax.Array]):
        """The kernel for these extras."""
        cut, rings = _with_rings(call, plan, arrays)
        axes = {"batch": call.batch, "head": call.query_heads, "block": blocks}
        grid = ordered(call.form, axes, call.queries, arrays)
        return kernel_of_blocks(
            functools.partial(_body, call, cut, shape, blocks, rings),
            "attention_query_gradient",
            plan.warp_groups,
            grid,
            out_type=call.result(call.queries, call.query_heads, call.head),
            scratch_types=(
                tiled((plan.warp_groups, ROWS, call.head), call.dtype),
                tiled((plan.warp_groups, ROWS, call.value), call.dtype),
                tiled((plan.key_slots, plan.key_tile, call.head), call.dtype),
                tiled((cut.value_slots, plan.key_tile, call.value), call.dtype),
                plgpu.Barrier(num_arrivals=2, num_barriers=plan.warp_groups),
                Ring.barrier_types(1, plan.key_slots, plan.warp_groups),
                Ring.barrier_types(1, cut.value_slots, plan.warp_groups),
                rings.scratch(),
                staging(plan.warp_groups, plan.key_tile, call.dtype),
            ),
        )

    def gradient(query, key, value, cotangent, extras, numbers):
        prepared = prepare(call.form, extras, shape)
        ranges = segment_ranges(extras, Extra.QUERY_SEGMENTS, Extra.KEY_SEGMENTS, ROWS, plan.key_tile)
        given = to_whole(numbers, plan.block), [*prepared.values()]
        return kernel(prepared)(query, key, value, cotangent, *given, ranges)

    return gradient


def _with_rings(call: BackwardCall, plan: QueryPlan, arrays: Mapping[Extra, jax.Array]) -> tuple[QueryPlan, ExtraRings]:
    """The plan, and the rings of a bias and mask; with one slot for values if that makes room for a further ring."""

    def rings(cut: QueryPlan) -> ExtraRings:
        free = backward_plan.shared_bytes() - cut.shared_bytes(call.head, call.value)
        return ExtraRings.fitting(arrays, (ROWS, cut.key_tile), cut.warp_groups, free)

    cuts = plan, dataclasses.replace(plan, value_slots=1)
    return max(((cut, rings(cut)) for cut in cuts), key=lambda pair: len(pair[1].slots))


def _body(call: BackwardCall, plan: QueryPlan, shape: Shape, blocks: int, rings: ExtraRings, *refs):
    query_ref, key_ref, value_ref, cotangent_ref, number_refs, extra_refs, segments_ref, result_ref, *scratch = refs
    query_memory, cotangent_memory, key_memory, value_memory, own_filled, *others = scratch
    key_barriers, value_barriers, extra_scratch, stages = others
    extras = dict(zip(call.form.extras, extra_refs, strict=True))
    keys = Ring([key_memory], plan.key_slots, *key_barriers)
    values = Ring([value_memory], plan.value_slots, *value_barriers)
    extra_tiles = rings.tiles(extras, extra_scratch)
    scores = Scores(call.form, shape, extras)
    batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "block"))
    if call.form.right is not None:  # the last queries have the most keys, and come first
        block = blocks - 1 - block

    def tiles(warp_group: int) -> Range:
        begin = block * plan.block + warp_group * ROWS
        found = key_tiles(call.form, shape, extras, batch, begin, ROWS)
        if segments_ref is not None:
            last = -(-call.queries // ROWS) - 1
            found = within(found, segments_ref, batch, jnp.minimum(block * plan.warp_groups + warp_group, last))
        return found

    all_tiles = [tiles(i) for i in range(plan.warp_groups)]
    first, end = union(all_tiles)

    def memory():
        key_head = call.key_head(head)

        def bring(tile, _):
            place = batch, pl.ds(tile * plan.key_tile, plan.key_tile), key_head
            keys.fill(tile - first, [key_ref.at[place]])
            extra_tiles.fill(tile - first, batch, head, block * plan.block, tile * plan.key_tile)
            values.fill(tile - first, [value_ref.at[place]])

        lax.fori_loop(first, end, bring, None)

    def compute():
        index = lax.axis_index("warp_group")
        begin = block * plan.block + index * ROWS
        place = batch, pl.ds(begin, ROWS), head
        own_query, own_cotangent = query_memory.at[index], cotangent_memory.at[index]
        plgpu.copy_gmem_to_smem(query_ref.at[place], own_query, own_filled.at[index])
        plgpu.copy_gmem_to_smem(cotangent_ref.at[place], own_cotangent, own_filled.at[index])
        keys.open()
        values.open()
        extra_tiles.open(index)
        of_query = WGMMA.reduce(1)
        lse, delta, *lse_residual = (
            versions.load(ref.at[batch, head, pl.ds(begin, ROWS)], layout=of_query, optimized=False)
            for ref in number_refs
        )
        limits = borders(call.form, shape, of_keys=False)
        known = scores.queries(batch, begin) if any(limits) else None
        plgpu.barrier_wait(own_filled.at[index])

        def step(gradient_acc, tile, masked):
            (key,), (value,) = keys.wait(tile - first), values.wait(tile - first)

            def probabilities_and_rises(score_acc, rise_acc):
                plgpu.wgmma(score_acc, own_query, key.transpose((1, 0)))
                plgpu.wgmma(rise_acc, own_cotangent, value.transpose((1, 0)))
                products = plgpu.wgmma_accumulator_load(score_acc, wait_n=1)
                where = {"query_begin": begin, "key_begin": tile * plan.key_tile, "batch": batch, "head": head}
                where |= {"queries": known, "masked": masked, "loaded": extra_tiles.load(tile - first, index)}
                p, slope = probabilities(scores, products, (lse, *lse_residual), with_slope=True, **where)
                extra_tiles.free(tile - first, index)
                return p, slope, rise_acc[...]

            accumulator = plgpu.WGMMAAccumulatorRef((ROWS, plan.key_tile), jnp.float32)
            p, slope, rise = pl.run_scoped(probabilities_and_rises, accumulator, accumulator)
            values.free(tile - first)
            dz = p * (rise - broadcast(delta, rise.shape, 0))
            if slope is not None:
                dz *= slope
            multiply(gradient_acc, dz.astype(call.dtype), key, stages)
            plgpu.wgmma_wait(0)
            keys.free(tile - first)

        def skip(tile):
            for ring in (keys, values):
                ring.wait(tile - first)
                ring.free(tile - first)
            extra_tiles.skip(tile - first, index)

        def loop(gradient_acc):
            own = select(all_tiles, index)
            for_tiles(first, end, own, limits, functools.partial(step, gradient_acc), skip)
            return gradient_acc[...]

        gradient = pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((ROWS, call.head), jnp.float32))
        own_query[...] = (gradient * call.form.scale).astype(call.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_query, result_ref.at[place])
        plgpu.wait_smem_to_gmem(0)

    roles(plan.warp_groups, compute, memory)
