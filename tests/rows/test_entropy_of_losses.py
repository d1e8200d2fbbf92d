"""The entropy that cross-entropies return beside the loss: values and gradients in float64, edges, and what moves.

How it transforms is in test_every_function, test_higher_orders and test_fuzz.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import each_dtype_in_turn, each_fast_implementation, each_implementation, precision, served, some
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import check_moved, collectives, each_axis_type, mesh_of, needs_devices, rows_on_a_device
from truth import assert_within

import jaxsoft
from jaxsoft import softmax_cross_entropy_with_integer_labels as cross_entropy

IGNORED = -100


def exact(x, labels, cotangents, counts=True, cap=None):
    """Losses, logsumexps, entropies, and the gradient of what they are paired with, in float64 or wider.

    Also the sizes of the terms of the entropies, and of the gradients.
    """
    x = np.asarray(x).astype(np.longdouble if x.dtype == np.float64 else np.float64)
    z, slope = (x, 1) if cap is None else (cap * np.tanh(x / cap), np.cosh(x / cap) ** -2)
    counts = np.broadcast_to(counts, x.shape) & (z > -np.inf)
    every, label = np.arange(len(x)), np.clip(labels, 0, x.shape[-1] - 1)
    read = labels != IGNORED
    counts = counts & read[:, None]
    some = counts.any(axis=-1)
    m = np.where(some, np.max(np.where(counts, z, -np.inf), axis=-1), 0)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        below = np.where(counts, z - m, 0)
        e = np.where(counts, np.exp(below), 0)
    s = np.where(some, e.sum(axis=-1), 1)[:, None]
    # log(s) with the digits of what is beside the maximum.
    rest = np.where(np.arange(x.shape[-1]) == np.argmax(np.where(counts, z, -np.inf), axis=-1)[:, None], 0, e)
    log_s = np.log1p(rest.sum(axis=-1, keepdims=True))
    mean = (e * below).sum(axis=-1, keepdims=True) / s
    p, entropy = e / s, (log_s - mean)[:, 0]
    lse = (m + log_s)[:, 0]
    loss = np.where(some, lse - z[every, label], 0)
    a, b, c = (np.where(some, v, 0)[:, None] for v in cotangents)
    dz = p * (a + b - c * (below - mean))
    dz[every, label] -= a[:, 0]
    here = counts[every, label]
    others = np.where(np.arange(x.shape[-1]) == label[:, None], 0, p).sum(axis=-1)
    precise = (-a * others[:, None] + p[every, label][:, None] * (b - c * (below[every, label][:, None] - mean)))[:, 0]
    dz[every, label] = np.where(here, precise, dz[every, label])
    sizes = p * (np.abs(a) + np.abs(b) + np.abs(c) * (np.abs(below) + np.abs(mean)))
    sizes[every, label] += np.abs(a[:, 0]) * np.where(here, others, 1)
    lse = np.where(some, lse, -np.inf)
    return (loss, lse, np.where(some, entropy, 0)), dz * slope, sizes * np.abs(slope)


def cotangents_of(count, dtype):
    state = np.float64 if dtype == jnp.float64 else np.float32
    return [v.astype(state) for v in np.random.default_rng(count).standard_normal((3, count))]


@functools.partial(jax.jit, static_argnames=("cap", "implementation"))
def value_and_pullback(x, cotangents, labels, where, cap, implementation):
    """Loss, logsumexp and entropy, and the pullback of their cotangents."""

    def f(x):
        options = {"where": where, "ignore_index": IGNORED, "logits_soft_cap": cap, "implementation": implementation}
        return cross_entropy(x, labels, **options, return_lse=True, return_entropy=True)

    y, pull = jax.vjp(f, x)
    return y, pull(tuple(cotangents))[0]


def check(x, labels, implementation, counts=None, cap=None):
    """Values and gradients, where loss, logsumexp and entropy have cotangents all at once."""
    cotangents = cotangents_of(len(x), x.dtype)
    want, dx_want, sizes = exact(x, labels, cotangents, True if counts is None else counts, cap)
    actual, dx = jax.tree.map(np.asarray, value_and_pullback(x, cotangents, labels, counts, cap, implementation))
    chex.assert_type(list(actual), jnp.float64 if x.dtype == np.float64 else jnp.float32)
    eps = 2.0**-40 if x.dtype == np.float64 else 2.0**-20
    what = f"{x.dtype} {x.shape} {cap}"
    size = np.abs(want[0]) + np.where(np.isfinite(want[1]), np.abs(want[1]), 0)
    assert_within(actual[0], want[0], eps * (1e-3 * size + np.abs(want[0]) + 0.1), f"loss of {what}")
    finite = np.isfinite(want[1])
    assert_within(actual[1][finite], want[1][finite], eps * (np.abs(want[1][finite]) + 1), f"logsumexp of {what}")
    assert_within(actual[2], want[2], eps * (np.abs(want[2]) + 0.2), f"entropy of {what}")
    assert dx.dtype == x.dtype
    info = jnp.finfo(x.dtype)
    bound = float(info.eps) * np.abs(dx_want) + 8 * eps * sizes + max(1e-35, float(info.smallest_subnormal))
    assert_within(dx, dx_want, bound, f"gradient of {what}")


@pytest.mark.costly
@each_dtype_in_turn
@each_fast_implementation
@pytest.mark.parametrize(
    "n", some([1, 2, 3, 7, 24, 25, 33, 128, 1000, 1025, 2049, 4097, 8209, 65537], [1, 7, 33, 1025, 2049, 8209, 65537])
)
def test_lengths(implementation, dtype, n):
    """Rows of every kind of length, labels at the ends and in between, an ignored row of NaN, and offsets."""
    count = 6 if n > 4097 else 13
    x = 3 * np.random.default_rng(n).standard_normal((count, n), np.float32)
    x[1] += 1000
    labels = np.random.default_rng(n).integers(0, n, count).astype(np.int32)
    labels[:5] = 0, n - 1, n // 2, IGNORED, min(7, n - 1)
    with precision(dtype), served(implementation):
        x = x.astype(dtype)
        x[3] = np.nan
        x[4, labels[4]] += 30  # the label is nearly certain
        check(np.where(np.isnan(x), 0, x).astype(dtype), labels, implementation)
        cotangents = [np.full_like(v, one) for v, one in zip(cotangents_of(count, dtype), (1, 0, 1), strict=True)]
        results = value_and_pullback(x, cotangents, labels, None, None, implementation)
        (loss, _, entropy), dx = jax.tree.map(np.asarray, results)
        assert loss[3] == 0 and entropy[3] == 0
        assert not np.any(dx[3]) and np.isfinite(dx.astype(np.float32)).all()


@pytest.mark.slow
@each_dtype_in_turn
@each_fast_implementation
@pytest.mark.parametrize("n", [32000, 50257, 131072, 262147, 2**20 + 1])
@pytest.mark.parametrize("count", [2, 40])
def test_long_rows(implementation, dtype, n, count):
    """Rows that kernels cut up, few and many."""
    count = min(count, max(2, 10**7 // n))
    x = 2 * np.random.default_rng(n).standard_normal((count, n), np.float32)
    labels = np.random.default_rng(n).integers(0, n, count).astype(np.int32)
    labels[:2] = 0, n - 1
    with precision(dtype), served(implementation):
        check(x.astype(dtype), labels, implementation)


@pytest.mark.costly
@each_dtype_in_turn
@each_fast_implementation
@pytest.mark.parametrize("n", [5, 300, 5000])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("masked", ["classes", "rows", "nothing"])
def test_masks_and_caps(implementation, dtype, n, cap, masked):
    """Classes that do not count, among them labels; rows that do not; and caps, all in one call."""
    x = 3 * np.random.default_rng(n).standard_normal((9, n), np.float32)
    if cap is None:
        x[1, n // 2 :] = -np.inf
    labels = np.random.default_rng(n).integers(0, n, 9).astype(np.int32)
    labels[:4] = 0, 1, IGNORED, n - 1
    counts = np.random.default_rng(n + 1).random((9, n)) < 0.6
    counts[0, 0], counts[1, 1], counts[3, n - 1], counts[4] = False, True, True, False
    counts[1, 0] = True
    with precision(dtype), served(implementation):
        x = x.astype(dtype)
        where = {"classes": counts, "rows": counts[:, :1]}.get(masked)
        check(x, labels, implementation, where, cap)


@pytest.mark.costly(1)
@each_fast_implementation
@each_dtype_in_turn
@pytest.mark.parametrize("n", [24, 1, 3, 10, 33, 48, 100])
def test_neighbours(implementation, dtype, n):
    """Many short rows, which kernels take together: of different offsets, and some that are not to be read."""
    count = 2500
    x = 2 * np.random.default_rng(n).standard_normal((count, n), np.float32)
    x += np.float32([0, 100, 0, -70, 20])[np.arange(count) % 5, None]
    labels = np.random.default_rng(n).integers(0, n, count).astype(np.int32)
    labels[3::7] = IGNORED
    with precision(dtype), served(implementation):
        check(x.astype(dtype), labels, implementation)


@each_implementation
def test_certainty(implementation):
    """A label that is nearly certain: an entropy and a gradient far below the last place of 1 have all their digits."""
    above = np.array([0, 5, 10, 15, 20, 40, 60, 80], np.float64)
    x = np.zeros((8, 50), np.float32)
    x[:, 3] = above
    zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
    labels = np.full(8, 3, np.int32)
    results = value_and_pullback(x, [zeros, zeros, ones], labels, None, None, implementation)
    (_, _, entropy), dx = jax.tree.map(np.asarray, results)
    s = 1 + 49 * np.exp(-above)
    mean = -49 * np.exp(-above) * above / s
    np.testing.assert_allclose(entropy, np.log1p(49 * np.exp(-above)) - mean, rtol=1e-5)
    assert np.abs(dx[0]).max() < 1e-8  # where all probabilities are equal
    np.testing.assert_allclose(dx[1:, 3], (mean / s)[1:], rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(dx[1:, 0], (np.exp(-above) / s * (above + mean))[1:], rtol=2e-5, atol=1e-37)


@each_implementation
@pytest.mark.parametrize("n", [4, 5002])
def test_special_values(implementation, n):
    """The edges of `jaxsoft.entropy`, whatever the label is: in range or not, ruled out, the only one, +inf or NaN."""
    inf, nan = np.inf, np.nan
    x = np.zeros((10, n), np.float32)
    x[0] = -inf  # nothing to choose from
    x[1, 2] = -inf  # the label is ruled out
    x[2, 1] = -inf  # another is
    x[3, 1] = inf
    x[4, 2] = inf  # the label's
    x[5, 0] = nan
    x[6, 2] = nan  # the label's
    x[7], x[7, 2] = -inf, 5  # nothing but the label
    x[9] = nan  # ignored
    labels = np.array([2, 2, 2, 2, 2, 2, 2, 2, -1, IGNORED])
    f = functools.partial(cross_entropy, labels=labels, ignore_index=IGNORED, implementation=implementation)

    @jax.jit
    def results(x):
        values, pull = jax.vjp(functools.partial(f, return_entropy=True), x)
        zeros, ones = (jnp.full(10, v, jnp.float32) for v in (0, 1))
        return values, f(x), pull((zeros, ones))[0], pull((ones, ones))[0]

    (loss, entropy), alone, of_entropy, of_both = jax.tree.map(np.asarray, results(x))
    np.testing.assert_allclose(
        entropy, [0, np.log(n - 1), np.log(n - 1), nan, nan, nan, nan, 0, np.log(n), 0], rtol=1e-5
    )
    chex.assert_trees_all_equal(loss, alone)
    finite = np.array([0, 1, 2, 7, 8, 9])
    for dx in (of_entropy, of_both):
        assert np.isfinite(dx[finite]).all()
        assert not np.any(dx[np.array([0, 9])])
    np.testing.assert_allclose(of_entropy[finite], 0, atol=1e-6)  # uniform probabilities


@pytest.mark.costly(1)
@each_fast_implementation
@pytest.mark.parametrize(
    "options",
    some([{"label_smoothing": 0.1}, {"z_loss": 0.1}, {"class_weights": 1}, {}], [{"label_smoothing": 0.1}, {}]),
    ids=str,
)
def test_other_options_leave_it(implementation, options):
    """The entropy is that of the logits, and the loss is as without it; for probabilities as labels, too."""
    rng = np.random.default_rng(0)
    x = 3 * rng.standard_normal((5, 60), np.float32)
    x[1, 3] = -np.inf
    labels, q = rng.integers(4, 60, 5), rng.random((5, 60), np.float32)
    counts = rng.random((5, 60)) < 0.8
    q[~counts | np.isinf(x)] = 0
    if options.get("class_weights"):
        options = {"class_weights": rng.random(60).astype(np.float32)}

    flags = (True, True), (True, False), (False, True)

    def gradient(f, x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)

    for where in (None, counts):

        @jax.jit
        def results(x, where=where):
            found = []
            for function, y in ((cross_entropy, labels), (jaxsoft.softmax_cross_entropy, q)):
                f = functools.partial(function, labels=y, where=where, implementation=implementation, **options)
                losses = [f(x, return_lse=lse, return_entropy=entropy) for lse, entropy in flags]
                dx = gradient(lambda x, f=f: f(x, return_entropy=True)[1], x)
                found.append((losses, dx))
            plain = functools.partial(jaxsoft.entropy, where=where, implementation="xla")
            return found, plain(x), gradient(plain, x)

        found, want, dx_want = results(x)
        for ((loss, lse, entropy), without, with_entropy), dx in found:
            chex.assert_trees_all_close((loss, lse), without, rtol=2e-6, atol=1e-6)
            chex.assert_trees_all_equal((loss, entropy), with_entropy)
            np.testing.assert_allclose(entropy, want, rtol=1e-5)
            np.testing.assert_allclose(dx, dx_want, rtol=1e-4, atol=1e-6)


@each_implementation
def test_second_order_where_the_label_is_far_above(implementation):
    """Its distance from the others is out of the reach of exp, in which no derivative may show."""
    x = np.zeros((2, 6), np.float32)
    x[0, 2], x[1, 3] = 300, -300

    def f(x, implementation=implementation):
        results = cross_entropy(
            x, np.array([2, 3]), return_lse=True, return_entropy=True, implementation=implementation
        )
        return sum(jnp.sum(v) for v in results)

    hessian, in_reverse = jax.jit(lambda x: (jax.hessian(f)(x), jax.jacrev(jax.grad(f))(x)))(x)
    assert np.isfinite(hessian).all()
    with jax.enable_x64(True):
        want = jax.jit(jax.hessian(lambda x: f(x, "xla")))(x.astype(np.float64))
    np.testing.assert_allclose(hessian, want, atol=1e-6)
    np.testing.assert_allclose(in_reverse, want, atol=1e-6)


@pytest.mark.costly(2)
@needs_devices
@each_fast_implementation
@each_axis_type
@pytest.mark.parametrize("spec", [P("a", None, "b"), P("a"), P("a", "b")], ids=str)
def test_sharded(implementation, kind, spec):
    """Sharded rows cost nothing, and sharded classes one exchange of a few numbers a row, forward and backward."""
    mesh = mesh_of(kind)
    x = (3 * np.random.default_rng(6).standard_normal((8, 16, 256))).astype(np.float32)
    labels = np.random.default_rng(7).integers(0, 256, (8, 16), np.int32)
    labels[0, :3] = IGNORED, 0, 255
    a, b, c = cotangents_of(128, np.float32)

    def f(x, labels):
        return cross_entropy(
            x, labels, ignore_index=IGNORED, return_lse=True, return_entropy=True, implementation=implementation
        )

    def pulled_back(x, labels, *g):
        return jax.vjp(lambda x: f(x, labels), x)[1](g)[0]

    want, dx_want, sizes = exact(x.reshape(-1, 256), labels.reshape(-1), (a, b, c))
    with jax.set_mesh(mesh), served(implementation):
        rows_spec = P(*(*spec, None)[:2])
        put = lambda v, s: jax.device_put(v, NamedSharding(mesh, s))  # noqa: E731
        operands = put(x, spec), put(labels, rows_spec)
        forward = jax.jit(f).lower(*operands).compile()
        back = (*operands, *(put(v.reshape(8, 16), rows_spec) for v in (a, b, c)))
        backward = jax.jit(pulled_back).lower(*back).compile()
        for actual, true in zip(forward(*operands), want, strict=True):
            actual, true = np.ravel(np.asarray(actual))[1:], true[1:]
            assert_within(actual, true, 1e-6 * (1 + np.abs(true)), f"values over {spec}")
        dx = np.asarray(backward(*back)).reshape(-1, 256)
        assert_within(dx, dx_want, 1e-5 * sizes + 1e-35, f"gradient over {spec}")
        most = 6 if len(spec) == 3 else 0
        for moved in map(collectives, (forward, backward)):
            exchanges = None if implementation == "xla" else int(len(spec) == 3)
            check_moved(spec, moved, most, rows_on_a_device(mesh, spec, x.shape), exchanges)


@pytest.mark.parametrize("name", ["return_lse", "return_entropy"])
def test_bad_flags(name):
    x = np.zeros((3, 4), np.float32)
    for f, labels in ((cross_entropy, np.zeros(3, int)), (jaxsoft.softmax_cross_entropy, x)):
        with pytest.raises(TypeError, match=f"{name} must be True or False; got 1"):
            f(x, labels, **{name: 1})


def test_results():
    """Their order and their number."""
    x, y = np.zeros((3, 4), np.float32), np.zeros(3, int)
    q = np.full((3, 4), 0.25, np.float32)
    flags = (True, True), (False, True), (True, False), (False, False)
    for f, labels in ((cross_entropy, y), (jaxsoft.softmax_cross_entropy, q)):
        every = jax.jit(lambda x, f=f, labels=labels: [f(x, labels, return_lse=a, return_entropy=b) for a, b in flags])
        (loss, lse, entropy), *others = every(x)
        chex.assert_trees_all_equal(others, [(loss, entropy), (loss, lse), loss])
        np.testing.assert_allclose(entropy, np.log(4), rtol=1e-6)
