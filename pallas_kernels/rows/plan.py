"""How rows are cut up: a plan for each of the three kernels, by the sizes of a GPU.

Plans decide how fast the kernels are, and nothing of what they compute but its rounding. Each function returns None
where its kernel cannot take the rows, or is not meant for them.
"""

import dataclasses

from jax.experimental import pallas as pl

from jaxsoft._rows.spec import RowSpec

from . import operations
from .operations import Signature
from .sizes import BlockShape, KeepSizes, RegisterSizes, RowSizes, Work

WARP = 32
THREADS = 128  # of a warp group
VECTOR_BYTES = 16  # what a thread loads or stores at a time, at most


@dataclasses.dataclass(frozen=True)
class RegisterPlan:
    """How rows lie in the registers of a block of one warp group.

    Attributes:
      vector: elements that a thread loads at a time.
      lanes: threads that share a row; a power of 2.
      repeat: rows that these threads have, one beside the other.
    """

    vector: int
    lanes: int
    repeat: int

    @property
    def words(self) -> str:
        """How a kernel's name goes on, and the plan in words."""
        return f"registers: {self.rows} rows a block of {THREADS} threads, {self.lanes} for each row"

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return THREADS // self.lanes * self.repeat

    @property
    def width(self) -> int:
        """Elements of a chunk: what the lanes of a row load of it at a time."""
        return self.lanes * self.vector

    def starts(self, n: int) -> list[int]:
        """Where the chunks of a row of n elements begin. The last one ends with the row."""
        return [min(i, n - self.width) for i in range(0, n, self.width)]


