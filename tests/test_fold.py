"""The fold: a monoid of states, the same result for every way of cutting a row, and merges of blocks.

A row is cut into tiles, splits, shards, pages and blocks of keys; what is tested here is what all of those rely on.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from truth import Truth, in_float64, wide

import jaxsoft
from jaxsoft.fold import (
    AttentionState,
    State,
    attention_identity,
    attention_state,
    combine,
    identity,
    lse,
    merge_softmax,
    merge_softmax_lse,
    output,
    running_states,
    state,
    update_output,
)

SCORES = st.one_of(st.floats(-(2.0**60), 2.0**60, width=32), st.floats(-20, 20, width=32), st.just(-np.inf))
ROWS = hnp.arrays(np.float32, st.integers(1, 12), elements=SCORES)


def assert_same(a: State, b: State) -> None:
    """The same maximum, and the same sum up to the rounding of a few exponentials of differences up to 100."""
    np.testing.assert_array_equal(a.m, b.m)
    np.testing.assert_allclose(a.s, b.s, rtol=2e-5)


def one(value: float) -> State:
    return state(jnp.array([value], jnp.float32))


def test_identity():
    """The unit, bit for bit, from both sides; for special states too."""
    for value in (0.0, -3.5, 1e4, 1e30, -1e30, np.inf, -np.inf, np.nan, 1e-40):
        a = one(value)
        chex.assert_trees_all_equal(combine(identity(), a), a)
        chex.assert_trees_all_equal(combine(a, identity()), a)
    chex.assert_trees_all_equal(
        combine(identity((2,), jnp.float16), identity((2,), jnp.float16)), identity((2,), jnp.float16)
    )
    assert lse(identity()) == -jnp.inf


@given(x=hnp.arrays(np.float32, 3, elements=SCORES))
def test_associative_and_commutative(x):
    a, b, c = map(one, x)
    chex.assert_trees_all_equal(combine(a, b), combine(b, a))
    assert_same(combine(combine(a, b), c), combine(a, combine(b, c)))


@given(x=ROWS, data=st.data())
def test_every_way_of_cutting_a_row(x, data):
    """Blocks of any lengths, empty ones too, combined in any order, have the state of the row."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=4)))
    blocks = [state(jnp.asarray(part)) for part in np.split(x, cuts)]
    order = data.draw(st.permutations(blocks))
    assert_same(functools.reduce(combine, order, identity()), state(jnp.asarray(x)))


@given(x=ROWS, data=st.data())
def test_merged_blocks_are_the_softmax(x, data):
    """Unequal blocks, some without a score, whose softmax is NaN; by state and by log-sum-exp."""
    cuts = sorted(data.draw(st.lists(st.integers(1, max(1, len(x) - 1)), max_size=3, unique=True)))
    parts = [jnp.asarray(part) for part in np.split(x, cuts) if part.size]
    truth = Truth.of(x[None])
    p = np.nan_to_num(wide(truth.p[0]))  # a row of nothing but -inf: 0
    y, total = merge_softmax([jax.nn.softmax(part) for part in parts], [state(part) for part in parts])
    assert_same(total, state(jnp.asarray(x)))
    np.testing.assert_allclose(y, p, rtol=3e-5, atol=1e-36)
    y, value = merge_softmax_lse([jax.nn.softmax(part) for part in parts], [lse(state(part)) for part in parts])
    # A log-sum-exp that is large holds the sum less closely: exp of its rounding.
    size = np.abs(x[np.isfinite(x)]).max(initial=0)
    if size < 2**20:
        np.testing.assert_allclose(y, p, rtol=3e-5 + 1e-6 * size, atol=1e-36)
    np.testing.assert_allclose(value, truth.lse[0], rtol=1e-6, atol=1e-5)


