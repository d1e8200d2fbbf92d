"""How the tiled kernel cuts up rows: by measurements on an H200."""

import dataclasses

from jax.experimental import pallas as pl

from . import arithmetic

THREADS = 128  # of a warpgroup


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel cuts up its work.

    Attributes:
      vector: elements that a thread loads at a time.
      chunks: such loads a tile.
      tiles: tiles a row.
      ring: tiles in a warpgroup's ring.
      warpgroups: of a block.
      cluster: blocks that share a row.
      clusters: of the grid.
      held: tiles that a warpgroup holds in registers besides.
      later: tiles in the ring of what the result needs and the fold does not; 0 where it is as long as the other.
    """

    vector: int
    chunks: int
    tiles: int
    ring: int
    warpgroups: int
    cluster: int
    clusters: int
    held: int = 0
    later: int = 0

    @property
    def tile(self) -> int:
        """Elements a tile."""
        return THREADS * self.vector * self.chunks

    @property
    def slot(self) -> int:
        """Bytes a tile of one array."""
        return THREADS * 16 * self.chunks

    @property
    def members(self) -> int:
        """Warpgroups that share a row."""
        return self.warpgroups * self.cluster

    @property
    def share(self) -> int:
        """The most tiles of a row that a warpgroup has."""
        return pl.cdiv(self.tiles, self.members)


_RING_BYTES = 216 << 10  # of all rings of a block, of the 227 KiB of shared memory that a multiprocessor has
_HALF_BYTES = 100 << 10  # of all rings, where two blocks are to share a multiprocessor
FEW_BYTES = 32 << 20  # rows that together have fewer leave multiprocessors idle, but for clusters


def plan(operation: str, rows: int, n: int, itemsize: int, multiprocessors: int) -> Plan | None:
    """How to cut up rows of n elements; None where copies cannot be aligned, or rows are too short.

    Rows of which several fit the shared memory of a multiprocessor, or of a cluster, get a block or a cluster each: the
    GPU deals them out as others end, so the faster multiprocessors have more of them, and what one waits for, others
    use. Of longer rows only one fits: there clusters stay, and the next row's tiles take the place of this one's.
    """
    vector, arrays = 16 // itemsize, arithmetic.SIGNATURES[operation][0]
    row_bytes, folds_one = n * itemsize * arrays, len(arithmetic.folded(operation)) == 1 < arrays
    chunk = THREADS * vector  # elements
    if n % vector or n < 2 * chunk:
        return None
    few = rows * row_bytes <= FEW_BYTES
    narrow = itemsize == 2 and arrays == 1  # rows with most to compute a byte
    # What a tile costs beside its own elements, in elements.
    beside = 256 if itemsize == 4 or few or folds_one else 512

    def cut(warpgroups, cluster, chunks, most=32, stays=False):
        """Rows in as few tiles as go up into the members, of so many chunks at most."""
        while cluster > 1 and n < 2 * warpgroups * cluster * chunk:
            cluster //= 2
        while warpgroups > 1 and n < 2 * warpgroups * chunk:
            warpgroups //= 2
        members = warpgroups * cluster
        least = members if few else 2 * members - 1
        sizes = [c for c in range(1, chunks + 1) if n >= least * c * chunk] or [1]

        def cost(count):
            tile = chunk * count
            return pl.cdiv(pl.cdiv(n, tile), members) * (tile + beside), -count

        best = min(sizes, key=cost)
        tiles = pl.cdiv(n, chunk * best)
        ring = min(most, 32 // warpgroups, _RING_BYTES // (THREADS * 16 * best * arrays * warpgroups))
        ring = ring if stays else min(ring, pl.cdiv(tiles, members))
        # Of clusters that stay, one that finds no place would begin when the others end: some multiprocessors are left
        # out, as it varies from chip to chip on how many of them clusters can be placed.
        fill = multiprocessors if cluster <= 2 else multiprocessors * 7 // 8
        return Plan(vector, best, tiles, ring, warpgroups, cluster, min(rows, fill // cluster) if stays else rows)

    def fits_half(plan):
        return plan.share <= plan.ring and plan.ring * plan.warpgroups * plan.slot * arrays <= _HALF_BYTES

    def with_registers(plan):
        """The plan with what fits in registers besides."""
        if plan.share <= plan.ring or plan.warpgroups > 3:
            return plan
        # Three warpgroups leave 168 registers to a thread; 16 bits take twice theirs while they are computed with. Of
        # log_softmax_vjp the fold needs one array, and a slot has room for the other of one tile.
        registers, of = (48, 1) if folds_one else (80, arrays)
        held = registers * itemsize // (16 * plan.chunks * of)
        return dataclasses.replace(plan, held=min(held, plan.share - plan.ring, plan.ring))

    if few:  # as many blocks a row as fill the GPU, and as hold it in 64 KB each
        wanted = max(pl.cdiv(128, rows), pl.cdiv(row_bytes, 64 << 10))
        return cut(2, min(16, pl.next_power_of_2(wanted)), 4)
    if operation in ("state", "logsumexp_vjp"):  # gone over once, so a row need not fit: several blocks read at a time
        cluster = min(16, max(1, pl.next_power_of_2(2 * multiprocessors // rows + 1) // 2))
        return cut(2, cluster, 4, 3) if operation == "state" else cut(4, cluster, 2, 3)
    if row_bytes <= (96 << 10 if narrow or folds_one else 192 << 10):
        return cut(4, 1, 2 if narrow else 4)
    if arrays == 1 or (folds_one and row_bytes <= 256 << 10):
        for cluster in (2, 4, 8, 16) if narrow else (2, 4):
            if fits_half(found := cut(2, cluster, 6)):
                return found
    if folds_one:  # what is folded of a row on chip, and what is about to be written of the other array
        cluster = min(16, pl.next_power_of_2(pl.cdiv(n * itemsize, 152 << 10)))
        for warpgroups in (2,) if itemsize == 4 else (4, 2):
            found = cut(warpgroups, cluster, 4, stays=True)
            later = min(_RING_BYTES // (warpgroups * found.slot) - found.share, 32 // warpgroups)
            if later >= 2 and found.share * warpgroups <= 32:
                return dataclasses.replace(found, ring=found.share, later=later)
    cluster = min(16, pl.next_power_of_2(pl.cdiv(row_bytes, 136 << 10)))
    if arrays == 1 and not narrow:
        cluster = max(8, cluster)
    whole = cut(4, cluster, 5 if narrow else 4, stays=True)
    if whole.share <= whole.ring:
        return whole
    # What is on chip counts most.
    plans = [cut(warpgroups, cluster, chunks, stays=True) for warpgroups, chunks in ((4, 4), (3, 4), (4, 2), (3, 2))]
    return max(map(with_registers, plans), key=lambda plan: min(1, (plan.ring + plan.held) / plan.share))
