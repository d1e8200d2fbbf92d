"""How the kernels cut up rows: all that decides their speed, and nothing of their results but the rounding.

`TUNING` is the table of sizes, and `plan` cuts up rows by one of its lines.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from jaxsoft._core.gpus import Generation

_VECTOR_BYTES = 16  # a thread loads and stores this much at a time
_WARP = 32  # lanes
# Triton compiles slowly where a tile has many units, so a long row has up to _UNITS of them, with several packs each.
# Rows that share a program have up to _MOST_UNITS, of one pack each, because Triton does not keep packs of several rows
# in one thread.
_UNITS = 4
_MOST_UNITS = 8


# --8<-- [start:tuning]
@dataclasses.dataclass(frozen=True)
class Tuning:
    """The sizes that decide the speed of a kernel.

    Attributes:
      elements: how many elements of a row a thread of the whole-row kernel holds in registers.
      most_lanes: the most threads that share a row there.
      most_elements: the most elements that such a thread holds; with `most_lanes`, this is the longest row that is read
        once.
      tile_lanes: how many threads share a row in the two-pass kernel.
      tile_elements: how many elements such a thread holds at a time; with `tile_lanes`, this is the largest tile.
      fewest_lanes: how many lanes share a short row, if it has as many vectors. Eight of them read 128 bytes that lie
        next to each other.
      threads: how many threads a program has that takes several rows.
      programs: a program takes fewer rows where there would otherwise be fewer programs than this.
    """

    elements: int = 32
    most_lanes: int = 512
    most_elements: int = 64
    tile_lanes: int = 1024
    tile_elements: int = 32
    fewest_lanes: int = 8
    threads: int = 128
    programs: int = 512
    # --8<-- [end:tuning]


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    """How a kernel cuts up its work.

    Attributes:
      n: how many elements a row has.
      tiles: how many tiles a row has; if it is one, the row is held in registers and read once.
      units: in how many parts a tile is loaded, one after the other.
      packs: how many vectors of a unit each lane has.
      rows: how many rows a program takes; 1 if a row has several tiles.
      lanes: how many threads share a row, a power of 2.
      vector: how many elements a thread loads at a time, a divisor of n.
      warps: how many warps a program has.
    """

    n: int
    tiles: int
    units: int
    packs: int
    rows: int
    lanes: int
    vector: int
    warps: int

    @property
    def words(self) -> str:
        """The plan in words."""
        tiles = f"{self.tiles} tiles of a row" if self.tiles > 1 else f"{self.rows} rows"
        return f"{tiles} a program of {self.warps} warps"

    @property
    def unit(self) -> int:
        """How many elements a unit has."""
        return self.packs * self.lanes * self.vector

    @property
    def tile(self) -> int:
        """How many elements a tile has."""
        return self.units * self.unit

    @property
    def exact(self) -> bool:
        """Whether the tiles end where the row does."""
        return self.tiles * self.tile == self.n


# By the generation of the GPU, and by what a kernel reads: one array of rows or two, of up to 32 bits an element, or 64
# bits. The sizes are those that the records on an H200 were taken with (see benchmarks/results). No other GPU was
# measured, and those without a row take these as well.
TUNING = {
    Generation.HOPPER: {
        "one array": Tuning(),
        "two arrays": Tuning(elements=16, most_elements=32, tile_elements=8),
        "64 bits": Tuning(elements=8, most_elements=16, tile_lanes=512, tile_elements=8),
    },
}


def tuning(generation: Generation, arrays: int, itemsize: int) -> Tuning:
    """The sizes for a kernel that reads this many arrays of rows with elements of this many bytes."""
    sizes = TUNING.get(generation, TUNING[Generation.HOPPER])
    if itemsize == 8:
        return sizes["64 bits"]
    return sizes["two arrays" if arrays == 2 else "one array"]


def of_call(generation: Generation, operands: Sequence[jax.Array | jax.core.ShapedArray]) -> TritonPlan:
    """The plan for the operands of a call."""
    x = operands[0]
    *leading, n = x.shape
    arrays = sum(v.ndim == x.ndim for v in operands)
    return plan(math.prod(leading), n, x.dtype.itemsize, tuning(generation, arrays, x.dtype.itemsize))


def plan(rows: int, n: int, itemsize: int, sizes: Tuning) -> TritonPlan:
    """Cuts `rows` rows of `n` elements."""
    vector = _VECTOR_BYTES // itemsize
    while n % vector:
        vector //= 2
    if n > sizes.most_elements * sizes.most_lanes:
        tiles, lanes = _ceil(n, sizes.tile_lanes * max(sizes.tile_elements, vector)), sizes.tile_lanes
    else:
        tiles, lanes = 1, max(sizes.fewest_lanes, _least_power(_ceil(n, sizes.elements)))
        # A row that needs more than a program's threads for several has as many as there may be.
        lanes = sizes.most_lanes if lanes > sizes.threads else min(lanes, _least_power(_ceil(n, vector)))
    vectors = _ceil(n, tiles * lanes * vector)  # of each lane
    if tiles == 1 and lanes < sizes.threads and vectors <= _MOST_UNITS:
        together = sizes.threads // lanes * _power(max(1, sizes.elements // (vectors * vector)))
        together = max(_WARP // lanes, 1, min(together, _power(max(1, rows // sizes.programs))))
        return TritonPlan(n, 1, vectors, 1, together, lanes, vector, min(together * lanes, sizes.threads) // _WARP)
    lanes = max(lanes, _WARP)
    vectors = _ceil(n, tiles * lanes * vector)
    packs = _least_power(_ceil(vectors, _UNITS))
    return TritonPlan(n, tiles, _ceil(vectors, packs), packs, 1, lanes, vector, lanes // _WARP)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power(k: int) -> int:
    """The largest power of 2 that is at most k."""
    return 1 << (k.bit_length() - 1)


def _least_power(k: int) -> int:
    """The least power of 2 that is at least k."""
    return 1 << (k - 1).bit_length()
