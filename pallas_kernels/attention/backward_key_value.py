"""The kernel of the keys' and values' gradients.

A block of keys of one key head loops over the query heads of its group and, for each, over the tiles of queries and
cotangents, and of a bias and mask, that a memory warp group brings. Tiles of scores have keys along their rows, so that
P and dz can go from registers into the products P . cotangents and dz . queries.

Both gradients of 64 keys stay in the registers of a warp group. Where heads are too large for that, two warp groups
share 64 keys: one computes P and the values' gradient, and passes P in shared memory to the other, which computes
the keys' gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from .backward_plan import ROWS, KeyValuePlan
from .extra_tiles import ExtraRings, ExtraTiles
from .ranges import Range, Shape, borders, query_tiles, segment_ranges, within
from .schedule import ordered
from .scores import Scores, prepare


def key_value_gradients(call: BackwardCall):
    """The kernel for a call.

    Returns:
      A function of the padded query, key, value and cotangent, the extras by name, and the numbers of every query
      (`numbers_of`), that returns the gradients of keys and values, padded.
    """
    plan = backward_plan.key_value_plan(call.head, call.value)
    shape = Shape(call.queries, call.keys, plan.query_tile, ROWS)
    blocks, holders = -(-call.keys // plan.block), plan.block // ROWS
    pair_tile = tiled((1, ROWS, plan.query_tile), jnp.float32)

    def kernel(arrays: Mapping[Extra, jax.Array]):
        """The kernel for these extras."""
        free = backward_plan.shared_bytes() - plan.shared_bytes(call.head, call.value, call.numbers)
        rings = ExtraRings.fitting(arrays, (ROWS, plan.query_tile), holders, free, queries_axis=1)
        axes = {"batch": call.batch, "head": call.key_heads, "block": blocks}
        grid = ordered(call.form, axes, call.keys, arrays)
        return kernel_of_blocks(
            functools.partial(_body, call, plan, shape, rings),
            "attention_key_value_gradients",
            plan.warp_groups,
            grid,
            out_type=(
                call.result(call.keys, call.key_heads, call.head),
                call.result(call.keys, call.key_heads, call.value),
            ),
            scratch_types=(
                tiled((holders, ROWS, call.head), call.dtype),
                tiled((holders, ROWS, call.value), call.dtype),
                tiled((plan.slots, plan.query_tile, call.head), call.dtype),
                tiled((plan.slots, plan.query_tile, call.value), call.dtype),
                [plgpu.SMEM((plan.slots, plan.query_tile), jnp.float32)] * call.numbers,
                plgpu.Barrier(num_arrivals=2, num_barriers=holders),
                Ring.barrier_types(2 + call.numbers, plan.slots, plan.warp_groups),
                (pair_tile, Ring.barrier_types(1, 1, 1)) if plan.paired else (),
                rings.scratch(),
                staging(plan.warp_groups, plan.query_tile, call.dtype),
            ),
        )

    def gradients(query, key, value, cotangent, extras, numbers):
        prepared = prepare(call.form, extras, shape)
        ranges = segment_ranges(extras, Extra.KEY_SEGMENTS, Extra.QUERY_SEGMENTS, ROWS, plan.query_tile)
        given = to_whole(numbers, plan.query_tile), [*prepared.values()]
        return kernel(prepared)(query, key, value, cotangent, *given, ranges)

    return gradients


def _body(call: BackwardCall, plan: KeyValuePlan, shape: Shape, rings: ExtraRings, *refs):
    query_ref, key_ref, value_ref, cotangent_ref, number_refs, extra_refs, segments_ref, *others = refs
    *results, key_memory, value_memory, query_memory, cotangent_memory, number_memory = others[:-5]
    own_filled, barriers, pair, extra_scratch, stages = others[-5:]
    extras = dict(zip(call.form.extras, extra_refs, strict=True))
    holders = plan.block // ROWS
    batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "block"))

    def tiles(holder: int) -> Range:
        found = query_tiles(call.form, shape, extras, batch, block * plan.block + holder * ROWS, ROWS)
        if segments_ref is not None:
            last = -(-call.keys // ROWS) - 1
            found = within(found, segments_ref, batch, jnp.minimum(block * holders + holder, last))
        return found

    all_tiles = [tiles(i) for i in range(holders)]
    first, end = union(all_tiles)
    extra_tiles = rings.tiles(extras, extra_scratch)
    ring = Ring([query_memory, cotangent_memory, *number_memory], plan.slots, *barriers)

    def memory():
        def bring_head(member, _):
            query_head = head * call.group + member

            def bring(tile, _):
                queries = pl.ds(tile * plan.query_tile, plan.query_tile)
                sources = [ref.at[batch, queries, query_head] for ref in (query_ref, cotangent_ref)]
                sources += [ref.at[batch, query_head, queries] for ref in number_refs]
                step = member * (end - first) + tile - first
                ring.fill(step, sources)
                extra_tiles.fill(step, batch, query_head, block * plan.block, tile * plan.query_tile)

            lax.fori_loop(first, end, bring, None)

        lax.fori_loop(0, call.group, bring_head, None)

    def compute():
        warp_group = lax.axis_index("warp_group")
        index = 0 if plan.paired else warp_group
        own_key, own_value = key_memory.at[index], value_memory.at[index]
        place = batch, pl.ds(block * plan.block + index * ROWS, ROWS), head

        def bring_own():
            plgpu.copy_gmem_to_smem(key_ref.at[place], own_key, own_filled.at[index])
            plgpu.copy_gmem_to_smem(value_ref.at[place], own_value, own_filled.at[index])

        if plan.paired:
            pl.when(warp_group == 0)(bring_own)
        else:
            bring_own()
        ring.open()
        worker = _Worker(
            call, plan, Scores(call.form, shape, extras, 1), ring, extra_tiles, own_key, own_value, batch, head,
            index, block * plan.block + index * ROWS, first, end, select(all_tiles, index),
            borders(call.form, shape, of_keys=True), stages,
        )  # fmt: skip
        plgpu.barrier_wait(own_filled.at[index])

        def write(gradient, scale, memory, result):
            memory[...] = (gradient * scale if scale != 1 else gradient).astype(call.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory, result.at[place])

        if plan.paired:
            pair_ring = Ring([pair[0]], 1, *pair[1])

            @pl.when(warp_group == 0)
            def _():
                write(worker.values_gradient(pair_ring), 1, own_value, results[1])
                plgpu.wait_smem_to_gmem(0)

            @pl.when(warp_group == 1)
            def _():
                write(worker.keys_gradient(pair_ring), call.form.scale, own_key, results[0])
                plgpu.wait_smem_to_gmem(0)
        else:
            key_gradient, value_gradient = worker.both_gradients()
            write(key_gradient, call.form.scale, own_key, results[0])
            write(value_gradient, 1, own_value, results[1])
            plgpu.wait_smem_to_gmem(0)

    roles(plan.warp_groups, compute, memory)


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A warp group that computes, and what it works on.

    Attributes:
      call, plan, scores, ring, extra_tiles: those of the kernel.
      own_key, own_value: references to its keys and values.
      batch, head: the entry of the batch and the key head.
      index: which 64 keys of the block it has.
      key_begin: the first of them.
      first, end: the tiles of queries that come.
      own: those that matter.
      borders: whether there can be tiles to be masked.
      stages: of `multiply`.
    """

    call: BackwardCall
    plan: KeyValuePlan
    scores: Scores
    ring: Ring
    extra_tiles: ExtraTiles
    own_key: Any
    own_value: Any
    batch: Any
    head: Any
    index: Any
    key_begin: Any
    first: Any
    end: Any
    own: Range
    borders: tuple[bool, bool]
    stages: Any

    @property
    def _accumulator(self) -> Any:
        return plgpu.WGMMAAccumulatorRef((ROWS, self.plan.query_tile), jnp.float32)

    def both_gradients(self) -> tuple[jax.Array, jax.Array]:
        """Those of the keys, but for the scale, and of the values."""

        def loop(key_acc, value_acc):
            self.extra_tiles.open(self.index)

            def step(place, slot):
                query, cotangent, lse_ref, delta_ref, *rest_ref = slot

                def compute(score_acc, rise_acc):
                    plgpu.wgmma(score_acc, self.own_key, query.transpose((1, 0)))
                    plgpu.wgmma(rise_acc, self.own_value, cotangent.transpose((1, 0)))
                    products = plgpu.wgmma_accumulator_load(score_acc, wait_n=1)
                    p, slope = self._probabilities(products, (lse_ref, *rest_ref), place)
                    multiply(value_acc, p.astype(self.call.dtype), cotangent, self.stages)
                    return p, slope, plgpu.wgmma_accumulator_load(rise_acc, wait_n=1)

                p, slope, rise = pl.run_scoped(compute, self._accumulator, self._accumulator)
                dz = self._dz(p if slope is None else p * slope, rise, delta_ref)
                multiply(key_acc, dz, query, self.stages)
                plgpu.wgmma_wait(0)

            self._over_tiles(step)
            return key_acc[...], value_acc[...]

        sizes = self.call.head, self.call.value
        return pl.run_scoped(loop, *(plgpu.WGMMAAccumulatorRef((ROWS, size), jnp.float32) for size in sizes))

    def values_gradient(self, pair_ring: Ring) -> jax.Array:
        """That of the values, while P, times the slope of the scores, is passed on."""

        def loop(value_acc):
            self.extra_tiles.open(self.index)

            def step(place, slot):
                query, cotangent, lse_ref, _, *rest_ref = slot

                def compute(score_acc):
                    plgpu.wgmma(score_acc, self.own_key, query.transpose((1, 0)))
                    return score_acc[...]

                products = pl.run_scoped(compute, self._accumulator)
                p, slope = self._probabilities(products, (lse_ref, *rest_ref), place)
                multiply(value_acc, p.astype(self.call.dtype), cotangent, self.stages)
                plgpu.barrier_wait(pair_ring.freed.at[0])
                pair_ring.buffers[0][0] = p if slope is None else p * slope
                plgpu.barrier_arrive(pair_ring.filled.at[0])
                plgpu.wgmma_wait(0)

            self._over_tiles(step)
            # The gradient will be written over the values, which the other reads until it has taken the last P.
            plgpu.barrier_wait(pair_ring.freed.at[0])
            return value_acc[...]

        return pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((ROWS, self.call.value), jnp.float32))

    def keys_gradient(self, pair_ring: Ring) -> jax.Array:
        """That of the keys, but for the scale, from the P that was passed on."""

        def loop(key_acc):
            pair_ring.open()

            def step(_, slot):
                query, cotangent, _, delta_ref, *_ = slot

                def compute(rise_acc):
                    plgpu.wgmma(rise_acc, self.own_value, cotangent.transpose((1, 0)))
                    return rise_acc[...]

                rise = pl.run_scoped(compute, self._accumulator)
                plgpu.barrier_wait(pair_ring.filled.at[0])
                p = versions.load(pair_ring.buffers[0].at[0], layout=WGMMA)
                plgpu.barrier_arrive(pair_ring.freed.at[0])
                multiply(key_acc, self._dz(p, rise, delta_ref), query, self.stages)
                plgpu.wgmma_wait(0)

            # Scores are the other's business.
            without = dataclasses.replace(self.extra_tiles, rings={})
            dataclasses.replace(self, borders=(False, False), extra_tiles=without)._over_tiles(step)
            return key_acc[...]

        return pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((ROWS, self.call.head), jnp.float32))

    def _probabilities(self, products: jax.Array, lse_refs: Sequence[Any], place: tuple) -> tuple[jax.Array, Any]:
        step, query_head, tile, masked = place
        lse = [versions.load(ref, layout=WGMMA.reduce(0)) for ref in lse_refs]
        begin = tile * self.plan.query_tile
        where = {"query_begin": begin, "key_begin": self.key_begin, "batch": self.batch, "head": query_head}
        loaded = self.extra_tiles.load(step, self.index)
        result = probabilities(self.scores, products, lse, masked=masked, with_slope=True, loaded=loaded, **where)
        self.extra_tiles.free(step, self.index)
        return result

    def _dz(self, p: jax.Array, rise: jax.Array, delta_ref: Any) -> jax.Array:
        delta = versions.load(delta_ref, layout=WGMMA.reduce(0))
        return (p * (rise - broadcast(delta, rise.shape, 1))).astype(self.call.dtype)

    def _over_tiles(self, step: Callable[[tuple, list[Any]], None]) -> None:
        """Calls a function for what matters: (step, query head, tile, whether to mask it), and what is in the slot."""

        def of_head(member, _):
            before, query_head = member * (self.end - self.first), self.head * self.call.group + member

            def take(tile, masked):
                number = before + tile - self.first
                step((number, query_head, tile, masked), self.ring.wait(number))
                self.ring.free(number)

            def skip(tile):
                number = before + tile - self.first
                self.ring.wait(number)
                self.ring.free(number)
                self.extra_tiles.skip(number, self.index)

            for_tiles(self.first, self.end, self.own, self.borders, take, skip)

        lax.fori_loop(0, self.call.group, of_head, None)
