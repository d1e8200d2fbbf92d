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
from truth import Truth, wide

import jaxsoft
from jaxsoft.fold import (
    State,
    combine,
    identity,
    lse,
    merge_softmax,
    merge_softmax_lse,
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


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_states(reverse, axis):
    """Against JAX's cumulative log-sum-exp; and where a prefix holds no score, -inf instead of its NaN."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((5, 33)) * 10
        np.testing.assert_allclose(
            jaxsoft.fold.cumlogsumexp(x, axis, reverse),
            jax.lax.cumlogsumexp(x, axis % 2, reverse),
            rtol=1e-13,
            atol=1e-13,
        )
        last = jax.tree.map(lambda v: jnp.take(v, 0 if reverse else -1, axis), running_states(x, axis, reverse))
        np.testing.assert_allclose(lse(last), jax.nn.logsumexp(x, axis), rtol=1e-13)
        x = np.where(np.arange(33) < 7, -np.inf, x)
        y = np.asarray(jaxsoft.fold.cumlogsumexp(x, 1))
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

        expected = np.nan_to_num(wide(jax.nn.softmax(x)))
        for f in (whole, blocks, running):
            np.testing.assert_allclose(jax.jit(jax.grad(f))(x), expected, rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(jax.jit(jax.jacfwd(f))(x), expected, rtol=1e-12, atol=1e-15)
        y = np.random.default_rng(1).standard_normal((4, 12))
        chex.assert_trees_all_close(
            jax.hessian(blocks)(y), jax.hessian(lambda x: jax.nn.logsumexp(x, -1).sum())(y), atol=1e-13
        )


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

        np.testing.assert_allclose(jax.grad(merged)(x), jax.grad(whole)(x), rtol=1e-10, atol=1e-12)
        for a, b in [(-jnp.inf, 1.0), (1.0, -jnp.inf), (-jnp.inf, -jnp.inf), (1e30, -1e30), (0.0, 0.0)]:

            def updated(o, a, block, b):
                out, l = update_output(o, a, block, b)
                return out.sum() + jnp.where(l > -jnp.inf, l, 0)

            grads = jax.grad(updated, argnums=(0, 1, 2, 3))(jnp.ones(2), a, 2 * jnp.ones(2), b)
            chex.assert_tree_all_finite(grads)


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
