"""Cross-entropy of logits: every option against float64, no cancellation, optax's semantics, and edges."""

import fractions
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import (
    as_usual,
    each_dtype_in_turn,
    each_fast_implementation,
    each_implementation,
    precision,
    served,
    slow,
    some,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import check_moved, collectives, each_axis_type, mesh_of, needs_devices, rows_on_a_device
from truth import in_float64, wide

import jaxsoft
from jaxsoft import softmax_cross_entropy_with_integer_labels as cross_entropy

CLASSES = 33
RNG = np.random.default_rng(0)
X = (3 * RNG.standard_normal((6, CLASSES))).astype(np.float32)
X[1] += 1000
X[2, 5] = -np.inf
LABELS = np.array([0, CLASSES - 1, 7, 3, -100, 20], np.int32)
WEIGHTS = RNG.uniform(0.2, 2, CLASSES).astype(np.float32)
WHERES = {"none": None, "classes": RNG.random((6, CLASSES)) < 0.7, "rows": np.array([1, 1, 0, 1, 1, 0], bool)}
OPTIONS = {
    "ignore_index": [None, -100, 3],
    "label_smoothing": [0.0, 0.1, 1.0],
    "z_loss": [0.0, 0.01],
    "logits_soft_cap": [None, 5.0],
    "class_weights": [None, WEIGHTS],
    "where": list(WHERES),
}


def drawn(rng):
    """Six choices of all options, in which each value of an option is as often as any other."""
    order = {name: rng.permutation(6) % len(values) for name, values in OPTIONS.items()}
    return [{name: values[order[name][i]] for name, values in OPTIONS.items()} for i in range(6)]


def truth(x, labels, *, where=None, ignore_index=None, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None,
          class_weights=None):  # fmt: skip
    """Losses, logsumexps, and the gradients of the losses, in float64 by their formulas; labels in range or ignored."""
    x, (count, n) = wide(x), x.shape
    w = np.ones(n) if class_weights is None else wide(class_weights)
    cap = np.inf if logits_soft_cap is None else logits_soft_cap
    z, slope = (x, 1) if logits_soft_cap is None else (cap * np.tanh(x / cap), np.cosh(x / cap) ** -2)
    counts = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    rows = counts.any(axis=-1) & (labels != ignore_index)
    counts = counts & (z > -np.inf) & rows[:, None]
    every, y = np.arange(count), np.clip(labels, 0, n - 1)
    with np.errstate(all="ignore"):
        m = np.max(z, axis=-1, where=counts, initial=-np.inf)
        e = np.where(counts, np.exp(z - m[:, None]), 0)
        s = e.sum(axis=-1)
        lse, p = m + np.log(s), e / s[:, None]
        others = np.where(np.arange(n) == y[:, None], 0, e).sum(axis=-1)
        nll = np.where(counts[every, y], np.log1p(others / e[every, y]), lse - z[every, y])  # with all digits near 0
        k = np.maximum(counts.sum(axis=-1), 1)
        masses = np.where(counts, w, 0)
        smooth = np.sum(np.where(counts, w * (lse[:, None] - z), 0), axis=-1) / k
        loss = (1 - label_smoothing) * w[y] * nll + label_smoothing * smooth + z_loss * lse**2
        share = (1 - label_smoothing) * w[y] + label_smoothing * masses.sum(axis=-1) / k + 2 * z_loss * lse
        dz = share[:, None] * p - label_smoothing * masses / k[:, None]
        dz[every, y] -= (1 - label_smoothing) * w[y]
        if not label_smoothing and not z_loss:
            dz[every, y] = np.where(counts[every, y], -w[y] * others / s, dz[every, y])
        dx = np.where(rows[:, None], dz * slope, 0)
    return np.where(rows, loss, 0), np.where(rows, lse, -np.inf), dx


def plain(x, labels, options):
    """The sum of the losses in plain JAX, to differentiate: smoothing, z-loss and cap of rows that count."""
    z = options["logits_soft_cap"] * jnp.tanh(x / options["logits_soft_cap"])
    lse = jax.nn.logsumexp(z, axis=-1)
    log_p = z - lse[..., None]
    q = jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype) * (1 - options["label_smoothing"])
    q += options["label_smoothing"] / x.shape[-1]
    return -jnp.sum(q * log_p) + options["z_loss"] * jnp.sum(lse**2)


def value_and_pullback(f, x, has_aux=False):
    """f's losses, the gradient of sum_i (i + 1) loss_i, and what f has beside the losses."""
    loss, pull, *beside = jax.vjp(f, x, has_aux=has_aux)
    return loss, pull(jnp.arange(1, loss.shape[0] + 1, dtype=loss.dtype))[0], *beside


