"""The sizes that decide how rows are cut up: a table with a row for each generation of GPUs.

`plan` cuts rows up by these sizes. They decide how fast the kernels are, and nothing of what is computed but its
rounding. Another generation is another row of `SIZES`. Nothing here imports Pallas, as whether there is a GPU that the
kernels serve is asked before any kernel is needed.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping

from jaxsoft._core import gpus
from jaxsoft._core.gpus import Generation, Gpu


class Work(enum.Enum):
    """What the tiled kernel does with the arrays that it reads."""

    FOLD = enum.auto()  # It folds one array, and writes numbers only.
    MAP = enum.auto()  # It folds nothing.
    FORWARD = enum.auto()  # It folds one array, and makes the result of that.
    BACKWARD = enum.auto()  # It folds two arrays, and makes the result of these.
    BACKWARD_FOLDING_ONE = enum.auto()  # It folds one of two arrays, and makes the result of both.


@dataclasses.dataclass(frozen=True)
class RegisterSizes:
    """The sizes of the kernel `register_rows`, whose rows stay in registers.

    Attributes:
      row_bytes: the length of the longest row.
      lane_bytes: the part of a row that a thread has, if more than a warp shares the row.
      side_bytes: the part of several rows that a thread has, if no more than a warp shares a row.
    """

    row_bytes: int
    lane_bytes: int
    side_bytes: int


@dataclasses.dataclass(frozen=True)
class SplitSizes:
    """The sizes of the kernels `split`, which cut a row over many blocks, in two launches.

    The first two fields have an entry (largest number of rows, size) for each range of numbers of rows.

    Attributes:
      row_bytes: the length of the shortest row that is split; clusters are faster for shorter ones.
      parts: the least number of parts of a row.
      choices: the numbers of parts that are tried, in this order.
    """

    row_bytes: tuple[tuple[float, int], ...]
    parts: tuple[tuple[float, int], ...]
    choices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """The shape of a block of the kernel `tiled`.

    Attributes:
      warpgroups: the number of warp groups; there are fewer if rows are too short for them.
      chunks: the largest number of vectors of a tile that each thread loads, which is the length of the tile.
      slots: the largest number of slots of a warp group's ring.
    """

    warpgroups: int
    chunks: int
    slots: int = 32


@dataclasses.dataclass(frozen=True)
class FewSizes:
    """The sizes of `tiled` for few rows, which clusters share so that no multiprocessor is idle.

    Attributes:
      bytes: rows are few if all of them have no more bytes together, in all arrays that are read.
      blocks: the least number of blocks of the grid, as far as clusters can be so large.
      block_bytes: the largest part of a row that a block has, as far as clusters can be so large.
      block: the shape of a block.
      tile_cost: what a tile costs beside its elements, in elements.
    """

    bytes: int
    blocks: int
    block_bytes: int
    block: BlockShape
    tile_cost: int


@dataclasses.dataclass(frozen=True)
class StreamSizes:
    """The sizes of `tiled` for work that goes over a row once, so that the row need not stay on chip.

    Attributes:
      block: the shape of a block.
      tile_cost: what a tile costs beside its elements, in elements.
    """

    block: BlockShape
    tile_cost: int


@dataclasses.dataclass(frozen=True)
class KeepSizes:
    """The sizes of `tiled` for work that goes over a row twice, as far as they depend on the work.

    The row is kept on chip in between. These are tried for that, in this order: a block; a cluster of which two fit the
    same multiprocessors, a pair; a persistent cluster; and one that keeps a part of the row, also in registers. Lengths
    of rows are those of all arrays together.

    Attributes:
      tile_cost: what a tile costs beside its elements, in elements.
      block_bytes: the length of the longest row that a block keeps. A multiprocessor has several such blocks.
      block: the shape of that block.
      pair_clusters: the numbers of blocks that clusters of a pair may have.
      pair_bytes: the length of the longest row of such a cluster.
      persistent_block: the shape of blocks of a persistent cluster.
      persistent_cluster: the least number of its blocks.
      register_elements: the number of elements that a thread keeps in registers.
    """

    tile_cost: int
    block_bytes: int
    block: BlockShape = BlockShape(warpgroups=4, chunks=4)
    pair_clusters: tuple[int, ...] = ()
    pair_bytes: float = math.inf
    persistent_block: BlockShape = BlockShape(warpgroups=4, chunks=4)
    persistent_cluster: int = 1
    register_elements: int = 80


@dataclasses.dataclass(frozen=True)
class PairSizes:
    """The sizes of clusters of which two fit the same multiprocessors.

    Attributes:
      ring_bytes: the shared memory for all rings of a block.
      block: the shape of a block.
    """

    ring_bytes: int
    block: BlockShape


@dataclasses.dataclass(frozen=True)
class PersistentSizes:
    """The sizes of persistent clusters, whatever the work. A cluster has one block or more.

    Attributes:
      placed: the part of the multiprocessors on which clusters of more than two blocks can be placed.
      block_bytes: the largest part of a row, in all arrays, that a block has, as far as clusters can be so large.
      register_blocks: the shapes of blocks that keep tiles in registers, of which the one that keeps most is taken.
    """

    placed: float
    block_bytes: int
    register_blocks: tuple[BlockShape, ...]


@dataclasses.dataclass(frozen=True)
class RowSizes:
    """The sizes that are the fastest on a GPU, and its limits.

    Attributes:
      gpu: the GPU.
      cluster_blocks: the largest number of blocks of a cluster.
      ring_slots: the largest number of slots of a block for one array.
      registers, split, few, pair, persistent: the sizes of these kernels and of these ways to cut up rows.
      stream, keep: the sizes of `tiled` by the work and the bytes of an element.
      softmax_rows: by the bytes of an element, the largest number of rows of a softmax for which these kernels are the
        fastest of all implementations, where rows are few and too long for `register_rows`.
    """

    gpu: Gpu
    cluster_blocks: int
    ring_slots: int
    registers: RegisterSizes
    split: SplitSizes
    few: FewSizes
    stream: Mapping[tuple[Work, int], StreamSizes]
    keep: Mapping[tuple[Work, int], KeepSizes]
    pair: PairSizes
    persistent: PersistentSizes
    softmax_rows: Mapping[int, float]

    @property
    def ring_bytes(self) -> int:
        """The shared memory for all rings of a block."""
        return self.gpu.shared_bytes - _RESERVED_BYTES


_RESERVED_BYTES = 11 << 10  # of a block's shared memory, for barriers and what warp groups tell each other
# A cluster can have 16 blocks, and a thread of a block of three warp groups 168 registers. All sizes that are not such
# limits were measured on an H200, on 2026-11-22 and 23, and are the fastest of those that were tried.
_HOPPER = RowSizes(
    gpu=gpus.H200,
    cluster_blocks=16,
    ring_slots=32,
    registers=RegisterSizes(row_bytes=32 << 10, lane_bytes=64, side_bytes=32),
    split=SplitSizes(
        row_bytes=((2, 256 << 10), (math.inf, 2 << 20)),
        parts=((1, 256), (7, 128), (math.inf, 64)),
        choices=(64, 128, 256, 512),
    ),
    few=FewSizes(
        bytes=32 << 20, blocks=128, block_bytes=64 << 10, block=BlockShape(warpgroups=2, chunks=4), tile_cost=256
    ),
    stream={
        (work, itemsize): StreamSizes(block, tile_cost)
        for work, block in ((Work.FOLD, BlockShape(2, chunks=4, slots=3)), (Work.MAP, BlockShape(4, chunks=2, slots=3)))
        for itemsize, tile_cost in ((4, 256), (2, 512))
    },
    keep={
        (Work.FORWARD, 4): KeepSizes(
            tile_cost=256,
            block_bytes=192 << 10,
            pair_clusters=(2, 4),
            persistent_cluster=8,
        ),
        (Work.FORWARD, 2): KeepSizes(  # This has the most to compute for each byte.
            tile_cost=512,
            block_bytes=96 << 10,
            block=BlockShape(warpgroups=4, chunks=2),
            pair_clusters=(2, 4, 8, 16),
            persistent_block=BlockShape(warpgroups=4, chunks=5),
        ),
        (Work.BACKWARD, 4): KeepSizes(tile_cost=256, block_bytes=192 << 10),
        (Work.BACKWARD, 2): KeepSizes(tile_cost=512, block_bytes=192 << 10),
        **dict.fromkeys(
            ((Work.BACKWARD_FOLDING_ONE, 4), (Work.BACKWARD_FOLDING_ONE, 2)),
            KeepSizes(
                tile_cost=256, block_bytes=96 << 10, pair_clusters=(2, 4), pair_bytes=256 << 10, register_elements=48
            ),
        ),
    },
    pair=PairSizes(ring_bytes=100 << 10, block=BlockShape(warpgroups=2, chunks=6)),
    persistent=PersistentSizes(
        # A cluster that finds no place would begin when the others end. On how many multiprocessors clusters can be
        # placed varies from chip to chip.
        placed=7 / 8,
        block_bytes=136 << 10,
        register_blocks=(BlockShape(warpgroups=3, chunks=4), BlockShape(warpgroups=3, chunks=2)),
    ),
    softmax_rows={4: math.inf, 2: 4},
)

# Those of data-centre Blackwell were neither measured nor tested. They are those of Hopper, whose shared memory,
# registers and clusters this generation has, too.
SIZES = {Generation.HOPPER: _HOPPER, Generation.BLACKWELL: _HOPPER}


def target() -> RowSizes:
    """The sizes for the GPU that is lowered for; those for Hopper if none is known."""
    gpu = gpus.assumed()
    found = SIZES.get(gpu.generation)
    return dataclasses.replace(found, gpu=gpu) if found else _HOPPER