def test_merge_checks_its_arguments():
    with pytest.raises(ValueError, match=r"blocks and states must have the same number of entries.*got 1 and 2"):
        merge_softmax([jnp.ones(1)], [identity(), identity()])
    with pytest.raises(ValueError, match="blocks and lses"):
        merge_softmax_lse([], [])
    block, rows = jnp.ones((2, 3)), r"blocks\[0\]\[\.\.\., 0\], blocks\[1\]\[\.\.\., 0\]"
    for blocks, shapes in (([block, block], (2, 5)), ([block, jnp.ones((5, 3))], (2, 2))):
        given = rf"must have shapes that broadcast with each other; got \(2,\), \({len(blocks[1])},\), \(2,\), "
        with pytest.raises(ValueError, match=rf"{rows}, states\[0\]\.m, states\[1\]\.m {given}"):
            merge_softmax(blocks, [identity(n) for n in shapes])
        with pytest.raises(ValueError, match=rf"{rows}, lses\[0\], lses\[1\] {given}"):
            merge_softmax_lse(blocks, [jnp.zeros(n) for n in shapes])
    with pytest.raises(ValueError, match=r"o, block must have shapes that broadcast .*got \(2, 3\), \(2, 4\)"):
        update_output(block, jnp.zeros(2), jnp.ones((2, 4)), jnp.zeros(2))
    with pytest.raises(
        ValueError, match=r"lse_o, lse_block must have shapes that .*got \(2,\), \(2,\), \(4,\), \(2,\)"
    ):
        update_output(block, jnp.zeros(4), block, jnp.zeros(2))


def test_bad_arguments():
    for f, name in ((state, "x"), (running_states, "x"), (jaxsoft.fold.from_lse, "value")):
        with pytest.raises(TypeError, match=f"{name} must hold real numbers; got dtype complex64"):
            f(jnp.ones(3, jnp.complex64))
    for dtype in (jnp.int32, bool, jnp.complex64):
        with pytest.raises(TypeError, match="dtype must be one of real floating-point numbers; got"):
            identity((), dtype)
    with pytest.raises(ValueError, match=r"where must broadcast to the shape of x, \(2, 3\); got shape \(4,\)"):
        state(jnp.ones((2, 3)), where=np.ones(4, bool))
    for axis, error, message in (
        (2, ValueError, "axis must be between -2 and 1 for an array of 2 dimensions; got 2"),
        (None, TypeError, "axis must be an integer; got None"),
        ((0,), TypeError, r"axis must be an integer; got \(0,\)"),
    ):
        with pytest.raises(error, match=message):
            running_states(jnp.ones((2, 3)), axis)


