"""Which scores are allowed, beside those of a boolean mask: one class for each rule, and all rules of a call as one.

A rule answers `allows(i, j)`, for the indices of queries and keys; `key_range`, the keys that are allowed for a query
or for several in a row; and `query_range`, the queries for which keys are. Blocks of plain JAX, parts, ring attention
and Pallas's kernels ask it, so its numbers are integers, arrays, or what kernels have loaded. The CUDA kernels ask
their twin, ffi/cuda/attention/limits.cuh.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax.numpy as jnp

from jaxsoft._attention.form import AttentionForm, Extra

type Number = Any  # an integer, or an array of some
type Limits = tuple[Number | None, Number | None]  # first <= index < end; None where there is no limit

# Farther limits exclude nothing, and sums with them do not overflow.
_FAR = 2**30


@dataclasses.dataclass(frozen=True)
class Span:
    """The indices begin <= i < end. All that are allowed are among them; those of the interior are all allowed.

    Each of the numbers may be out of range, and the interior may be empty or begin after its end.
    """

    begin: Number
    interior_begin: Number
    interior_end: Number
    end: Number


@dataclasses.dataclass(frozen=True)
class Band:
    """Limits by position: p - left <= j <= p + right, for the position p = offset + i of query i.

    Attributes:
      left, right: None for no such limit.
      offset: the position of the first query.
    """

    left: int | None = None
    right: int | None = None
    offset: Number = 0

    @property
    def limits(self) -> bool:
        """Whether it excludes anything."""
        return self.left is not None or self.right is not None

    def allows(self, i: Number, j: Number) -> list[Any]:
        """The conditions, all of which have to hold."""
        position = self._position(i)
        found = []
        if self.left is not None:
            found.append(j + self.left >= position)
        if self.right is not None:
            found.append(j - self.right <= position)
        return found

    def key_range(self, i: Number, count: Number = 1) -> Limits:
        """The keys that are allowed for one of `count` queries from i on."""
        return self._any(self._position(i), self.left, self.right, count)

    def common_keys(self, i: Number, count: int) -> Limits:
        """The keys that are allowed for all of them."""
        return self._all(self._position(i), self.left, self.right, count)

    def query_range(self, j: Number, count: Number = 1) -> Limits:
        """The queries for which one of `count` keys from j on is allowed."""
        return self._any(self._index(j), self.right, self.left, count)

    def common_queries(self, j: Number, count: int) -> Limits:
        """The queries for which all of them are allowed."""
        return self._all(self._index(j), self.right, self.left, count)

    def meets(self, queries: int, keys: int) -> bool:
        """Whether some of the first keys are allowed for some of the first queries."""
        begin, end = self.key_range(0, queries)
        return (begin is None or begin < keys) and (end is None or end > 0)

    def part(self, query: int, key: int) -> Self:
        """The same rule for indices that begin at this query and this key. The offset is that of the whole."""
        shift = query - key
        left = None if self.left is None else self.left - shift
        right = None if self.right is None else self.right + shift
        return dataclasses.replace(self, left=left, right=right)

    def _position(self, i: Number) -> Number:
        return i if _is_zero(self.offset) else i + self.offset

    def _index(self, j: Number) -> Number:
        return j if _is_zero(self.offset) else j - self.offset

    @staticmethod
    def _any(position: Number, before: int | None, after: int | None, count: Number) -> Limits:
        """What is near one of `count` positions from this one on."""
        begin = None if before is None else position - min(before, _FAR)
        return begin, None if after is None else position + (count + min(after, _FAR))

    @staticmethod
    def _all(position: Number, before: int | None, after: int | None, count: int) -> Limits:
        """What is near all of them."""
        begin = None if before is None else position + (count - 1 - min(before, _FAR))
        return begin, None if after is None else position + (min(after, _FAR) + 1)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Limits by number: query_begins <= i < query_lengths and j < key_lengths.

    Attributes:
      queries, keys: how many there are.
      query_begins, query_lengths, key_lengths: None for no such limit.
    """

    queries: int
    keys: int
    query_begins: Number | None = None
    query_lengths: Number | None = None
    key_lengths: Number | None = None

    def allows(self, i: Number, j: Number) -> list[Any]:
        """The conditions, all of which have to hold."""
        found = []
        if self.query_begins is not None:
            found.append(i >= self.query_begins)
        if self.query_lengths is not None:
            found.append(i < self.query_lengths)
        if self.key_lengths is not None:
            found.append(j < self.key_lengths)
        return found

    @property
    def query_end(self) -> Number:
        """The end of the queries that there are and that the limits allow."""
        return self.queries if self.query_lengths is None else jnp.minimum(self.query_lengths, self.queries)

    @property
    def key_end(self) -> Number:
        """The end of the keys, likewise."""
        return self.keys if self.key_lengths is None else jnp.minimum(self.key_lengths, self.keys)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Only what has the same number is allowed.

    Attributes:
      of_query, of_key: (indices) -> their segments, in arrays that compare.
    """

    of_query: Callable[[Number], Any]
    of_key: Callable[[Number], Any]

    def allows(self, i: Number, j: Number) -> list[Any]:
        """The condition."""
        return [self.of_query(i) == self.of_key(j)]


@dataclasses.dataclass(frozen=True)
class Masks:
    """All rules of a call. A score is allowed if every rule allows it.

    Which tiles share a segment depends on all numbers of them, so ranges leave segments out.
    """

    band: Band
    lengths: Lengths
    segments: Segments | None = None

    @classmethod
    def of(
        cls,
        form: AttentionForm,
        queries: int,
        keys: int,
        number: Callable[[Extra], Any],
        segments: Segments | None = None,
    ) -> Self:
        """The rules of a form.

        Args:
          form: of the call.
          queries, keys: how many there are.
          number: gives an extra of one number for each entry of the batch.
          segments: how segments are found, if there are any.
        """
        of_numbers = (Extra.OFFSET, Extra.QUERY_BEGINS, Extra.QUERY_LENGTHS, Extra.KEY_LENGTHS)
        found = {extra: number(extra) for extra in form.extras if extra in of_numbers}
        band = Band(form.left, form.right, found.pop(Extra.OFFSET, 0))
        lengths = Lengths(queries, keys, **{extra.value: x for extra, x in found.items()})
        return cls(band, lengths, segments if Extra.QUERY_SEGMENTS in form.extras else None)

    def conditions(self, i: Number, j: Number) -> list[Any]:
        """The conditions, all of which have to hold: arrays that broadcast to those of both indices."""
        rules: tuple[Band | Lengths | Segments | None, ...] = (self.band, self.lengths, self.segments)
        return [condition for rule in rules if rule is not None for condition in rule.allows(i, j)]

    def allows(self, i: Number, j: Number) -> Any:
        """Whether the scores of queries and keys are allowed; None if all are."""
        return all_of(self.conditions(i, j))

    def key_range(self, i: Number, count: int = 1) -> Span:
        """The keys that are allowed for some, and for all, of `count` queries from i on, by position and number."""
        own, others = self.lengths.query_end, self.lengths.key_end
        there = count if self.band.right is None else jnp.minimum(own - i, count)
        span = _within(self.band.key_range(i, there), self.band.common_keys(i, count), 0, others)
        if self.lengths.query_lengths is not None:
            span = _if_any(span, i < own, i + count <= own)
        if (begins := self.lengths.query_begins) is not None:
            span = _if_any(span, i + count > begins, i >= begins)
        return span

    def keys_of(self, i: Number, keys_end: bool = False, queries_end: bool = False) -> Limits:
        """The keys that are allowed for queries, by position and number; the end is one number if it is so for all.

        Args:
          i: indices of queries.
          keys_end, queries_end: whether there are indices from the number of keys, and of queries, on.
        """
        (first, after), lengths = self.band.key_range(i), self.lengths
        end = lengths.key_end if keys_end or lengths.key_lengths is not None else None
        if after is not None:
            end = after if end is None else jnp.minimum(after, end)
        if queries_end or lengths.query_lengths is not None:
            end = jnp.where(i < lengths.query_end, lengths.keys if end is None else end, 0)
        if lengths.query_begins is not None:
            end = jnp.where(i >= lengths.query_begins, lengths.keys if end is None else end, 0)
        return first, end

    @staticmethod
    def may_exclude(form: AttentionForm, of_keys: bool) -> tuple[bool, bool]:
        """Whether a form may exclude queries of a key, or else keys of a query, before others and after them."""
        first, last = (form.right, form.left) if of_keys else (form.left, form.right)
        before = {Extra.QUERY_SEGMENTS, *([Extra.QUERY_BEGINS] if of_keys else [])}
        after = {Extra.QUERY_SEGMENTS, Extra.QUERY_BEGINS, Extra.QUERY_LENGTHS, Extra.KEY_LENGTHS}
        extras = set(form.extras)
        return first is not None or bool(before & extras), last is not None or bool(after & extras)

    def query_range(self, j: Number, count: int = 1) -> Span:
        """The queries for which some, and all, of `count` keys from j on are allowed, by position and number."""
        own, others = self.lengths.key_end, self.lengths.query_end
        there = count if self.band.left is None else jnp.minimum(own - j, count)
        first = 0 if self.lengths.query_begins is None else self.lengths.query_begins
        span = _within(self.band.query_range(j, there), self.band.common_queries(j, count), first, others)
        if self.lengths.key_lengths is not None or self.lengths.keys % count:
            span = _if_any(span, j < own, j + count <= own)
        return span


def all_of(conditions: Sequence[Any]) -> Any:
    """Where all conditions hold; None if there are none."""
    return functools.reduce(operator.and_, conditions) if conditions else None


def _within(some: Limits, every: Limits, first: Number, last: Number) -> Span:
    """The span of two ranges that are cut to what there is."""
    begin, interior_begin = (first if x is None else jnp.maximum(x, first) for x in (some[0], every[0]))
    interior_end, end = (last if x is None else jnp.minimum(x, last) for x in (every[1], some[1]))
    return Span(begin, interior_begin, interior_end, end)


def _if_any(span: Span, some: Any, every: Any) -> Span:
    """A span that is empty unless some of what it is for is there, and has an interior only if all is."""
    return dataclasses.replace(
        span, end=jnp.where(some, span.end, 0), interior_end=jnp.where(every, span.interior_end, 0)
    )


def _is_zero(offset: Number) -> bool:
    return isinstance(offset, int) and offset == 0
