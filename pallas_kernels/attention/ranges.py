"""Which tiles of keys matter to a block of queries, and which tiles of queries to a block of keys.

Both are ranges with an interior, in which limits, lengths and segments exclude no score. The functions are of numbers
that may be known or not, and are called in the kernels, but for `segment_ranges`, which XLA computes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft._attention.form import Extra, Form

# Farther limits exclude nothing, and sums with them do not overflow.
_FAR = 2**30


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


@dataclasses.dataclass(frozen=True)
class Range:
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


def borders(form: Form, shape: Shape, of_keys: bool) -> tuple[bool, bool]:
    """Whether there can be tiles before and after the interior that have to be masked.

    Args:
      form, shape: the call's.
      of_keys: True for the tiles of queries that matter to keys, False for those of keys that matter to queries.
    """
    extras = set(form.extras)
    segments = Extra.QUERY_SEGMENTS in extras
    ragged = shape.keys % shape.key_tile or (of_keys and shape.queries % shape.query_tile)
    lengths = extras & {Extra.QUERY_LENGTHS, Extra.KEY_LENGTHS}
    first, last = (form.right, form.left) if of_keys else (form.left, form.right)
    return first is not None or segments, last is not None or bool(ragged or lengths) or segments


def limits_of_queries(
    form: Form, shape: Shape, refs: Mapping[Extra, Any], batch: Any, query: Any, queries_axis: int = 0
) -> tuple[Any, Any]:
    """The first key that counts for a query, and one more than the last; None where there is no need to look.

    The end is one number if it is the same for all queries.

    Args:
      form: the call's.
      shape: the call's, and that of tiles.
      refs: references to the extras.
      batch: the index of the batch's entry.
      query: indices of queries.
      queries_axis: 1 if queries past the last must not count, since results are summed over queries.
    """
    position = query
    if Extra.OFFSET in refs:
        position += _number(refs[Extra.OFFSET], batch)
    first = position - min(form.left, _FAR) if form.left is not None else None
    end = None
    if shape.keys % shape.key_tile or Extra.KEY_LENGTHS in refs:
        end = _key_end(shape, refs, batch)
    if form.right is not None:
        after = position + (min(form.right, _FAR) + 1)
        end = after if end is None else jnp.minimum(after, end)
    if Extra.QUERY_LENGTHS in refs or (queries_axis == 1 and shape.queries % shape.query_tile):
        end = jnp.where(query < _query_end(shape, refs, batch), shape.keys if end is None else end, 0)
    return first, end


def key_tiles(form: Form, shape: Shape, refs: Mapping[Extra, Any], batch: Any, begin: Any, count: int) -> Range:
    """The tiles of keys that matter to the `count` queries from `begin` on, by limits and lengths."""
    last, keys = _query_end(shape, refs, batch), _key_end(shape, refs, batch)
    offset = _number(refs[Extra.OFFSET], batch) if Extra.OFFSET in refs else 0
    position, end, inner_end = begin + offset, keys, keys
    first: Any = 0
    inner_first: Any = 0
    if form.left is not None:
        first = jnp.maximum(position - min(form.left, _FAR), 0)
        inner_first = jnp.maximum(position + (count - 1 - min(form.left, _FAR)), 0)
    if form.right is not None:
        right = min(form.right, _FAR)
        inner_end = jnp.minimum(position + (right + 1), keys)
        end = jnp.minimum(position + (jnp.minimum(last - begin, count) + right), keys)
    if Extra.QUERY_LENGTHS in refs:
        end = jnp.where(begin < last, end, 0)
        inner_end = jnp.where(begin + count <= last, inner_end, 0)
    return _range(first, inner_first, inner_end, end, shape.key_tile)


def query_tiles(form: Form, shape: Shape, refs: Mapping[Extra, Any], batch: Any, begin: Any, count: int) -> Range:
    """The tiles of queries to which the `count` keys from `begin` on matter, by limits and lengths."""
    last, keys = _query_end(shape, refs, batch), _key_end(shape, refs, batch)
    offset = _number(refs[Extra.OFFSET], batch) if Extra.OFFSET in refs else 0
    index, end, inner_end = begin - offset, last, last
    first: Any = 0
    inner_first: Any = 0
    if form.right is not None:  # offset + query + right >= key
        first = jnp.maximum(index - min(form.right, _FAR), 0)
        inner_first = jnp.maximum(index + (count - 1 - min(form.right, _FAR)), 0)
    if form.left is not None:  # offset + query - left <= key
        left = min(form.left, _FAR)
        inner_end = jnp.minimum(index + (left + 1), last)
        end = jnp.minimum(index + (jnp.minimum(keys - begin, count) + left), last)
    if Extra.KEY_LENGTHS in refs or shape.keys % count:
        end = jnp.where(begin < keys, end, 0)
        inner_end = jnp.where(begin + count <= keys, inner_end, 0)
    return _range(first, inner_first, inner_end, end, shape.query_tile)


def segment_ranges(own: jax.Array, other: jax.Array, block: int, tile: int) -> jax.Array:
    """The tiles of the others that share a segment with a block, by the least and largest segments of both.

    Args:
      own: (B or 1, length), the segments of what is in blocks, queries or keys.
      other: (B or 1, length), the segments of what is in tiles.
      block, tile: how many are in each.

    Returns:
      int32 (B or 1, blocks, 4): the four numbers of Range.
    """
    least, most = (reduce(_in_blocks(own, block), axis=2)[:, :, None] for reduce in (jnp.min, jnp.max))
    other_least, other_most = (reduce(_in_blocks(other, tile), axis=2)[:, None, :] for reduce in (jnp.min, jnp.max))
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


def _range(first: Any, inner_first: Any, inner_end: Any, end: Any, tile: int) -> Range:
    """The range of tiles for a range of their elements and its interior."""
    if all(isinstance(i, int) for i in (first, inner_first, inner_end, end)):
        return Range(first // tile, -(-inner_first // tile), inner_end // tile, -(-end // tile))
    size = jnp.int32(tile)
    first, inner_first, inner_end, end = (jnp.maximum(i, 0) for i in (first, inner_first, inner_end, end))
    above = size - 1
    return _nested(
        lax.div(_int32(first), size),
        lax.div(_int32(inner_first) + above, size),
        lax.div(_int32(inner_end), size),
        lax.div(_int32(end) + above, size),
    )


def _int32(number: Any) -> Any:
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


def _query_end(shape: Shape, refs: Mapping[Extra, Any], batch: Any) -> Any:
    """How many queries there are."""
    if Extra.QUERY_LENGTHS not in refs:
        return shape.queries
    return jnp.minimum(_number(refs[Extra.QUERY_LENGTHS], batch), shape.queries)


def _key_end(shape: Shape, refs: Mapping[Extra, Any], batch: Any) -> Any:
    """How many keys there are."""
    if Extra.KEY_LENGTHS not in refs:
        return shape.keys
    return jnp.minimum(_number(refs[Extra.KEY_LENGTHS], batch), shape.keys)