def register_rows(sizes: RegisterSizes, rows: int, n: int, itemsize: int, together: int = 0) -> RegisterPlan | None:
    """Plans for rows that stay in registers.

    Args:
      sizes: of the GPU.
      rows: how many there are.
      n: their length.
      itemsize: the most bytes of an element of their arrays.
      together: the rows of a block are a divisor of this number.
    """
    fitting = (v for v in (8, 4, 2, 1) if v * itemsize <= VECTOR_BYTES and n % v == 0 and n >= 2 * v)
    vector = next(fitting, None)
    if vector is None or n * itemsize > sizes.row_bytes:
        return None
    most_lanes = min(THREADS, _power_up_to(n // vector))
    lanes = min(most_lanes, max(WARP, pl.next_power_of_2(pl.cdiv(n * itemsize, sizes.lane_bytes))))
    repeat = max(1, sizes.side_bytes * lanes // (n * itemsize))
    plan = RegisterPlan(vector, lanes, max(1, min(repeat, rows * lanes // THREADS)))
    if together % plan.rows:
        plan = RegisterPlan(vector, lanes, 1)
    while together % plan.rows and plan.lanes < most_lanes:
        plan = RegisterPlan(vector, 2 * plan.lanes, 1)
    return None if together % plan.rows else plan


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """How long rows are split.

    Attributes:
      parts: how many parts a row has.
      part: how a part, as if it were a row, lies in the registers of a block. Parts of a block are of one row.
    """

    parts: int
    part: RegisterPlan

    @property
    def words(self) -> str:
        """How a kernel's name goes on, and the plan in words."""
        return f"split: {self.parts} parts of a row, {self.part.rows} a block, in two launches"


def split(sizes: RowSizes, operation: RowSpec, rows: int, n: int, itemsize: int) -> SplitPlan | None:
    """Plans for a few long rows, each cut over many blocks."""
    least_bytes = _for_number(sizes.split.row_bytes, rows)
    least_parts = _for_number(sizes.split.parts, rows)
    if n * itemsize < least_bytes or rows * n * itemsize > sizes.few.bytes or not operations.folded(operation):
        return None
    for parts in sizes.split.choices:
        length, beyond = divmod(n, parts)
        part_bytes = length * itemsize
        if parts < least_parts or beyond or part_bytes % VECTOR_BYTES or part_bytes > sizes.registers.row_bytes:
            continue
        part = register_rows(sizes.registers, rows * parts, length, itemsize)
        if part and parts % part.rows == 0:
            return SplitPlan(parts, part)
    return None


@dataclasses.dataclass(frozen=True)
class TiledPlan:
    """How rows are cut up into tiles.

    Attributes:
      vector: elements that a thread loads at a time.
      chunks: vectors of a tile that each thread loads.
      tiles: tiles of a row.
      ring: slots of a warp group's ring, of a tile each.
      warpgroups: of a block.
      cluster: blocks that share a row.
      clusters: of the grid. Where there are fewer than rows, they are persistent, and take rows in turn.
      register_tiles: tiles that a warp group keeps in registers, besides.
    """

    vector: int
    chunks: int
    tiles: int
    ring: int
    warpgroups: int
    cluster: int
    clusters: int
    register_tiles: int = 0

    @property
    def words(self) -> str:
        """How a kernel's name goes on, and the plan in words."""
        blocks = "a block" if self.cluster == 1 else f"a cluster of {self.cluster} blocks"
        return (
            f"tiled: {self.tiles} tiles of a row, by {blocks} of {self.warpgroups} warp groups, {self.clusters} times"
        )

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return THREADS * self.vector * self.chunks

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return THREADS * VECTOR_BYTES * self.chunks

    @property
    def members(self) -> int:
        """Warp groups that share a row."""
        return self.warpgroups * self.cluster

    @property
    def share(self) -> int:
        """Tiles of a row that a warp group has, at most."""
        return pl.cdiv(self.tiles, self.members)

    @property
    def fits(self) -> bool:
        """Whether the rings keep a whole row."""
        return self.share <= self.ring


def _work_of(operation: RowSpec) -> Work:
    """The work that an operation is to the tiled kernel."""
    signature, folded = Signature.of(operation), operations.folded(operation)
    if not signature.row_results:
        return Work.FOLD
    if not folded:
        return Work.MAP
    if signature.rows == 1:
        return Work.FORWARD
    return Work.BACKWARD if len(folded) == signature.rows else Work.BACKWARD_FOLDING_ONE


def tiled(sizes: RowSizes, operation: RowSpec, rows: int, n: int, itemsize: int) -> TiledPlan | None:
    """Plans for rows that come to shared memory in tiles; None if copies cannot be aligned, or rows are short."""
    cutter = _Cutter(sizes, _work_of(operation), Signature.of(operation).rows, rows, n, itemsize)
    if n % cutter.vector or n < 2 * cutter.chunk:
        return None
    if cutter.few:
        return cutter.few_rows()
    if cutter.work in (Work.FOLD, Work.MAP):
        return cutter.streamed()
    return cutter.one_block() or cutter.paired() or cutter.kept() or cutter.partly_kept()


@dataclasses.dataclass(frozen=True)
class _Cutter:
    """Cuts up rows for the tiled kernel.

    Rows of which several fit the shared memory of a multiprocessor, or of a cluster, get a block or a cluster each: the
    GPU starts these as others end, so that faster multiprocessors take more of them, and while one waits, others use
    the memory. Of longer rows only one fits: there clusters are persistent, and the next row's tiles take the place of
    this one's.

    Attributes:
      sizes: those of the GPU.
      work: what is done with the rows.
      arrays: the number of arrays that are read.
      rows, n, itemsize: the number of rows, their length, and the bytes of an element.
    """

    sizes: RowSizes
    work: Work
    arrays: int
    rows: int
    n: int
    itemsize: int

    @property
    def vector(self) -> int:
        """Elements that a thread loads at a time."""
        return VECTOR_BYTES // self.itemsize

    @property
    def chunk(self) -> int:
        """Elements that a warp group loads at a time."""
        return THREADS * self.vector

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all arrays."""
        return self.n * self.itemsize * self.arrays

    @property
    def few(self) -> bool:
        """Whether there are too few rows to give each a block."""
        return self.rows * self.row_bytes <= self.sizes.few.bytes

    @property
    def keep(self) -> KeepSizes:
        """The sizes for work that goes over a row twice."""
        return self.sizes.keep[self.work, self.itemsize]

    def few_rows(self) -> TiledPlan:
        """Clusters that are so large that together they fill the GPU, and each block has a moderate part of a row."""
        few = self.sizes.few
        blocks = max(pl.cdiv(few.blocks, self.rows), pl.cdiv(self.row_bytes, few.block_bytes))
        return self._cut(few.block, self._cluster(blocks), few.tile_cost)

    def streamed(self) -> TiledPlan:
        """Blocks or clusters with short rings, as rows that are gone over once need not fit them.

        Several blocks of a multiprocessor read at the same time.
        """
        stream = self.sizes.stream[self.work, self.itemsize]
        cluster = min(self.sizes.cluster_blocks, max(1, _power_up_to(2 * self.sizes.gpu.multiprocessors // self.rows)))
        return self._cut(stream.block, cluster, stream.tile_cost)

    def one_block(self) -> TiledPlan | None:
        """A block for each row."""
        if self.row_bytes > self.keep.block_bytes:
            return None
        return self._cut(self.keep.block, 1, self.keep.tile_cost)

    def paired(self) -> TiledPlan | None:
        """A cluster for each row, of the smallest size with which two of them fit the same multiprocessors."""
        if self.row_bytes > self.keep.pair_bytes:
            return None
        for cluster in self.keep.pair_clusters:
            plan = self._cut(self.sizes.pair.block, cluster, self.keep.tile_cost)
            ring_bytes = plan.ring * plan.warpgroups * plan.slot_bytes * self.arrays
            if plan.fits and ring_bytes <= self.sizes.pair.ring_bytes:
                return plan
        return None

    def kept(self) -> TiledPlan | None:
        """Persistent clusters whose rings keep a row."""
        plan = self._cut(self.keep.persistent_block, self._persistent, self.keep.tile_cost, persistent=True)
        return plan if plan.fits else None

    def partly_kept(self) -> TiledPlan:
        """Persistent clusters whose rings and registers keep as much of a row as they can."""
        plans = [
            self._with_registers(self._cut(block, self._persistent, self.keep.tile_cost, persistent=True))
            for block in self.sizes.persistent.register_blocks
        ]
        return max(plans, key=lambda plan: min(1, (plan.ring + plan.register_tiles) / plan.share))

    @property
    def _persistent(self) -> int:
        """The number of blocks of a persistent cluster."""
        return max(
            self.keep.persistent_cluster, self._cluster(pl.cdiv(self.row_bytes, self.sizes.persistent.block_bytes))
        )

    def _with_registers(self, plan: TiledPlan) -> TiledPlan:
        """The plan, with what fits in registers besides.

        A thread computes in f32, so an element takes a register, whatever its bytes. The array that the fold does not
        need, if any, waits in the slots of the tiles that registers hold: so these are no more than there are slots.
        """
        if plan.fits:
            return plan
        arrays = 1 if self.work is Work.BACKWARD_FOLDING_ONE else self.arrays
        tiles = self.keep.register_elements // (plan.vector * plan.chunks * arrays)
        return dataclasses.replace(plan, register_tiles=min(tiles, plan.share - plan.ring, plan.ring))

    def _cluster(self, blocks: int) -> int:
        """The number of blocks of a cluster that has at least this many, as far as it can."""
        return min(self.sizes.cluster_blocks, pl.next_power_of_2(blocks))

    def _cut(self, block: BlockShape, cluster: int, tile_cost: int, persistent: bool = False) -> TiledPlan:
        """Cuts rows into as few tiles as can be shared out evenly.

        Args:
          block: the shape of a block. It has fewer warp groups, and a cluster fewer blocks, if the row is too short.
          cluster: the blocks of a cluster.
          tile_cost: what a tile costs beside its elements, in elements.
          persistent: whether clusters take several rows, or end with one.
        """
        n, chunk, warpgroups = self.n, self.chunk, block.warpgroups
        while cluster > 1 and n < 2 * warpgroups * cluster * chunk:
            cluster //= 2
        while warpgroups > 1 and n < 2 * warpgroups * chunk:
            warpgroups //= 2
        members = warpgroups * cluster
        # Each warp group has at least one tile, and where rows are many, all but one have two.
        least = members if self.few else 2 * members - 1
        choices = [chunks for chunks in range(1, block.chunks + 1) if n >= least * chunks * chunk] or [1]

        def cost(chunks):
            tile = chunk * chunks
            return pl.cdiv(pl.cdiv(n, tile), members) * (tile + tile_cost), -chunks

        chunks = min(choices, key=cost)
        tiles = pl.cdiv(n, chunk * chunks)
        slot_bytes = THREADS * VECTOR_BYTES * chunks * self.arrays * warpgroups
        ring = min(block.slots, self.sizes.ring_slots // warpgroups, self.sizes.ring_bytes // slot_bytes)
        clusters = self.rows
        if persistent:
            part = 1 if cluster <= 2 else self.sizes.persistent.placed
            clusters = min(self.rows, int(self.sizes.gpu.multiprocessors * part) // cluster)
        else:
            ring = min(ring, pl.cdiv(tiles, members))
        return TiledPlan(self.vector, chunks, tiles, ring, warpgroups, cluster, clusters)


def _for_number(entries: tuple[tuple[float, int], ...], number: int) -> int:
    """The size of the first entry that goes up to this number."""
    return next(size for most, size in entries if number <= most)


def _power_up_to(k: int) -> int:
    """The largest power of 2 that is at most k; 0 for 0."""
    return 1 << k.bit_length() >> 1
