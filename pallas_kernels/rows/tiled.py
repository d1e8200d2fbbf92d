"""The tiled kernel: rows of any length, in tiles that asynchronous copies bring to shared memory.

A row is dealt out by tiles to the warpgroups of a block, or of a cluster of blocks. Each streams its tiles through a
ring of its own, folds them into a state for each thread, and, when the states of all are combined, goes over its tiles
once more to write the result. So a row whose tiles fit the rings is read once. An array that only the result needs has
a ring of its own, which need not hold the row. Of a longer row, some tiles stay in registers, and it is gone over
backwards then, so that only what has left the rings is read again, most recently used tiles first, while the L2 may
still hold them. Where blocks take several rows, in turn, the next row's tile takes a tile's place as soon as that is
written.

- Every warpgroup fills and empties its ring by itself, so that the only thing that warpgroups wait for is each other's
  states, once a row.
- Reductions over a block that JAX writes by itself use one scratch area a block, where several warpgroups race (JAX
  0.11.2). So threads put their states in shared memory, and every warp combines all of them by itself.
- Tiles never leave their row. The last one ends with it and overlaps the one before: elements seen before are masked in
  the fold, and written twice with the same value. No copy is out of bounds, and copies need no tensor map, with its 256
  elements a dimension.
- A row's label is one element of one tile: it becomes -inf in shared memory before that tile is folded, and its result
  is written over the tile's. Nothing else of a row is compared with the label.
- Results go from registers to global memory, in 16-byte stores, not through shared memory, which is left to the rings.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._rows.operation import NO_ROW

from . import arithmetic, cluster
from .extras import Extras, Rules
from .memory import load, load_as_is, load_in_every_warp, store
from .tiling import THREADS, Plan


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
    _, _, wide, narrow = arithmetic.SIGNATURES[operation]
    full = jax.ShapeDtypeStruct((rows, n // plan.vector, plan.vector), dtypes[1])
    number = jax.ShapeDtypeStruct((rows,), jnp.float32)
    slots = [plan.warpgroups * size for size in _ring_sizes(operation, plan)]
    numbers = len(arithmetic.identity(operation, 1)) // 2
    # States of two rows, as the first warpgroup to have its next one ready must not write over what others still read.
    states = plgpu.SMEM((numbers, 2, plan.warpgroups * THREADS), jnp.float32)
    clustered = plan.cluster > 1
    mailbox = plgpu.SMEM((numbers, 2, plan.cluster), jnp.float32), plgpu.SMEM((2,), jnp.int32)
    return plgpu.kernel(
        functools.partial(_body, operation, plan, extras),
        out_type=(full,) * wide + (number,) * narrow,
        scratch_types=(
            [plgpu.SMEM((count, plan.chunks * THREADS, plan.vector), dtypes[0]) for count in slots],
            [plgpu.Barrier(num_arrivals=1, num_barriers=count) for count in slots],
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


def _ring_sizes(operation: str, plan: Plan) -> list[int]:
    """Tiles in a warpgroup's ring of each row operand."""
    folded = arithmetic.folded(operation)
    return [plan.ring if i in folded else plan.later or plan.ring for i in range(arithmetic.SIGNATURES[operation][0])]


