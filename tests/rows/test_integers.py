"""Integers of every dtype, at every border of its range, for every argument that takes some."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from common import OPS, as_usual, each_fast_implementation, each_implementation, each_op, served, slow
from truth import wide

import jaxsoft
from jaxsoft import linear_softmax_cross_entropy as linear
from jaxsoft import softmax_cross_entropy_with_integer_labels as cross_entropy

WIDE = (jnp.int64, jnp.uint64)  # under x64 alone
DTYPES = (jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32, *WIDE)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
each_dtype_in_turn = pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=() if d in (jnp.uint8, jnp.int16, jnp.uint64) else slow, id=d.__name__) for d in DTYPES],
)


def borders(dtype, classes):
    """Values of the dtype, at the borders of its range and of the classes."""
    info = jnp.iinfo(dtype)
    wanted = {0, 1, -1, -100, classes - 1, classes, classes + 1, int(info.min), int(info.max), int(info.max) // 2}
    return sorted(v for v in wanted if info.min <= v <= info.max)


def class_numbers(dtype):
    """Numbers of classes around what the dtype can hold."""
    bits = min(jnp.iinfo(dtype).bits, 16)
    return 2**bits, 2**bits + 1, 2 ** (bits - 1), 2**bits - 1


def as_labels(values, dtype):
    """Python's integers as an array of the dtype, which they fit."""
    return jnp.asarray(np.array(values, object if dtype in WIDE else np.int64).astype(dtype))


def truth(logits, labels):
    """The losses, and the gradients of their sum, as (i + 1) times the i-th; in float64. NaN for a bad label."""
    x, n = wide(logits), logits.shape[-1]
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    lse, p = x.max(axis=-1) + np.log(e.sum(axis=-1)), e / e.sum(axis=-1, keepdims=True)
    valid = np.array([0 <= v < n for v in labels])
    at = np.array([v if 0 <= v < n else 0 for v in labels])
    loss = np.where(valid, lse - x[np.arange(len(x)), at], np.nan)
    dx = p - (np.arange(n) == at[:, None]) * valid[:, None]
    return loss, dx * np.arange(1, len(x) + 1)[:, None]


def losses_and_gradient(f, x):
    loss, pull = jax.vjp(f, x)
    return loss, pull(jnp.arange(1, loss.size + 1, dtype=loss.dtype))[0]


def assert_true(f, logits, values):
    """Compares the losses of labels of these values, and their gradient by the logits, under jit."""
    what = f"{logits.shape[-1]} classes, labels {values}"
    loss, dx = jax.jit(lambda x: losses_and_gradient(f, x))(logits)
    want, dx_want = truth(logits, values)
    np.testing.assert_allclose(loss, want, rtol=2e-6, atol=1e-6, err_msg=what)
    np.testing.assert_allclose(dx, dx_want, rtol=1e-5, atol=1e-5, err_msg=what)


@pytest.mark.costly(4)
@each_dtype
@each_fast_implementation
@pytest.mark.parametrize("i", range(4))
def test_labels(dtype, implementation, i):
    """Losses and gradients of labels in range and out of it, and of as many classes as the dtype holds, or nearly."""
    with jax.enable_x64(dtype in WIDE), served(implementation):
        n = class_numbers(dtype)[i]
        values = borders(dtype, n)
        labels = as_labels(values, dtype)
        x = np.random.default_rng(n).standard_normal((len(values), n)).astype(np.float32)
        f = lambda x: cross_entropy(x, labels, implementation=implementation)  # noqa: E731
        assert_true(f, x, values)


