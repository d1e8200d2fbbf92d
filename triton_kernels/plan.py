"""How the kernels cut up rows: all that decides their speed, and nothing that decides their results but rounding."""

import dataclasses

_VECTOR_BYTES = 16  # what a thread loads and stores at a time
_WARP = 32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The sizes that were found on an H200.

    Attributes:
      held: elements of a row that a thread holds in registers, in the whole-row kernel.
      most_lanes: threads a row there; with `held`, the longest row that is read once.
      tile_lanes: threads a row in the two-pass kernel.
      tile_held: elements that they hold at a time; with `tile_lanes`, the largest tile.
      fewest_lanes: lanes of a short row, if it has so many vectors: 128 bytes next to each other.
      threads: of a program that takes several rows.
      programs: rather fewer rows a program than fewer programs than this.
    """

    held: int = 32
    most_lanes: int = 1024
    tile_lanes: int = 512
    tile_held: int = 16
    fewest_lanes: int = 8
    threads: int = 128
    programs: int = 512


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel cuts up its work.

    Attributes:
      n: elements a row.
      tiles: tiles a row; if 1, the row is held in registers and read once.
      units: vectors that each lane holds of a tile.
      rows: rows a program; 1 if a row has several tiles.
      lanes: threads that share a row; a power of 2.
      vector: elements that a thread loads at a time, a divisor of n.
      warps: warps a program.
    """

    n: int
    tiles: int
    units: int
    rows: int
    lanes: int
    vector: int
    warps: int

    @property
    def chunk(self) -> int:
        """What a row's lanes load at a time, a vector each."""
        return self.lanes * self.vector

    @property
    def tile(self) -> int:
        """Elements a tile."""
        return self.units * self.chunk

    @property
    def exact(self) -> bool:
        """Whether the tiles end where the row does."""
        return self.tiles * self.tile == self.n


def tuning(arrays: int, itemsize: int) -> Tuning:
    """The sizes for a kernel that reads this many arrays of rows with elements of this many bytes."""
    if arrays == 2 or itemsize == 8:
        return Tuning(held=16, tile_held=8)
    return Tuning()


def plan(rows: int, n: int, itemsize: int, sizes: Tuning) -> Plan:
    """Cuts `rows` rows of `n` elements."""
    vector = _VECTOR_BYTES // itemsize
    while n % vector:
        vector //= 2
    if n > sizes.held * sizes.most_lanes:
        chunk = sizes.tile_lanes * vector
        tiles = _ceil(n, sizes.tile_lanes * max(sizes.tile_held, vector))
        return Plan(n, tiles, _ceil(n, tiles * chunk), 1, sizes.tile_lanes, vector, sizes.tile_lanes // _WARP)
    lanes = min(_power(_ceil(n, vector)), max(sizes.fewest_lanes, _power(_ceil(n, sizes.held))))
    units = _ceil(n, lanes * vector)
    # As many rows as fill the program's threads, and each thread's registers.
    most = max(1, sizes.threads // lanes) * _power(max(1, sizes.held // (units * vector)) + 1) // 2
    together = max(1, _WARP // lanes, min(most, _power(rows // sizes.programs + 1) // 2))
    return Plan(n, 1, units, together, lanes, vector, min(together * lanes, max(lanes, sizes.threads)) // _WARP)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power(k: int) -> int:
    """The least power of 2 that is at least k."""
    return 1 << (k - 1).bit_length()
