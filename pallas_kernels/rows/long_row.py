"""Rows that are longer than the rings of the tiled kernel: what is not kept of them is read again.

Registers hold the first tiles of a warp group, if the plan says so, and the ring has the last ones when all are folded.
The result is written backwards: from the ring first; then from tiles that have left it and come back, most recently
used ones first, while the L2 may still hold them; and from registers last. Meanwhile the next row's first tiles come to
the slots that are free.

The order of the slots turns round from row to row, so that the next row's first tile comes to the slot that is free
first. Arrays that the fold does not need wait in the slots until the result is written.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .extras import Rules
from .fold import Lanes
from .operations import Finished
from .plan import THREADS, TiledPlan
from .ring import RowRing
from .warpgroup import WarpGroup

type RegisterTile = list[list[jax.Array | None]]  # the chunks of a tile in registers


def take_rows(group: WarpGroup) -> None:
    """Takes all rows of a warp group."""
    for slot in range(group.plan.ring):
        _fill_folded(group, 0, slot, slot)
        _fill_others(group, 0, slot, slot)

    def take_row(k, _):
        row = _LongRow(group, k, lax.rem(k, 2), group.rules(k))
        kept, lanes = row.fold()
        finished = group.finish(k, group.total(k, lanes))
        assert finished
        row.write(kept, finished)

    lax.fori_loop(0, group.rows.count, take_row, None)


def _fill_folded(group: WarpGroup, k: jax.Array | int, tile: jax.Array | int, slot: jax.Array | int) -> None:
    """Starts the copies of what the fold needs of a tile."""
    group.fill(group.folded_rings, slot, k, tile)


def _fill_others(group: WarpGroup, k: jax.Array | int, tile: jax.Array | int, slot: jax.Array | int) -> None:
    """Starts the copies of what the fold does not need of the last tile that comes to the slot of this one."""
    ring = group.plan.ring
    last = tile + lax.div(group.share.count - 1 - tile, jnp.int32(ring)) * ring
    group.fill(group.other_rings, slot, k, last)


@dataclasses.dataclass(frozen=True)
class _LongRow:
    """What a warp group does with a long row.

    Attributes:
      group: the warp group.
      k: the index of the row among those of the cluster.
      odd: whether that is odd, as 0 or 1.
      rules: what the extras do to the row.
    """

    group: WarpGroup
    k: jax.Array
    odd: jax.Array
    rules: Rules

    @property
    def plan(self) -> TiledPlan:
        return self.group.plan

    @property
    def on_chip(self) -> int:
        """The number of tiles that are on chip when all are folded."""
        return self.plan.register_tiles + self.plan.ring

    def slot(self, tile: jax.Array | int) -> jax.Array:
        """The slot that a tile comes to."""
        ring = self.plan.ring
        turned = ring - 1 - (tile + -self.plan.register_tiles % ring) % ring
        return jnp.where(self.odd == 1, turned, tile % ring)

    def fold(self) -> tuple[list[RegisterTile], Lanes]:
        """Folds all tiles, of which the first stay in registers."""
        reduction = self.group.fold
        assert reduction
        kept, lanes = [], reduction.identity(THREADS)
        for tile in range(self.plan.register_tiles):
            lanes, chunks = self._fold_tile(tile, lanes)
            kept.append(chunks)
        rest = self.plan.register_tiles, self.group.share.count
        return kept, lax.fori_loop(*rest, lambda tile, lanes: self._fold_tile(tile, lanes)[0], lanes)

    def _fold_tile(self, tile: jax.Array | int, lanes: Lanes) -> tuple[Lanes, RegisterTile]:
        """Folds a tile, and fills its slot with the next one that comes there."""
        group, slot = self.group, self.slot(tile)
        _wait(group.folded_rings, slot)
        chunks = list(group.chunks(group.folded_rings, slot))
        lanes = group.fold_tile(lanes, tile, chunks, self.rules)

        @pl.when(tile + self.plan.ring < group.share.count)
        def _():
            plgpu.commit_smem()
            _fill_folded(group, self.k, tile + self.plan.ring, slot)

        return lanes, chunks

    def write(self, kept: list[RegisterTile], finished: Finished) -> None:
        """Writes the result, from the last tile to the first, and fills the slots for the next row."""
        count = self.group.share.count
        if kept:  # slots that held a tile which is in registers, and none after it, are free
            plgpu.commit_smem()
            lax.fori_loop(count, self.on_chip, lambda tile, _: self._begin_next(_fill_folded, tile), None)

        def write_tile(step, _):
            tile = count - 1 - step
            slot = self.slot(tile)
            pl.when(step >= self.plan.ring)(lambda: _wait(self.group.folded_rings, slot))
            _wait(self.group.other_rings, slot)
            chunks = self.group.chunks(self.group.rings, slot)
            self.group.write_tile(self.k, tile, chunks, self.rules, finished)
            plgpu.commit_smem()
            self._refill(tile, slot)

        lax.fori_loop(0, count - self.plan.register_tiles, write_tile, None)
        for tile in reversed(range(self.plan.register_tiles)):
            self._write_from_registers(tile, kept[tile], finished)

    def _refill(self, tile: jax.Array, slot: jax.Array) -> None:
        """Fills the slot of a tile that is written.

        The tile that was in the slot before comes back, if there was one. If registers hold that, only those of its
        arrays come back that they do not hold, and the others are the next row's already.
        """
        group, ring = self.group, self.plan.ring
        pl.when(tile >= self.on_chip)(lambda: group.fill(group.rings, slot, self.k, tile - ring))
        pl.when(tile < self.on_chip)(lambda: self._begin_next(_fill_folded, tile))
        in_registers = (tile >= ring) & (tile < self.on_chip)
        pl.when(in_registers)(lambda: group.fill(group.other_rings, slot, self.k, tile - ring))
        pl.when(tile < ring)(lambda: self._begin_next(_fill_others, tile))

    def _write_from_registers(self, tile: int, kept: RegisterTile, finished: Finished) -> None:
        """Writes the result of a tile in registers. What the fold did not need of it is in the slots."""
        group, slot = self.group, self.slot(tile)
        _wait(group.other_rings, slot)
        both = zip(kept, group.chunks(group.other_rings, slot), strict=True)
        chunks = [[y if x is None else x for x, y in zip(*chunk, strict=True)] for chunk in both]
        group.write_tile(self.k, tile, chunks, self.rules, finished)
        if group.other_rings:
            plgpu.commit_smem()
            self._begin_next(_fill_others, tile + self.plan.ring)

    def _begin_next(self, fill: Callable[..., None], tile: jax.Array | int) -> None:
        """Starts a copy for the next row to the slot of a tile, after the last tile of this row that was there."""
        fill(self.group, self.k + 1, self.on_chip - 1 - tile, self.slot(tile))


def _wait(rings: Sequence[RowRing], slot: jax.Array) -> None:
    for ring in rings:
        ring.wait(slot)
