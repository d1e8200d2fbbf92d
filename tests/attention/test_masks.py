"""The rules of masks: their ranges, and those of tiles in Pallas's kernels, against the scores that they allow."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._attention.masks import Band, Masks
from jaxsoft.pallas_kernels.attention import ranges

_LIMITS = st.none() | st.integers(-3, 40)
_NUMBERS = {
    Extra.QUERY_BEGINS: st.integers(-2, 30),
    Extra.QUERY_LENGTHS: st.integers(-2, 40),
    Extra.KEY_LENGTHS: st.integers(-2, 40),
    Extra.OFFSET: st.integers(-40, 40),
}


@st.composite
def rules(draw, without=()):
    """A form, the numbers of queries and keys, and the extras of the rules."""
    extras = [extra for extra in _NUMBERS if extra not in without and draw(st.booleans())]
    form = AttentionForm(np.dtype(np.float32), 1.0, draw(_LIMITS), draw(_LIMITS), extras=tuple(extras))
    numbers = {extra: draw(_NUMBERS[extra]) for extra in extras}
    return form, draw(st.integers(1, 40)), draw(st.integers(1, 40)), numbers


_MANY = hypothesis.settings(max_examples=100)  # few of them have one rule alone
_MOST = 47  # queries or keys: whatever their number, all are computed, in arrays of one shape


def _allowed(masks, queries, keys):
    i, j = np.ogrid[:_MOST, :_MOST]
    found = masks.allows(i, j)
    return np.broadcast_to(True if found is None else found, (_MOST, _MOST))[:queries, :keys]


def _within(begin, end, count):
    """Which of so many indices are in a range."""
    return (np.arange(count) >= int(begin)) & (np.arange(count) < int(end))


@_MANY
@hypothesis.given(rules(), st.integers(1, 16), st.data())
def test_ranges_hold_what_is_allowed(given, count, data):
    """All that is allowed is in a range, and all of the interior is allowed, of keys and of queries."""
    form, queries, keys, numbers = given
    masks = Masks.of(form, queries, keys, numbers.__getitem__)
    allowed = _allowed(masks, queries, keys)
    for of_range, scores in ((masks.key_range, allowed), (masks.query_range, allowed.T)):
        begin = data.draw(st.integers(0, scores.shape[0] - 1))
        span = of_range(begin, count)
        here = scores[begin : begin + count]
        assert not here[:, ~_within(span.begin, span.end, scores.shape[1])].any()
        assert here[:, _within(span.interior_begin, span.interior_end, scores.shape[1])].all()


@_MANY
@hypothesis.given(rules(), st.data())
def test_ranges_of_one_are_exact(given, data):
    """The range of one query, or of one key, is what is allowed."""
    form, queries, keys, numbers = given
    masks = Masks.of(form, queries, keys, numbers.__getitem__)
    allowed = _allowed(masks, queries, keys)
    for of_range, scores in ((masks.key_range, allowed), (masks.query_range, allowed.T)):
        begin = data.draw(st.integers(0, scores.shape[0] - 1))
        span, length = of_range(begin), scores.shape[1]
        np.testing.assert_array_equal(scores[begin], _within(span.begin, span.end, length))
        if scores is allowed:
            interior = _within(span.interior_begin, span.interior_end, length)
            np.testing.assert_array_equal(scores[begin], interior)


@_MANY
@hypothesis.given(rules())
def test_keys_of_queries(given):
    """The keys of each query are what is allowed, also of queries and keys past the last."""
    form, queries, keys, numbers = given
    masks = Masks.of(form, queries, keys, numbers.__getitem__)
    for more in (0, 7):
        allowed = _allowed(masks, queries + more, keys + more)
        allowed = allowed & (np.arange(queries + more)[:, None] < queries) & (np.arange(keys + more) < keys)
        first, end = masks.keys_of(np.arange(_MOST), keys_end=more > 0, queries_end=more > 0)
        first, end = (0 if first is None else first), (keys + more if end is None else end)
        first, end = (np.broadcast_to(x, _MOST)[: queries + more, None] for x in (first, end))
        index = np.arange(keys + more)
        np.testing.assert_array_equal(allowed, (index >= first) & (index < end))


@hypothesis.settings(max_examples=500)
@hypothesis.given(rules())
def test_what_a_form_may_exclude(given):
    """Where it excludes nothing on a side, nothing lies on that side of what is allowed."""
    form, queries, keys, numbers = given
    allowed = _allowed(Masks.of(form, queries, keys, numbers.__getitem__), queries, keys)
    for of_keys, scores in ((False, allowed), (True, allowed.T)):
        before, after = Masks.may_exclude(form, of_keys)
        for row in scores:
            some = np.flatnonzero(row)
            assert some.size or before or after
            assert before or row[: some.max(initial=-1) + 1].all()
            assert after or row[some.min(initial=row.size) :].all()


@hypothesis.given(rules(without=(Extra.QUERY_BEGINS,)), st.sampled_from([4, 8]), st.sampled_from([4, 16]), st.data())
def test_tiles(given, block, tile, data):
    """The tiles of Pallas's kernels hold what is allowed, and need no masks in their interior."""
    form, queries, keys, numbers = given
    refs = {extra: jnp.array([number], jnp.int32) for extra, number in numbers.items()}
    i, j = np.ogrid[: queries + block, : keys + 2 * tile]
    allowed = Masks.of(form, queries, keys, numbers.__getitem__).allows(i, j)
    shape = (queries + block, keys + 2 * tile)
    allowed = np.broadcast_to(True if allowed is None else allowed, shape) & (i < queries) & (j < keys)
    begin = data.draw(st.integers(0, (queries - 1) // block)) * block
    found = ranges.key_tiles(form, ranges.Shape(queries, keys, block, tile), refs, 0, jnp.int32(begin), block)
    here = allowed[begin : min(begin + block, queries)]  # results of queries past the last are not stored
    assert found.begin <= found.interior_begin <= found.interior_end <= found.end
    assert not here[:, : found.begin * tile].any() and not here[:, found.end * tile :].any()
    assert here[:, found.interior_begin * tile : found.interior_end * tile].all()


@hypothesis.given(_LIMITS, _LIMITS, st.integers(-40, 40), st.integers(1, 20), st.integers(1, 20))
def test_meets(left, right, offset, queries, keys):
    """A band meets a block unless it excludes all of it. It may say so of one between whose limits nothing lies."""
    band = Band(left, right, offset)
    i, j = np.ogrid[:queries, :keys]
    assert (
        band.meets(queries, keys)
        or not np.logical_and.reduce([np.broadcast_to(x, (queries, keys)) for x in (True, *band.allows(i, j))]).any()
    )


@hypothesis.given(_LIMITS, _LIMITS, st.integers(0, 10), st.integers(0, 10))
def test_part(left, right, query, key):
    """A part's band allows what that of the whole does."""
    i, j = np.ogrid[query : query + 20, key : key + 20]
    for of_whole, of_part in zip(
        Band(left, right).allows(i, j), Band(left, right).part(query, key).allows(i - query, j - key), strict=True
    ):
        np.testing.assert_array_equal(of_whole, of_part)