def test_shapes_of_the_identity():
    for shape, expected in ((3, (3,)), ([2, 3], (2, 3)), ((), ())):
        assert identity(shape).m.shape == identity(shape).s.shape == expected


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.int32])
def test_state_of_axes_and_masks(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        x = (np.random.default_rng(0).standard_normal((3, 4, 5)) * 4).astype(dtype)
        where = np.random.default_rng(1).random((3, 4, 5)) < 0.5
        where[0] = False
        for axis in (-1, 0, (0, 2), None):
            st = state(x, axis, where)
            assert st.m.dtype == st.s.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
            seen = np.where(where, wide(x), -np.inf)
            m = seen.max(axis=axis)
            np.testing.assert_array_equal(st.m, m)
            keep = np.max(seen, axis=axis, keepdims=True)
            s = np.exp(seen - np.where(np.isfinite(keep), keep, 0)).sum(axis=axis)
            np.testing.assert_allclose(st.s, s, rtol=1e-6)


def test_state_of_nothing():
    chex.assert_trees_all_equal(state(jnp.zeros((2, 0))), identity((2,)))
    chex.assert_trees_all_equal(state(jnp.full((2, 3), -jnp.inf)), identity((2,)))
    chex.assert_trees_all_equal(lse(state(jnp.full((2, 3), jnp.inf))), jnp.full(2, jnp.inf))


@pytest.mark.costly(1)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_states(reverse, axis):
    """Against JAX's cumulative log-sum-exp; and where a prefix holds no score, -inf instead of its NaN."""

    @jax.jit
    def results(x, masked):
        last = jax.tree.map(lambda v: jnp.take(v, 0 if reverse else -1, axis), running_states(x, axis, reverse))
        return jaxsoft.fold.cumlogsumexp(x, axis, reverse), lse(last), jaxsoft.fold.cumlogsumexp(masked, 1)

    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((5, 33)) * 10
        masked = np.where(np.arange(33) < 7, -np.inf, x)
        every, last, y = map(np.asarray, results(x, masked))
        expected = in_float64(lambda x: jax.lax.cumlogsumexp(x, axis % 2, reverse), x)
        np.testing.assert_allclose(every, expected, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(last, np.logaddexp.reduce(x, axis), rtol=1e-13)
        np.testing.assert_array_equal(y[:, :7], -np.inf)
        np.testing.assert_allclose(y[:, 7:], np.logaddexp.accumulate(x[:, 7:], axis=1), rtol=1e-13, atol=1e-13)


def test_running_update_of_ring_attention():
    """Blocks of keys one by one, of any scale and with masked blocks in between, give attention over all keys."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        for scale in (1, 1e3, 1e6):
            scores, values = rng.standard_normal((3, 40)) * scale, rng.standard_normal((40, 4))
            scores[0, :16], scores[1, 8:24] = -np.inf, -np.inf
            o, l = jnp.zeros((3, 4)), jnp.full(3, -jnp.inf)
            for start in range(0, 40, 8):
                block = scores[:, start : start + 8]
                o, l = update_output(
                    o, l, jnp.nan_to_num(jax.nn.softmax(block)) @ values[start : start + 8], jax.nn.logsumexp(block, -1)
                )
            truth = Truth.of(scores)
            np.testing.assert_allclose(o, wide(truth.p @ values), rtol=1e-9 * scale, atol=1e-12 * scale)
            np.testing.assert_allclose(l, wide(truth.lse), rtol=1e-13)


@given(
    a=st.one_of(st.floats(-(2.0**126), 2.0**126, width=32), st.floats(-9, 9, width=32), st.just(-np.inf)),
    b=st.one_of(st.floats(-(2.0**126), 2.0**126, width=32), st.floats(-9, 9, width=32), st.just(-np.inf)),
)
def test_running_update_is_stable(a, b):
    """For any two log-sum-exps the output lies between the two sides, also where a side without keys holds NaN."""
    left = jnp.array([1.0, jnp.nan if a == -np.inf else 2.0])
    right = jnp.array([3.0, jnp.nan if b == -np.inf else 5.0])
    o, l = update_output(left, jnp.float32(a), right, jnp.float32(b))
    if a == b == -np.inf:
        np.testing.assert_array_equal(o, 0)
        assert l == -np.inf
        return
    weight = 1 / (1 + np.exp(np.clip(np.float64(b) - np.float64(a), -800, 800)))
    expected = weight * np.nan_to_num(wide(left)) + (1 - weight) * np.nan_to_num(wide(right))
    np.testing.assert_allclose(o, expected, rtol=1e-6)
    np.testing.assert_allclose(l, np.logaddexp(np.float64(a), np.float64(b)), rtol=1e-6, atol=1e-6)


def test_gradients():
    """The log-sum-exp of a state, however it was put together, has softmax as its gradient, 0 where a score is -inf."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((4, 12))
        x[0, :6], x[1], x[2, 3] = -np.inf, -np.inf, -np.inf

        def whole(x):
            return lse(state(x)).sum()

        def blocks(x):
            return lse(
                functools.reduce(
                    combine, (state(x[:, i : i + 3]) for i in range(0, 12, 3)), identity((4,), jnp.float64)
                )
            ).sum()

        def running(x):
            return jaxsoft.fold.cumlogsumexp(x)[:, -1].sum()

        @jax.jit
        def results(x, y):
            first = [derivative(f)(x) for f in (whole, blocks, running) for derivative in (jax.grad, jax.jacfwd)]
            return first, jax.hessian(blocks)(y)

        y = np.random.default_rng(1).standard_normal((4, 12))
        first, second = results(x, y)
        for actual in first:
            np.testing.assert_allclose(actual, np.nan_to_num(wide(Truth.of(x).p)), rtol=1e-12, atol=1e-15)
        expected = in_float64(jax.hessian(lambda y: jax.nn.logsumexp(y, -1).sum()), y)
        np.testing.assert_allclose(second, expected, rtol=1e-6, atol=1e-13)


def test_gradients_of_merges():
    """Masked blocks leave no NaN in any gradient, and an unmasked merge has the gradient of the whole softmax."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((3, 8))
        weight = np.arange(24.0).reshape(3, 8)

        def merged(x):
            parts = (x[:, :3], x[:, 3:])
            y, st = merge_softmax([jax.nn.softmax(part) for part in parts], [state(part) for part in parts])
            return jnp.sum(y * weight) + lse(st).sum()

        def whole(x):
            return jnp.sum(jax.nn.softmax(x) * weight) + jax.nn.logsumexp(x, -1).sum()

        expected = in_float64(jax.grad(whole), x)
        np.testing.assert_allclose(jax.jit(jax.grad(merged))(x), expected, rtol=1e-10, atol=1e-12)

        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1, 2, 3))
        def updated(o, a, block, b):
            out, l = update_output(o, a, block, b)
            return out.sum() + jnp.where(l > -jnp.inf, l, 0)

        for a, b in [(-np.inf, 1.0), (1.0, -np.inf), (-np.inf, -np.inf), (1e30, -1e30), (0.0, 0.0)]:
            chex.assert_tree_all_finite(updated(np.ones(2), a, 2 * np.ones(2), b))


def test_transformations():
    """jit, vmap over any axis, lax.reduce and lax.scan take the fold as it is."""
    x = np.random.default_rng(0).standard_normal((4, 6, 5)).astype(np.float32)
    expected = state(x)
    for in_axis in (0, 1):
        chex.assert_trees_all_close(jax.vmap(state, in_axis, in_axis)(x), expected, rtol=1e-6)
    total = jax.jit(
        lambda x: jax.lax.scan(lambda c, v: (combine(c, one_each(v)), None), identity((4, 6)), jnp.moveaxis(x, -1, 0))
    )
    chex.assert_trees_all_close(total(x)[0], expected, rtol=1e-6)
    reduced = jax.lax.reduce(one_each(x), identity(), lambda a, b: combine(State(*a), State(*b)), (2,))
    chex.assert_trees_all_close(State(*reduced), expected, rtol=1e-6)


def one_each(x) -> State:
    """Each score's own state."""
    return State(jnp.asarray(x), jnp.ones(x.shape, x.dtype))


VALUES = hnp.arrays(np.float32, (12, 3), elements=st.floats(-9, 9, width=32))


def assert_same_attention(a: AttentionState, b: AttentionState) -> None:
    """The same maximum, the same sum, and the same weighted sum, whose terms may cancel."""
    assert_same(State(a.m, a.s), State(b.m, b.s))
    np.testing.assert_allclose(a.o, b.o, rtol=2e-5, atol=2e-4 * np.max(b.s, initial=0))


def keys(x, values) -> list[AttentionState]:
    """The state of each key by itself."""
    return [attention_state(jnp.asarray(x[i : i + 1]), jnp.asarray(values[i : i + 1])) for i in range(len(x))]


def test_identity_of_attention():
    """The unit, bit for bit, from both sides, also where there is no key and the sum of values is NaN."""
    for score in (0.0, -3.5, 1e30, -1e30, np.inf, -np.inf, np.nan):
        a = attention_state(jnp.array([score], jnp.float32), jnp.array([[1.0, -2.0]], jnp.float32))
        for combined in (combine(attention_identity((), 2), a), combine(a, attention_identity((), 2))):
            chex.assert_trees_all_equal(combined, a)
    b = attention_state(jnp.ones(1), jnp.ones((1, 2)))
    nothing = AttentionState(jnp.float32(-jnp.inf), jnp.float32(0), jnp.full(2, jnp.nan))
    for combined in (combine(nothing, b), combine(b, nothing)):
        chex.assert_trees_all_equal(combined, b)
    empty = attention_identity((3,), 2, jnp.float64 if jax.config.jax_enable_x64 else jnp.bfloat16)
    assert [v.shape for v in empty] == [(3,), (3,), (3, 2)]
    assert not output(empty).any() and (lse(empty) == -jnp.inf).all()


@given(x=hnp.arrays(np.float32, 3, elements=SCORES), values=VALUES)
def test_attention_is_associative_and_commutative(x, values):
    a, b, c = keys(x, values)
    chex.assert_trees_all_equal(combine(a, b), combine(b, a))
    assert_same_attention(combine(combine(a, b), c), combine(a, combine(b, c)))


@given(x=ROWS, values=VALUES, data=st.data())
def test_attention_by_blocks_and_by_keys(x, values, data):
    """Blocks of any lengths, empty ones too, in any order, keys one by one, and a scan give attention over all keys."""
    values = values[: len(x)]
    whole = attention_state(jnp.asarray(x), jnp.asarray(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=4)))
    pairs = zip(np.split(x, cuts), np.split(values, cuts), strict=True)
    blocks = [attention_state(jnp.asarray(part), jnp.asarray(v)) for part, v in pairs]
    for parts in (data.draw(st.permutations(blocks)), keys(x, values)):
        assert_same_attention(functools.reduce(combine, parts, attention_identity((), 3)), whole)
    stacked = jax.tree.map(lambda *v: np.stack(v), *keys(x, values))
    scanned = jax.jit(functools.partial(jax.lax.associative_scan, combine))(stacked)
    assert_same_attention(jax.tree.map(lambda v: np.asarray(v)[-1], scanned), whole)
    p = np.nan_to_num(wide(Truth.of(x[None]).p[0]))
    np.testing.assert_allclose(output(whole), p @ wide(values), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(lse(whole), Truth.of(x[None]).lse[0], rtol=1e-6, atol=1e-5)


@given(x=hnp.arrays(np.float32, 6, elements=SCORES), values=VALUES)
def test_merges_are_states_of_attention(x, values):
    """`update_output` is `combine` of normalised states, and `merge_softmax` that of values that are unit vectors."""
    values = values[:6]
    a, b = (attention_state(jnp.asarray(x[i : i + 3]), jnp.asarray(values[i : i + 3])) for i in (0, 3))
    o, value = update_output(output(a), lse(a), output(b), lse(b))
    total = combine(a, b)
    size = np.abs(x[np.isfinite(x)]).max(initial=0)
    if size < 2**20:  # a log-sum-exp that is large holds the sum less closely
        np.testing.assert_allclose(o, output(total), rtol=1e-5, atol=1e-5 * (10 + size))
    np.testing.assert_allclose(value, lse(total), rtol=1e-6, atol=1e-5)
    parts = jnp.asarray(x[:3]), jnp.asarray(x[3:])
    y, _ = merge_softmax([jax.nn.softmax(v) for v in parts], [state(v) for v in parts])
    unit = jnp.eye(6, dtype=jnp.float32)
    by_units = combine(*(attention_state(v, unit[i : i + 3]) for v, i in zip(parts, (0, 3), strict=True)))
    np.testing.assert_allclose(y, output(by_units), rtol=3e-5, atol=1e-36)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_attention_state_of_many(dtype):
    """Queries and batches at once, values for each or for all, and a mask, under which values count for nothing."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == jnp.float64):
        x, mask = (rng.standard_normal((2, 5, 7)) * 3).astype(dtype), rng.random((5, 7)) < 0.6
        mask[2] = False
        for values in (rng.standard_normal((7, 4)), rng.standard_normal((2, 7, 4))):
            with jax.numpy_rank_promotion("allow"):
                st = attention_state(x, values.astype(dtype), np.broadcast_to(mask, x.shape))
            chex.assert_type(list(st), jnp.float64 if dtype == jnp.float64 else jnp.float32)
            e = np.where(
                mask, np.exp(wide(x) - np.where(mask, wide(x), -np.inf).max(-1, keepdims=True, initial=-99)), 0
            )
            s = e.sum(-1, keepdims=True)
            expected = (e / np.where(s == 0, 1, s)) @ wide(values.astype(dtype))
            np.testing.assert_allclose(output(st), expected, rtol=1e-5, atol=1e-6)
            assert not np.asarray(output(st))[:, 2].any() and (lse(st)[:, 2] == -jnp.inf).all()
            assert output(st, jnp.float16).dtype == jnp.float16


def test_gradients_of_attention():
    """By scores and values, however a state was put together; 0, and never NaN, where no key counts."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, values = rng.standard_normal((4, 12)), rng.standard_normal((12, 3))
        x[0, :6], x[1], x[2, 3] = -np.inf, -np.inf, -np.inf

        def total(st):
            return jnp.sum(jnp.sin(output(st))) + jnp.sum(jnp.where(st.s > 0, lse(st), 0) ** 2)

        def whole(x, values):
            return total(attention_state(x, values))

        def blocks(x, values):
            parts = (attention_state(x[:, i : i + 3], values[i : i + 3]) for i in range(0, 12, 3))
            return total(functools.reduce(combine, parts, attention_identity((4,), 3, jnp.float64)))

        def running(x, values):
            elements = AttentionState(x, jaxsoft.fold.weight(x, x), jaxsoft.fold.weight(x, x)[..., None] * values[None])
            return total(jax.tree.map(lambda v: v[:, -1], jax.lax.associative_scan(combine, elements, axis=1)))

        def definition(x, values):
            some = (x > -jnp.inf).any(-1)
            p = jnp.where(some[:, None], jax.nn.softmax(jnp.where(some[:, None], x, 0)), 0)
            of_rows = jnp.where(some, jax.nn.logsumexp(jnp.where(some[:, None], x, 0), -1), 0)
            return jnp.sum(jnp.sin(p @ values)) + jnp.sum(of_rows**2)

        expected = in_float64(jax.grad(definition, (0, 1)), x, values)
        pairs = [derivative(f, (0, 1)) for f in (whole, blocks, running) for derivative in (jax.grad, jax.jacfwd)]
        for actual in jax.jit(lambda *v: [f(*v) for f in pairs])(x, values):
            chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_derivatives_of_scores_that_are_computed_twice():
    """XLA may compute scores once with a product and a sum fused, and once not: no derivative looks for a maximum."""
    rng = np.random.default_rng(0)
    x, b = rng.standard_normal((64, 257)).astype(np.float32), rng.standard_normal((64, 1)).astype(np.float32)
    values = rng.standard_normal((257, 2)).astype(np.float32)

    def f(x, b):
        with jax.numpy_rank_promotion("allow"):
            z = x * np.float32(0.3535) + b
        return jnp.sum(jnp.sin(lse(state(z)))) + jnp.sum(output(attention_state(z, values)))

    first = jax.grad(f, (0, 1))
    chex.assert_tree_all_finite(jax.jit(first)(x, b))
    chex.assert_tree_all_finite(jax.jit(lambda *v: jax.jvp(first, v, v))(x, b))


def test_bad_arguments_of_attention():
    with pytest.raises(TypeError, match="scores must hold real numbers; got dtype complex64"):
        attention_state(jnp.ones(3, jnp.complex64), jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="values must be a number or an array of numbers; got None"):
        attention_state(jnp.ones(3), None)
    with pytest.raises(TypeError, match="dtype must be one of real floating-point numbers; got"):
        attention_identity((), 2, jnp.int32)
    with pytest.raises(ValueError, match=r"where must broadcast to the shape of scores, \(3,\); got shape \(4,\)"):
        attention_state(jnp.ones(3), jnp.ones((3, 2)), np.ones(4, bool))
    with pytest.raises(ValueError, match=r"scores must have at least one axis, that of the keys; got shape \(\)"):
        attention_state(1.0, jnp.ones((1, 2)))
    for values in (jnp.ones((4, 2)), jnp.ones(3)):
        with pytest.raises(ValueError, match=r"values must have the shape \(3, d\) or \(\.\.\., 3, d\).*got shape"):
            attention_state(jnp.ones(3), values)