def _body(operation: str, plan: Plan, extras: Extras, *refs):
    *in_global, rings, loaded, states, posted, mailbox = refs
    in_refs, given_refs, beside, out_refs, number_refs = arithmetic.sorted_refs(operation, in_global)
    extra_refs = dict(zip(extras.names, beside, strict=True))
    numbers = states.shape[0]
    rows, n = in_refs[0].shape[0], in_refs[0].shape[1] * plan.vector
    chunk = THREADS * plan.vector
    # Which arrays the fold needs, and which the result needs beside them.
    arrays, folded, sizes = tuple(range(len(in_refs))), arithmetic.folded(operation), _ring_sizes(operation, plan)
    others = tuple(i for i in arrays if i not in folded)
    writes = operation != "state"
    again = bool(folded) and writes and plan.share > plan.ring  # tiles that have left the ring are read again
    overlap = plan.tiles * plan.tile - n  # of the last tile with the one before
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((THREADS, plan.vector), (32, plan.vector))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
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
        return jnp.minimum((base + tile) * (plan.chunks * THREADS), (n - plan.tile) // plan.vector)

    def number(name, k):
        return extra_refs[name][extras.place(name, first + k * stride)[0]]

    def label_of(k):
        return number("i", k) if "i" in extras.names else None

    def if_read(label, act, otherwise=lambda: None):
        """Does something for a row with this label, or something else if it is not to be read."""
        return act() if label is None else lax.cond(label == NO_ROW, otherwise, act)

    def at_label(label, tile, act):
        """Does something with the label's place in a tile, in vectors and in elements, if that has it."""
        if label is not None:
            index = label - start(tile) * plan.vector
            here = (index >= 0) & (index < plan.tile)
            pl.when(here)(lambda: act(lax.div(index, plan.vector), lax.rem(index, plan.vector)))

    def start_load(k, tile, slot, which):
        """Starts the copies of a tile of the cluster's k-th row, if it has one and is to be read.

        A tile that begins beyond what counts is not read, but the row's beginning in its place, which is in the L2.
        """
        if not which:
            return

        def copy():
            begin = start(tile)
            if "l" in extras.names:
                begin = jnp.where(begin * plan.vector < number("l", k), begin, 0)
            place = pl.ds(begin, plan.chunks * THREADS)
            for i in which:
                plgpu.copy_gmem_to_smem(
                    in_refs[i].at[first + k * stride, place],
                    rings[i].at[warpgroup * sizes[i] + slot],
                    loaded[i].at[warpgroup * sizes[i] + slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        pl.when(k < count)(lambda: if_read(label_of(k), copy))

    def wait(slot, which):
        for i in which:
            plgpu.barrier_wait(loaded[i].at[warpgroup * sizes[i] + slot])

    def columns():
        """Where the elements of a chunk are in it."""
        vectors, elements = (
            plgpu.broadcasted_iota(jnp.int32, (THREADS, plan.vector), axis, layout=layout) for axis in (0, 1)
        )
        return vectors * plan.vector + elements

    def rules_of(k):
        """What the extras do to the cluster's k-th row. Places are in vectors."""
        scale, limit = (number(name, k) if name in extras.names else None for name in "sl")

        def chunk(name, begin):
            if limit is not None:
                begin = jnp.where(begin * plan.vector < limit, begin, 0)
            row, _ = extras.place(name, first + k * stride)
            return load(extra_refs[name].at[row, pl.ds(begin, THREADS)], layout)

        def counts(begin, chunks):
            conditions = [chunk("w", begin) != 0] if "w" in extras.names else []
            if limit is not None:
                conditions.append(columns() + begin * plan.vector < limit)
            return functools.reduce(jnp.logical_and, conditions + [chunks[0] != 0] * extras.masked)

        bias = functools.partial(chunk, "b") if "b" in extras.names else None
        return Rules(operation, scale, counts if extras.partial else None, bias)

    def in_rings(slots):
        """What the chunks of a tile hold of each array: those that have a slot here."""
        for begin in range(0, plan.chunks * THREADS, THREADS):
            places = {i: rings[i].at[warpgroup * sizes[i] + slot, pl.ds(begin, THREADS)] for i, slot in slots.items()}
            yield [load_as_is(places[i], layout) if i in places else None for i in arrays]

    def prepared(tile, chunks, rules):
        """Where the chunks of a tile begin in the row, in vectors, what they hold for the plain kernel, what counts."""
        for i, values in enumerate(chunks):
            begin = start(tile) + i * THREADS
            values = [None if x is None else x.astype(jnp.float32) for x in values]
            yield begin, *rules.prepare(begin, values)

    def take(lanes, tile, chunks, rules):
        """Folds a tile: of the last one, without what the tile before has too."""
        scores = operation in arithmetic.SCORES
        accumulate = arithmetic.accumulate_scores if scores else arithmetic.accumulate_sum
        values = [x for _, x, _ in prepared(tile, chunks, rules)]
        values = [x[0] if scores else arithmetic.terms(operation, *x) for x in values]
        if not overlap:
            return accumulate(lanes, values)

        def without_overlap():
            neutral = -jnp.inf if scores else 0.0
            new = list(values)
            for i in range(pl.cdiv(overlap, chunk)):
                new[i] = jnp.where(columns() + i * chunk < overlap, neutral, new[i])
            return accumulate(lanes, new)

        last = base + tile == plan.tiles - 1
        return lax.cond(last, without_overlap, lambda: accumulate(lanes, values))

    def write(tile, chunks, k, rules, finished):
        for begin, values, counts in prepared(tile, chunks, rules):
            result = rules.conclude(counts, finished(*values))
            store(out_refs[0].at[first + k * stride, pl.ds(begin, THREADS)], result)

    def write_zeros(tile, k):
        zeros = plgpu.layout_cast(jnp.zeros((THREADS, plan.vector)), layout)
        for begin in range(0, plan.chunks * THREADS, THREADS):
            store(out_refs[0].at[first + k * stride, pl.ds(start(tile) + begin, THREADS)], zeros)

    def after(slot, size):
        return jnp.where(slot == size - 1, 0, slot + 1)

    def refill(turn, which):
        """Fills the slot whose turn it is with a tile of this row or of one to come, and says what comes next."""
        slot, k, tile = turn
        start_load(k, tile, slot, which)
        last = tile == share - 1
        return after(slot, sizes[which[0]]), jnp.where(last, k + 1, k), jnp.where(last, 0, tile + 1)

    def filled(which):
        """Fills rings to begin with, and says what comes next."""
        turn = 0, 0, 0
        for _ in range(sizes[which[0]]):
            turn = refill(turn, which)
        return turn

    def combined(k, lanes):
        """The row's totals, from the states of all threads that share it."""
        turn = lax.rem(k, 2)
        for i, value in enumerate(arithmetic.state(lanes)):
            states[i, turn, pl.ds(warpgroup * THREADS, THREADS)] = value
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

    groups = [folded, others] if plan.later else [arrays]  # whose rings turn together

    def row(k, turns):
        """One row of which the ring keeps what is folded until it is written, or that is gone over once."""
        rules, totals, label = rules_of(k), (), label_of(k)
        if folded:

            def fold(tile, state):
                lanes, slot, turn = state

                def without_label(vector, element):
                    rings[0][warpgroup * sizes[0] + slot, vector, element] = jnp.asarray(-jnp.inf, rings[0].dtype)
                    plgpu.commit_smem()  # for all threads

                def taken():
                    wait(slot, folded)
                    at_label(label, tile, without_label)
                    return take(lanes, tile, in_rings(dict.fromkeys(folded, slot)), rules)

                lanes = if_read(label, taken, lambda: lanes)
                if not writes:
                    plgpu.commit_smem()  # all threads have read the slot
                    turn = refill(turn, folded)
                return lanes, after(slot, plan.ring), turn

            turn, *rest = turns
            lanes, _, turn = lax.fori_loop(0, share, fold, (arithmetic.identity(operation, THREADS), turn[0], turn))
            turns, totals = [turn, *rest], combined(k, lanes)
        finish = finished(k, totals)
        if writes:

            def visit(tile, turns):
                slots = {i: slot for (slot, *_), which in zip(turns, groups, strict=True) for i in which}

                def written():
                    for i in others:
                        wait(slots[i], (i,))
                    write(tile, in_rings(slots), k, rules, finish)

                def with_label(vector, element):
                    result = number("h", k).astype(out_refs[0].dtype)
                    out_refs[0][first + k * stride, start(tile) + vector, element] = result

                if_read(label, written, lambda: write_zeros(tile, k))
                plgpu.commit_smem()
                at_label(label, tile, with_label)  # after what other threads have written
                return [refill(turn, which) for turn, which in zip(turns, groups, strict=True)]

            turns = lax.fori_loop(0, share, visit, turns)
        return turns

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
            chunks = list(in_rings(dict.fromkeys(folded, slot)))
            lanes = take(lanes, tile, chunks, rules)

            @pl.when(tile + plan.ring < share)
            def _():
                plgpu.commit_smem()
                load_folded(k, tile + plan.ring, slot)

            return lanes, chunks

        held, lanes = [], arithmetic.identity(operation, THREADS)
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
            write(tile, in_rings(dict.fromkeys(arrays, slot)), k, rules, finish)
            plgpu.commit_smem()

            pl.when(tile >= on_chip)(lambda: start_load(k, tile - plan.ring, slot, arrays))
            pl.when(tile < on_chip)(lambda: begin_next(load_folded, tile))
            pl.when((tile >= plan.ring) & (tile < on_chip))(lambda: start_load(k, tile - plan.ring, slot, others))
            pl.when(tile < plan.ring)(lambda: begin_next(load_others, tile))

        lax.fori_loop(0, share - plan.held, visit, None)
        for tile in reversed(range(plan.held)):
            slot = slot_of(tile)
            wait(slot, others)
            both = zip(held[tile], in_rings(dict.fromkeys(others, slot)), strict=True)
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
        lax.fori_loop(0, count, row, [filled(which) for which in groups])
