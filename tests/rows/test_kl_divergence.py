"""softmax_kl_divergence beside its definition in float64 or wider: lengths around every border, logits near each other,
special values, axes, dtypes, bad arguments.

How it transforms is in test_every_function, test_higher_orders and test_fuzz; its forms are in test_forms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import (
    IMPLEMENTATIONS,
    as_usual,
    each_dtype_in_turn,
    each_fast_implementation,
    each_implementation,
    on_gpu,
    precision,
    served,
    slow,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, needs_devices
from test_export import exported
from truth import assert_within, in_float64, wide

import jaxsoft

kl = jaxsoft.softmax_kl_divergence
LENGTHS = (1, 2, 3, 24, 25, 33, 127, 128, 1000, 1025, 2049, 4097, 65537)
LONG = (151936, 2**20 + 3)
NEAR, FAR, EQUAL, PEAKED = "near", "far", "equal", "peaked"


def exact(x, y):
    """The divergence of rows, its derivatives by both, and what its terms are in size, in float64 or wider."""
    x, y = (np.asarray(v).astype(np.longdouble) for v in (x, y))
    with np.errstate(invalid="ignore"):
        log_p, log_q = (v - v.max(-1, keepdims=True) for v in (x, y))
        log_p, log_q = (v - np.log(np.exp(v).sum(-1, keepdims=True)) for v in (log_p, log_q))
        p, q = np.exp(log_p), np.exp(log_q)
        d = np.where(p > 0, log_q - log_p, 0)
    k = np.where(p > 0, p * np.where(np.abs(d) < 0.1, beyond(d), q / np.where(p > 0, p, 1) - 1 - d), q).sum(-1)
    return k, -p * (d + k[..., None]), q - p, p, d


def beyond(d):
    """exp(d) - 1 - d, where d is small."""
    d = np.where(np.abs(d) < 0.1, d, 0)
    series = np.ones_like(d)
    for i in range(14, 2, -1):
        series = 1 + d / i * series
    return d * d / 2 * series


def rows(kind, n, dtype):
    """Two arrays of rows that are plain, spread out, offset by 100 and by -100."""
    rng = np.random.default_rng(n)
    count = 3 if n > 100_000 else 4
    x, noise = rng.standard_normal((2, count, n)).astype(np.float64)
    i = np.arange(count)[:, None]
    x = x * np.where(i == 1, 5, 1) + np.where(i == 2, 100, 0) - np.where(i == 3, 100, 0)
    y = {NEAR: x + 1e-3 * noise, FAR: noise - 3, EQUAL: x, PEAKED: 20 * noise}[kind]
    return x.astype(dtype), y.astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def gradients(f, *operands):
    """The value and the gradients of its sum, in one program."""
    k, pull = jax.vjp(f, *operands)
    return k, pull(jnp.ones_like(k))


def check(x, y, implementation):
    """The value relative to the true one, however near the two arrays are; the gradients to their terms."""
    k, by_x, by_y, p, d = exact(x, y)
    actual, (dx, dy) = gradients(functools.partial(kl, implementation=implementation), x, y)
    what = f"KL of {x.dtype} and {y.dtype} {x.shape} by {implementation}"
    f64 = x.dtype == y.dtype == np.float64
    assert actual.dtype == (np.float64 if x.dtype == np.float64 else np.float32) and dx.dtype == x.dtype
    eps, least = (2.0**-40, 1e-26) if f64 else (2.0**-18, 1e-13)
    size = 1 + np.abs(np.stack([wide(x), wide(y)])).max((0, -1))  # scores of f32 are rounded before their differences
    reach = (2.0**-50 if f64 else 2.0**-22) * size  # of a rounded distance
    assert_within(actual, k, eps * k + np.sqrt(k) * reach + reach**2 + least, what)
    assert np.all(np.asarray(actual) >= 0)
    # A distance is rounded as the scores are. What is left relative to the gradient is the rounding of its dtype.
    of_x = p * (np.abs(d) + k[..., None] + reach[..., None]) * (16 * eps) + p * 2 * reach[..., None]
    of_y = np.abs(by_y) * (16 * eps) + p * 2 * reach[..., None]
    for which, found, expected, bound in (("p", dx, by_x, of_x), ("q", dy, by_y, of_y)):
        bound = bound + np.abs(expected) * float(jnp.finfo(found.dtype).eps) + 1e-35
        bound = np.maximum(bound, float(jnp.finfo(found.dtype).smallest_subnormal))
        assert_within(found, expected, bound, f"gradient by {which}_logits of {what}")


@pytest.mark.costly
@each_dtype_in_turn
@each_fast_implementation
@pytest.mark.parametrize("kind", [NEAR, FAR, PEAKED])
@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(LONG, marks=slow)], ids=["short", "long"])
def test_against_float64(dtype, implementation, kind, lengths):
    with precision(dtype):
        for n in lengths:
            with served(implementation):
                check(*rows(kind, n, dtype), implementation)


@each_fast_implementation
@pytest.mark.parametrize("scale", [None, 0.7, "traced"])
def test_a_thousandth_apart(implementation, scale):
    """1e-5 of a divergence of which the sum of p * log(p / q) in f32 is off by more than 1e-2."""
    x, y = rows(NEAR, 5000, np.float32)
    with served(implementation):
        given = np.float32(0.7) if scale == "traced" else scale
        f = lambda x, y, s: kl(x, y, scale=s, implementation=implementation)  # noqa: E731
        found = jax.jit(f)(x, y, given) if scale == "traced" else jax.jit(lambda x, y: f(x, y, given))(x, y)
        z, w = (v if scale is None else v * np.float32(0.7) for v in (x, y))
        expected = exact(z, w)[0]
        np.testing.assert_allclose(np.asarray(found, np.float64)[:2], expected[:2].astype(np.float64), rtol=1e-5)
        in_f32 = jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - jax.nn.log_softmax(w)), -1)
        assert np.max(np.abs(in_f32[:2] / expected[:2].astype(float) - 1)) > 1e-2


@pytest.mark.costly(1)
@each_dtype_in_turn
@each_implementation
def test_equal_logits(dtype, implementation):
    """Exactly 0, and so are the gradients; of huge scores, too."""
    with precision(dtype):
        for n in (1, 40, 4097):
            x, _ = rows(EQUAL, n, dtype)
            x[1] *= 100
            x[2] = float(jnp.finfo(dtype).max)
            with served(implementation):
                k, slopes = gradients(functools.partial(kl, implementation=implementation), x, x)
                assert not np.any(k) and not any(map(np.any, slopes)), (n, k)
                assert not np.any(kl(x, x, scale=0.7, where=x > 0, implementation=implementation))


@pytest.mark.costly
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")], ids=str)
@each_implementation
def test_two_dtypes(dtypes, implementation):
    """Each gradient has the dtype of what it is of. The kernels take one dtype, and the default sees to that."""
    for n in (7, 1000):
        x, y = (v.astype(jnp.dtype(d)) for v, d in zip(rows(FAR, n, np.float32), dtypes, strict=True))
        for scale in (None, 0.5):
            with served(implementation):
                f = functools.partial(kl, scale=scale, implementation=implementation)
                k, slopes = gradients(f, x, y)
                factor = scale or 1
                true = exact(wide(x) * factor, wide(y) * factor)
                np.testing.assert_allclose(k, true[0].astype(float), rtol=1e-4)
                for found, expected, of in zip(slopes, true[1:3], (x, y), strict=True):
                    assert found.dtype == of.dtype
                    expected, most = factor * expected.astype(float), np.abs(expected).max()
                    np.testing.assert_allclose(wide(found), expected, rtol=1e-2, atol=1e-5 + 1e-4 * float(most))


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_f64_beside_another_dtype(implementation):
    """It is computed in f64, whichever of both it is."""
    with jax.enable_x64(True), served(implementation):
        x, y = rows(FAR, 100, np.float64)
        y = jnp.asarray(y, jnp.float32)
        for given in ((x, y), (y, x)):
            k, slopes = gradients(functools.partial(kl, implementation=implementation), *given)
            assert k.dtype == jnp.float64 and [v.dtype for v in slopes] == [v.dtype for v in given]
            np.testing.assert_allclose(k, exact(*map(wide, given))[0].astype(float), rtol=1e-12)


def special(n):
    """Rows with the divergence that they must have."""
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((2, 11, n)).astype(np.float32)
    x[0, 1:] = -np.inf  # p is 1 for one element
    x[1], y[2] = -np.inf, -np.inf  # nothing of p; nothing of q
    y[3, n // 2] = -np.inf  # what has a share of p has none of q
    x[4, n // 2] = y[4, n // 2] = -np.inf  # for neither of both
    x[5, n // 2], y[6, n // 3] = np.nan, np.nan
    x[7, n // 2], y[8, n // 3] = np.inf, np.inf
    x[9], y[9] = 1e38, -1e38
    x[10, : n // 2], y[10, : n // 2] = -1e9, -1e9
    with np.errstate(invalid="ignore"):
        lse = [np.logaddexp.reduce(wide(v), axis=-1) for v in (x, y)]
        expected = np.zeros(11)
        for i in (0, 4, 10):
            log_p, log_q = (wide(v)[i] - total[i] for v, total in zip((x, y), lse, strict=True))
            expected[i] = np.sum(np.where(np.exp(log_p) > 0, np.exp(log_p) * (log_p - log_q), 0)[np.exp(log_p) > 0])
    expected[[2, 3]] = np.inf
    expected[5:9] = np.nan
    return x, y, expected


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_special_values(implementation):
    """-inf has no share; NaN and +inf make NaN; the gradients of what is finite, and of what is masked, are finite."""
    for n in (2, 40) if implementation == "reference" else (2, 40, 5000, 70001):
        x, y, expected = special(n)
        with served(implementation):
            results = gradients(functools.partial(kl, implementation=implementation), x, y)
            k, (dx, dy) = jax.tree.map(np.asarray, results)
            np.testing.assert_allclose(k, expected, rtol=1e-5, atol=1e-6)
            some = np.array([0, 1, 4, 9, 10])
            assert np.isfinite(dx[some]).all() and np.isfinite(dy[some]).all()
            assert not np.any(dx[1]) and not np.any(dy[1])


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradient_of_what_is_infinite(implementation):
    """It is finite, so that such rows may be left out of a mean, also where q has no scores at all."""
    for n in (3, 33, 3000):
        x, y = np.random.default_rng(n).standard_normal((2, 3, n)).astype(np.float32)
        x[1, 0], y[:2], y[2, 1] = -np.inf, -np.inf, -np.inf
        with served(implementation):
            k, slopes = gradients(functools.partial(kl, implementation=implementation), x, y)
            assert np.isinf(k).all() and all(np.isfinite(slope).all() for slope in slopes)
            p, q = (np.exp(wide(v)) for v in (x, y))
            p, q = (v / np.where(v.any(-1, keepdims=True), v.sum(-1, keepdims=True), 1) for v in (p, q))
            np.testing.assert_allclose(slopes[1], q - p, rtol=1e-4, atol=1e-6)


@pytest.mark.costly(5)
@each_dtype_in_turn
@each_implementation
@pytest.mark.parametrize("n", [7, 300, 5000, 70001])
@pytest.mark.parametrize("offset", [9, 100, 1e4, 1e6, 1e9])
def test_scores_that_are_far_from_each_other(dtype, implementation, n, offset):
    """What is added to a whole row of either array changes nothing, but for what it rounds the scores to."""
    if (dtype == jnp.float16 and offset > 1e4) or (implementation == "reference" and n > 300):
        pytest.skip("out of range, or slow")
    with precision(dtype), served(implementation):
        x, y = rows(FAR, n, dtype)
        f = functools.partial(kl, implementation=implementation)
        shifted = (x + offset, y), (x, y - offset), (x - offset, y + offset), (x - offset, x), (x, y / 9 + x + offset)
        for z, w in shifted:
            z, w = (v.astype(dtype) for v in (z, w))
            k, by_x, by_y, p, _ = exact(z, w)
            found, (dx, dy) = gradients(f, z, w)
            tiny = 1e-12 if dtype == jnp.float64 else 1e-6
            np.testing.assert_allclose(found, k.astype(float), rtol=20 * tiny, atol=tiny / 100)
            eps = 4 * float(jnp.finfo(dtype).eps)
            for grad, true in ((dx, by_x), (dy, by_y)):
                np.testing.assert_allclose(
                    wide(grad),
                    true.astype(float),
                    rtol=eps + 100 * tiny,
                    atol=20 * tiny * np.abs(p).max().astype(float),
                )


@each_fast_implementation
@pytest.mark.parametrize("size", [1e3, 1e5, -1e6])
def test_near_scores_that_are_large(implementation, size):
    """Their distances have all digits, as do those from the maximum, so the gradients do too."""
    x, noise = np.random.default_rng(7).standard_normal((2, 4, 5000))
    x = (x + size).astype(np.float32)
    y = (x + np.array([0.01, 0.1, 1, 3])[:, None] * noise).astype(np.float32)
    k, by_x, by_y, p, _ = (v.astype(float) for v in exact(x, y))
    with served(implementation):
        found, slopes = gradients(functools.partial(kl, implementation=implementation), x, y)
    np.testing.assert_allclose(found, k, rtol=2e-5)
    for slope, expected in zip(slopes, (by_x, by_y), strict=True):
        np.testing.assert_allclose(slope, expected, rtol=2e-5, atol=2e-6 * p.max())


@on_gpu
@each_dtype_in_turn
def test_rows_that_blocks_share(dtype):
    """Rows that several blocks reduce, blocks that begin and end within rows, and blocks of many rows."""
    shapes = (1, 30_011), (3, 200_003), (7, 2**19), (700, 9000), (999, 20_001), (2100, 33_000)
    many = (100_001, 40), (50_000, 2100), (25_000, 4200)
    with precision(dtype):
        for count, n in (*shapes, *many):
            x, y = (v.repeat(4, 0)[: min(13, count)] for v in rows(FAR, n, dtype))
            x[4:] *= np.linspace(0.5, 1, len(x[4:]))[:, None].astype(dtype)
            where = np.random.default_rng(n).random(n) < 0.8
            for mask in (None, where):
                kept = slice(None) if mask is None else mask
                expected = exact(x[:, kept], y[:, kept])[0].astype(float)
                of = np.arange(count) % len(x)
                f = jax.jit(functools.partial(kl, where=mask, implementation="ffi"))
                found = f(jnp.array(x)[of], jnp.array(y)[of])
                tiny = 1e-12 if dtype == jnp.float64 else 1e-5
                np.testing.assert_allclose(found, expected[of], rtol=tiny, err_msg=str((count, n)))


@pytest.mark.costly
@each_implementation
@pytest.mark.parametrize("mask", [-1e9, -1e30, float(np.finfo(np.float32).min)], ids=str)
def test_rows_that_are_masked_by_a_large_number(implementation, mask):
    """All of p or of q, which is then the same for every element, or all but one element."""
    for n in (8, 300) if implementation == "reference" else (8, 300, 9000):
        x, y = np.random.default_rng(n).standard_normal((2, 6, n)).astype(np.float32)
        x[0], y[1], x[2], y[2] = mask, mask, mask, mask
        x[3, : n - 1], x[4, 1:], y[5, : n // 2] = mask, mask, max(mask, -1e9)  # else the divergence is infinite
        with served(implementation):
            k, slopes = gradients(functools.partial(kl, implementation=implementation), x, y)
            assert_masked(k, slopes, exact(x, y))


def assert_masked(k, slopes, expected):
    """The gradient by p is as exact as its terms, of which the divergence is one."""
    true, *of_true, p, _ = expected
    np.testing.assert_allclose(k, true.astype(float), rtol=2e-5)
    for found, slope, term in zip(slopes, of_true, (true[:, None], 0), strict=True):
        assert_within(found, slope, 1e-4 * np.abs(slope) + 1e-6 * p * (1 + term) + 1e-35, "gradient")


@each_implementation
def test_what_is_masked_by_a_large_number(implementation):
    """Of p, of q or of both, in parts of a row, as padded classes are: of what p does not have q may have much."""
    for n in (64, 300) if implementation == "reference" else (64, 300, 9000, 140_000):
        rng = np.random.default_rng(n)
        x, y = rng.standard_normal((2, 7, n)).astype(np.float32)
        x[0, : n // 2], x[1, n // 2 :], x[2, 1:], x[3, :-1] = -1e9, -1e9, -1e9, -1e9
        x[4, n // 3 :] -= 200
        y[4, n // 3 :] += 200
        y[5] = x[5] + y[5] / 1000
        x[5, n // 2 :], y[5, n // 2 :] = -1e9, -1e8
        x[6, ::3] = -3e38
        expected = exact(x, y)
        with served(implementation):
            k, slopes = gradients(functools.partial(kl, implementation=implementation), x, y)
            assert_masked(k, slopes, expected)


@each_fast_implementation
def test_masks_and_scales(implementation):
    """What does not count is as if it were not there; a scale of any sign, of all rows or of each, is that of both."""
    rng = np.random.default_rng(0)
    for shape in ((3, 5, 130), (2, 3, 3001)):
        x, y = rng.standard_normal((2, *shape)).astype(np.float32)
        counts = rng.random(shape) < 0.5
        counts[0, 0] = False
        hidden = np.where(counts, x, np.nan)
        scale = rng.uniform(-2, 2, (shape[0], 1, 1)).astype(np.float32)
        for where, s in ((counts, None), (None, scale), (counts, scale), (counts[0, 1], np.float32(0.3)), (None, 0.0)):
            full = np.broadcast_to(True if where is None else where, shape)
            given = (hidden, np.where(counts, y, np.inf)) if where is counts else (x, y)
            z, w = (np.float32(1 if s is None else s) * np.where(full, v, 0) for v in given)
            none = ~full.any(-1, keepdims=True)
            expected, by_x, by_y, *_ = exact(*(np.where(full | none, v, -np.inf) for v in (z, w)))
            with served(implementation):
                f = functools.partial(kl, where=where, scale=s, implementation=implementation)
                k, (dx, dy) = gradients(f, *given)
                np.testing.assert_allclose(k, np.where(none[..., 0], 0, expected).astype(float), rtol=1e-4, atol=1e-6)
                for found, slope in ((dx, by_x), (dy, by_y)):
                    slope = np.where(full & ~none, slope * (1 if s is None else s), 0).astype(float)
                    np.testing.assert_allclose(found, slope, rtol=1e-3, atol=1e-5)


@each_fast_implementation
def test_axes_and_shapes(implementation):
    x = np.random.default_rng(0).standard_normal((3, 4, 50)).astype(np.float32)
    y = np.random.default_rng(1).standard_normal((4, 1)).astype(np.float32)
    full = np.broadcast_to(y, x.shape)
    with served(implementation):
        for axis in (0, 1, -1, (0, 2), None):
            axes = tuple(range(3)) if axis is None else axis if isinstance(axis, tuple) else (axis % 3,)
            kept = [a for a in range(3) if a not in axes]
            z, w = (v.transpose(*kept, *axes).reshape(*(v.shape[a] for a in kept), -1) for v in (x, full))
            expected, *slopes = exact(z, w)[:3]
            f = functools.partial(kl, axis=axis, implementation=implementation)
            k, (dx, dy) = gradients(f, x, y)
            np.testing.assert_allclose(k, expected.astype(float), rtol=1e-5, atol=1e-7)
            by_x, by_y = (
                s.reshape(*(x.shape[a] for a in (*kept, *axes))).transpose(*np.argsort([*kept, *axes])) for s in slopes
            )
            np.testing.assert_allclose(dx, by_x.astype(float), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(dy, by_y.sum((0, 2), keepdims=True)[0].astype(float), rtol=1e-4, atol=1e-5)
        assert kl(x[:, :, :0], x[:, :, :0], implementation=implementation).tolist() == [[0.0] * 4] * 3
        assert kl(x[:0], x[:0], implementation=implementation).shape == (0, 4)


def test_bad_arguments():
    x = jnp.zeros((3, 4))
    for name, given in (("p_logits", (x.astype(jnp.complex64), x)), ("q_logits", (x, x.astype(jnp.complex64)))):
        with pytest.raises(TypeError, match=f"^{name} must hold float16, bfloat16, float32 or float64; got dtype "):
            kl(*given)
    with pytest.raises(ValueError, match=r"^q_logits must have a shape that broadcasts .* \(3, 4\); got \(2, 4\)"):
        kl(x, x[:2])
    with pytest.raises(ValueError, match="axis must be between -2 and 1"):
        kl(x, x, axis=2)
    with pytest.raises(ValueError, match="where must broadcast to the shape of the scores"):
        kl(x, x, where=jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match="scale must"):
        kl(x, x, scale=jnp.ones(4))
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        kl(x, x, implementation="cuda")
    with pytest.raises(TypeError):
        kl(x, x, -1)
    assert kl(np.arange(3), np.zeros(3, int)) == kl(jnp.arange(3.0), jnp.zeros(3))


def test_several_implementations():
    """One of those that are accepted serves; where none does, the error says why for each."""
    x, y = rows(FAR, 100, np.float32)
    assert_trees_all_close(kl(x, y, implementation=("xla", "reference")), kl(x, y), rtol=1e-5)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match=r"pallas: .*NVIDIA.*; triton: .*NVIDIA"):
            kl(x, y, implementation=("pallas", "triton"))


@pytest.mark.parametrize("near", [False, True], ids=["far", "near"])
def test_beside_optax(near):
    """optax takes the logarithms of q first. It is exact where the two are far from each other."""
    optax = pytest.importorskip("optax")
    x, y = rows(NEAR if near else FAR, 300, np.float32)
    with as_usual():
        theirs = optax.losses.kl_divergence(jax.nn.log_softmax(y), jax.nn.softmax(x))
    if near:
        error = np.abs(wide(theirs) / exact(x, y)[0].astype(float) - 1)
        assert error.max() > 1e-2, "what the docs say of it"
    else:
        np.testing.assert_allclose(kl(x, y), theirs, rtol=1e-5)


def test_the_gradient_of_one():
    """By q alone, as with a fixed teacher, no gradient of p is computed; by both it is."""
    x, y = (jnp.asarray(v) for v in rows(FAR, 100, np.float32))
    total = lambda x, y: jnp.sum(kl(x, y))  # noqa: E731
    expected = jax.grad(total, (0, 1))(x, y)
    for f, value in (
        (jax.grad(total, 1), expected[1]),
        (jax.grad(lambda y, x: total(jax.lax.stop_gradient(x), y)), expected[1]),
    ):
        operands = (x, y) if f.__wrapped__ is total else (y, x)
        names = [choice.operation for choice in jaxsoft.explain(f, *operands).choices]
        assert "kl_divergence_vjp_other" in names and "kl_divergence_vjp" not in names
        np.testing.assert_array_equal(f(*operands), value)
    names = [choice.operation for choice in jaxsoft.explain(jax.grad(total, (0, 1)), x, y).choices]
    assert "kl_divergence_vjp" in names
    np.testing.assert_allclose(jax.grad(total)(x, y), expected[0], rtol=1e-6)


@slow  # each transformation by itself: test_every_function
def test_jax_transformations():
    """checkpoint, linearize and hessian; a scan that is differentiated; export for unknown shapes."""
    with jax.enable_x64(True):
        x, y = np.random.default_rng(0).standard_normal((2, 3, 7))
        f = lambda x, y: jnp.sum(jnp.sin(kl(x, y, scale=0.7)))  # noqa: E731

        def g(x, y):
            log_p, log_q = jax.nn.log_softmax(0.7 * x), jax.nn.log_softmax(0.7 * y)
            return jnp.sum(jnp.sin(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)))

        def transformed(f, x, y):
            return (
                jax.grad(jax.checkpoint(f), (0, 1))(x, y),
                jax.hessian(f, (0, 1))(x, y),
                jax.linearize(f, x, y)[1](y, x),
                jax.vmap(jax.grad(f, 1), (0, None))(x, y),
                jax.vmap(jax.grad(f, 0), (None, 0))(x, y),
                jax.grad(lambda x, y: jnp.sum(jax.lax.scan(lambda c, v: (c, f(v, y)), 0.0, x[None])[1]))(x, y),
            )

        expected = in_float64(functools.partial(transformed, g), x, y)
        assert_trees_all_close(jax.jit(functools.partial(transformed, f))(x, y), expected, rtol=1e-9, atol=1e-11)
    with jax.debug_nans(True), jax.debug_infs(True):
        z, w = rows(NEAR, 33, np.float32)
        z[:, 3] = -1e9
        jax.block_until_ready(gradients(kl, z, w))


def test_export():
    """One program for any number of rows and any length."""
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b, n"), jnp.float32)
    both, program = exported(lambda x, y: kl(x, y, scale=0.5, where=x > -1), shape, shape)
    for given in ((2, 3, 33), (1, 1, 1), (3, 2, 300)):
        x, y = np.random.default_rng(0).standard_normal((2, *given)).astype(np.float32)
        assert_trees_all_close(program.call(x, y), jax.jit(both)(x, y), rtol=1e-4, atol=1e-6)


@pytest.mark.costly(3)
@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize(
    "spec", [P("a", None), P(("a", "b"), None), P(None, "b"), P("a", "b"), P(None, ("a", "b"))], ids=str
)
def test_over_a_mesh(kind, spec):
    """Rows over devices move nothing; parts of rows, some numbers a row."""
    x, y = rows(FAR, 64, np.float32)
    x, y = (np.concatenate([v, v[::-1]]) for v in (x, y))
    x[0, :16], y[1, 16:48] = -1e9, -1e9
    mesh = mesh_of(kind)
    expected = gradients(kl, x, y)
    with jax.set_mesh(mesh):
        operands = [jax.device_put(v, NamedSharding(mesh, spec)) for v in (x, y)]
        assert_trees_all_close(gradients(kl, *operands), expected, rtol=1e-5, atol=1e-6)
        moved = collectives(jax.jit(kl).lower(*operands).compile())
    assert len(moved) == (spec[1] is not None), moved
    assert all(name == "all-gather" and np.prod(shape) <= DEVICES * 6 * len(x) for name, shape in moved)


@needs_devices
def test_inside_shard_map():
    """Rows on each device, with the gradient taken inside and outside."""
    x, y = rows(FAR, 64, np.float32)
    mesh, spec = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2]), P("a")
    mapped = jax.shard_map(kl, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    x, y = (jnp.concatenate([jnp.asarray(v)] * 2) for v in (x, y))
    assert_trees_all_close(gradients(mapped, x, y), gradients(kl, x, y), rtol=1e-6, atol=1e-7)
    inside = jax.shard_map(
        lambda x, y: jax.grad(lambda x, y: jnp.sum(kl(x, y)), (0, 1))(x, y),
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=(spec, spec),
    )
    assert_trees_all_close(jax.jit(inside)(x, y), gradients(kl, x, y)[1], rtol=1e-6, atol=1e-7)


@needs_devices
def test_inside_shard_map_beside_what_is_the_same_everywhere():
    """The gradient of logits that do not vary over the mesh is the sum of what its devices have of it."""
    x, y = rows(FAR, 64, np.float32)
    mesh, varies = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2]), P("a")
    both = np.concatenate([x, x[::-1]])
    for f, given in (
        (kl, (both, y)),
        (lambda x, y: kl(y, x), (both, y)),
        (lambda s, x: kl(x, y, scale=s[0]), (np.array([0.5, 2], np.float32), x)),
    ):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=(varies, P()), out_specs=varies)

        def by_parts(v, w, f=f):
            return jnp.concatenate([f(part, w) for part in jnp.split(v, 2)])

        def results(g, *given):
            return gradients(g, *given), jax.grad(lambda w: jnp.sum(g(given[0], w)))(given[1])

        actual, expected = (jax.jit(functools.partial(results, g))(*given) for g in (mapped, by_parts))
        assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.costly
@needs_devices
@pytest.mark.parametrize(
    ("n", "p", "q"),
    [
        (50_000, -20, (-30, -13)),
        (20_000, -20, (-30, -15)),
        pytest.param(300_000, -20, (-30, -13), marks=slow),
        pytest.param(2**20, -82, (-83, -74), marks=slow),
    ],
    ids=str,
)
def test_parts_that_are_far_from_each_other(n, p, q):
    """Parts of a row whose ratios are far apart; in one of them q is on few elements of p, or p on few of q."""
    x, y = np.full((1, 2 * n), -200 if p == -20 else p, np.float32), np.repeat(np.float32(q), n)[None]
    if p == -20:
        x[0, 0], x[0, n] = 0, p
    else:
        x[0, :n] = 0
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2])
    x, y = (jax.device_put(v, NamedSharding(mesh, P(None, "a"))) for v in (x, y))
    np.testing.assert_allclose(jax.jit(kl)(x, y), exact(x, y)[0].astype(float), rtol=2e-5)
