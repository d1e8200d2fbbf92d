"""What the backward kernels have in common: the numbers of a call, the roles of warp groups, and loops.

A block has warp groups that compute and one more, which fills the slots of rings in shared memory with the tiles that
these need, in the order in which they need them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxsoft.pallas_kernels.blocks as blocks
from jaxsoft._attention.form import AttentionForm

from . import backward_plan
from .backward_plan import ROWS
from .operands import head_size
from .ranges import Range, int32
from .scores import LOG2E, Scores, has_residual

WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """The numbers of a call.

    Attributes:
      form: its form.
      batch, queries, keys, query_heads, key_heads: B, T, S, N and K.
      head, value: H and D, padded.
      dtype: of queries, keys and values.
    """

    form: AttentionForm
    batch: int
    queries: int
    keys: int
    query_heads: int
    key_heads: int
    head: int
    value: int
    dtype: Any

    @classmethod
    def of(cls, form: AttentionForm, operands: Sequence[Any]) -> "BackwardCall":
        """The numbers of a call with these operands."""
        (batch, queries, query_heads, head), (_, keys, key_heads, value) = operands[0].shape, operands[2].shape
        sizes = (head_size(head), head_size(value))
        return cls(form, batch, queries, keys, query_heads, key_heads, *sizes, operands[0].dtype)

    @property
    def numbers(self) -> int:
        """How many numbers every query has: see `numbers_of`."""
        return 3 if has_residual(self.form) else 2

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.query_heads // self.key_heads

    def key_head(self, query_head: Any) -> Any:
        """The key head of a query head."""
        return query_head if self.group == 1 else lax.div(query_head, jnp.int32(self.group))

    def result(self, length: int, heads: int, size: int) -> jax.ShapeDtypeStruct:
        """The type of a gradient as kernels write it, at times and sizes that are padded."""
        return jax.ShapeDtypeStruct((self.batch, padded_time(length), heads, size), self.dtype)


def padded_time(length: int) -> int:
    """The padded length of a time dimension."""
    return -(-length // backward_plan.TIME_STEP) * backward_plan.TIME_STEP


def padded(array: jax.Array) -> jax.Array:
    """An operand (B, time, heads, size) as the kernels read it: padded, if it must be."""
    time, size = array.shape[1], array.shape[3]
    widths = (0, padded_time(time) - time), (0, head_size(size) - size)
    if widths == ((0, 0), (0, 0)):
        return array
    return jnp.pad(array, ((0, 0), widths[0], (0, 0), widths[1]))


def numbers_of(form: AttentionForm, lse: jax.Array, lse_residual: jax.Array, delta: jax.Array) -> list[jax.Array]:
    """The numbers of every query that the kernels read: the log-sum-exp, delta, and if it matters the residual.

    The log-sum-exp is in base 2, or with a residual natural, and infinite where no key is valid, so that all weights
    are 0 there, and not NaN. The residual is in base 2.
    """
    exact = has_residual(form)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse if exact else lse * LOG2E)
    return [lse, delta, lse_residual * LOG2E] if exact else [lse, delta]


def to_whole(numbers: Sequence[jax.Array], block: int) -> list[jax.Array]:
    """The numbers of every query (B, N, T) padded to whole blocks, with queries without a valid key."""
    widths = (0, 0), (0, 0), (0, -numbers[0].shape[2] % block)
    return [jnp.pad(x, widths, constant_values=0.0 if i else jnp.inf) for i, x in enumerate(numbers)]


def staging(warp_groups: int, columns: int, dtype: Any) -> Any:
    """Shared memory for `multiply`. Only the interpreter needs it: it has no products of what is in registers."""
    return blocks.tiled((warp_groups, ROWS, columns), dtype) if blocks.INTERPRET else ()


def multiply(accumulator: Any, tile: jax.Array, ref: Any, stages: Any) -> None:
    """Starts the product of a tile in registers and one in shared memory."""
    if isinstance(stages, tuple):
        plgpu.wgmma(accumulator, tile, ref)
    else:
        stage = stages.at[lax.axis_index("warp_group")]
        stage[...] = tile
        plgpu.commit_smem()
        plgpu.wgmma(accumulator, stage, ref)


def union(ranges: Sequence[Range]) -> tuple[Any, Any]:
    """Where the tiles of any of these ranges begin and end."""
    begin, end = ranges[0].begin, ranges[0].end
    for other in ranges[1:]:
        begin, end = jnp.minimum(begin, other.begin), jnp.maximum(end, other.end)
    return int32(begin), int32(end)


def select(ranges: Sequence[Range], index: Any) -> Range:
    """The range of this index, which is not static."""
    chosen = ranges[0]
    for i, other in enumerate(ranges[1:], 1):
        chosen = Range(*(jnp.where(index == i, b, a) for a, b in zip(chosen, other, strict=True)))
    return chosen


def for_tiles(
    begin: Any, end: Any, own: Range, borders: tuple[bool, bool], step: Callable[[Any, bool], None], skip: Callable
) -> None:
    """Calls functions for the tiles of a block, in order.

    Borders have loops of their own: with one loop and a branch in it, as the forward kernel has them, the gradients
    were slower by 1 % at heads of 128 and 9 % at 64 (H100, 32K causal, JAX 0.11.2).

    Args:
      begin, end: the tiles of the block.
      own: those that matter to this warp group.
      borders: whether there can be a border before the interior, and after it.
      step: is called with a tile that matters, and whether it has to be masked.
      skip: is called with a tile that does not.
    """
    own = Range(*map(int32, own))

    def loop(first, last, body):
        lax.fori_loop(first, last, lambda tile, _: body(tile), None)

    if any(borders):
        loop(begin, own.begin, skip)
    if borders[0]:
        loop(own.begin, own.interior_begin, lambda tile: step(tile, True))
    interior_begin = own.interior_begin if borders[0] else own.begin
    interior_end = own.interior_end if borders[1] else own.end
    loop(interior_begin, interior_end, lambda tile: step(tile, False))
    if borders[1]:
        loop(own.interior_end, own.end, lambda tile: step(tile, True))
    if any(borders):
        loop(own.end, end, skip)


def probabilities(scores: Scores, products: jax.Array, lse: Sequence[jax.Array], **where: Any) -> tuple[jax.Array, Any]:
    """exp(score - lse) of a tile, and the slope of its scores, if they have one.

    Args:
      scores: how products become scores.
      products: the tile's.
      lse: of its queries, and its residual if it has one (see `numbers_of`).
      where: the further arguments of Scores.tile.
    """
    tile = scores.tile(products, **where)
    return scores.exp(tile.values, *(broadcast(x, products.shape, scores.queries_axis) for x in lse)), tile.slope


def broadcast(numbers: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Numbers along an axis of a tile, for all of the tile."""
    return lax.broadcast_in_dim(numbers, shape, [axis])
