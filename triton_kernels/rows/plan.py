"""How the kernels cut up rows: all that decides their speed, and nothing that decides their results but rounding."""

import dataclasses

_VECTOR_BYTES = 16  # what a thread loads and stores at a time
# The compiler takes its time over many units, and does not keep packs of several rows in one thread.
_UNITS = 4
_MOST_UNITS = 8
_WARP = 32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The sizes that decide the speed, and nothing else.

    Attributes:
      held: elements of a row that a thread holds in registers, in the whole-row kernel.
      most_lanes: threads a row there, at most.
      most_held: elements that they hold at most; with `most_lanes`, the longest row that is read once.
      tile_lanes: threads a row in the two-pass kernel.
      tile_held: elements that they hold at a time; with `tile_lanes`, the largest tile.
      fewest_lanes: lanes of a short row, if it has so many vectors: 128 bytes next to each other.
      threads: of a program that takes several rows.
      programs: rather fewer rows a program than fewer programs than this.
    """

    held: int = 32
    most_lanes: int = 512
    most_held: int = 64
    tile_lanes: int = 1024
    tile_held: int = 32
    fewest_lanes: int = 8
    threads: int = 128
    programs: int = 512


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel cuts up its work.

    Attributes:
      n: elements a row.
      tiles: tiles a row; if 1, the row is held in registers and read once.
      units: parts that a tile is loaded in, one after the other.
      packs: vectors that each lane has of a unit.
      rows: rows a program; 1 if a row has several tiles.
      lanes: threads that share a row; a power of 2.
      vector: elements that a thread loads at a time, a divisor of n.
      warps: warps a program.
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
    def unit(self) -> int:
        """Elements a unit."""
        return self.packs * self.lanes * self.vector

    @property
    def tile(self) -> int:
        """Elements a tile."""
        return self.units * self.unit

    @property
    def exact(self) -> bool:
        """Whether the tiles end where the row does."""
        return self.tiles * self.tile == self.n


def tuning(arrays: int, itemsize: int) -> Tuning:
    """The sizes for a kernel that reads this many arrays of rows with elements of this many bytes."""
    if itemsize == 8:
        return Tuning(held=8, most_held=16, tile_lanes=512, tile_held=8)
    return Tuning(held=16, most_held=32, tile_held=8) if arrays == 2 else Tuning()


def plan(rows: int, n: int, itemsize: int, sizes: Tuning) -> Plan:
    """Cuts `rows` rows of `n` elements."""
    vector = _VECTOR_BYTES // itemsize
    while n % vector:
        vector //= 2
    if n > sizes.most_held * sizes.most_lanes:
        tiles, lanes = _ceil(n, sizes.tile_lanes * max(sizes.tile_held, vector)), sizes.tile_lanes
    else:
        tiles, lanes = 1, max(sizes.fewest_lanes, _least_power(_ceil(n, sizes.held)))
        # A row that needs more than a program's threads for several has as many as there may be.
        lanes = sizes.most_lanes if lanes > sizes.threads else min(lanes, _least_power(_ceil(n, vector)))
    held = _ceil(n, tiles * lanes * vector)  # vectors, by each lane
    if tiles == 1 and lanes < sizes.threads and held <= _MOST_UNITS:
        together = sizes.threads // lanes * _power(max(1, sizes.held // (held * vector)))
        together = max(_WARP // lanes, 1, min(together, _power(max(1, rows // sizes.programs))))
        return Plan(n, 1, held, 1, together, lanes, vector, min(together * lanes, sizes.threads) // _WARP)
    lanes = max(lanes, _WARP)
    held = _ceil(n, tiles * lanes * vector)
    packs = _least_power(_ceil(held, _UNITS))
    return Plan(n, tiles, _ceil(held, packs), packs, 1, lanes, vector, lanes // _WARP)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power(k: int) -> int:
    """The largest power of 2 that is at most k."""
    return 1 << (k.bit_length() - 1)


def _least_power(k: int) -> int:
    """The least power of 2 that is at least k."""
    return 1 << (k - 1).bit_length()
