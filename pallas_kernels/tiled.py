"""The tiled kernel: rows of any length, in tiles that asynchronous copies bring to shared memory.

A row is dealt out by tiles to the warpgroups of a block, or of a cluster of blocks. Each streams its tiles through a
ring of its own, folds them into a state for each thread, and, when the states of all are combined, goes over its tiles
once more to write the result. So a row whose tiles fit the rings is read once. Of a longer row, some tiles stay in
registers, and it is gone over backwards then, so that only what has left the rings is read again, most recently used
tiles first, while the L2 may still hold them. Where blocks take several rows, in turn, the next row's tile takes a
tile's place as soon as that is written.

- Every warpgroup fills and empties its ring by itself, so that the only thing that warpgroups wait for is each other's
  states, once a row.
- Reductions over a block that JAX writes by itself use one scratch area a block, where several warpgroups race (JAX
  0.11.2). So threads put their states in shared memory, and every warp combines all of them by itself.
- Tiles never leave their row. The last one ends with it and overlaps the one before: elements seen before are masked in
  the fold, and written twice with the same value. No copy is out of bounds, and copies need no tensor map, with its 256
  elements a dimension.
- Results go from registers to global memory, in 16-byte stores, not through shared memory, which is left to the rings.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import arithmetic, cluster
from .extras import Extras, Rules
from .memory import load, load_as_is, load_in_every_warp, store

_THREADS = 128  # of a warpgroup


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
    """

    vector: int
    chunks: int
    tiles: int
    ring: int
    warpgroups: int
    cluster: int
    clusters: int
    held: int = 0

    @property
    def tile(self) -> int:
        """Elements a tile."""
        return _THREADS * self.vector * self.chunks

    @property
    def members(self) -> int:
        """Warpgroups that share a row."""
        return self.warpgroups * self.cluster

    @property
    def share(self) -> int:
        """The most tiles of a row that a warpgroup has."""
        return -(-self.tiles // self.members)


_RING_BYTES = 216 << 10  # of all rings of a block, of the 227 KiB of shared memory that a multiprocessor has
FEW_BYTES = 32 << 20  # rows that together have fewer leave multiprocessors idle, but for clusters


def plan(operation: str, rows: int, n: int, itemsize: int, multiprocessors: int) -> Plan | None:
    """How to cut up rows of n elements; None where copies cannot be aligned, or rows are too short.

    Rows of which several fit the shared memory of a multiprocessor, or of a cluster, get a block or a cluster each: the
    GPU deals them out as others end, so the faster multiprocessors have more of them, and what one waits for, others
    use. Of longer rows only one fits: there clusters stay, and the next row's tiles take the place of this one's.
    """
    vector, arrays = 16 // itemsize, arithmetic.SIGNATURES[operation][0]
    row_bytes = n * itemsize * arrays
    if n % vector or n < 2 * _THREADS * vector:
        return None
    warpgroups, cluster, chunks, most, stays = 4, 1, 4, 32, False
    few = rows * row_bytes <= FEW_BYTES
    narrow = itemsize == 2 and arrays == 1  # rows with most to compute a byte
    if few:
        # As many blocks a row as fill the GPU, and as hold it in 64 KB each.
        wanted = max(pl.cdiv(128, rows), pl.cdiv(row_bytes, 64 << 10))
        warpgroups, cluster = 2, min(16, pl.next_power_of_2(wanted))
    elif operation == "state":  # which goes over a row once, so that it need not fit: several blocks read at a time
        warpgroups, cluster, most = 2, min(16, max(1, pl.next_power_of_2(2 * multiprocessors // rows + 1) // 2)), 3
    elif row_bytes <= (96 << 10 if narrow else 192 << 10):
        chunks = 2 if narrow else 4
    elif arrays == 1 and row_bytes <= 256 << 10:
        warpgroups, cluster = 2, 2 if row_bytes <= 128 << 10 else 4
    else:
        cluster, stays = min(16, pl.next_power_of_2(pl.cdiv(row_bytes, 136 << 10))), True
        if arrays == 1 and not narrow:
            cluster = max(8, cluster)
    while cluster > 1 and n < 2 * warpgroups * cluster * _THREADS * vector:
        cluster //= 2
    while warpgroups > 1 and n < 2 * warpgroups * _THREADS * vector:
        warpgroups //= 2

    def cut(warpgroups, chunks):
        # Few tiles, that go up into the members, without much overlap: each costs 256 elements beside its own.
        members = warpgroups * cluster
        least = members if few else 2 * members - 1
        sizes = [c for c in range(1, chunks + 1) if n >= least * c * _THREADS * vector] or [1]

        def cost(count):
            tile = _THREADS * vector * count
            return pl.cdiv(pl.cdiv(n, tile), members) * (tile + 256), -count

        best = min(sizes, key=cost)
        tiles = pl.cdiv(n, _THREADS * vector * best)
        ring = min(most, 32 // warpgroups, _RING_BYTES // (_THREADS * 16 * best * arrays * warpgroups))
        ring = ring if stays else min(ring, pl.cdiv(tiles, members))
        # Of clusters that stay, one that finds no place would begin when the others end: some multiprocessors are left
        # out, as it varies from chip to chip on how many of them clusters can be placed.
        fill = multiprocessors if cluster <= 2 else multiprocessors * 7 // 8
        whole = Plan(vector, best, tiles, ring, warpgroups, cluster, min(rows, fill // cluster) if stays else rows)
        if not stays or whole.share <= ring or warpgroups > 3:
            return whole
        # Three warpgroups leave 168 registers to a thread; 16 bits take twice theirs while they are computed with. Of
        # log_softmax_vjp the fold needs one array, and a slot has room for the other of one tile.
        registers, of = (48, 1) if operation == "log_softmax_vjp" else (80, arrays)
        return dataclasses.replace(whole, held=min(registers * itemsize // (16 * best * of), whole.share - ring, ring))

    found = cut(warpgroups, chunks)
    if stays and found.share > found.ring:  # then what is on chip counts most
        others = [found, *(cut(*sizes) for sizes in ((3, 4), (4, 2), (3, 2)))]
        found = max(others, key=lambda cut: min(1, (cut.ring + cut.held) / cut.share))
    return found


def row_kernel(
    operation: str,
    rows: int,
    n: int,
    dtypes: tuple[Any, Any],
    plan: Plan,
    extras: Extras = Extras(),
    interpret: Any = None,
):
    """The kernel of an operation on `rows` rows of n elements.

    Args:
      operation, rows, n: what is asked for.
      dtypes: of operands and of results of shape (rows, n).
      plan: how rows are cut up.
      extras: what comes beside the rows.
      interpret: Pallas interpreter parameters, for tests on a CPU. It knows no clusters.

    Returns:
      A function of the operands of shape (rows, n / vector, vector) and (rows,), and of the extras, of shape (their
      rows, n / vector, vector) and (their rows,), where booleans are bytes. It returns a tuple of arrays of the first
      two shapes.
    """
    of_rows, _, wide, narrow = arithmetic.SIGNATURES[operation]
    full = jax.ShapeDtypeStruct((rows, n // plan.vector, plan.vector), dtypes[1])
    number = jax.ShapeDtypeStruct((rows,), jnp.float32)
    slots, numbers = plan.warpgroups * plan.ring, len(arithmetic.identity(operation, 1)) // 2
    ring = plgpu.SMEM((slots, plan.chunks * _THREADS, plan.vector), dtypes[0])
    # States of two rows, as the first warpgroup to have its next one ready must not write over what others still read.
    states = plgpu.SMEM((numbers, 2, plan.warpgroups * _THREADS), jnp.float32)
    clustered = plan.cluster > 1
    mailbox = plgpu.SMEM((numbers, 2, plan.cluster), jnp.float32), plgpu.SMEM((2,), jnp.int32)
    return plgpu.kernel(
        functools.partial(_body, operation, plan, extras),
        out_type=(full,) * wide + (number,) * narrow,
        scratch_types=(
            [ring] * of_rows,
            [plgpu.Barrier(num_arrivals=1, num_barriers=slots) for _ in range(of_rows)],
            states,
            plgpu.Barrier(num_arrivals=plan.warpgroups),
            mailbox if clustered else (),
        ),
        # The kernel places its own barriers: a slot is refilled after commit_smem, and what else is written is read
        # after a barrier.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(plan.cluster,) if clustered else (),
        cluster_names=("peer",) if clustered else (),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        kernel_name=f"jaxsoft_{operation}_tiled",
        interpret=interpret,
    )


def _body(operation: str, plan: Plan, extras: Extras, *refs):
    *in_global, rings, loaded, states, posted, mailbox = refs
    in_refs, given_refs, beside, out_refs, number_refs = arithmetic.sorted_refs(operation, in_global)
    extra_refs = dict(zip(extras.names, beside, strict=True))
    numbers = states.shape[0]
    rows, n = in_refs[0].shape[0], in_refs[0].shape[1] * plan.vector
    chunk = _THREADS * plan.vector
    folds, writes = operation != "logsumexp_vjp", operation != "state"
    again = folds and writes and plan.share > plan.ring  # tiles that have left the ring are read again
    # Which arrays the fold needs, and which the result needs beside them.
    arrays = tuple(range(len(in_refs)))
    folded = () if not folds else (1,) if operation == "log_softmax_vjp" else arrays
    others = tuple(i for i in arrays if i not in folded)
    overlap = plan.tiles * plan.tile - n  # of the last tile with the one before
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((_THREADS, plan.vector), (32, plan.vector))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
    )
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("peer") if plan.cluster > 1 else 0
    member = block * plan.warpgroups + warpgroup
    # This warpgroup's tiles of a row: neighbours, so that the last one and the one it overlaps have the same writer.
    base = lax.div(member * plan.tiles, plan.members)
    share = lax.div((member + 1) * plan.tiles, plan.members) - base
    first, stride = lax.axis_index("cluster"), plan.clusters
    count = lax.div(rows - first + stride - 1, stride)  # this cluster's rows

    def start(tile):
        """Where the warpgroup's tile begins, in vectors."""
        return jnp.minimum((base + tile) * (plan.chunks * _THREADS), (n - plan.tile) // plan.vector)

    def number(name, k):
        return extra_refs[name][extras.place(name, first + k * stride)[0]]

    def start_load(k, tile, slot, which):
        """Starts the copies of a tile of the cluster's k-th row, if it has one.

        A tile that begins beyond what counts is not read, but the row's beginning in its place, which is in the L2.
        """
        if not which:
            return

        @pl.when(k < count)
        def _():
            begin = start(tile)
            if "l" in extras.names:
                begin = jnp.where(begin * plan.vector < number("l", k), begin, 0)
            place = pl.ds(begin, plan.chunks * _THREADS)
            for i in which:
                plgpu.copy_gmem_to_smem(
                    in_refs[i].at[first + k * stride, place],
                    rings[i].at[warpgroup * plan.ring + slot],
                    loaded[i].at[warpgroup * plan.ring + slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

    def wait(slot, which):
        for i in which:
            plgpu.barrier_wait(loaded[i].at[warpgroup * plan.ring + slot])

    def columns():
        """Where the elements of a chunk are in it."""
        vectors, elements = (
            plgpu.broadcasted_iota(jnp.int32, (_THREADS, plan.vector), axis, layout=layout) for axis in (0, 1)
        )
        return vectors * plan.vector + elements

    def rules_of(k):
        """What the extras do to the cluster's k-th row. Places are in vectors."""
        scale, limit = (number(name, k) if name in extras.names else None for name in "sl")

        def chunk(name, begin):
            if limit is not None:
                begin = jnp.where(begin * plan.vector < limit, begin, 0)
            row, _ = extras.place(name, first + k * stride)
            return load(extra_refs[name].at[row, pl.ds(begin, _THREADS)], layout)

        def counts(begin, chunks):
            conditions = [chunk("w", begin) != 0] if "w" in extras.names else []
            if limit is not None:
                conditions.append(columns() + begin * plan.vector < limit)
            return functools.reduce(jnp.logical_and, conditions + [chunks[0] != 0] * extras.masked)

        bias = functools.partial(chunk, "b") if "b" in extras.names else None
        return Rules(operation, scale, counts if extras.partial else None, bias)

    def in_ring(slot, which):
        """What the chunks of a tile hold of each array."""
        for begin in range(0, plan.chunks * _THREADS, _THREADS):
            places = [ring.at[warpgroup * plan.ring + slot, pl.ds(begin, _THREADS)] for ring in rings]
            yield [load_as_is(place, layout) if i in which else None for i, place in enumerate(places)]

    def prepared(tile, chunks, rules):
        """Where the chunks of a tile begin in the row, in vectors, what they hold for the plain kernel, what counts."""
        for i, values in enumerate(chunks):
            begin = start(tile) + i * _THREADS
            values = [None if x is None else x.astype(jnp.float32) for x in values]
            yield begin, *rules.prepare(begin, values)

    def new(tile, chunks, rules):
        """What is folded of a tile: without what the tile before has too."""
        neutral = -jnp.inf if operation in arithmetic.SCORES else 0.0
        seen = jnp.where(base + tile == plan.tiles - 1, overlap, 0)
        for i, (_, values, _) in enumerate(prepared(tile, chunks, rules)):
            x = values[0] if operation in arithmetic.SCORES else arithmetic.terms(operation, *values)
            yield jnp.where(columns() + i * chunk < seen, neutral, x) if i * chunk < overlap else x

    def write(tile, chunks, k, rules, finished):
        for begin, values, counts in prepared(tile, chunks, rules):
            result = rules.conclude(counts, finished(*values))
            store(out_refs[0].at[first + k * stride, pl.ds(begin, _THREADS)], result)

    accumulate = arithmetic.accumulate_scores if operation in arithmetic.SCORES else arithmetic.accumulate_sum

    def after(slot):
        return jnp.where(slot == plan.ring - 1, 0, slot + 1)

    def refill(ahead, slot):
        """Fills a slot with the next tile of this row or of one to come, and says which is the one after that."""
        plgpu.commit_smem()  # all threads have read it
        k, tile = ahead
        start_load(k, tile, slot, arrays)
        last = tile == share - 1
        return jnp.where(last, k + 1, k), jnp.where(last, 0, tile + 1)

    def combined(k, lanes):
        """The row's totals, from the states of all threads that share it."""
        turn = lax.rem(k, 2)
        for i, value in enumerate(arithmetic.state(lanes)):
            states[i, turn, pl.ds(warpgroup * _THREADS, _THREADS)] = value
        plgpu.barrier_arrive(posted)
        plgpu.barrier_wait(posted)
        totals = arithmetic.total([load_in_every_warp(states.at[i, turn]) for i in range(numbers)])
        if plan.cluster == 1:
            return totals
        pl.when(warpgroup == 0)(lambda: cluster.send(plan.cluster, turn, block, mailbox, totals))
        return cluster.receive(plan.cluster, turn, mailbox)

    def finished(k, totals):
        row = first + k * stride
        given = tuple(ref[row] for ref in given_refs)
        if number_refs:

            @pl.when(member == 0)
            def _():
                for ref, value in zip(number_refs, totals, strict=True):
                    ref[row] = value

        return arithmetic.finish(operation, totals, given, lambda v: v) if writes else None

    def row(k, state):
        """One row whose tiles stay in the ring until they are written, or that is gone over once."""
        (begin, ahead), rules = state, rules_of(k)
        totals = ()
        if folds:

            def fold(tile, state):
                lanes, slot, ahead = state
                wait(slot, folded)
                lanes = accumulate(lanes, list(new(tile, in_ring(slot, folded), rules)))
                return lanes, after(slot), ahead if writes else refill(ahead, slot)

            lanes, slot, ahead = lax.fori_loop(0, share, fold, (arithmetic.identity(operation, _THREADS), begin, ahead))
            totals = combined(k, lanes)
        finish = finished(k, totals)
        if writes:

            def visit(tile, state):
                slot, ahead = state
                wait(slot, others)
                write(tile, in_ring(slot, arrays), k, rules, finish)
                return after(slot), refill(ahead, slot)

            slot, ahead = lax.fori_loop(0, share, visit, (begin, ahead))
        return slot, ahead

    def load_folded(k, tile, slot):
        """Starts the copies of what the fold needs of a tile."""
        start_load(k, tile, slot, folded)

    def load_others(k, tile, slot):
        """Starts the copies of what the fold does not need of the last tile that comes to a slot, after this one."""
        start_load(k, tile + lax.div(share - 1 - tile, jnp.int32(plan.ring)) * plan.ring, slot, others)

    def long_row(k, _):
        """One row of which registers hold the first tiles, if any, and the ring keeps the last.

        The slots' order turns round from row to row, so that the next row's first tile is in the slot that is free
        first. What the fold does not need waits in the slots for the result.
        """
        odd, rules = lax.rem(k, 2), rules_of(k)
        on_chip = plan.held + plan.ring

        def slot_of(tile):
            turned = plan.ring - 1 - (tile + -plan.held % plan.ring) % plan.ring
            return jnp.where(odd == 1, turned, tile % plan.ring)

        def fold(tile, lanes):
            slot = slot_of(tile)
            wait(slot, folded)
            chunks = list(in_ring(slot, folded))
            lanes = accumulate(lanes, list(new(tile, chunks, rules)))

            @pl.when(tile + plan.ring < share)
            def _():
                plgpu.commit_smem()
                load_folded(k, tile + plan.ring, slot)

            return lanes, chunks

        held, lanes = [], arithmetic.identity(operation, _THREADS)
        for tile in range(plan.held):
            lanes, chunks = fold(tile, lanes)
            held.append(chunks)
        lanes = lax.fori_loop(plan.held, share, lambda tile, lanes: fold(tile, lanes)[0], lanes)
        finish = finished(k, combined(k, lanes))

        def begin_next(load, tile):
            """Starts a copy for the next row in the slot of a tile, which is the last on chip that has been there."""
            load(k + 1, on_chip - 1 - tile, slot_of(tile))

        if held:  # to where nothing came after what registers hold now
            plgpu.commit_smem()
            lax.fori_loop(share, on_chip, lambda tile, _: begin_next(load_folded, tile), None)

        def visit(step, _):
            tile = share - 1 - step
            slot = slot_of(tile)
            pl.when(step >= plan.ring)(lambda: wait(slot, folded))
            wait(slot, others)
            write(tile, in_ring(slot, arrays), k, rules, finish)
            plgpu.commit_smem()

            pl.when(tile >= on_chip)(lambda: start_load(k, tile - plan.ring, slot, arrays))
            pl.when(tile < on_chip)(lambda: begin_next(load_folded, tile))
            pl.when((tile >= plan.ring) & (tile < on_chip))(lambda: start_load(k, tile - plan.ring, slot, others))
            pl.when(tile < plan.ring)(lambda: begin_next(load_others, tile))

        lax.fori_loop(0, share - plan.held, visit, None)
        for tile in reversed(range(plan.held)):
            slot = slot_of(tile)
            wait(slot, others)
            both = zip(held[tile], in_ring(slot, others), strict=True)
            chunks = [[y if x is None else x for x, y in zip(*chunk, strict=True)] for chunk in both]
            write(tile, chunks, k, rules, finish)
            if others:
                plgpu.commit_smem()
                begin_next(load_others, tile + plan.ring)

    if plan.cluster > 1:
        cluster.open_mailbox(mailbox)
    if again:
        for slot in range(plan.ring):
            load_folded(0, slot, slot)
            load_others(0, slot, slot)
        lax.fori_loop(0, count, long_row, None)
    else:
        ahead = 0, 0
        for slot in range(plan.ring):
            ahead = refill(ahead, slot)
        lax.fori_loop(0, count, row, (0, ahead))
