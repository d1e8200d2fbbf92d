"""A block of the forward kernel: what its warp groups do. forward.py says how they work together."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxsoft.pallas_kernels.blocks as blocks
from jaxsoft._attention.form import AttentionForm, Extra

from ..rows.memory import store
from . import operands as tiles
from .extra_tiles import ExtraTiles
from .plan import ForwardPlan
from .ranges import Range, borders, key_tiles, within
from .schedule import indices
from .scores import LOG2E, Queries, Scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory: what is in it, and the barriers. The output takes the place of queries if it is None."""

    queries: Any
    keys: Any
    values: Any
    output: Any
    lse: Any
    queries_there: Any
    keys_there: Any
    values_there: Any
    keys_read: Any
    values_read: Any
    turns: Any
    extras: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardState:
    """The state of a warp group's queries.

    Attributes:
      largest: the largest value of a tile (see scores.py), (rows,).
      m: the maximum, in base 2 or natural (see scores.py), (rows,). A sink may be above all scores.
      s: the sum of weights, (rows,).
      o: the sum of weighted values, (rows, value head).
    """

    largest: jax.Array
    m: jax.Array
    s: jax.Array
    o: jax.Array


# The number of the next item, and whether there is one; None where there is known to be none.
type Following = tuple[jax.Array, jax.Array] | None


@dataclasses.dataclass(frozen=True)
class Item:
    """The queries of one head that a block computes at a time.

    Attributes:
      batch: its entry of the batch.
      head: its query head.
      begin: its first query.
      tiles: the tiles of keys that matter to it.
    """

    batch: jax.Array
    head: jax.Array
    begin: jax.Array
    tiles: Range


