"""The rings that bring tiles to shared memory, and which rows and tiles a warp group has.

Each warp group has a ring of slots for each array that it reads. A slot holds a tile; asynchronous copies fill it, and
complete its barrier. A warp group fills and empties its rings by itself, so that no other waits for them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .plan import THREADS, TiledPlan


@dataclasses.dataclass(frozen=True, eq=False)
class RowRing:
    """The ring of a warp group for one array.

    Attributes:
      source: a reference to the array in global memory, of shape (rows, n / vector, vector).
      slots: a reference to the slots of all warp groups of the block, of shape (slots, vectors of a tile, vector).
      loaded: the barriers of these slots.
      size: how many slots a warp group has.
      warpgroup: the index of the warp group in the block.
    """

    source: Any
    slots: Any
    loaded: Any
    size: int
    warpgroup: jax.Array

    def fill(self, slot: jax.Array | int, row: jax.Array, vectors: Any) -> None:
        """Starts the copy of some vectors of a row to a slot."""
        plgpu.copy_gmem_to_smem(
            self.source.at[row, vectors],
            self.slots.at[self._index(slot)],
            self.loaded.at[self._index(slot)],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def wait(self, slot: jax.Array | int) -> None:
        """Waits until a slot is filled."""
        plgpu.barrier_wait(self.loaded.at[self._index(slot)])

    def chunk(self, slot: jax.Array | int, begin: int) -> Any:
        """A reference to a chunk of the tile in a slot: a vector for each thread."""
        return self.slots.at[self._index(slot), pl.ds(begin, THREADS)]

    def set(self, slot: jax.Array | int, vector: jax.Array, element: jax.Array, value: float) -> None:
        """Overwrites an element of the tile in a slot, before other threads read it."""
        self.slots[self._index(slot), vector, element] = jnp.asarray(value, self.slots.dtype)
        plgpu.commit_smem()

    def after(self, slot: jax.Array | int) -> jax.Array:
        """The next slot."""
        return jnp.where(slot == self.size - 1, 0, slot + 1)

    def _index(self, slot: jax.Array | int) -> jax.Array:
        return self.warpgroup * self.size + slot


class Turn(NamedTuple):
    """What a ring is to be filled with next.

    Attributes:
      slot: the slot that is to be filled.
      row: the index of the tile's row among those of the cluster.
      tile: the index of the tile among those that the warp group has of a row.
    """

    slot: jax.Array | int
    row: jax.Array | int
    tile: jax.Array | int


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that a cluster takes, round-robin.

    Attributes:
      first: the first of them.
      stride: the distance to the next one, which is the number of clusters.
      count: the number of them.
    """

    first: jax.Array
    stride: int
    count: jax.Array

    @staticmethod
    def of(rows: int, plan: TiledPlan) -> "Rows":
        """The rows of this cluster."""
        first, stride = lax.axis_index("cluster"), plan.clusters
        return Rows(first, stride, lax.div(rows - first + stride - 1, stride))

    def __getitem__(self, k: jax.Array | int) -> jax.Array:
        """The k-th of the rows."""
        return self.first + k * self.stride


@dataclasses.dataclass(frozen=True)
class Share:
    """The tiles of a row that a warp group has.

    They are neighbours, so that the last tile of a row and the one that it overlaps are written by the same warp group.

    Attributes:
      plan: how rows are cut up.
      n: the number of elements of a row.
      first: the first of the tiles.
      count: the number of them.
    """

    plan: TiledPlan
    n: int
    first: jax.Array
    count: jax.Array

    @staticmethod
    def of(member: jax.Array, n: int, plan: TiledPlan) -> "Share":
        """The tiles of the warp group that has this index among those that share a row."""
        first = lax.div(member * plan.tiles, plan.members)
        return Share(plan, n, first, lax.div((member + 1) * plan.tiles, plan.members) - first)

    @property
    def vectors(self) -> int:
        """Vectors of a tile."""
        return self.plan.chunks * THREADS

    @property
    def overlap(self) -> int:
        """How many elements of the last tile of a row are in the one before, too."""
        return self.plan.tiles * self.plan.tile - self.n

    def start(self, tile: jax.Array | int) -> jax.Array:
        """Where a tile begins in the row, in vectors."""
        return jnp.minimum((self.first + tile) * self.vectors, (self.n - self.plan.tile) // self.plan.vector)

    def is_last(self, tile: jax.Array | int) -> jax.Array:
        """Whether a tile is the last of the row."""
        return self.first + tile == self.plan.tiles - 1
