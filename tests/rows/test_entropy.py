"""entropy beside its definition in float64: lengths around every border, special values, axes, dtypes, bad arguments.

How it transforms is in test_every_function, test_higher_orders and test_fuzz, its forms are in test_forms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import IMPLEMENTATIONS, each_dtype_in_turn, each_fast_implementation, on_gpu, precision, rows, served, slow
from truth import assert_within, wide

import jaxsoft
from jaxsoft.fold import accumulator

LENGTHS = (1, 2, 3, 24, 25, 33, 128, 1000, 1025, 2049, 4097, 65537)
LONG = (151936, 2**20 + 1)


def exact(x):
    """The entropy of rows, and its derivative -p (log(p) + H), in float64 or wider."""
    x = np.asarray(x).astype(np.longdouble if x.dtype == np.float64 else np.float64)
    with np.errstate(invalid="ignore"):
        d = x - x.max(axis=-1, keepdims=True)
        e = np.exp(d)
        below = np.where(e > 0, d, 0)
    s = e.sum(axis=-1, keepdims=True)
    mean = (e * below).sum(axis=-1, keepdims=True) / s
    return (np.log(s) - mean)[..., 0], -(e / s) * (below - mean)


@functools.partial(jax.jit, static_argnums=0)
def value_and_pullback(implementation, x, g):
    h, pull = jax.vjp(lambda x: jaxsoft.entropy(x, implementation=implementation), x)
    return h, pull(g)[0]


def check(x, implementation):
    """The value and the gradient of rows, relative to the true ones."""
    h, dh = exact(x)
    eps = 2.0**-40 if x.dtype == np.float64 else 2.0**-20
    actual, dx = value_and_pullback(implementation, x, np.ones_like(h, accumulator(x.dtype)))
    assert actual.dtype == (jnp.float64 if x.dtype == np.float64 else jnp.float32)
    # log(s) is within a rounding of 1 where one score dominates; the rest is relative.
    assert_within(actual, h, eps * (np.abs(h) + 0.2), f"entropy of {x.dtype} {x.shape}")
    rounding = float(jnp.finfo(x.dtype).eps) + 8 * eps
    scale = np.abs(dh) + (1 + np.abs(h))[..., None] * np.exp(-np.abs(wide(x) - wide(x).max(-1, keepdims=True)))
    bound = rounding * scale + max(1e-35, float(jnp.finfo(x.dtype).smallest_subnormal))
    assert_within(dx, dh, bound, f"gradient of entropy of {x.dtype} {x.shape}")


@each_dtype_in_turn
@each_fast_implementation
@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(LONG, marks=slow)], ids=["short", "long"])
def test_against_float64(dtype, implementation, lengths):
    with precision(dtype):
        for n in lengths:
            with served(implementation):
                check(rows(n, dtype), implementation)


# So many that a GPU's small blocks take a row each, of one warp and of more; and, in the end, too few for that.
@on_gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(66_000, 1030), (9000, 8192), (2200, 32_000), (500, 140_001), (600, 120_000)])
def test_many_rows(dtype, shape):
    """The entropy, and the one beside a loss."""
    count, n = shape
    row = jnp.arange(count)
    size, offset = (v.astype(jnp.float32)[:, None] for v in (1 + row % 5, 100 * (row % 3)))
    x = size * jax.random.normal(jax.random.key(n), shape, jnp.float32) + offset
    x = x.astype(dtype).at[5, n - 1].set(-jnp.inf).at[7, 5:].set(jnp.finfo(dtype).min)
    labels = row * 7919 % n
    entropy = jaxsoft.entropy(x, implementation="ffi")
    loss, beside = jaxsoft.softmax_cross_entropy_with_integer_labels(
        x, labels, return_entropy=True, implementation="ffi"
    )

    some = np.unique(np.r_[:12, count - 3 : count])
    z = wide(x[some])
    h, _ = exact(z)
    at_label = np.take_along_axis(z, np.asarray(labels)[some, None], axis=-1)[:, 0]
    true_loss = np.logaddexp.reduce(z, axis=-1) - at_label
    assert_within(entropy[some], h, 2.0**-20 * (np.abs(h) + 0.2), f"entropy of {jnp.dtype(dtype).name} {shape}")
    assert_within(beside[some], h, 2.0**-20 * (np.abs(h) + 0.2), f"entropy beside a loss of {jnp.dtype(dtype).name}")
    assert_within(loss[some], true_loss, 2.0**-20 * (np.abs(true_loss) + 1), f"loss of {jnp.dtype(dtype).name} {shape}")


@each_fast_implementation
def test_special_values(implementation):
    """-inf adds nothing; a row of nothing else is 0, with gradient 0; NaN and +inf make NaN; offsets change nothing."""
    with served(implementation):
        for n in (2, 40, 5000, 70001):
            x = np.random.default_rng(n).standard_normal((6, n)).astype(np.float32)
            x[0, :-1] = -np.inf
            x[1] = -np.inf
            x[2, n // 2] = np.nan
            x[3, n // 2] = np.inf
            x[4, :: max(2, n // 3)] = -np.inf
            x[5] = 3e38
            results = value_and_pullback(implementation, x, np.array([1, 1, 0, 0, 1, 1], np.float32))
            h, dx = map(np.asarray, results)
            expected, slope = exact(x[[0, 4, 5]])
            np.testing.assert_allclose(h[np.array([0, 4, 5])], expected, rtol=1e-5, atol=1e-6)
            assert h[1] == 0 and np.isnan(h[2]) and np.isnan(h[3])
            np.testing.assert_allclose(dx[np.array([0, 4, 5])], slope, rtol=1e-4, atol=1e-6)
            assert not np.any(dx[1])


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_further_apart_than_f32_reaches(implementation):
    """A score that is out of reach of the maximum adds nothing, to the value or to any derivative."""
    x = np.float32([-3e38, 3e38])
    with served(implementation):
        f = lambda x: jaxsoft.entropy(x, implementation=implementation)  # noqa: E731
        pushed = lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))  # noqa: E731
        for result in jax.tree.leaves(jax.jit(lambda x: (pushed(x), jax.grad(f)(x), jax.hessian(f)(x)))(x)):
            assert not np.any(result)


@each_dtype_in_turn
@each_fast_implementation
def test_masks_of_the_least_number(dtype, implementation):
    """Scores are often masked by the least finite number instead of -inf, in parts of a row or in all of it."""
    least = np.array(-1e307 if dtype == jnp.float64 else jnp.finfo(dtype).min).astype(dtype)
    with precision(dtype), served(implementation):
        for n in (3, 700, 1500, 3000, 4096):
            x = np.full((4, n), least)
            x[1, : n // 2] = rows(n, dtype)[0, : n // 2]
            x[2, -min(n, 100) :] = 0
            x[3, ::2] = -np.inf
            check(x, implementation)


@each_fast_implementation
def test_large_cotangents(implementation):
    """Where a score of -inf has no probability, it has no gradient, however large the cotangent is."""
    x = np.random.default_rng(0).standard_normal((2, 3000)).astype(np.float32)
    x[:, ::3] = -np.inf
    with served(implementation):
        dx = np.asarray(value_and_pullback(implementation, x, np.full(2, 1e19, np.float32))[1])
        assert not np.any(dx[:, ::3])
        np.testing.assert_allclose(dx, 1e19 * exact(x)[1], rtol=1e-4, atol=1e13)


@each_fast_implementation
def test_masked_rows_and_offsets(implementation):
    """What does not count is like -inf, and a huge offset is like none."""
    with served(implementation):
        x = np.random.default_rng(0).integers(-8, 8, (5, 300)).astype(np.float32)
        counts = np.random.default_rng(1).random((5, 300)) < 0.5
        counts[3] = False
        h = jaxsoft.entropy(x, where=counts, implementation=implementation)
        expected = np.where(counts.any(-1), exact(np.where(counts | ~counts.any(-1)[:, None], x, -np.inf))[0], 0)
        np.testing.assert_allclose(h, expected, rtol=1e-5)
        np.testing.assert_allclose(jaxsoft.entropy(x + 2.0**20, implementation=implementation), exact(x)[0], rtol=1e-5)


@each_fast_implementation
def test_axes_and_arguments(implementation):
    with served(implementation):
        x = np.random.default_rng(0).standard_normal((3, 4, 50)).astype(np.float32)
        for axis in (0, 1, -1, (0, 2), None):
            axes = tuple(range(3)) if axis is None else axis if isinstance(axis, tuple) else (axis % 3,)
            last = np.moveaxis(x, axes, range(3 - len(axes), 3))
            expected = exact(last.reshape(*last.shape[: 3 - len(axes)], -1) * 0.5)[0]
            h = jaxsoft.entropy(x, axis, scale=0.5, implementation=implementation)
            np.testing.assert_allclose(h, expected, rtol=1e-5)
            kept = jaxsoft.entropy(x, axis, scale=0.5, keepdims=True, implementation=implementation)
            assert kept.shape == tuple(1 if a in axes else d for a, d in enumerate(x.shape))
        causal = jaxsoft.entropy(jnp.zeros((4, 4)), is_causal=True, implementation=implementation)
        np.testing.assert_allclose(causal, np.log([1, 2, 3, 4]), rtol=1e-6, atol=1e-7)
        assert jaxsoft.entropy(x, dtype=jnp.bfloat16, implementation=implementation).dtype == jnp.bfloat16


def test_bad_arguments():
    x = jnp.zeros((3, 4))
    with pytest.raises(TypeError, match="x must hold float16, bfloat16, float32 or float64; got dtype complex64"):
        jaxsoft.entropy(x.astype(jnp.complex64))
    with pytest.raises(ValueError, match="axis must be between -2 and 1"):
        jaxsoft.entropy(x, 2)
    with pytest.raises(ValueError, match="where must broadcast to the shape of the scores"):
        jaxsoft.entropy(x, where=jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        jaxsoft.entropy(x, implementation="cuda")
