"""The whole-row kernel: rows that fit the registers of some threads, read once and written once.

One block of one warpgroup takes the next few rows: it loads them, reduces them and writes the result. What keeps the
memory busy meanwhile are the other blocks of the multiprocessor. 2 to 128 threads hold a row, so that short rows share
a warp, and reductions of rows of up to a warp need nothing but shuffles.

Chunks never leave their row. The last one ends with the row and overlaps the one before: what was seen before is masked
in the reduction, and written twice with the same value.
"""

import dataclasses
import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._rows.operation import NO_ROW

from . import arithmetic
from .extras import Extras, Rules
from .memory import load, store


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are laid out over the 128 threads of a block.

    Attributes:
      vector: elements that a thread loads at a time.
      lanes: threads that hold a row, a power of 2.
      repeat: how many rows such threads hold side by side.
    """

    vector: int
    lanes: int
    repeat: int

    @property
    def rows(self) -> int:
        """Rows a block."""
        return 128 // self.lanes * self.repeat

    @property
    def width(self) -> int:
        """Elements of a row that are loaded at a time."""
        return self.lanes * self.vector

    def starts(self, n: int) -> list[int]:
        """Where the chunks of a row of n elements begin."""
        return [min(i, n - self.width) for i in range(0, n, self.width)]

    @property
    def layout(self) -> Any:
        """Of a chunk, of shape (rows, width)."""
        tiles: tuple[tuple[int, ...], ...]
        warp_dims: tuple[int, ...]
        lane_dims: tuple[int, ...]
        if self.lanes < 32:  # a warp has several rows
            side = 32 // self.lanes
            tiles = ((4 * side, self.width), (side, self.width), (self.vector,))
            warp_dims, lane_dims = (-5,), (-3, -2)
        elif self.lanes == 32:
            tiles = ((4, self.width), (self.vector,))
            warp_dims, lane_dims = (-3,), (-2,)
        else:  # a row has several warps
            tiles = ((128 // self.lanes, self.width), (32 * self.vector,), (self.vector,))
            warp_dims, lane_dims = (-4, -3) if self.lanes == 64 else (-3,), (-2,)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1)


MOST_BYTES = 32 << 10  # of a row
_LANE_BYTES = 64  # of a thread's share of a row that has more than a warp


def plan(rows: int, n: int, itemsize: int, together: int = 0) -> Plan | None:
    """How to hold rows of n elements, with blocks of a divisor of `together` rows; None if too short or long."""
    vector = next((v for v in (8, 4, 2, 1) if v * itemsize <= 16 and n % v == 0 and n >= 2 * v), None)
    if vector is None or n * itemsize > MOST_BYTES:
        return None
    most = min(128, 1 << (n // vector).bit_length() - 1)
    lanes = min(most, max(32, pl.next_power_of_2(pl.cdiv(n * itemsize, _LANE_BYTES))))
    repeat = max(1, _LANE_BYTES // 2 * lanes // (n * itemsize))  # of rows shorter than a warp
    cut = Plan(vector, lanes, max(1, min(repeat, rows * lanes // 128)))
    if together % cut.rows:
        cut = Plan(vector, lanes, 1)
    while together % cut.rows and cut.lanes < most:
        cut = Plan(vector, 2 * cut.lanes, 1)
    return None if together % cut.rows else cut


def row_kernel(
    operation: str, rows: int, n: int, dtype: Any, plan: Plan, extras: Extras = Extras(), interpret: Any = None
):
    """The kernel of an operation on `rows` rows of n elements, of which there are at least plan.rows and plan.width.

    Args:
      operation, rows, n: what is asked for.
      dtype: of results of shape (rows, n).
      plan: how rows are laid out. Rows of a block must have neighbouring rows of the extras, or the same.
      extras: what comes beside the rows.
      interpret: Pallas interpreter parameters, for tests on a CPU.

    Returns:
      A function of the operands of shape (rows, n) and (rows,), and of the extras, of shape (their rows, n) and (their
      rows,), where booleans are bytes. It returns a tuple of arrays of the first two shapes.
    """
    full, number = jax.ShapeDtypeStruct((rows, n), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)
    *_, wide, narrow = arithmetic.SIGNATURES[operation]
    return plgpu.kernel(
        functools.partial(_body, operation, plan, extras),
        out_type=(full,) * wide + (number,) * narrow,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        grid=(rows // plan.rows,),
        grid_names=("block",),
        kernel_name=f"jaxsoft_{operation}_held",
        interpret=interpret,
    )


def _body(operation: str, plan: Plan, extras: Extras, *refs):
    in_refs, given_refs, beside, out_refs, number_refs = arithmetic.sorted_refs(operation, refs)
    extra_refs = dict(zip(extras.names, beside, strict=True))
    (rows, n), shape = in_refs[0].shape, (plan.rows, plan.width)
    starts = plan.starts(n)
    overlap = len(starts) * plan.width - n

    def new(chunks, neutral):
        """The chunks without what the last one of a row has seen before."""
        if not overlap or len(chunks) < len(starts):
            return chunks
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plan.layout)
        return [*chunks[:-1], jnp.where(column < overlap, neutral, chunks[-1])]

    def spread(number):
        return lax.broadcast_in_dim(number, shape, (0,))

    def row_sum(chunks):
        return jnp.sum(functools.reduce(operator.add, new(chunks, 0.0)), axis=1)

    def rules_of(first):
        """What the extras do to rows from this one on, and the place of a chunk that begins at an element.

        The place is where the chunk is read: what does not count of a row is not. What begins beyond its end is read at
        its beginning instead, which is there already, and does not count.
        """

        def number(name):
            index, same = extras.place(name, first)
            if same or plan.rows == 1:
                return extra_refs[name][index]
            return spread(plgpu.load(extra_refs[name].at[pl.ds(index, plan.rows)], optimized=False))

        scale, limit, label, instead = (number(name) if name in extras.names else None for name in "slih")

        def columns(start):
            known = limit is not None and not limit.shape
            return pl.ds(jnp.where(start < limit, start, 0) if known and start else start, plan.width)

        def chunk(name, start):
            index, same = extras.place(name, first)
            if same:
                return lax.broadcast_in_dim(load(extra_refs[name].at[index, columns(start)]), shape, (1,))
            return load(extra_refs[name].at[pl.ds(index, plan.rows), columns(start)], plan.layout)

        def counts(start, chunks):
            conditions = [chunk("w", start) != 0] if "w" in extras.names else []
            if limit is not None:
                column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plan.layout)
                conditions.append(column + start < limit)
            if extras.masked:
                conditions.append(chunks[0] != 0)
            return functools.reduce(jnp.logical_and, conditions)

        def at_label(start):
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plan.layout)
            return (column == label - start) | (label == NO_ROW)

        bias = functools.partial(chunk, "b") if "b" in extras.names else None
        rules = Rules(operation, scale, counts if extras.partial else None, bias)
        if label is not None:
            instead = 0.0 if instead is None else jnp.where(label == NO_ROW, 0.0, instead)
            rules = dataclasses.replace(rules, label=at_label, instead=instead)
        return rules, columns, limit

    def row_block(first):
        rules, columns, limit = rules_of(first)
        if limit is None or limit.shape or not 1 < len(starts) <= 8 or {*extras.names} & {"w", "b"}:
            return reduced(first, rules, columns, len(starts))
        # What does not count costs no arithmetic either: the kernel is compiled for the quarters of a row. Not where
        # that takes too long: the most of a row, or with a mask or a bias, half a minute.
        counted = sum((start < limit).astype(jnp.int32) for start in starts)
        quarters = sorted({-(-len(starts) * k // 4) for k in (1, 2, 3, 4)})
        for fewer, most in itertools.pairwise([-1, *quarters]):
            enough = (counted > fewer) & (counted <= most)
            pl.when(enough)(functools.partial(reduced, first, rules, columns, most))

    def reduced(first, rules, columns, most):
        """Some rows, of which no more than the first so many chunks count."""
        block_rows = pl.ds(first, plan.rows)

        def prepared(start):
            return rules.prepare(start, [load(ref.at[block_rows, columns(start)], plan.layout) for ref in in_refs])

        chunks_of, counts = zip(*map(prepared, starts[:most]), strict=True)
        arrays = list(zip(*chunks_of, strict=True))
        given = tuple(load(ref.at[block_rows]) for ref in given_refs)
        totals: arithmetic.Lanes = ()
        if operation in arithmetic.SCORES:
            scores = [rules.without_label(start, x) for start, x in zip(starts, arrays[0], strict=False)]
            m = jnp.max(functools.reduce(jnp.maximum, new(scores, -jnp.inf)), axis=1)
            ref = spread(arithmetic.reference(m))
            powers = [jnp.exp(x - ref) for x in scores]
            totals = m, row_sum(powers)
        elif operation in arithmetic.SUMS:
            totals = (row_sum([arithmetic.terms(operation, *chunks) for chunks in zip(*arrays, strict=True)]),)
        for ref, total in zip(number_refs, totals, strict=False):
            store(ref.at[block_rows], total)
        if not out_refs:
            return
        finished = arithmetic.finish(operation, totals, given, spread)
        results = [
            rules.conclude(counted, finished(*chunks)) for chunks, counted in zip(chunks_of, counts, strict=True)
        ]
        nothing = plgpu.layout_cast(jnp.full(shape, rules.nothing, jnp.float32), plan.layout)
        for start, result in itertools.zip_longest(starts, results, fillvalue=nothing):
            store(out_refs[0].at[block_rows, pl.ds(start, plan.width)], rules.with_label(start, result))

    block = lax.axis_index("block")
    row_block(extras.first_row(block, plan.rows))
    if rows % plan.rows:  # the rows that are left, with some of the last block's own

        @pl.when(block == rows // plan.rows - 1)
        def _():
            row_block(rows - plan.rows)