def assert_close(actual, expected, dtype=np.float32, scale=1.0):
    """Losses within the precision of a sum of terms of this size, gradients of terms that may be 1e-3 of it.

    scale is a number, or the size of the terms of each element of the gradient. Gradients are rounded to dtype.
    """
    unit, info = {2: 2.0**-8, 4: 4e-6, 8: 1e-13}, jnp.finfo(dtype)
    scales = (1.0, scale) if isinstance(scale, np.ndarray) else (scale, 1e-3 * scale)
    for a, e, terms, width in zip(actual, expected, scales, (max(4, info.bits // 8), info.bits // 8), strict=True):
        a, e = wide(a), wide(e)
        assert a.shape == e.shape
        tolerance = unit[width] * np.maximum(np.abs(e), terms)
        if width == 2:
            tolerance = unit[2] * np.abs(e) + unit[4] * terms + float(info.smallest_subnormal)
        wrong = ~((np.abs(a - e) <= tolerance) | (a == e) | (np.isnan(a) & np.isnan(e)))
        assert not wrong.any(), (np.argwhere(wrong)[:3], a[wrong][:3], e[wrong][:3])


@pytest.mark.costly(5)
@each_fast_implementation
@pytest.mark.parametrize("options", drawn(RNG) + drawn(RNG), ids=[f"draw {i}" for i in range(12)])
def test_options(implementation, options):
    """All options together: losses, logsumexps and gradients."""
    where = WHERES[options["where"]]
    options = {**options, "where": None}
    labels = LABELS if options["ignore_index"] == -100 else np.where(LABELS == -100, 1, LABELS)

    def f(x):
        return cross_entropy(x, labels, **{**options, "where": where}, return_lse=True, implementation=implementation)

    loss, dx, lse = jax.jit(lambda x: value_and_pullback(f, x, has_aux=True))(X)
    shown = where if where is None or where.ndim == 2 else where[:, None]
    want, lse_want, dx_want = truth(X, labels, **{**options, "where": shown})
    dx_want *= np.arange(1, 7)[:, None]
    assert np.isfinite(loss).all() and np.isfinite(dx).all()
    assert_close((loss, dx), (want, dx_want), scale=np.full(X.shape, 30.0 if options["z_loss"] else 3.0))
    chex.assert_trees_all_close(lse, np.asarray(lse_want, np.float32), rtol=1e-6)


@pytest.mark.costly(5)
@each_implementation
@each_dtype_in_turn
@pytest.mark.parametrize("n", [1, 2, 3, 7, 24, 25, 127, 1000, 4099])
def test_lengths(implementation, dtype, n):
    """Values and gradients of rows of every kind of length, with offsets of 1e4."""
    x = (2 * np.random.default_rng(n).standard_normal((5, n))).astype(np.float32)
    x = (x + np.array([0, 0, 1e4, -1e4, 0])[:, None] * (dtype != jnp.float16)).astype(dtype)
    labels = np.array([0, n - 1, n // 2, n // 3, n // 5], np.int32)
    with precision(dtype), served(implementation):
        f = jax.jit(lambda x: value_and_pullback(lambda x: cross_entropy(x, labels, implementation=implementation), x))
        loss, dx = f(x)
        chex.assert_type((loss, dx), (jnp.float64 if dtype == jnp.float64 else jnp.float32, dtype))
        want, _, dx_want = truth(x, labels)
        assert_close((loss, dx), (want, dx_want * np.arange(1, 6)[:, None]), dtype, scale=1)


@pytest.mark.slow
@each_fast_implementation
@each_dtype_in_turn
@pytest.mark.parametrize("n", [8192, 32768, 50257, 65537, 131072, 262147, 2**20, 2**20 + 1])
@pytest.mark.parametrize("count", [2, 9, 150])
def test_long_rows(implementation, dtype, n, count):
    """Rows that kernels cut up, few and many, labels at the ends and in between."""
    if n * count > 3e7:
        count = 20
    x = 2 * np.random.default_rng(n).standard_normal((count, n), np.float32)
    labels = np.random.default_rng(n).integers(0, n, count, np.int32)
    labels[:2] = 0, n - 1
    with precision(dtype), served(implementation):
        x = x.astype(dtype)
        f = jax.jit(
            lambda x: value_and_pullback(
                lambda x: cross_entropy(x, labels, label_smoothing=0.1, implementation=implementation), x
            )
        )
        want, _, dx_want = truth(x, labels, label_smoothing=0.1)
        weight = np.arange(1, count + 1)[:, None]
        assert_close(f(x), (want, dx_want * weight), dtype, scale=(np.abs(dx_want) + 0.2 / n) * weight)


NEIGHBOURS = [(2500, n) for n in (1, 3, 10, 24, 33, 48, 100)] + [(9, 65537), (20, 50257), (33, 20001)]


@pytest.mark.costly(4)
@each_fast_implementation
@each_dtype_in_turn
@pytest.mark.parametrize("shape", some(NEIGHBOURS, [(2500, n) for n in (3, 24, 100)]), ids=str)
def test_neighbours(implementation, dtype, shape):
    """Rows that kernels take together: of different offsets, and some that are not to be read."""
    count, n = shape
    rng = np.random.default_rng(n)
    x = 2 * rng.standard_normal(shape, np.float32) + np.float32([0, 100, 0, -70, 20])[np.arange(count) % 5, None]
    labels = rng.integers(0, n, count, np.int32)
    labels[3::7], x[3::7] = -100, np.nan
    smoothings = (0.0, 0.1)

    def losses(x, **options):
        return cross_entropy(x, labels, **options, ignore_index=-100, implementation=implementation)

    with precision(dtype), served(implementation):
        x = x.astype(dtype)
        fs = [functools.partial(losses, label_smoothing=smoothing) for smoothing in smoothings]
        actual = jax.jit(lambda x: [value_and_pullback(f, x) for f in fs])(x)
        for found, smoothing in zip(actual, smoothings, strict=True):
            want, _, dx_want = truth(x, labels, ignore_index=-100, label_smoothing=smoothing)
            weight = np.arange(1, count + 1)[:, None]
            terms = (np.abs(dx_want) + 2 * smoothing / n) * weight
            assert_close(found, (want, dx_want * weight), dtype, scale=terms)


@each_implementation
def test_certainty(implementation):
    """A label that is nearly certain: a loss and a gradient far below the last place of 1 have all their digits."""
    x = np.zeros((8, 50), np.float32)
    x[:, 3] = [0, 5, 10, 15, 20, 40, 60, 80]
    labels = np.full(8, 3)
    f = lambda x: cross_entropy(x, labels, implementation=implementation)  # noqa: E731
    loss, dx = jax.jit(lambda x: value_and_pullback(f, x))(x)
    want, _, dx_want = truth(x, labels)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(dx, dx_want * np.arange(1, 9)[:, None], rtol=2e-5, atol=1e-37)


@each_implementation
def test_special_values(implementation):
    """What is not finite: poison for labels out of range, nothing from rows of nothing, and finite gradients."""
    inf, nan = np.inf, np.nan
    x = np.zeros((9, 4), np.float32)
    x[0] = -inf  # nothing to choose from
    x[1, 2] = -inf  # the label is ruled out
    x[2, 1] = -inf  # another is
    x[3, 1] = inf
    x[4, 2] = inf  # the label's
    x[5, 0] = nan
    labels = np.array([2, 2, 2, 2, 2, 2, -1, 4, -100])
    x[8] = nan  # ignored
    f = functools.partial(cross_entropy, labels=labels, ignore_index=-100, implementation=implementation)
    smooth = functools.partial(f, label_smoothing=0.3)
    both = jax.jit(lambda x: [value_and_pullback(g, x) for g in (f, smooth)])(x)
    (loss, dx), smoothed = jax.tree.map(np.asarray, both)
    np.testing.assert_allclose(loss, [0, inf, np.log(3), inf, nan, nan, nan, nan, 0], rtol=1e-6)
    assert np.isfinite(dx[np.array([0, 1, 2, 8])]).all()
    np.testing.assert_allclose(dx[1], np.array([1, 1, -3, 1]) * 2 / 3, rtol=1e-6)
    assert (dx[0] == 0).all() and (dx[8] == 0).all()
    np.testing.assert_allclose(dx[6:8], [[7 / 4] * 4, [8 / 4] * 4], rtol=1e-6)  # the logsumexp's
    loss, dx = smoothed
    np.testing.assert_allclose(loss[np.array([0, 2, 8])], [0, np.log(3), 0], rtol=1e-6)
    assert np.isfinite(dx[np.array([0, 1, 2, 8])]).all()


@each_implementation
@pytest.mark.parametrize("n", [3, 5002])
def test_nan_beside_nothing(implementation, n):
    """A NaN makes the loss and the logsumexp NaN, also where beside it and the label there is only -inf, or +inf."""
    inf, nan = np.inf, np.nan
    x = np.full((4, n), -inf, np.float32)
    x[:, :3] = [[nan, -inf, 1], [nan, inf, -inf], [nan, -inf, -inf], [-inf, nan, 1]]
    labels = np.array([2, 2, 1, 2])
    given = {"return_lse": True, "implementation": implementation}
    one_hot = np.eye(3, n, dtype=np.float32)

    def losses(x):
        dense = [jaxsoft.softmax_cross_entropy(x, one_hot[y], **given) for y in (labels, np.zeros(4, int))]
        return [cross_entropy(x, labels, label_smoothing=smoothing, **given) for smoothing in (0.0, 0.1)] + dense

    assert np.isnan(jax.jit(losses)(x)).all()


@pytest.mark.costly(4)
@each_implementation
@each_dtype_in_turn
@pytest.mark.parametrize("cap", [0.5, 30.0, 1e3, 1e5, 1e7, 1e15, 1e30])
def test_caps(implementation, dtype, cap):
    """Caps far below the logits and far above, and logits that are not finite."""
    x = 3 * np.random.default_rng(0).standard_normal((4, 500), np.float32)
    x[1] *= 1e-3
    x[2, 3:7] = 0
    with precision(dtype), served(implementation):
        x, labels = x.astype(dtype), np.array([0, 499, 3, 77], np.int32)
        f = lambda x: cross_entropy(x, labels, logits_soft_cap=cap, implementation=implementation)  # noqa: E731
        want, _, dx_want = truth(x, labels, logits_soft_cap=cap)
        dx_want *= np.arange(1, 5)[:, None]
        assert_close(jax.jit(lambda x: value_and_pullback(f, x))(x), (want, dx_want), dtype, scale=np.abs(dx_want))
        x[0, 1], x[1, 1], x[2, 1], x[3, 77] = np.inf, -np.inf, np.nan, np.inf
        z = np.float64(np.float32(cap)) * np.tanh(wide(x) / cap)
        z = wide(np.float32(z))
        with np.errstate(invalid="ignore"):
            want = np.logaddexp.reduce(z, axis=-1) - z[np.arange(4), labels]
        np.testing.assert_allclose(f(x), want, rtol=1e-5, atol=1e-6)


@each_implementation
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=["plain", "smooth"])
@pytest.mark.parametrize("run", [jax.jit, pytest.param(lambda f: f, marks=slow)], ids=["jitted", "not jitted"])
def test_labels_out_of_range_that_are_masked(implementation, options, run):
    """Their losses are NaN, but of nothing but -inf. Masked afterwards they leave nothing in any gradient; not masked,
    the logsumexp's.
    """
    x = np.array([[0, 1, 2, 3], [4, 3, 2, 1], [-np.inf] * 4, [1, 0, -np.inf, 2]], np.float32)
    labels = np.array([1, 4, -1, -100], np.int32)
    weights = jnp.asarray(WEIGHTS[:4] if options else np.ones(4, np.float32))

    def f(x, w):
        return cross_entropy(x, labels, class_weights=w, **options, implementation=implementation)

    def masked(x, w):
        return jnp.sum(jnp.sin(jnp.where(np.arange(4) < 1, f(x, w), 0)))

    def gradients(x, w):
        loss, pull = jax.vjp(f, x, w)
        alone = jax.grad(lambda x, w: jnp.sin(f(x, w)[0]), (0, 1))(x, w)
        return loss, jax.grad(masked, (0, 1))(x, w), alone, pull(jnp.ones(4, jnp.float32))[0]

    loss, found, alone, dx = jax.tree.map(np.asarray, run(gradients)(x, weights))
    assert np.isnan(loss).tolist() == [False, True, False, True]
    chex.assert_trees_all_close(found, alone, rtol=1e-6)
    assert not np.any(found[0][1:]) and np.any(found[0][0])
    assert np.isfinite(dx).all()
    if not options:
        np.testing.assert_allclose(dx[1], np.exp(x[1]) / np.exp(x[1]).sum(), rtol=1e-6)


_EVERY_OPTION = {"label_smoothing": 0.1, "z_loss": 0.1, "return_entropy": True}


@pytest.mark.costly(1)
@each_implementation
@pytest.mark.parametrize("options", [{}, _EVERY_OPTION, {**_EVERY_OPTION, "logits_soft_cap": 3.0}], ids=len)
@pytest.mark.parametrize("which", ["rows", "classes", "-inf", "ignored"])
@pytest.mark.parametrize("labels", ["integers", "probabilities"])
def test_rows_that_do_not_count(implementation, options, which, labels):
    """Whatever their labels and logits are, they have loss 0, and leave nothing in any derivative of either order."""
    if (which == "ignored" and labels == "probabilities") or (which == "-inf" and "logits_soft_cap" in options):
        pytest.skip("does not exist")
    nan, inf = np.nan, np.inf
    count = np.array([True, False, False, True, False])
    x, w = X[:5, :4].copy(), WEIGHTS[:4]
    x[1] -= 1000
    y = np.array([1, -1, 4, 2, 2**30])
    where = {"rows": count, "classes": count[:, None] & (np.arange(4) != [[0], [0], [0], [1], [0]])}.get(which)
    given = {"where": where}
    x[~count] = -inf if which == "-inf" else [[nan], [inf], [-inf]]
    if which == "classes":
        x[0, 0], x[3, 1] = nan, inf
    if which == "ignored":
        y, given = np.where(count, y, -7), {"ignore_index": -7}
    q = (y[:, None] == np.arange(4)).astype(np.float32) * np.float32(0.7) + np.float32(0.1)
    q = np.where(count[:, None] if where is None else np.broadcast_to(where.reshape(5, -1), (5, 4)), q, nan)
    q[1] = inf

    def every(x, q, w, y, where):
        def f(x, q, w):
            more = given | {"where": where} if "where" in given else given
            function, target = (cross_entropy, y) if labels == "integers" else (jaxsoft.softmax_cross_entropy, q)
            weights = w if options else None
            found = function(x, target, **more, **options, class_weights=weights, implementation=implementation)
            return found if options else (found,)

        def first(x, q, w):
            return jax.grad(lambda *v: sum(jnp.sum(jnp.sin(u)) for u in f(*v)), (0, 1, 2))(x, q, w)

        second = jax.grad(lambda *v: sum(jnp.sum(jnp.sin(u)) for u in first(*v)), (0, 1, 2))(x, q, w)
        return f(x, q, w), first(x, q, w), second

    found = jax.jit(every)(x, q, w, y, where)
    known = jax.jit(every)(x[count], q[count], w, y[count], None if where is None else where[count])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        if a.shape == w.shape and b.shape == w.shape:  # the class weights'
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_allclose(np.asarray(a)[count], b, rtol=1e-4, atol=1e-6)
            assert not np.any(np.asarray(a)[~count])


@pytest.mark.costly
@needs_devices
@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b")], ids=str)
def test_rows_that_do_not_count_over_a_mesh(spec):
    """Labels out of range have loss 0 in rows of which nothing counts, or of nothing but -inf, and else NaN."""
    mesh, x = mesh_of(), np.zeros((8, 64), np.float32)
    x[4:6] = -np.inf
    labels, where = np.array([1, -1, 64, -1, -1, 64, 63, -1]), np.arange(8) < [[8], [0], [0], [9], [8], [8], [8], [0]]
    where = jnp.asarray(np.repeat(where, 8, axis=1))
    x = jax.device_put(x, NamedSharding(mesh, spec))
    loss, dx = jax.jit(lambda x: value_and_pullback(lambda x: cross_entropy(x, labels, where=where), x))(x)
    np.testing.assert_allclose(loss, [np.log(64), 0, 0, np.nan, 0, 0, np.log(64), 0], rtol=1e-6)
    assert np.isfinite(dx).all()


@pytest.mark.parametrize(
    "shapes",
    some(
        [((5, 7), (1,)), ((1, 7), (5,)), ((2, 1, 7), (1, 3)), ((2, 3, 7), (2, 1))],
        [((1, 7), (5,)), ((2, 3, 7), (2, 1))],
    ),
    ids=str,
)
def test_labels_and_logits_that_broadcast(shapes):
    """Each along the other's dimensions of length 1, as in optax: losses, logsumexps and gradients; linear, too."""
    logits, rows = shapes
    x = np.random.default_rng(0).standard_normal(logits).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 7, rows)

    @jax.jit
    def results(x):
        functions = cross_entropy, optax.softmax_cross_entropy_with_integer_labels
        through = [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x, labels))))(x) for f in functions]
        linear = jaxsoft.linear_softmax_cross_entropy(x, np.eye(7, dtype=np.float32), labels)
        return cross_entropy(x, labels, return_lse=True), linear, functions[1](x, labels), through

    (loss, lse), linear, want, through = results(x)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(lse, np.broadcast_to(np.logaddexp.reduce(x, axis=-1), want.shape), rtol=1e-6)
    np.testing.assert_allclose(*through, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(linear, want, rtol=1e-5)


@each_fast_implementation
def test_all_ignored(implementation):
    """A batch of nothing but padding: finite losses, logsumexps of -inf, zero gradients, even from NaN."""
    x = np.full((3, 7), np.nan, np.float32)
    f = lambda x: cross_entropy(  # noqa: E731
        x, np.full(3, 255, np.uint8), ignore_index=255, z_loss=0.1, label_smoothing=0.1, return_lse=True,
        implementation=implementation,
    )  # fmt: skip
    loss, dx, lse = map(np.asarray, jax.jit(lambda x: value_and_pullback(f, x, has_aux=True))(x))
    assert (loss == 0).all() and (lse == -np.inf).all() and (dx == 0).all()


@pytest.mark.costly(1)
@pytest.mark.parametrize("axis", [-1, pytest.param(0, marks=slow), 1, pytest.param((1, 2), marks=slow), (0, -1)])
def test_optax(axis):
    """Arguments, shapes, axes and masks as in optax."""
    x = np.random.default_rng(1).standard_normal((4, 5, 6)).astype(np.float32)
    axes = tuple(a % 3 for a in (axis if isinstance(axis, tuple) else (axis,)))
    kept = [a for a in range(3) if a not in axes]
    labels = np.random.default_rng(2).integers(0, np.prod([x.shape[a] for a in axes]), [x.shape[a] for a in kept])
    wheres = [None, np.random.default_rng(3).random(x.shape) < 0.6]
    if isinstance(axis, int):
        wheres.append(np.random.default_rng(4).random(labels.shape) < 0.6)

    @functools.partial(jax.jit, static_argnums=0)
    def results(f, x):
        losses = [f(x, labels, axis, where) for where in wheres]
        return losses, [jax.grad(lambda x, where=where: f(x, labels, axis, where).sum())(x) for where in wheres[:2]]

    actual, expected = (results(f, x) for f in (cross_entropy, optax.softmax_cross_entropy_with_integer_labels))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@each_fast_implementation
def test_derivatives(implementation):
    """Forward mode, vmap with one of each argument mapped, and maps of gradients; test_higher_orders has the others."""
    x, labels = wide(X[:, :6])[[0, 1, 3]], np.array([0, 5, 3], np.int32)
    options = dict(label_smoothing=0.1, z_loss=0.01, logits_soft_cap=4.0)
    with jax.enable_x64(True):
        f = lambda x: cross_entropy(x, labels, **options, implementation=implementation).sum()  # noqa: E731
        f0 = lambda x: plain(x, labels, options)  # noqa: E731
        stacked, both = np.stack([x, 2 * x]), np.stack([labels, labels[::-1]])
        mapped = jax.vmap(lambda x, y: cross_entropy(x, y, **options, implementation=implementation))
        of_maps = jax.grad(lambda x: jax.vmap(f, in_axes=2)(x).sum())
        push = lambda f, x: jax.jvp(f, (x,), (jnp.cos(x),))  # noqa: E731
        with served(implementation):
            pushed, losses, dx = jax.jit(
                lambda x, stacked: (push(f, x), mapped(stacked, both), of_maps(jnp.moveaxis(stacked, 0, -1)))
            )(x, stacked)
            expected, dx_expected = in_float64(lambda x: (push(f0, x), jax.grad(f0)(2 * x)), x)
            chex.assert_trees_all_close(pushed, expected, rtol=1e-10)
            want = [truth(v, y, **options)[0] for v, y in zip(stacked, both, strict=True)]
            chex.assert_trees_all_close(losses, np.stack(want), rtol=1e-10)
            chex.assert_trees_all_close(dx[..., 1], dx_expected, rtol=1e-8)


def test_weights_and_options_are_differentiable_in_training():
    """The gradient by class weights, and under checkpoint and scan, as a training step has it."""
    labels = np.where(LABELS < 0, 1, LABELS)
    x = np.where(np.isinf(X), 0, X)
    mean = lambda x: cross_entropy(x, labels).mean()  # noqa: E731

    @jax.jit
    def gradients(x, w):
        by_w = jax.grad(lambda w: cross_entropy(x, labels, class_weights=w, label_smoothing=0.2).sum())(w)
        step = jax.checkpoint(mean)
        total = jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + step(x), None), 0.0, None, 3)[0])(x)
        return by_w, total, jax.grad(mean)(x)

    by_w, total, once = gradients(x, WEIGHTS)
    unit = np.eye(CLASSES)  # the loss is linear in w
    want = [truth(x, labels, class_weights=e, label_smoothing=0.2)[0].sum() for e in unit]
    chex.assert_trees_all_close(by_w, np.float32(want), rtol=1e-5)
    chex.assert_trees_all_close(total, 3 * once, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(labels=np.zeros(5)), TypeError, "labels must hold integers; got dtype float"),
        (dict(labels=np.zeros(4, int)), ValueError, r"labels must have the shape .*\(5,\), or .*; got shape \(4,\)"),
        (dict(axis=2), ValueError, "axis must be between"),
        (dict(axis=()), ValueError, "axis must name at least one"),
        (dict(where=np.ones((2, 7), bool)), ValueError, r"where must broadcast .*\(5, 7\); got shape \(2, 7\)"),
        (dict(ignore_index=1.5), TypeError, "ignore_index must be None or an integer .*; got 1.5"),
        (dict(label_smoothing=1.5), ValueError, "label_smoothing must be between 0 and 1; got 1.5"),
        (dict(ignore_index=True), TypeError, "ignore_index must be None or an integer .*; got True"),
        (dict(label_smoothing="a"), TypeError, "label_smoothing must be a real number; got 'a'"),
        (dict(label_smoothing=True), TypeError, "label_smoothing must be a real number; got True"),
        (
            dict(label_smoothing=np.complex64(1j)),
            TypeError,
            "label_smoothing must be a real number; got dtype complex",
        ),
        (dict(label_smoothing=np.nan), ValueError, "label_smoothing must be between 0 and 1; got nan"),
        (dict(z_loss=-1), ValueError, "z_loss must be at least 0, and finite in float32; got -1"),
        (dict(z_loss=1e39), ValueError, r"z_loss must be at least 0, and finite in float32; got 1e\+39"),
        (dict(z_loss=10**400), ValueError, "z_loss must be at least 0, and finite in float32; got 10000"),
        (dict(logits_soft_cap=0), ValueError, "logits_soft_cap must be from 1e-30 to 1e30, or None; got 0"),
        (dict(logits_soft_cap=1e39), ValueError, r"logits_soft_cap must be from 1e-30 to 1e30, or None; got 1e\+39"),
        (dict(logits_soft_cap=1e301), ValueError, "logits_soft_cap must be from 1e-30 to 1e30"),
        (dict(logits_soft_cap=10**400), ValueError, "logits_soft_cap must be from 1e-30 to 1e30, or None; got 10000"),
        (dict(logits_soft_cap=np.inf), ValueError, "logits_soft_cap must be from 1e-30 to 1e30, or None; got inf"),
        (dict(class_weights=np.ones(6)), ValueError, r"class_weights must have one number .* 7 classes; got \(6,\)"),
        (dict(class_weights=np.ones(7, bool)), TypeError, "class_weights must hold real numbers"),
        (dict(implementation="cuda"), ValueError, "implementation must be None or one of"),
        (dict(logits=np.ones((5, 7), complex)), TypeError, "logits must hold float16"),
        (dict(labels=np.zeros((), int)), ValueError, r"labels must have the shape .*\(5,\), or .*; got shape \(\)"),
        (dict(where=jax.random.key(0)), TypeError, "where must hold booleans or integers; got dtype key"),
        (dict(labels=jax.random.split(jax.random.key(0), 5)), TypeError, "labels must hold integers; got dtype key"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        cross_entropy(**{"logits": np.zeros((5, 7), np.float32), "labels": np.zeros(5, int), **arguments})


def test_options_of_every_kind_of_number():
    """What counts as an integer, and as a real number."""
    labels = np.array([0, 1, 2, 3, -1, 4])
    want = cross_entropy(X, labels, ignore_index=3, label_smoothing=0.5, z_loss=1.0, logits_soft_cap=2.0)
    for integer, half, one, two in (
        (np.int8(3), np.float32(0.5), 1, np.int64(2)),
        (np.array(3), fractions.Fraction(1, 2), np.uint8(1), np.float16(2)),
    ):
        options = dict(ignore_index=integer, label_smoothing=half, z_loss=one, logits_soft_cap=two)
        chex.assert_trees_all_equal(cross_entropy(X, labels, **options), want)


@each_implementation
def test_weights_of_ignored_rows(implementation):
    """What an ignored row holds is not read by the sums of label smoothing, nor by their gradient."""
    x, labels = np.float32([[1, 2, 3], [1, np.inf, np.nan]]), np.array([0, -100])
    f = lambda x, w: cross_entropy(  # noqa: E731
        x, labels, ignore_index=-100, label_smoothing=0.1, class_weights=w, implementation=implementation
    )

    @jax.jit
    def value_and_gradients(x, w):
        loss, pull = jax.vjp(f, x, w)
        return loss, pull(jnp.ones_like(loss))

    with served(implementation):
        actual, expected = (value_and_gradients(v, np.ones(3, np.float32)) for v in (x, np.where(np.isfinite(x), x, 1)))
        chex.assert_trees_all_close(actual, expected, rtol=1e-6)


def test_empty():
    """No rows, and no classes: as optax where it has an answer, and 0 where nothing counts, as there are no classes."""
    assert cross_entropy(np.zeros((0, 7), np.float32), np.zeros(0, int)).shape == (0,)
    for weights in (None, np.zeros(0, np.float32)):
        loss = cross_entropy(np.zeros((2, 0), np.float32), np.zeros(2, int), class_weights=weights)
        np.testing.assert_array_equal(loss, [0, 0])


def test_every_pair_of_label_dtypes():
    """Any integer dtype holds labels; an ignore_index that it cannot hold ignores nothing."""
    pairs = list(itertools.product((np.int8, np.uint8, np.int16, np.uint32), (None, -100, 300)))
    of = lambda x, dtype, ignore: cross_entropy(x, np.array([3, 7], dtype), ignore_index=ignore)  # noqa: E731
    want, *losses = jax.jit(lambda x: [cross_entropy(x, np.array([3, 7])), *(of(x, *pair) for pair in pairs)])(X[:2])
    for loss in losses:
        chex.assert_trees_all_equal(loss, want)
    assert jaxsoft.softmax_cross_entropy_with_integer_labels is cross_entropy


def dense_truth(x, q, where, smoothing, z_loss, cap, w):
    """Losses and gradients for labels q, in float64."""
    x = wide(x)
    z, slope = (x, 1) if cap is None else (cap * np.tanh(x / cap), np.cosh(x / cap) ** -2)
    counts = (z > -np.inf) & np.broadcast_to(True if where is None else where, x.shape)
    rows = counts.any(axis=-1)
    with np.errstate(all="ignore"):
        e = np.where(counts, np.exp(z - np.max(z, axis=-1, keepdims=True, where=counts, initial=-np.inf)), 0)
        p = e / e.sum(axis=-1, keepdims=True)
        lse = np.max(z, axis=-1, where=counts, initial=-np.inf) + np.log(e.sum(axis=-1))
        k = np.maximum(counts.sum(axis=-1, keepdims=True), 1)
        a = np.where(counts, w * ((1 - smoothing) * wide(q) + smoothing / k), 0)
        loss = np.sum(np.where(counts, a * (lse[:, None] - z), 0), axis=-1) + z_loss * lse**2
        dx = (p * (a.sum(axis=-1, keepdims=True) + 2 * z_loss * lse[:, None]) - a) * slope
    return np.where(rows, loss, 0), np.where(rows[:, None], dx, 0)


@each_fast_implementation
@pytest.mark.parametrize(
    ("smoothing", "z_loss", "cap", "weighted", "where"),
    [(0.0, 0.0, None, False, "none"), (0.1, 0.01, 5.0, True, "classes"), (0.2, 0.0, None, True, "rows")],
)
def test_dense_labels(implementation, smoothing, z_loss, cap, weighted, where):
    """Distributions as labels: losses, and gradients by the logits and by the labels."""
    x = np.where(np.isinf(X), -np.inf, X - 1000 * (np.arange(6) == 1)[:, None]).astype(np.float32)
    q = np.exp(np.where(np.isinf(x), -np.inf, RNG.standard_normal(x.shape) * 3))
    q = (q / q.sum(axis=-1, keepdims=True)).astype(np.float32)
    where, w = WHERES[where], WEIGHTS if weighted else np.ones(CLASSES)
    options = dict(label_smoothing=smoothing, z_loss=z_loss, logits_soft_cap=cap)

    def f(x, q):
        return jaxsoft.softmax_cross_entropy(
            x, q, -1, where, **options, class_weights=WEIGHTS if weighted else None, implementation=implementation
        )

    by_q = jax.grad(lambda q, x: f(x, q).sum())
    loss, dx, dq = jax.jit(lambda x, q: (*value_and_pullback(lambda x: f(x, q), x), by_q(q, x)))(x, q)
    shown = where if where is None or where.ndim == 2 else where[:, None]
    want, dx_want = dense_truth(x, q, shown, smoothing, z_loss, cap, wide(w))
    assert_close((loss, dx), (want, dx_want * np.arange(1, 7)[:, None]), scale=np.full(X.shape, 3.0))
    if cap is None and where is None:  # the derivative by the labels is -w log(p) where they count
        log_p = wide(x) - np.log(np.sum(np.exp(wide(x)), axis=-1, keepdims=True))
        finite = np.isfinite(x)
        np.testing.assert_allclose(np.where(finite, dq, 0), np.where(finite, -log_p, 0), rtol=1e-5)


@each_implementation
def test_dense_offsets(implementation):
    """An offset of a row costs no digits: of the loss, of its gradients, forward mode, and of the second order."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((4, 50), np.float32) + np.float32([[0], [1e4], [-1e4], [2e5]])
    q, t = np.exp(rng.standard_normal((4, 50), np.float32)), np.cos(x)
    q /= q.sum(axis=-1, keepdims=True)
    f = functools.partial(jaxsoft.softmax_cross_entropy, implementation=implementation)

    @jax.jit
    def derivatives(x, q, t):
        loss, pull = jax.vjp(f, x, q)
        along = jax.jvp(lambda x: f(x, q), (x,), (t,))[1]
        return loss, *pull(jnp.ones_like(loss)), along, jax.jvp(jax.grad(lambda x: jnp.sum(f(x, q))), (x,), (t,))[1]

    loss, dx, dq, along, turned = derivatives(x, q, t)
    d = wide(x) - wide(x).max(axis=-1, keepdims=True)
    s = np.exp(d).sum(axis=-1, keepdims=True)
    p, nll = np.exp(d) / s, np.log(s) - d
    np.testing.assert_allclose(loss, np.sum(q * nll, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(dq, nll, rtol=1e-6)
    assert (np.abs(wide(dx) - (p - q)) <= 1e-6 * (p + q)).all()
    np.testing.assert_allclose(along, np.sum((p - q) * t, axis=-1), rtol=1e-5, atol=1e-6)
    assert (np.abs(wide(turned) - p * (t - np.sum(p * t, axis=-1, keepdims=True))) <= 2e-6 * p).all()
    huge = np.float32([[3e38, 3e38, 1]])
    np.testing.assert_allclose(f(huge, np.float32([[1, 0, 0]])), [np.log(2)], rtol=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None])
def test_dense_labels_as_optax(axis):
    """Arguments, shapes and masks, and labels that broadcast."""
    x = np.random.default_rng(1).standard_normal((4, 5, 6)).astype(np.float32)
    q = np.random.default_rng(5).random((5, 6)).astype(np.float32)
    wheres = (None, np.random.default_rng(3).random(x.shape) < 0.6)
    y = jax.jit(lambda x: [jaxsoft.softmax_cross_entropy(x, q, axis, where) for where in wheres])(x)
    with as_usual():
        y0 = jax.jit(lambda x: [optax.softmax_cross_entropy(x, q, axis, where) for where in wheres])(x)
    chex.assert_trees_all_close(y, y0, rtol=2e-5)


def test_dense_edges():
    """A ruled-out class with and without a label, a row of nothing, and errors."""
    x = np.array([[0, -np.inf, 0], [0, -np.inf, 0], [-np.inf] * 3], np.float32)
    q = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 0]], np.float32)
    loss, dx = jax.jit(lambda x: value_and_pullback(lambda x: jaxsoft.softmax_cross_entropy(x, q), x))(x)
    np.testing.assert_allclose(loss, [np.log(2), np.inf, 0], rtol=1e-6)
    np.testing.assert_allclose(dx, [[-0.5, 0, 0.5], [1, -2, 1], [0, 0, 0]], rtol=1e-6)
    with pytest.raises(ValueError, match=r"labels must broadcast with .*\(3, 3\); got shape \(2, 3\)"):
        jaxsoft.softmax_cross_entropy(x, q[:2])
    with pytest.raises(TypeError, match="labels must hold real numbers; got dtype complex"):
        jaxsoft.softmax_cross_entropy(x, q.astype(complex))
    f = lambda x, q: jaxsoft.softmax_cross_entropy(x, q, label_smoothing=0.1, z_loss=0.1).sum()  # noqa: E731
    x = np.float32([[0.3, 1.2, -0.4]])
    hessian = jax.jit(jax.hessian(f))(x, q[:1])[0, :, 0]
    step = 1e-2 * np.eye(3, dtype=np.float32)
    gradient = jax.jit(jax.grad(f))
    change = (gradient(x + step, q[[0, 0, 0]]) - gradient(x - step, q[[0, 0, 0]])) / 2e-2
    np.testing.assert_allclose(hessian, change, atol=1e-3)


@pytest.mark.costly(1)
@each_implementation
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"return_entropy": True}], ids=str)
def test_second_order_in_reverse(implementation, options):
    """A label that is far above the others is no weight of its row, and an ignored row hides what it holds."""
    x = np.float32([[200, 0, 1], [1, 2, 500], [np.nan, np.inf, 1], [0.5, -1, 2]])
    v, labels = np.float32([[1, 2, 3]] * 4), np.array([0, -1, -1, 1])

    def f(x):
        found = cross_entropy(x, labels, ignore_index=-1, implementation=implementation, **options)
        return sum(jnp.sum(v) for v in (found if isinstance(found, tuple) else (found,)))

    @jax.jit
    def second_derivatives(x):
        twice = jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x)
        return twice, jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x), jax.jvp(jax.grad(f), (x,), (v,))[1]

    with served(implementation):
        *in_reverse, forward = second_derivatives(x)
        for second in in_reverse:
            assert not np.any(second[:3])
            np.testing.assert_allclose(second[3], forward[3], rtol=1e-5, atol=1e-6)


_SHARDED_OPTIONS = dict(ignore_index=-100, label_smoothing=0.1, z_loss=0.01, logits_soft_cap=20.0)


@pytest.mark.costly(3)
@needs_devices
@each_fast_implementation
@each_axis_type
@pytest.mark.parametrize(
    "case",
    [
        (P("a", None, "b"), {"ignore_index": -100}),
        (P("a"), _SHARDED_OPTIONS),
        (P("a", None, "b"), _SHARDED_OPTIONS),
        (P("a"), {"ignore_index": -100}),
        (P("a", "b"), {"ignore_index": -100}),
    ],
    ids=lambda case: f"{case[0]}-{len(case[1])} options",
)
def test_sharded(implementation, kind, case):
    """Sharded rows cost nothing, and a sharded vocabulary one exchange of a few numbers a row, forward and backward."""
    spec, options = case
    mesh, classes_are_sharded = mesh_of(kind), len(spec) == 3
    x = (3 * np.random.default_rng(6).standard_normal((8, 16, 256))).astype(np.float32)
    labels = np.random.default_rng(7).integers(0, 256, (8, 16), np.int32)
    labels[0, :3] = -100, 0, 255

    def f(x, labels):
        return cross_entropy(x, labels, **options, implementation=implementation)

    def pulled_back(x, labels, g):
        return jax.vjp(lambda x: f(x, labels), x)[1](g)[0]

    g = np.sin(np.arange(128, dtype=np.float32)).reshape(8, 16)
    want, _, dx_want = truth(x.reshape(-1, 256), labels.reshape(-1), **options)
    with jax.set_mesh(mesh), served(implementation):
        rows_spec = P(*(*spec, None)[:2])
        put = lambda v, s: jax.device_put(v, NamedSharding(mesh, s))  # noqa: E731
        operands = put(x, spec), put(labels, rows_spec)
        forward = jax.jit(f).lower(*operands).compile()
        operands_back = *operands, put(g, rows_spec)
        backward = jax.jit(pulled_back).lower(*operands_back).compile()
        loss, dx = np.asarray(forward(*operands)), np.asarray(backward(*operands_back))
        actual = loss.reshape(-1), dx.reshape(-1, 256)
        assert_close(actual, (want, dx_want * g.reshape(-1, 1)), scale=np.full((128, 256), 1.0))
        most = (5 if options.keys() == {"ignore_index"} else 8) if classes_are_sharded else 0
        for moved in map(collectives, (forward, backward)):
            exchanges = None if implementation == "xla" else int(classes_are_sharded)
            check_moved(spec, moved, most, rows_on_a_device(mesh, spec, x.shape), exchanges)