@dataclasses.dataclass(frozen=True)
class ForwardBlock:
    """What a block does, item by item: while warp groups end one, the copies for the next are on their way.

    Attributes:
      form, plan: what is asked for.
      items: the sizes of the axes of all items, by name, the last of which changes first.
      scores: how products become scores.
      refs: the references to query, key and value.
      results: those to the results, by name.
      schedule: references to the result of schedule.py, or None.
      segments: the reference to the ranges that segments leave, if there are any.
      scratch: shared memory.
      extra_tiles: the rings in it for a bias and mask.
    """

    form: AttentionForm
    plan: ForwardPlan
    items: Mapping[str, int]
    scores: Scores
    refs: tuple[Any, Any, Any]
    results: Mapping[str, Any]
    schedule: tuple[Any, Any] | None
    segments: Any
    scratch: Scratch
    extra_tiles: ExtraTiles

    def _first(self) -> jax.Array:
        """The number of the first item."""
        block = lax.axis_index("block")
        return block if self.schedule is None else self.schedule[0][self.schedule[1][block]]

    def _each(self, body: Callable[[jax.Array, Following, jax.Array], jax.Array]) -> None:
        """Calls a function for each item: of its number, the following one, and the tiles of all before, to which the
        function adds its own.
        """
        if self.schedule is None:
            body(lax.axis_index("block"), None, jnp.int32(0))
            return
        numbers, begins = self.schedule
        begin, end = (begins[lax.axis_index("block") + i] for i in range(2))

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            number, before = state
            following = numbers[jnp.minimum(i + 1, end - 1)]
            return following, body(number, (following, i + 1 < end), before)

        lax.fori_loop(begin, end, step, (self._first(), jnp.int32(0)))

    def _item(self, number: jax.Array) -> Item:
        """An item. Those of a head that have the most keys come first."""
        index = indices(number, self.items)
        batch, queries = index["batch"], index["queries"]
        if self.form.right is not None:
            queries = self.items["queries"] - 1 - queries
        begin = queries * self.plan.block_rows
        return Item(batch, index["heads"], begin, self._tiles(batch, begin, begin, self.plan.block_rows))

    def _tiles(self, batch: jax.Array, block_begin: jax.Array, begin: jax.Array, count: int) -> Range:
        """The tiles of keys that matter to the `count` queries from `begin` on, of the block that begins before."""
        tiles = key_tiles(self.form, self.scores.shape, self.scores.refs, batch, begin, count)
        if self.segments is None:
            return tiles
        return within(tiles, self.segments, batch, lax.div(block_begin, jnp.int32(self.plan.block_rows)))

    # The warp group that copies.

    def copy(self) -> None:
        """Copies the tiles of keys, of a bias and mask, and of values, as slots become free."""
        key, value = self.refs[1:]
        scratch, slots = self.scratch, self.plan.slots

        def copy_item(number: jax.Array, following: Following, before: jax.Array) -> jax.Array:
            del following
            item = self._item(number)
            key_head = lax.div(item.head, jnp.int32(self.refs[0].shape[2] // key.shape[2]))
            count = item.tiles.end - item.tiles.begin

            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                step = before + i
                slot = lax.rem(step, jnp.int32(slots))
                begin = (item.tiles.begin + i) * self.plan.key_tile

                def bring(array: Any, ring: Any, there: Any, read: Any) -> None:
                    pl.when(step >= slots)(functools.partial(plgpu.barrier_wait, read.at[slot]))
                    rows = tiles.rows(array, item.batch, begin, self.plan.key_tile, key_head, ring.shape[2])
                    plgpu.copy_gmem_to_smem(rows, ring.at[slot], there.at[slot])

                bring(key, scratch.keys, scratch.keys_there, scratch.keys_read)
                self.extra_tiles.fill(step, item.batch, item.head, item.begin, begin)
                bring(value, scratch.values, scratch.values_there, scratch.values_read)

            return before + count

        self._each(copy_item)

    # The warp groups that compute.

    def compute(self, group: jax.Array) -> None:
        """Computes the output of a warp group's queries, item by item."""
        self._bring_queries(self._item(self._first()), group)
        self.extra_tiles.open(group)
        pl.when(group == 1)(self._take_turns)
        self._each(functools.partial(self._compute_item, group))
        pl.when(group == 0)(self._take_turns)
        plgpu.wait_smem_to_gmem(0)

    def _bring_queries(self, item: Item, group: jax.Array) -> None:
        """Starts the copy of a warp group's queries."""
        own = self.scratch.queries.at[group]
        begin = item.begin + group * self.plan.query_rows
        rows = tiles.rows(self.refs[0], item.batch, begin, self.plan.query_rows, item.head, own.shape[1])
        plgpu.copy_gmem_to_smem(rows, own, self.scratch.queries_there.at[group])

    def _compute_item(self, group: jax.Array, number: jax.Array, following: Following, before: jax.Array) -> jax.Array:
        """Computes and writes an item's results, and asks for the next one's queries."""
        item, scratch = self._item(number), self.scratch
        span, begin = item.tiles, item.begin + group * self.plan.query_rows
        own = self._own_tiles(item, begin)
        queries = self.scores.queries(item.batch, begin)
        state = self._initial(item)
        before_first = before - span.begin
        if self._skips and self.form.left is not None:
            self._skip(before_first, span.begin, own.begin, group)
        first_slot = lax.rem(before_first + own.begin, jnp.int32(self.plan.slots))
        plgpu.barrier_wait(scratch.queries_there.at[group])
        pl.when(own.end > own.begin)(lambda: plgpu.barrier_wait(scratch.keys_there.at[first_slot]))
        step = functools.partial(self._step, item, own, group, queries, before_first)
        state = lax.fori_loop(own.begin, own.end, step, state)
        if self._skips:
            self._skip(before_first, own.end, span.end, group)

        def bring_next() -> None:
            if following is not None:
                number, is_there = following
                pl.when(is_there)(lambda: self._bring_queries(self._item(number), group))

        self._finish(item, group, state, bring_next)
        return before + (span.end - span.begin)

    @property
    def _idle(self) -> bool:
        """Whether there are warp groups without queries, in the last block."""
        return -self.scores.shape.queries % self.plan.block_rows >= self.plan.query_rows

    @property
    def _skips(self) -> bool:
        """Whether warp groups let tiles pass that matter to others alone. In turns, they would wait all the same."""
        limited = self.form.left is not None or self.form.right is not None
        return self.plan.groups > 1 and not self.plan.turns and (limited or self._idle)

    def _own_tiles(self, item: Item, begin: jax.Array) -> Range:
        """The tiles of an item that matter to the queries of a warp group, from `begin` on."""
        if not self._skips:
            return item.tiles
        own = self._tiles(item.batch, item.begin, begin, self.plan.query_rows)
        end = jnp.minimum(own.end, item.tiles.end)
        if self._idle:
            end = jnp.where(begin < self.scores.shape.queries, end, item.tiles.begin)
        return own._replace(begin=jnp.minimum(own.begin, end), end=end)

    def _skip(self, before_first: jax.Array, begin: jax.Array, end: jax.Array, group: jax.Array) -> None:
        """Lets tiles pass."""
        scratch = self.scratch

        @pl.loop(begin, end)
        def _(tile: jax.Array) -> None:
            step = before_first + tile
            slot = lax.rem(step, jnp.int32(self.plan.slots))
            for there, read in ((scratch.keys_there, scratch.keys_read), (scratch.values_there, scratch.values_read)):
                plgpu.barrier_wait(there.at[slot])
                plgpu.barrier_arrive(read.at[slot])
            self.extra_tiles.skip(step, group)

    def _take_turns(self) -> None:
        """Waits until the other warp group is where this one is to go on."""
        if self.plan.turns:
            plgpu.barrier_arrive(self.scratch.turns)
            plgpu.barrier_wait(self.scratch.turns)

    def _initial(self, item: Item) -> ForwardState:
        """The state before any key: the identity, or a sink alone."""
        rows, layout = self.plan.query_rows, plgpu.Layout.WGMMA
        m, s = jnp.float32(-jnp.inf), jnp.float32(0)
        if Extra.SINKS in self.scores.refs:
            ref = self.scores.refs[Extra.SINKS]
            m = ref[tuple(index if n > 1 else 0 for index, n in zip((item.batch, item.head), ref.shape, strict=True))]
            s = jnp.where(m == -jnp.inf, 0.0, 1.0)
        largest, m, s = (
            plgpu.layout_cast(lax.broadcast_in_dim(v, (rows,), []), layout.reduce(1))
            for v in (jnp.float32(-jnp.inf), m, s)
        )
        o = plgpu.layout_cast(jnp.zeros((rows, self.scratch.values.shape[2]), jnp.float32), layout)
        return ForwardState(largest, m, s, o)

    def _step(
        self,
        item: Item,
        own: Range,
        group: jax.Array,
        queries: Queries,
        before_first: jax.Array,
        tile: jax.Array,
        state: ForwardState,
    ) -> ForwardState:
        """Takes a tile of keys into the state.

        Tiles that have to be masked take a branch: beside a loop of their own, the compiler makes that of the others
        slower, by 10 % at heads of 256 (H100, 32K causal, JAX 0.11.2).
        """
        own_queries = self.scratch.queries.at[group]
        masked = own.masked(tile, borders(self.form, self.scores.shape, of_keys=False))
        scratch, shape = self.scratch, (self.plan.query_rows, self.plan.key_tile)
        step = before_first + tile
        slot = lax.rem(step, jnp.int32(self.plan.slots))

        where: dict[str, Any] = {
            "query_begin": item.begin + group * self.plan.query_rows,
            "key_begin": tile * self.plan.key_tile,
            "batch": item.batch,
            "head": item.head,
        }
        loaded = self.scores.load(**where, without=self.extra_tiles.rings)

        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, own_queries, scratch.keys.at[slot].transpose((1, 0)))
            self._take_turns()
            return accumulator[...]

        products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(scratch.keys_read.at[slot])
        # From shared memory only now, for loads are short, and registers are few while products are computed.
        loaded |= self.extra_tiles.load(step, group)
        values = self.scores.tile(products, **where, queries=queries, masked=masked, loaded=loaded).values
        self.extra_tiles.free(step, group)
        largest = jnp.maximum(state.largest, values.max(axis=1))
        m = jnp.maximum(state.m, self.scores.maximum(largest))
        reference = _reference(m)
        rescale = self.scores.weight(state.m, reference)
        p = self.scores.exp(values, lax.broadcast_in_dim(reference, shape, [0]))
        o = state.o * lax.broadcast_in_dim(rescale, state.o.shape, [0])
        s = state.s * rescale
        p16 = p.astype(scratch.values.dtype)
        if state.o.shape[1] <= 128:  # the order is JAX's own kernel's, and matters
            s += p.sum(axis=1)
            m, s, o, p16 = lax.optimization_barrier((m, s, o, p16))
            self._end_turn(slot)
        else:
            self._end_turn(slot)
            s += p.sum(axis=1)

        def accumulate(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, p16, scratch.values.at[slot])
            wait_for_keys()

        def wait_for_keys() -> None:
            following = lax.rem(step + 1, jnp.int32(self.plan.slots))
            pl.when(tile + 1 < own.end)(lambda: plgpu.barrier_wait(scratch.keys_there.at[following]))

        if blocks.INTERPRET:  # the interpreter has no wgmma of what is in registers
            o += jnp.dot(p16, scratch.values[slot], preferred_element_type=jnp.float32)
            plgpu.commit_smem()
            wait_for_keys()
        else:
            o = pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(o))
        plgpu.barrier_arrive(scratch.values_read.at[slot])
        return ForwardState(largest, m, s, o)

    def _end_turn(self, slot: jax.Array) -> None:
        """After the exponentials: waits for the values, and for the other warp group to end its products."""
        if self.plan.turns:
            plgpu.barrier_arrive(self.scratch.turns)
        plgpu.barrier_wait(self.scratch.values_there.at[slot])
        if self.plan.turns:
            plgpu.barrier_wait(self.scratch.turns)

    def _finish(self, item: Item, group: jax.Array, state: ForwardState, bring_next: Callable[[], None]) -> None:
        """Writes the results of a warp group's queries, and calls a function as soon as their place is free."""
        output, lse = self.results["output"], self.results["lse"]
        scratch, count = self.scratch, self.plan.query_rows
        begin = item.begin + group * count
        direct = output.dtype == jnp.float32
        inverse = jnp.where(state.s == 0.0, 0.0, 1 / (state.s - self._lost(state)))
        result = state.o * lax.broadcast_in_dim(inverse, state.o.shape, [0])
        lse_rows = scratch.lse.at[group]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
        if direct or scratch.output is not None:
            bring_next()
        lse_rows[...] = self._lse(state)
        if direct:
            store(output.at[item.batch, pl.ds(begin, count), item.head], result)
        else:
            staged = (scratch.queries if scratch.output is None else scratch.output).at[group]
            rounded = result.astype(output.dtype)
            staged[...] = rounded
        plgpu.commit_smem()

        def write(array: Any) -> None:
            rows = tiles.rows(array, item.batch, begin, count, item.head, staged.shape[1])
            plgpu.copy_smem_to_gmem(staged, rows)

        if not direct:
            write(output)
        numbers = item.batch, item.head, pl.ds(begin, count)
        plgpu.copy_smem_to_gmem(lse_rows, lse.at[numbers])
        if "lse_residual" in self.results:
            lost = jnp.log(state.s) - (self._lse(state) - state.m)
            store(self.results["lse_residual"].at[numbers], jnp.where(state.s == 0.0, 0.0, lost))
        if "output_residual" in self.results:
            left = result - rounded.astype(jnp.float32)
            # Beside an output that overflowed, or is not a number, there is none.
            left = jnp.where(jnp.abs(left) < jnp.inf, left, 0.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = left.astype(staged.dtype)
            plgpu.commit_smem()
            write(self.results["output_residual"])
        if not direct and scratch.output is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            bring_next()

    def _lost(self, state: ForwardState) -> jax.Array:
        """What the largest weight lost as it was rounded to 16 bits, which is in s but not in o.

        It matters where that weight is nearly all there is. Of the key that has the maximum it is exp2(values * unit -
        m), where only m was rounded before: not 1, but off from it by up to half of the last place of m.
        """
        weight = self.scores.exp(state.largest, _reference(state.m))
        return weight - weight.astype(self.scratch.values.dtype).astype(jnp.float32)

    def _lse(self, state: ForwardState) -> jax.Array:
        """The log-sum-exp of a state."""
        log = jnp.log(state.s)
        return state.m + log if self.scores.natural else (state.m + log * LOG2E) * math.log(2)


def _reference(m: jax.Array) -> jax.Array:
    """What exponentials are relative to. Where no key was valid so far, all are 0 rather than exp2(-inf + inf)."""
    return jnp.where(m == -jnp.inf, 0.0, m)
