"""Tiles of a bias and a mask on their way through shared memory.

What differs along both queries and keys has as many numbers as there are scores. Where threads load those from global
memory in the layout of scores, each load of a warp touches eight rows, with few bytes of each, and lookups in L1 bound
the kernel. So the warp group that copies keys copies tiles of these too, to rings of their own, and the others read
them from there without bank conflicts. What shared memory has no room for is loaded by `Scores.load`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxsoft.pallas_kernels.blocks as blocks
from jaxsoft._attention.form import Extra

from ..blocks import Ring, tiled
from .scores import index_into, load_tile

_MOST_SLOTS = 2


def with_tiles(arrays: Mapping[Extra, Any]) -> list[Extra]:
    """Those of a call's extras that have both queries and keys."""
    present = [name for name in (Extra.BIAS, Extra.MASK) if name in arrays]
    return [name for name in present if min(arrays[name].shape[2:]) > 1]


@dataclasses.dataclass(frozen=True)
class ExtraRings:
    """The types of the rings of a block.

    Attributes:
      dtypes: of what has a ring.
      slots: how many of them each reader has.
      tile: rows and columns of a tile of scores.
      readers: warp groups that compute, of which each has rows of its own.
      queries_axis: that of a tile. What a slot holds has queries along its rows in any case.
    """

    dtypes: Mapping[Extra, Any]
    slots: Mapping[Extra, int]
    tile: tuple[int, int]
    readers: int
    queries_axis: int

    @classmethod
    def fitting(
        cls, arrays: Mapping[Extra, Any], tile: tuple[int, int], readers: int, free_bytes: int, queries_axis: int = 0
    ) -> "ExtraRings":
        """As many as there is room for: a slot for each is better than more of them for one."""
        dtypes = {name: jnp.dtype(arrays[name].dtype) for name in with_tiles(arrays)}
        slots = dict.fromkeys(dtypes, 0)
        for count in range(_MOST_SLOTS):
            for name, dtype in dtypes.items():
                size = readers * math.prod(tile) * dtype.itemsize
                if slots[name] == count and size <= free_bytes:
                    slots[name] += 1
                    free_bytes -= size
        return cls(dtypes, {name: n for name, n in slots.items() if n}, tile, readers, queries_axis)

    @property
    def bytes(self) -> int:
        """Shared memory of all rings."""
        return sum(
            n * self.readers * math.prod(self.tile) * self.dtypes[name].itemsize for name, n in self.slots.items()
        )

    def scratch(self) -> tuple[Any, ...]:
        """What kernels have to allocate."""
        counts = {name: n * self.readers for name, n in self.slots.items()}
        shape = self.tile if self.queries_axis == 0 else self.tile[::-1]
        return tuple((tiled((n, *shape), self.dtypes[name]), Ring.barrier_types(1, n, 1)) for name, n in counts.items())

    def tiles(self, arrays: Mapping[Extra, Any], scratch: Sequence[Any]) -> "ExtraTiles":
        """The rings themselves, in what was allocated, for references to the extras."""
        pairs = zip(self.slots.items(), scratch, strict=True)
        rings = {name: Ring([memory], n * self.readers, *barriers) for (name, n), (memory, barriers) in pairs}
        return ExtraTiles(self, {name: arrays[name] for name in rings}, rings)


@dataclasses.dataclass(frozen=True)
class ExtraTiles:
    """The rings of a block.

    Readers take turns in a ring: each frees its slots as it is done, whatever the others do, and so there is most time
    to fill them again.

    Attributes:
      types: those of the rings.
      refs: references to the arrays that have rings, prepared.
      rings: their rings.
    """

    types: ExtraRings
    refs: Mapping[Extra, Any]
    rings: Mapping[Extra, Ring]

    def open(self, reader: Any) -> None:
        """Tells that a reader's slots are free. To be called by it before the first step."""
        for ring in self.rings.values():
            for step in range(ring.slots // self.types.readers):
                ring.free(self._turn(step, reader))

    def fill(self, step: Any, batch: jax.Array, head: jax.Array, row: jax.Array, column: jax.Array) -> None:
        """Waits until the slots of a step are free, and starts the copies for tiles that begin at a row and a column.

        What is past the last row is zeros.
        """
        rows, columns = self.types.tile
        for reader in range(self.types.readers):
            along = pl.ds(row + reader * rows, rows), pl.ds(column, columns)
            where = along if self.types.queries_axis == 0 else along[::-1]
            for name, ring in self.rings.items():
                ref = self.refs[name]
                source = ref.at[index_into(ref, 0, batch), index_into(ref, 1, head), *where]
                ring.fill(self._turn(step, reader), [source])

    def load(self, step: Any, reader: Any) -> dict[Extra, jax.Array]:
        """Waits for a reader's slots of a step, and loads what is in them, in the layout of scores."""
        turn, axis = self._turn(step, reader), self.types.queries_axis
        return {name: load_tile(ring.wait(turn)[0], axis, in_shared_memory=True) for name, ring in self.rings.items()}

    def free(self, step: Any, reader: Any) -> None:
        """Tells that a reader is done with its slots of a step."""
        if blocks.INTERPRET and self.rings:  # for the interpreter, barriers do not keep copies behind loads
            plgpu.commit_smem()
        for ring in self.rings.values():
            ring.free(self._turn(step, reader))

    def skip(self, step: Any, reader: Any) -> None:
        """Waits for a reader's slots of a step, which it does not need."""
        for ring in self.rings.values():
            ring.wait(self._turn(step, reader))
        self.free(step, reader)

    def _turn(self, step: Any, reader: Any) -> Any:
        """The step of a ring."""
        return step * self.types.readers + reader