@pytest.mark.costly
@each_dtype_in_turn
@pytest.mark.parametrize("i", range(4))
def test_labels_of_a_linear_layer(dtype, i):
    with jax.enable_x64(dtype in WIDE):
        n = class_numbers(dtype)[i]
        values = borders(dtype, n)
        labels = as_labels(values, dtype)
        hidden = np.eye(len(values), dtype=np.float32)
        weight = np.random.default_rng(n).standard_normal((len(values), n)).astype(np.float32)
        f = lambda w: linear(hidden, w, labels, chunk_size=1 + n // 3)  # noqa: E731
        assert_true(f, weight, values)


@pytest.mark.costly(1)
@each_dtype_in_turn
@pytest.mark.parametrize("part", [0, 1])
def test_ignored_labels(dtype, part):
    """An ignore_index at every border, and those that the dtype cannot hold, which ignore nothing."""
    with jax.enable_x64(dtype in WIDE):
        n = 9
        values = borders(dtype, n)
        labels = as_labels(values, dtype)
        x = np.random.default_rng(0).standard_normal((len(values), n)).astype(np.float32)
        want, dx_want = truth(x, values)
        every = [*values, -1, -100, 255, 2**16, -(2**31), 2**31, 2**32 - 1, -(2**63), 2**63 - 1, 2**64 - 1, 2**70]
        every = every[part::2]

        @jax.jit
        def results(x):
            of = lambda v: losses_and_gradient(lambda x: cross_entropy(x, labels, ignore_index=v), x)  # noqa: E731
            eye = np.eye(n, dtype=np.float32)
            return [(*of(v), linear(x, eye, labels, ignore_index=v)) for v in every]

        for ignored, (loss, dx, same) in zip(every, results(x), strict=True):
            here = np.array([v == ignored for v in values])
            np.testing.assert_allclose(loss, np.where(here, 0, want), rtol=2e-6, err_msg=f"ignore_index={ignored}")
            np.testing.assert_allclose(dx, np.where(here[:, None], 0, dx_want), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(same, np.where(here, 0, want), rtol=2e-6, err_msg=f"ignore_index={ignored}")


@pytest.mark.cover("op", "implementation")
@each_dtype_in_turn
@each_op
@each_implementation
def test_scores(dtype, op, implementation):
    """Of the scores as JAX makes floats of them: f32, and f64 of 64 bits; with a mask, as jax.nn does then."""
    with jax.enable_x64(dtype in WIDE), served(implementation):
        values = [v for v in borders(dtype, 5) if abs(v) < 2**24]
        x = jnp.asarray(np.array(values, np.int64).astype(dtype))
        with as_usual():
            expected = getattr(jax.nn, op)(x.astype(float) if dtype in WIDE else x.astype(jnp.float32))
        actual = getattr(jaxsoft, op)(x, implementation=implementation)
        assert actual.dtype == expected.dtype
        assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.costly(1)
@each_dtype_in_turn
def test_other_arguments(dtype):
    """Masks, scales, biases, weights, labels that are numbers, options of sampling, and scores of the fold."""
    with jax.enable_x64(dtype in WIDE):
        x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
        one = jnp.asarray(np.array([0, 1, 3, 0]).astype(dtype))
        same = np.array([0, 1, 3, 0], np.float32)
        labels = np.array([3, 1])

        def results(given, mask, scale):
            calls = [functools.partial(getattr(jaxsoft, op), x, -1) for op in OPS]
            return (
                [f(where=mask) for f in calls],
                [f(bias=given) for f in calls],
                [f(scale=scale) for f in calls],
                cross_entropy(x, labels, class_weights=given, label_smoothing=0.1),
                cross_entropy(x, labels, where=mask[None]),
                jaxsoft.softmax_cross_entropy(x, given),
                jaxsoft.logsumexp(given, b=given).astype(jnp.float32),
                jaxsoft.entropy(given).astype(jnp.float32),
                jaxsoft.fold.lse(jaxsoft.fold.state(given)).astype(jnp.float32),
                jaxsoft.fold.cumlogsumexp(given)[-1].astype(jnp.float32),
            )

        actual, expected = jax.jit(lambda a, b, c: (results(a, a, a[2]), results(b, c, 3.0)))(one, same, same != 0)
        assert_trees_all_close(actual, expected, rtol=1e-6)
        assert_trees_all_equal(actual[0], expected[0])
        st = jax.eval_shape(jaxsoft.fold.state, one)
        assert st.m.dtype == (jnp.float64 if dtype in WIDE else jnp.float32)
        np.testing.assert_allclose(expected[-2:], np.logaddexp.reduce(same), rtol=1e-6)
        assert jaxsoft.top_k_softmax(one, 2)[2].tolist() == [2, 1]
        options = {"temperature": jnp.asarray(np.array([0, 1]).astype(dtype)), "top_p": one[1], "min_p": one[1]}
        tokens, p = jaxsoft.random.sample(jax.random.key(0), x, **options)
        assert tokens.tolist() == np.argmax(x, axis=-1).tolist() and p.tolist() == [1, 1]
        assert jaxsoft.random.sample(jax.random.key(0), one, temperature=0)[0] == 2


@pytest.mark.costly
@pytest.mark.parametrize("number", [np.int8, np.uint8, np.int32, np.uint64], ids=lambda t: t.__name__)
def test_numbers_that_are_known(number):
    """k, axes, chunk sizes and the like as NumPy's integers."""
    x, labels = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32), np.array([0, 3])
    assert_trees_all_equal(jaxsoft.top_k_softmax(x, number(2), number(1)), jaxsoft.top_k_softmax(x, 2, 1))
    for op in OPS:
        assert_trees_all_equal(getattr(jaxsoft, op)(x, number(1)), getattr(jaxsoft, op)(x, 1))
    assert_trees_all_equal(cross_entropy(x, labels, number(1)), cross_entropy(x, labels, 1))
    ignoring = cross_entropy(x, labels, ignore_index=number(3)), cross_entropy(x, labels, ignore_index=3)
    assert_trees_all_equal(*ignoring)
    chunked = [linear(x, np.ones((4, 6), np.float32), labels, chunk_size=size) for size in (number(4), 4)]
    assert_trees_all_equal(*chunked)
    draws = [jaxsoft.random.sample(jax.random.key(0), x, top_k=k) for k in (number(2), 2)]
    assert_trees_all_equal(*draws)


@pytest.mark.costly
@each_dtype_in_turn
@pytest.mark.parametrize("shape", [(), (3,), pytest.param((2, 3), marks=slow)])
def test_shapes_and_transformations(dtype, shape):
    """Labels of a narrow dtype under jit, vmap and scan, with one label or many."""
    if dtype in WIDE:
        pytest.skip("they are narrow without x64")
    x = np.random.default_rng(0).standard_normal((*shape, 20)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 7, shape)
    want = cross_entropy(x, labels.astype(np.int32))
    narrow = jnp.asarray(labels.astype(dtype))
    ways = [cross_entropy, jax.jit(cross_entropy)]
    if shape:
        ways += [jax.vmap(cross_entropy), lambda x, y: jax.lax.map(lambda v: cross_entropy(*v), (x, y))]
    if jnp.iinfo(dtype).bits < 8 and shape:
        ways.pop()  # XLA for GPUs cannot cut a slice of half a byte
    for way in ways:
        assert_trees_all_close(way(x, narrow), want, rtol=1e-6)
