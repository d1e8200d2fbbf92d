"""Which tiles of keys matter to a block of queries, and which tiles of queries to a block of keys.

Both are ranges with an interior, in which limits, lengths and segments exclude no score. What is allowed the rules say
(see `jaxsoft._attention.masks`); here it becomes tiles. The functions are of numbers that may be known or not, and are
called in the kernels, but for `segment_ranges`, which XLA computes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._attention.masks import Masks, Span


@dataclasses.dataclass(frozen=True)
class Shape:
    """Numbers of queries and keys.

    Attributes:
      queries, keys: of the call, T and S.
      query_tile, key_tile: of a tile of scores.
    """

    queries: int
    keys: int
    query_tile: int
    key_tile: int


class Range(NamedTuple):
    """The tiles begin <= i < end, of which those with interior_begin <= i < interior_end need no masks for limits,
    lengths and segments. The interior is within the range, and empty wherever the range is.
    """

    begin: Any
    interior_begin: Any
    interior_end: Any
    end: Any

    def masked(self, tile: Any, borders: tuple[bool, bool]) -> Any:
        """Whether a tile lies in one of the borders, which may be there before the interior and after it."""
        before, after = borders
        if before and after:
            return (tile < self.interior_begin) | (tile >= self.interior_end)
        if before:
            return tile < self.interior_begin
        return tile >= self.interior_end if after else False


def borders(form: AttentionForm, shape: Shape, of_keys: bool) -> tuple[bool, bool]:
    """Whether there can be tiles before and after the interior that have to be masked.

    Args:
      form, shape: the call's.
      of_keys: True for the tiles of queries that matter to keys, False for those of keys that matter to queries.
    """
    ragged = bool(shape.keys % shape.key_tile or (of_keys and shape.queries % shape.query_tile))
    before, after = Masks.may_exclude(form, of_keys)
    return before, after or ragged


def masks(form: AttentionForm, shape: Shape, refs: Mapping[Extra, Any], batch: Any) -> Masks:
    """The rules of an entry of the batch. Segments are compared by tiles (see `segment_ranges` and `scores`)."""
    return Masks.of(form, shape.queries, shape.keys, lambda extra: _number(refs[extra], batch))


def key_tiles(
    form: AttentionForm, shape: Shape, refs: Mapping[Extra, Any], batch: Any, begin: Any, count: int
) -> Range:
    """The tiles of keys that matter to the `count` queries from `begin` on, by limits and lengths."""
    return _range(masks(form, shape, refs, batch).key_range(begin, count), shape.key_tile)


def query_tiles(
    form: AttentionForm, shape: Shape, refs: Mapping[Extra, Any], batch: Any, begin: Any, count: int
) -> Range:
    """The tiles of queries to which the `count` keys from `begin` on matter, by limits and lengths."""
    return _range(masks(form, shape, refs, batch).query_range(begin, count), shape.query_tile)


def segment_ranges(
    extras: Mapping[Extra, jax.Array], own: Extra, other: Extra, block: int, tile: int
) -> jax.Array | None:
    """The tiles of the others that share a segment with a block, by the least and largest segments of both.

    Args:
      extras: the call's.
      own: the segments, (B or 1, length), of what is in blocks, queries or keys.
      other: those of what is in tiles, likewise.
      block, tile: how many are in each.

    Returns:
      int32 (B or 1, blocks, 4): the four numbers of Range; None for a call without segments.
    """
    if own not in extras:
        return None
    lowest_highest = jnp.min, jnp.max
    least, most = (reduce(_in_blocks(extras[own], block), axis=2)[:, :, None] for reduce in lowest_highest)
    other_least, other_most = (reduce(_in_blocks(extras[other], tile), axis=2)[:, None, :] for reduce in lowest_highest)
    matter = (least <= other_most) & (other_least <= most)
    same = (least == most) & (other_least == other_most) & (least == other_least)
    index = lax.broadcasted_iota(jnp.int32, matter.shape, 2)
    count = matter.shape[2]
    begin = jnp.min(jnp.where(matter, index, count), axis=2)
    end = jnp.max(jnp.where(matter, index + 1, 0), axis=2)
    inner_begin = jnp.min(jnp.where(same, index, count), axis=2)
    other_again = ~same & (index >= inner_begin[:, :, None])
    inner_end = jnp.min(jnp.where(other_again, index, count), axis=2)
    inner_end = jnp.where(inner_begin == count, 0, inner_end)
    return jnp.stack([begin, inner_begin, inner_end, end], axis=2).astype(jnp.int32)


def within(tiles: Range, ref: Any, batch: Any, block: Any) -> Range:
    """A range cut to that of a block in the result of segment_ranges, of which this is a reference."""
    entry = batch if ref.shape[0] > 1 else 0
    begin, inner_begin, inner_end, end = (ref[entry, block, i] for i in range(4))
    return _nested(
        jnp.maximum(tiles.begin, begin),
        jnp.maximum(tiles.interior_begin, inner_begin),
        jnp.minimum(tiles.interior_end, inner_end),
        jnp.minimum(tiles.end, end),
    )


def _in_blocks(segments: jax.Array, block: int) -> jax.Array:
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % block)), mode="edge")
    return padded.reshape(padded.shape[0], -1, block)


def _range(span: Span, tile: int) -> Range:
    """The range of tiles for a range of their elements and its interior."""
    numbers = (span.begin, span.interior_begin, span.interior_end, span.end)
    if all(isinstance(i, int) for i in numbers):
        first, inner_first, inner_end, end = numbers
        return Range(first // tile, -(-inner_first // tile), inner_end // tile, -(-end // tile))
    size = jnp.int32(tile)
    first, inner_first, inner_end, end = (jnp.maximum(i, 0) for i in numbers)
    above = size - 1
    return _nested(
        lax.div(int32(first), size),
        lax.div(int32(inner_first) + above, size),
        lax.div(int32(inner_end), size),
        lax.div(int32(end) + above, size),
    )


def int32(number: Any) -> Any:
    """An int32. Kernels have no copies, which a conversion of what is one already would be."""
    return jnp.int32(number) if isinstance(number, int) else number


def _nested(begin: Any, inner_begin: Any, inner_end: Any, end: Any) -> Range:
    """A range of which each part may be empty, so that begin <= interior_begin <= interior_end <= end."""
    end = jnp.maximum(end, begin)
    inner_begin = jnp.minimum(jnp.maximum(inner_begin, begin), end)
    return Range(begin, inner_begin, jnp.minimum(jnp.maximum(inner_end, inner_begin), end), end)


def _number(ref: Any, batch: Any) -> jax.Array:
    """An extra of one number for each entry of the batch, or for all."""
    return ref[batch if ref.shape[0] > 1 else 0]
