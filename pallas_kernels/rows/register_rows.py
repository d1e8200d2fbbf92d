"""The whole-row kernel: rows that fit the registers of some threads, read once and written once.

A block of one warp group takes the next few rows: it loads them, reduces them and writes the result. Meanwhile the
other blocks of the multiprocessor keep the memory busy. 2 to 128 threads hold a row, so that short rows share a warp,
and reductions of rows of up to a warp need nothing but shuffles.

Chunks never leave their row. The last one ends with the row and overlaps the one before: the elements that both have
are masked in the reduction, and written twice with the same value.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._rows.spec import NO_ROW, RowExtra, RowSpec

from .. import versions
from . import fold, operations
from .extras import Extras, LabelExtra, Name, Prepared, Rules
from .fold import State, reference
from .memory import load, store
from .operations import References, Signature
from .plan import THREADS, WARP, RegisterPlan

# Where rows have a limit, the kernel is compiled for each quarter of a row that may count, if a row has no more chunks
# than this. For the longest rows, or beside a mask or a bias, compiling would take half a minute.
_MOST_CHUNKS_IN_QUARTERS = 8


def row_kernel(
    operation: RowSpec,
    rows: int,
    n: int,
    dtype: Any,
    plan: RegisterPlan,
    extras: Extras = Extras(),
):
    """The kernel of an operation on `rows` rows of n elements, of which there are at least plan.rows and plan.width.

    Args:
      operation, rows, n: what is asked for.
      dtype: of results of shape (rows, n).
      plan: how rows are laid out. Rows of a block must have neighbouring rows of the extras, or the same.
      extras: what comes beside the rows.

    Returns:
      A function of the operands of shape (rows, n) and (rows,), and of the extras, of shape (their rows, n) and (their
      rows,), where booleans are bytes. It returns a tuple of arrays of the first two shapes.
    """
    full, number = jax.ShapeDtypeStruct((rows, n), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)
    signature = Signature.of(operation)
    return versions.kernel(
        functools.partial(_body, operation, plan, extras),
        out_type=(full,) * signature.row_results + (number,) * signature.number_results,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        grid=(rows // plan.rows,),
        grid_names=("block",),
        kernel_name=f"jaxsoft_{operation.name}_registers",
    )


def layout(plan: RegisterPlan) -> Any:
    """How a chunk, of shape (rows of a block, width), lies in the registers of a warp group."""
    tiles: tuple[tuple[int, ...], ...]
    warp_dims: tuple[int, ...]
    lane_dims: tuple[int, ...]
    if plan.lanes < WARP:  # a warp has several rows
        side = WARP // plan.lanes
        tiles = ((4 * side, plan.width), (side, plan.width), (plan.vector,))
        warp_dims, lane_dims = (-5,), (-3, -2)
    elif plan.lanes == WARP:
        tiles = ((4, plan.width), (plan.vector,))
        warp_dims, lane_dims = (-3,), (-2,)
    else:  # a row has several warps
        tiles = ((THREADS // plan.lanes, plan.width), (WARP * plan.vector,), (plan.vector,))
        warp_dims, lane_dims = (-4, -3) if plan.lanes == 64 else (-3,), (-2,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1)


def _body(operation: RowSpec, plan: RegisterPlan, extras: Extras, *refs):
    kernel = _Kernel(operation, plan, extras, References.of(operation, refs))
    block = lax.axis_index("block")
    kernel.take_rows(extras.first_row(block, plan.rows))
    beyond = kernel.rows % plan.rows
    if beyond:  # the last block takes the rows that are left, too, together with some that are its own

        @pl.when(block == kernel.rows // plan.rows - 1)
        def _():
            kernel.take_rows(kernel.rows - plan.rows)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel, before it is known which rows the block takes."""

    operation: RowSpec
    plan: RegisterPlan
    extras: Extras
    refs: References

    @property
    def rows(self) -> int:
        return self.refs.rows[0].shape[0]

    @property
    def n(self) -> int:
        return self.refs.rows[0].shape[1]

    @property
    def starts(self) -> list[int]:
        """Where the chunks of a row begin."""
        return self.plan.starts(self.n)

    @property
    def overlap(self) -> int:
        """How many elements of the last chunk are in the one before, too."""
        return len(self.starts) * self.plan.width - self.n

    def take_rows(self, first: jax.Array | int) -> None:
        """Takes the rows of a block, from this one on."""
        rules = _RegisterRules.of(self, first)
        limit = rules.limit
        several = 1 < len(self.starts) <= _MOST_CHUNKS_IN_QUARTERS
        if limit is None or limit.shape or not several or {*self.extras.names} & {RowExtra.WHERE, RowExtra.BIAS}:
            return self.take_chunks(first, rules, len(self.starts))
        # Chunks that are masked cost no arithmetic either.
        counted = sum((start < limit).astype(jnp.int32) for start in self.starts)
        quarters = sorted({-(-len(self.starts) * k // 4) for k in (1, 2, 3, 4)})
        for fewer, most in itertools.pairwise([-1, *quarters]):
            enough = (counted > fewer) & (counted <= most)
            pl.when(enough)(functools.partial(self.take_chunks, first, rules, most))

    def take_chunks(self, first: jax.Array | int, rules: "_RegisterRules", most: int) -> None:
        """Loads, reduces and writes the rows of a block, whose valid elements are in the first `most` chunks."""
        block_rows = pl.ds(first, self.plan.rows)
        prepared = [self._load(block_rows, rules, start) for start in self.starts[:most]]
        numbers = tuple(load(ref.at[block_rows]) for ref in self.refs.numbers)
        total = self._total(prepared, rules)
        for ref, value in zip(self.refs.number_results, total, strict=False):
            store(ref.at[block_rows], value)
        if self.refs.row_results:
            self._write(block_rows, prepared, rules, total, numbers)

    def _load(self, block_rows: Any, rules: "_RegisterRules", start: int) -> Prepared:
        """Loads a chunk of each row operand."""
        chunks = [load(ref.at[block_rows, rules.place(start)], layout(self.plan)) for ref in self.refs.rows]
        return rules.prepare(start, chunks)

    def _total(self, prepared: Sequence[Prepared], rules: "_RegisterRules") -> State:
        """Reduces the rows. As they are in registers, scores are gone over twice: for the maximum and for the sum."""
        reduction = operations.fold_of(self.operation)
        if reduction is None:
            return ()
        if reduction is fold.SUM:
            return (self._row_sum([operations.terms(self.operation, p.chunks) for p in prepared]),)
        scores = [rules.without_label(start, p.chunks[0]) for start, p in zip(self.starts, prepared, strict=False)]
        m = jnp.max(functools.reduce(jnp.maximum, self._new(scores, -jnp.inf)), axis=1)
        ref = self.broadcast(reference(m))
        return m, self._row_sum([jnp.exp(x - ref) for x in scores])

    def _row_sum(self, chunks: Sequence[jax.Array]) -> jax.Array:
        return jnp.sum(functools.reduce(operator.add, self._new(chunks, 0.0)), axis=1)

    def _new(self, chunks: Sequence[jax.Array], neutral: float) -> Sequence[jax.Array]:
        """The chunks, without what the last one of a row has in common with the one before."""
        if not self.overlap or len(chunks) < len(self.starts):
            return chunks
        return [*chunks[:-1], jnp.where(self.columns() < self.overlap, neutral, chunks[-1])]

    def _write(
        self, block_rows: Any, prepared: Sequence[Prepared], rules: "_RegisterRules", total: State, numbers: State
    ) -> None:
        """Writes the result of all chunks. Those that are not prepared are masked."""
        finished = operations.finish(self.operation, total, numbers, self.broadcast)
        results = [rules.conclude(p.valid, finished(*p.chunks)) for p in prepared]
        masked_result = jnp.full(self.shape, self.operation.masked_result, jnp.float32)
        masked_result = plgpu.layout_cast(masked_result, layout(self.plan))
        for start, result in itertools.zip_longest(self.starts, results, fillvalue=masked_result):
            place = block_rows, pl.ds(start, self.plan.width)
            store(self.refs.row_results[0].at[place], rules.with_label(start, result))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a chunk."""
        return self.plan.rows, self.plan.width

    def broadcast(self, number: jax.Array) -> jax.Array:
        """A chunk that has a number a row all over the row."""
        return lax.broadcast_in_dim(number, self.shape, (0,))

    def columns(self) -> jax.Array:
        """The columns of a chunk's elements in the chunk."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=layout(self.plan))


@dataclasses.dataclass(frozen=True)
class _RegisterRules(Rules):
    """What the extras do to the rows of a block. The place of a chunk is where it begins in the row.

    Attributes:
      kernel: the kernel.
      first: the first row of the block.
      label: the labels in a form that broadcasts with a chunk, if rows have any.
      at_label: likewise, the result at the label; 0 all over a row that is not to be read.
    """

    kernel: _Kernel
    first: jax.Array | int
    label: jax.Array | None
    at_label: jax.Array | None

    @staticmethod
    def of(kernel: _Kernel, first: jax.Array | int) -> "_RegisterRules":
        """The rules for the rows of a block, from this one on."""
        extras, rows = kernel.extras, kernel.plan.rows
        refs = dict(zip(extras.names, kernel.refs.extras, strict=True))

        def number(name: Name) -> jax.Array | None:
            if name not in extras.names:
                return None
            index, same = extras.place(name, first)
            if same or rows == 1:
                return refs[name][index]
            return kernel.broadcast(versions.load(refs[name].at[pl.ds(index, rows)], optimized=False))

        scale, limit = number(RowExtra.SCALE), number(RowExtra.LIMIT)
        label, result = number(LabelExtra.LABEL), number(LabelExtra.RESULT)
        if label is not None and result is not None:
            result = jnp.where(label == NO_ROW, 0.0, result)
        return _RegisterRules(kernel.operation, extras, refs, scale, limit, kernel, first, label, result)

    def place(self, start: int) -> Any:
        """Where to read a chunk. Beyond a limit that all rows share, that is the row's beginning, which is there."""
        begin: jax.Array | int = start
        if start and self.limit is not None and not self.limit.shape:
            begin = jnp.where(start < self.limit, start, 0)
        return pl.ds(begin, self.kernel.plan.width)

    def chunk(self, name: RowExtra, place: int) -> jax.Array:
        plan = self.kernel.plan
        index, same = self.extras.place(name, self.first)
        if same:
            row = load(self.refs[name].at[index, self.place(place)])
            return lax.broadcast_in_dim(row, self.kernel.shape, (1,))
        return load(self.refs[name].at[pl.ds(index, plan.rows), self.place(place)], layout(plan))

    def columns(self, place: int) -> jax.Array:
        return self.kernel.columns() + place

    def without_label(self, start: int, scores: jax.Array) -> jax.Array:
        """The scores of a chunk as the fold takes them: without the label's, or any of a row that is not to be read."""
        return scores if self.label is None else jnp.where(self._at_label(self.label, start), -jnp.inf, scores)

    def with_label(self, start: int, result: jax.Array) -> jax.Array:
        """The result of a chunk, with the label's."""
        if self.label is None or self.at_label is None:
            return result
        return jnp.where(self._at_label(self.label, start), self.at_label, result)

    def _at_label(self, label: jax.Array, start: int) -> jax.Array:
        """Which elements of a chunk are the label's, or of a row that is not to be read."""
        return jnp.equal(self.kernel.columns(), label - start) | jnp.equal(label, NO_ROW)
