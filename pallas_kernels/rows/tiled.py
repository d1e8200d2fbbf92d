"""The tiled kernel: rows of any length, in tiles that asynchronous copies bring to shared memory.

The tiles of a row are divided among the warp groups of a block, or of a cluster of blocks. Each streams its tiles
through a ring of its own, folds them into lanes, and, when the states of all threads are combined, goes over its tiles
once more to write the result. So a row whose tiles fit the rings is read once. `long_row` takes rows that the rings do
not keep. Where clusters take several rows, in turn, the next row's tile takes a tile's place as soon as that is
written.

- Every warp group fills and empties its rings by itself, so that the only thing that warp groups wait for is each
  other's states, once a row.
- Reductions over a block that JAX writes by itself use one scratch area a block, where several warp groups race (JAX
  0.11.2). So threads put their states in shared memory, and every warp combines all of them by itself.
- Tiles never leave their row. The last one ends with it and overlaps the one before: elements seen before are masked in
  the fold, and written twice with the same value. No copy is out of bounds, and copies need no tensor map, with its 256
  elements a dimension.
- A row's label is one element of one tile: it becomes -inf in shared memory before that tile is folded, and its result
  is written over the tile's. Nothing else of a row is compared with the label.
- Results go from registers to global memory, in 16-byte stores, not through shared memory, which is left to the rings.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._rows.spec import RowSpec

from .. import versions
from . import fold, long_row, operations
from .cluster import ClusterExchange
from .extras import Extras, Rules
from .fold import Lanes
from .operations import Finished, References, Signature
from .plan import THREADS, TiledPlan
from .ring import RowRing, Rows, Share, Turn
from .warpgroup import WarpGroup, if_read


def row_kernel(
    operation: RowSpec,
    rows: int,
    n: int,
    dtypes: tuple[Any, Any],
    plan: TiledPlan,
    extras: Extras = Extras(),
):
    """The kernel of an operation on `rows` rows of n elements.

    Args:
      operation, rows, n: what is asked for.
      dtypes: of operands and of results of shape (rows, n).
      plan: how rows are cut up.
      extras: what comes beside the rows.

    Returns:
      A function of the operands of shape (rows, n / vector, vector) and (rows,), and of the extras, of shape (their
      rows, n / vector, vector) and (their rows,), where booleans are bytes. It returns a tuple of arrays of the first
      two shapes.
    """
    signature = Signature.of(operation)
    full = jax.ShapeDtypeStruct((rows, n // plan.vector, plan.vector), dtypes[1])
    number = jax.ShapeDtypeStruct((rows,), jnp.float32)
    slots = plan.warpgroups * plan.ring
    numbers = (operations.fold_of(operation) or fold.SUM).numbers
    # There is room for the states of two rows: a warp group that has the next one ready must not write over states that
    # others still read.
    states = plgpu.SMEM((numbers, 2, plan.warpgroups * THREADS), jnp.float32)
    clustered = plan.cluster > 1
    return versions.kernel(
        functools.partial(_body, operation, plan, extras),
        out_type=(full,) * signature.row_results + (number,) * signature.number_results,
        scratch_types=(
            [plgpu.SMEM((slots, plan.chunks * THREADS, plan.vector), dtypes[0])] * signature.rows,
            [plgpu.Barrier(num_arrivals=1, num_barriers=slots)] * signature.rows,
            states,
            plgpu.Barrier(num_arrivals=plan.warpgroups),
            ClusterExchange.scratch(numbers, plan.cluster) if clustered else (),
        ),
        # The kernel places its own barriers: a slot is refilled after commit_smem, and what is written elsewhere in
        # shared memory is read after a barrier.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(plan.cluster,) if clustered else (),
        cluster_names=("peer",) if clustered else (),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        kernel_name=f"jaxsoft_{operation.name}_tiled",
    )


def _body(operation: RowSpec, plan: TiledPlan, extras: Extras, *refs):
    group = _warpgroup(operation, plan, extras, refs)
    if group.exchange:
        group.exchange.open()
    if group.fold and group.writes and not plan.fits:
        return long_row.take_rows(group)
    turn = Turn(0, 0, 0)
    for _ in range(plan.ring):
        turn = _refill(group, turn)
    lax.fori_loop(0, group.rows.count, functools.partial(_take_row, group), turn)


def _warpgroup(operation: RowSpec, plan: TiledPlan, extras: Extras, refs: Sequence[Any]) -> WarpGroup:
    """The warp group that runs this kernel."""
    *in_global, slots, loaded, states, posted, exchange = refs
    sorted_refs = References.of(operation, in_global)
    index, block = lax.axis_index("warpgroup"), lax.axis_index("peer") if plan.cluster > 1 else 0
    member = block * plan.warpgroups + index
    rows, vectors, _ = sorted_refs.rows[0].shape
    return WarpGroup(
        operation,
        plan,
        extras,
        sorted_refs,
        index,
        block,
        member,
        share=Share.of(member, vectors * plan.vector, plan),
        rows=Rows.of(rows, plan),
        rings=[RowRing(*ring, plan.ring, index) for ring in zip(sorted_refs.rows, slots, loaded, strict=True)],
        states=states,
        posted=posted,
        exchange=ClusterExchange(plan.cluster, *exchange) if exchange else None,
    )


def _refill(group: WarpGroup, turn: Turn) -> Turn:
    """Fills a slot of each ring with a tile of this row or of one to come, and returns their next turn."""
    slot, k, tile = turn
    group.fill(group.rings, slot, k, tile)
    last = tile == group.share.count - 1
    return Turn(group.rings[0].after(slot), jnp.where(last, k + 1, k), jnp.where(last, 0, tile + 1))


def _take_row(group: WarpGroup, k: jax.Array, turn: Turn) -> Turn:
    """Takes a row whose tiles the rings keep until the result is written, or that is gone over once.

    Args:
      group: the warp group.
      k: the index of the row among those of the cluster.
      turn: the next turn of the rings.

    Returns:
      Their next turn after this row.
    """
    rules, label = group.rules(k), group.label(k)
    total: fold.State = ()
    if group.fold:
        lanes, turn = _fold_row(group, rules, label, turn)
        total = group.total(k, lanes)
    finished = group.finish(k, total)
    return _write_row(group, k, rules, label, finished, turn) if finished else turn


def _fold_row(group: WarpGroup, rules: Rules, label: jax.Array | None, turn: Turn) -> tuple[Lanes, Turn]:
    """Folds the tiles of a row as they come. If no result is to be written, their slots are free then."""
    rings, reduction = group.folded_rings, group.fold
    assert reduction

    def fold_tile(tile, carry):
        lanes, slot, turn = carry

        def folded():
            for ring in rings:
                ring.wait(slot)
            group.at_label(label, tile, lambda vector, element: rings[0].set(slot, vector, element, -jnp.inf))
            return group.fold_tile(lanes, tile, group.chunks(rings, slot), rules)

        lanes = if_read(label, folded, lambda: lanes)
        if not group.writes:
            plgpu.commit_smem()  # all threads have read the slot
            turn = _refill(group, turn)
        return lanes, rings[0].after(slot), turn

    initial = reduction.identity(THREADS), turn.slot, turn
    lanes, _, turn = lax.fori_loop(0, group.share.count, fold_tile, initial)
    return lanes, turn


def _write_row(
    group: WarpGroup, k: jax.Array, rules: Rules, label: jax.Array | None, finished: Finished, turn: Turn
) -> Turn:
    """Writes the result of a row, and fills each slot anew as soon as its tile is written."""

    def write_tile(tile, turn):
        def written():
            for ring in group.other_rings:
                ring.wait(turn.slot)
            group.write_tile(k, tile, group.chunks(group.rings, turn.slot), rules, finished)

        if_read(label, written, lambda: group.write_zeros(k, tile))
        plgpu.commit_smem()
        # commit_smem is a barrier, too: nothing is written over the label's result any more.
        group.at_label(label, tile, functools.partial(group.write_label, k, tile))
        return _refill(group, turn)

    return lax.fori_loop(0, group.share.count, write_tile, turn)
