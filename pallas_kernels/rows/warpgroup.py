"""One warp group of the tiled kernel: what it has of the rows, and what it does with a tile or with a row's total."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._rows.spec import NO_ROW, RowExtra, RowSpec

from . import operations
from .cluster import ClusterExchange
from .extras import Extras, LabelExtra, Name, Prepared, Rules
from .fold import Fold, Lanes, State
from .memory import load, load_as_is, load_in_every_warp, store
from .operations import Finished, References
from .plan import THREADS, WARP, TiledPlan
from .ring import RowRing, Rows, Share

# The chunks of a tile, each as one for every array, or None for an array that is not loaded. They are an iterator where
# they are loaded one by one, so that registers need not hold all of them at a time.
type Chunks = Iterable[list[jax.Array | None]]


@dataclasses.dataclass(frozen=True)
class WarpGroup:
    """A warp group, and all that it works on.

    Attributes:
      operation, plan, extras: what is asked for.
      refs: the references to operands, extras and results.
      index: the index of the warp group in its block.
      block: the index of its block in the cluster.
      member: the index of the warp group among all that share a row.
      share: the tiles of a row that it has.
      rows: the rows that its cluster takes.
      rings: its rings, one for each array.
      states: a reference to shared memory for the states of all threads of the block, of shape (numbers, 2, threads),
        as rows take turns.
      posted: the barrier of the block's warp groups after which all states are there.
      exchange: that of the states of all blocks of a cluster; None for a block alone.
    """

    operation: RowSpec
    plan: TiledPlan
    extras: Extras
    refs: References
    index: jax.Array
    block: jax.Array | int
    member: jax.Array
    share: Share
    rows: Rows
    rings: Sequence[RowRing]
    states: Any
    posted: Any
    exchange: ClusterExchange | None

    @property
    def fold(self) -> Fold | None:
        """How the operation reduces a row."""
        return operations.fold_of(self.operation)

    @property
    def writes(self) -> bool:
        """Whether the result has the shape of the rows."""
        return bool(self.refs.row_results)

    @property
    def folded_rings(self) -> Sequence[RowRing]:
        """The rings of the arrays that the fold needs."""
        return [self.rings[i] for i in operations.folded(self.operation)]

    @property
    def other_rings(self) -> Sequence[RowRing]:
        """The rings of the arrays that only the result needs."""
        folded = operations.folded(self.operation)
        return [ring for i, ring in enumerate(self.rings) if i not in folded]

    # What comes beside a row. Here and below, k is the index of a row among those of the cluster.

    def number(self, name: Name, k: jax.Array | int) -> jax.Array:
        """An extra of one number a row."""
        return self.refs.extras[self.extras.names.index(name)][self.extras.place(name, self.rows[k])[0]]

    def label(self, k: jax.Array | int) -> jax.Array | None:
        """The label of a row, if rows have one."""
        return self.number(LabelExtra.LABEL, k) if LabelExtra.LABEL in self.extras.names else None

    def rules(self, k: jax.Array | int) -> "_TiledRules":
        """What the extras do to a row."""
        scale, limit = (
            self.number(name, k) if name in self.extras.names else None for name in (RowExtra.SCALE, RowExtra.LIMIT)
        )
        refs = dict(zip(self.extras.names, self.refs.extras, strict=True))
        return _TiledRules(self.operation, self.extras, refs, scale, limit, self, k)

    # What is done with a tile. `tile` is its index among those that the warp group has of a row.

    def fill(self, rings: Sequence[RowRing], slot: jax.Array | int, k: jax.Array | int, tile: jax.Array | int) -> None:
        """Starts the copies of a tile of a row, if the cluster has that row, and it is to be read.

        In place of a tile that begins beyond the limit, the row's beginning is read, which is in the L2.
        """
        if not rings:
            return

        def copy():
            begin = self.share.start(tile)
            if RowExtra.LIMIT in self.extras.names:
                begin = jnp.where(begin * self.plan.vector < self.number(RowExtra.LIMIT, k), begin, 0)
            vectors = pl.ds(begin, self.share.vectors)
            for ring in rings:
                ring.fill(slot, self.rows[k], vectors)

        pl.when(k < self.rows.count)(lambda: if_read(self.label(k), copy))

    def chunks(self, rings: Sequence[RowRing], slot: jax.Array | int) -> Iterator[list[jax.Array | None]]:
        """Loads the chunks of a tile from a slot of some rings, each when it is asked for; None for other rings."""
        for begin in range(0, self.share.vectors, THREADS):
            yield [load_as_is(ring.chunk(slot, begin), self.layout) if ring in rings else None for ring in self.rings]

    def fold_tile(self, lanes: Lanes, tile: jax.Array | int, chunks: Chunks, rules: Rules) -> Lanes:
        """Folds a tile, but for the elements that the tile before it has as well."""
        reduction = self.fold
        assert reduction
        prepared = [prepared.chunks for _, prepared in self._prepared(tile, chunks, rules)]
        values = [operations.terms(self.operation, arrays) for arrays in prepared]
        overlap, chunk = self.share.overlap, THREADS * self.plan.vector
        if not overlap:
            return reduction.accumulate(lanes, values)

        def without_overlap():
            new = list(values)
            for i in range(-(-overlap // chunk)):
                new[i] = jnp.where(self.columns() + i * chunk < overlap, reduction.neutral, new[i])
            return reduction.accumulate(lanes, new)

        return lax.cond(self.share.is_last(tile), without_overlap, lambda: reduction.accumulate(lanes, values))

    def write_tile(self, k: jax.Array, tile: jax.Array | int, chunks: Chunks, rules: Rules, finished: Finished) -> None:
        """Writes the result of a tile, chunk by chunk."""
        for begin, prepared in self._prepared(tile, chunks, rules):
            result = rules.conclude(prepared.valid, finished(*prepared.chunks))
            store(self.refs.row_results[0].at[self.rows[k], pl.ds(begin, THREADS)], result)

    def write_zeros(self, k: jax.Array, tile: jax.Array) -> None:
        """Writes the result of a tile of a row that is not to be read."""
        zeros = plgpu.layout_cast(jnp.zeros((THREADS, self.plan.vector)), self.layout)
        for begin in range(0, self.share.vectors, THREADS):
            result = self.refs.row_results[0].at[self.rows[k], pl.ds(self.share.start(tile) + begin, THREADS)]
            store(result, zeros)

    def at_label(self, label: jax.Array | None, tile: jax.Array, act: Callable[[jax.Array, jax.Array], None]) -> None:
        """Calls a function with the place of a label in a tile, as vector and element, if the tile has it."""
        if label is not None:
            index = label - self.share.start(tile) * self.plan.vector
            here = (index >= 0) & (index < self.plan.tile)
            pl.when(here)(lambda: act(lax.div(index, self.plan.vector), lax.rem(index, self.plan.vector)))

    def write_label(self, k: jax.Array, tile: jax.Array, vector: jax.Array, element: jax.Array) -> None:
        """Writes the result at the label over what is written there."""
        result = self.refs.row_results[0]
        value = self.number(LabelExtra.RESULT, k).astype(result.dtype)
        result[self.rows[k], self.share.start(tile) + vector, element] = value

    def _prepared(self, tile: jax.Array | int, chunks: Chunks, rules: Rules) -> Iterator[tuple[jax.Array, Prepared]]:
        """Where each chunk of a tile begins in the row, in vectors, and the chunk with the extras applied."""
        for i, values in enumerate(chunks):
            begin = self.share.start(tile) + i * THREADS
            wide = [None if x is None else x.astype(jnp.float32) for x in values]
            yield begin, rules.prepare(begin, wide)

    # What is done once a row.

    def total(self, k: jax.Array, lanes: Lanes) -> State:
        """The total of a row, from the lanes of all threads that share it."""
        reduction, turn = self.fold, lax.rem(k, 2)
        assert reduction
        for i, value in enumerate(reduction.state(lanes)):
            self.states[i, turn, pl.ds(self.index * THREADS, THREADS)] = value
        plgpu.barrier_arrive(self.posted)
        plgpu.barrier_wait(self.posted)
        numbers = range(self.states.shape[0])
        total = reduction.total(tuple(load_in_every_warp(self.states.at[i, turn]) for i in numbers))
        exchange = self.exchange
        if exchange is None:
            return total
        pl.when(self.index == 0)(lambda: exchange.send(turn, self.block, total))
        return reduction.combine(exchange.receive(turn))

    def finish(self, k: jax.Array, total: State) -> Finished | None:
        """Writes the results of one number a row, and returns the function that makes the others, if there are any."""
        row = self.rows[k]
        numbers = tuple(ref[row] for ref in self.refs.numbers)
        if self.refs.number_results:

            @pl.when(self.member == 0)
            def _():
                for ref, value in zip(self.refs.number_results, total, strict=True):
                    ref[row] = value

        return operations.finish(self.operation, total, numbers, lambda v: v) if self.writes else None

    # How a chunk lies in registers.

    @property
    def layout(self) -> Any:
        """The layout of a chunk, of shape (threads, vector): a vector in each thread."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((THREADS, self.plan.vector), (WARP, self.plan.vector))),
            warp_dims=(-4,),
            lane_dims=(-2,),
            vector_dim=-1,
        )

    def columns(self) -> jax.Array:
        """The columns of a chunk's elements in the chunk."""
        vectors, elements = (
            plgpu.broadcasted_iota(jnp.int32, (THREADS, self.plan.vector), axis, layout=self.layout) for axis in (0, 1)
        )
        return vectors * self.plan.vector + elements


@dataclasses.dataclass(frozen=True)
class _TiledRules(Rules):
    """What the extras do to a row. The place of a chunk is where it begins in the row, in vectors.

    Attributes:
      group: the warp group.
      k: the index of the row among those of the cluster.
    """

    group: WarpGroup
    k: jax.Array | int

    def chunk(self, name: RowExtra, place: jax.Array) -> jax.Array:
        if self.limit is not None:
            place = jnp.where(place * self.group.plan.vector < self.limit, place, 0)
        row, _ = self.extras.place(name, self.group.rows[self.k])
        return load(self.refs[name].at[row, pl.ds(place, THREADS)], self.group.layout)

    def columns(self, place: jax.Array) -> jax.Array:
        return self.group.columns() + place * self.group.plan.vector


def if_read(label: jax.Array | None, act: Callable[[], Any], otherwise: Callable[[], Any] = lambda: None) -> Any:
    """Calls a function for a row with this label, or another one if the row is not to be read."""
    return act() if label is None else lax.cond(label == NO_ROW, otherwise, act)
