"""The tiled online softmax: one Mosaic GPU kernel for the forward row operations.

A block of one warpgroup takes a few rows in turn. It streams a row in tiles from global to shared memory with bulk
asynchronous copies, folds them into a state (m, s), and then goes over the tiles once more, backwards, to write the
result. So a row that fits in the block's ring of tiles is read once, and of a longer row only what has left the ring is
read again, most recently used tiles first, while the L2 may still hold them.

Three choices keep it simple, and right:

- One warpgroup a block. Reductions over a tile use one scratch area a block, where several warpgroups would race. To
  need them once a row and not once a tile, each lane folds its own elements into its own state, elementwise.
- Tiles never leave their row. The last one starts at n - tile and overlaps the one before: elements seen before are
  masked in the fold, and written twice with the same value. No copy is out of bounds, so no fill value is needed and
  no row is written over by its neighbour; and bulk copies need no tensor map, with its 256 elements a dimension.
- Results go from registers to global memory, in 16-byte stores, not through shared memory, which is left to the ring.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_LANES = 128  # the threads of a warpgroup
_VECTOR_BYTES = 16  # what a thread loads and stores at a time


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The sizes that decide the speed, and nothing else.

    Attributes:
      tile_bytes: the largest tile. A thread holds its part of a tile in registers.
      tile_cost: what a tile costs beside its elements, in elements; decides between few tiles and little overlap.
      ring_bytes: shared memory of a block whose row does not fit: bytes in flight against blocks a multiprocessor.
      resident_bytes: the longest row that is kept in shared memory and read once. At most 96 KiB runs everywhere.
      row_buffers: how many short rows a block has in flight or in hand.
      block_bytes: short rows are dealt out in groups of this size, which a block takes in turn.
      min_blocks: rather smaller groups than fewer blocks than this.
    """

    tile_bytes: int = 16 << 10
    tile_cost: int = 256
    ring_bytes: int = 48 << 10
    resident_bytes: int = 96 << 10
    row_buffers: int = 4
    block_bytes: int = 128 << 10
    min_blocks: int = 2048


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel cuts up its work.

    Attributes:
      vector: elements that a thread loads at a time.
      tile: elements a tile, a multiple of a chunk.
      tiles: tiles a row.
      ring: tiles of a row that are in shared memory at once.
      buffers: such rings, for as many rows.
      rows: rows a block; 1 if a row is longer than its ring.
    """

    vector: int
    tile: int
    tiles: int
    ring: int
    buffers: int
    rows: int

    @property
    def chunk(self) -> int:
        """What the warpgroup loads at a time, a vector a thread."""
        return _LANES * self.vector


def plan(rows: int, n: int, itemsize: int, tuning: Tuning) -> Plan:
    """Cuts `rows` rows of `n` elements, at least 512 bytes, into blocks and tiles."""
    vector = min(_VECTOR_BYTES // itemsize, 1 << int(math.log2(n // _LANES)))
    chunk = _LANES * vector
    sizes = range(chunk, max(chunk, min(n, tuning.tile_bytes // itemsize)) + 1, chunk)
    tile = min(sizes, key=lambda size: (pl.cdiv(n, size) * (size + tuning.tile_cost), -size))
    tiles, tile_bytes = pl.cdiv(n, tile), tile * itemsize
    if tiles * tile_bytes > tuning.resident_bytes:
        return Plan(vector, tile, tiles, min(tiles, max(2, tuning.ring_bytes // tile_bytes)), 1, 1)
    group = max(1, min(tuning.block_bytes // (n * itemsize), rows // tuning.min_blocks))
    buffers = max(1, min(tuning.row_buffers, tuning.ring_bytes // (tiles * tile_bytes), group))
    return Plan(vector, tile, tiles, tiles, buffers, group)


def row_kernel(operation: str, rows: int, n: int, dtype: Any, tuning: Tuning | None = None, interpret: Any = None):
    """The kernel of an operation for an operand of shape (rows, n).

    Args:
      operation: "softmax", "log_softmax" or "state".
      rows, n, dtype: of the operand.
      tuning: sizes to use instead of the default ones.
      interpret: Pallas interpreter parameters, for tests on a CPU.

    Returns:
      A function of the operand that returns a tuple: (y,), (y, m, s) or (m, s).
    """
    cut = plan(rows, n, jnp.dtype(dtype).itemsize, tuning or Tuning())
    slots = cut.buffers * cut.ring
    full, statistic = jax.ShapeDtypeStruct((rows, n), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)
    return plgpu.kernel(
        functools.partial(_body, operation, cut),
        out_type={"softmax": (full,), "log_softmax": (full, statistic, statistic), "state": (statistic, statistic)}[
            operation
        ],
        scratch_types=(plgpu.SMEM((slots, cut.tile), dtype), plgpu.Barrier(num_arrivals=1, num_barriers=slots)),
        # The kernel places its own barriers: a slot is refilled after commit_smem, and nothing else is written that is
        # read.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=(pl.cdiv(rows, cut.rows),),
        grid_names=("block",),
        kernel_name=f"jaxsoft_{operation}",
        interpret=interpret,
    )


def _body(operation: str, cut: Plan, x_ref, *refs):
    *out_refs, smem, loaded = refs
    rows, n = x_ref.shape
    writes, resident = operation != "state", cut.ring == cut.tiles
    overlap = cut.tiles * cut.tile - n  # of the last tile with the one before
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((cut.chunk,), (32 * cut.vector,), (cut.vector,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    first = lax.axis_index("block") * cut.rows
    count = jnp.minimum(cut.rows, rows - first)

    def start(tile):
        return jnp.minimum(tile * cut.tile, n - cut.tile)

    def slot(k, tile):
        return lax.rem(k, cut.buffers) * cut.ring + lax.rem(tile, cut.ring)

    def load(k, tile):
        """Starts the copy of a tile of the block's k-th row, if it has one, to the slot of that tile."""

        @pl.when(k < count)
        def _():
            plgpu.copy_gmem_to_smem(
                x_ref.at[first + k, pl.ds(start(tile), cut.tile)],
                smem.at[slot(k, tile)],
                loaded.at[slot(k, tile)],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def refill(k, tile, step):
        """Fills the slot of a tile that is done with: with one further on in this row, or with the next row's."""
        if resident and cut.rows <= cut.buffers:
            return
        plgpu.commit_smem()  # all threads have read it
        if resident:
            load(k + cut.buffers, tile)
        else:
            following = tile + step * cut.ring
            pl.when((following >= 0) & (following < cut.tiles))(lambda: load(k, following))

    def chunks(k, tile):
        """The elements of a tile in f32."""
        for i in range(0, cut.tile, cut.chunk):
            x = plgpu.load(smem.at[slot(k, tile), pl.ds(i, cut.chunk)], layout=layout)
            yield i, x.astype(jnp.float32)

    def masked(k, tile):
        """`chunks` with -inf for what the tile before has too."""
        seen = jnp.where(tile == cut.tiles - 1, overlap, 0)
        for i, x in chunks(k, tile):
            if i < overlap:
                x = jnp.where(plgpu.broadcasted_iota(jnp.int32, (cut.chunk,), 0, layout=layout) + i < seen, -jnp.inf, x)
            yield x

    # Rows that share a buffer are gone over in alternate directions: the next row's tiles come in as soon as this one
    # is done with their slots, so in the order of its second pass.
    alternate = writes and resident and cut.rows > cut.buffers

    def row(k, _):
        def tile_at(position):
            if not alternate:
                return position
            return jnp.where(lax.rem(lax.div(k, cut.buffers), 2) == 1, cut.tiles - 1 - position, position)

        def fold(position, lanes):
            tile = tile_at(position)
            plgpu.barrier_wait(loaded.at[slot(k, tile)])
            lanes = _accumulate(lanes, list(masked(k, tile)))
            if not (writes and resident):
                refill(k, tile, 1)
            return lanes

        m, s = _total(lax.fori_loop(0, cut.tiles, fold, _identity(cut.chunk)))
        if operation != "softmax":
            out_refs[-2][first + k] = m
            out_refs[-1][first + k] = s
        scale = jnp.where(m == jnp.inf, jnp.nan, 1 / s)  # inf / inf has no value
        log_s = jnp.where(jnp.abs(m) < jnp.inf, jnp.log(s), jnp.nan)

        def write(step, _):
            tile = tile_at(cut.tiles - 1 - step)
            if not resident:  # else, or in the ring's last tiles, what the fold has read is still there
                pl.when(tile < cut.tiles - cut.ring)(lambda: plgpu.barrier_wait(loaded.at[slot(k, tile)]))
            for i, x in chunks(k, tile):
                x = x - _reference(m)
                y = jnp.exp(x) * scale if operation == "softmax" else x - log_s
                out_refs[0][first + k, pl.ds(start(tile) + i, cut.chunk)] = y.astype(x_ref.dtype)
            refill(k, tile, -1)

        if writes:
            lax.fori_loop(0, cut.tiles, write, None)

    for k in range(cut.buffers):
        lax.fori_loop(0, cut.ring, lambda tile, _, k=k: load(k, tile), None)
    lax.fori_loop(0, count, row, None)


def _reference(m):
    """What exp subtracts: m where it is finite, else 0, so that no exponent is inf - inf."""
    return jnp.where(jnp.abs(m) < jnp.inf, m, 0.0)


def _identity(size: int):
    """The state of nothing, in every lane: the maximum, the reference of the sum, the sum and its error."""
    return tuple(jnp.full((size,), value, jnp.float32) for value in (-jnp.inf, -jnp.inf, 0, 0))


def _accumulate(lanes, chunks):
    """Folds one tile into the lanes' states.

    The reference of a sum follows the maximum only when it falls behind by more than 1. A slowly rising row would
    otherwise rescale the sum with every tile, each time with a rounding error, and these add up. The additions are
    compensated for the same reason: a lane of a long row makes thousands.
    """
    m, ref, s, error = lanes
    m = functools.reduce(jnp.maximum, chunks, m)
    new = jnp.where(m > ref + 1.0, m, ref)
    shift = _reference(new)
    scale = jnp.exp(ref - shift)  # 0 for the identity
    old, part = s * scale, _tree_sum([jnp.exp(x - shift) for x in chunks])
    s = old + part
    virtual = s - old
    return m, new, s, error * scale + ((old - (s - virtual)) + (part - virtual))


def _tree_sum(terms):
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return terms[0]


def _total(lanes):
    """Combines the lanes' states into the row's."""
    m, ref, s, error = lanes
    top = jnp.max(m)
    total = jnp.sum((s + error) * jnp.exp(ref - _reference(top)))
    return top, jnp.where(top == jnp.inf, jnp.inf, total)  # where the errors are inf - inf
