"""Sampling: the tokens that may be drawn, how often they are, and the probability that is returned with them.

The reference builds the whole filtered distribution of a row in float64, by sorting it.
"""

import fractions
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import each_dtype, each_implementation, precision, same_bits, served, slow
from meshes import mesh_of, needs_devices
from truth import EPS, wide

from jaxsoft.random import sample

KEY = jax.random.key(0)
OPTIONS = ("temperature", "top_k", "top_p", "min_p")
COMBINATIONS = [given for r in range(5) for given in itertools.combinations(OPTIONS, r)]


def distribution(x, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """The probability of each token of a row of finite numbers or -inf."""
    order = np.argsort(-x, kind="stable")
    z = x[order] / (temperature or 1)
    w = np.exp(z - z[0])
    if temperature == 0:
        w[1:] = 0
    w[len(w) if top_k is None else top_k :] = 0
    if top_p < 1:
        w[np.concatenate([[0], np.cumsum(w)[:-1]]) >= top_p * w.sum()] = 0
    w[w < min_p] = 0
    p = np.empty_like(w)
    p[order] = w / w.sum()
    return p


def distributions(x, options):
    """The same of each row of x (rows, n), with options that may be one a row."""
    each = [{k: v[i] if np.ndim(v) else v for k, v in options.items()} for i in range(len(x))]
    return np.stack([distribution(row, **o) for row, o in zip(wide(x), each, strict=True)])


def in_every_draw(options):
    """Options of each row, as they are for several draws from each."""
    return {name: v[:, None] if np.ndim(v) else v for name, v in options.items()}


def check(x, options, draws=16, key=KEY, implementation=None):
    """Every token that is drawn may be, and its probability is the reference's."""
    expected = distributions(x, options)
    many = np.broadcast_to(x, (draws, *x.shape))
    token, p = sample(key, many, **in_every_draw(options), implementation=implementation)
    assert token.shape == p.shape == many.shape[:-1]
    assert token.dtype == jnp.int32
    assert p.dtype == (jnp.float64 if x.dtype == np.float64 else jnp.float32)
    token, true = np.asarray(token), np.take_along_axis(expected, np.asarray(token).T, axis=1).T
    finite = np.where(np.isfinite(wide(x)), np.abs(wide(x)), 0).max(-1)
    coldest = np.min(np.where(np.asarray(options.get("temperature", 1)) == 0, 1, options.get("temperature", 1)))
    np.testing.assert_array_less(0, true)
    error = np.abs(np.asarray(p) - true) / true
    bound = EPS[p.dtype.itemsize] * (16 + 4 * finite / coldest)
    assert np.all(error <= bound), (options, error.max(), bound)
    return token


def logits(n, dtype=np.float32):
    """Rows: a few likely tokens, many alike, some masked, ties, all the same, all masked but one."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((12, n)) * np.array([4, 1, 4, 1, 0, 1] * 2)[:, None]
    x[2:4] = np.where(rng.random((2, n)) < 0.3, -np.inf, x[2:4])
    x[8:10] = np.round(x[8:10])
    x[[5, 11]] = -np.inf
    x[:, n // 2] = np.where(np.isfinite(x[:, n // 2]), x[:, n // 2], 1)
    return (x + 0.0).astype(dtype)  # without -0, which some order before 0


def options_for(given, rows, n, seed=0):
    """One number a row for each option that is given."""
    rng = np.random.default_rng(seed)
    every = {
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 2.0], rows).astype(np.float32),
        "top_k": max(1, n // 3),
        "top_p": rng.choice([0.1, 0.5, 0.93, 0.999, 1.0], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.013, 0.21, 1.0], rows).astype(np.float32),
    }
    return {name: every[name] for name in given}


@pytest.mark.costly(1)
@pytest.mark.parametrize("n", [600, pytest.param(7, marks=slow)])
@pytest.mark.parametrize("given", [g if len(g) != 2 else pytest.param(g, marks=slow) for g in COMBINATIONS], ids=str)
def test_probabilities(given, n):
    """Of every combination of options, some of them other for each row, and where 256 tokens do not reach top_p."""
    check(logits(n), options_for(given, 12, n))


@pytest.mark.costly(1)
@pytest.mark.parametrize("n", [257, 1, 256, *(pytest.param(n, marks=slow) for n in (2, 255, 2**20))])
def test_lengths(n):
    x = logits(n)
    for given in ((), ("temperature", "top_p")):
        check(x, options_for(given, len(x), n, seed=n), draws=16 if n < 1000 else 1)


@pytest.mark.costly(1)
@each_dtype
def test_dtypes(dtype):
    with precision(dtype):
        x = logits(300, dtype)
        check(x, options_for(("temperature", "top_p", "min_p"), len(x), 300))


@each_implementation
def test_implementations(implementation):
    x = logits(512)
    with served(implementation):
        check(x, options_for(("temperature", "top_p"), len(x), 512), implementation=implementation)


def chi_square(tokens, p):
    """How far counts are from a distribution, in standard deviations of what chance does. The rare share a cell."""
    expected = p * tokens.size
    cells = np.cumsum(expected > 10) * (expected > 10)  # 0 for the rare
    expected = np.bincount(cells, expected)
    observed = np.bincount(cells[tokens.ravel()], minlength=len(expected))
    some = expected > 0
    assert not observed[~some].any()
    freedom = some.sum() - 1
    return (np.sum((observed - expected)[some] ** 2 / expected[some]) - freedom) / np.sqrt(2 * max(freedom, 1))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("n", "draws", "options"),
    [
        pytest.param(11, 100_000, {}, marks=slow),
        (11, 100_000, {"temperature": 0.6}),
        (11, 100_000, {"top_k": 6}),
        (11, 100_000, {"top_p": 0.8}),
        pytest.param(11, 100_000, {"min_p": 0.05}, marks=slow),
        (400, 10_000, {}),
        pytest.param(400, 10_000, {"temperature": 2.0, "top_p": 0.95}, marks=slow),
    ],
)
def test_frequencies(n, draws, options):
    """Chance alone makes it 5 with a probability below 1e-4; were all tokens alike it would be far more."""
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    token, _ = sample(KEY, jnp.broadcast_to(x, (draws, n)), **options)
    token, p = np.asarray(token), distribution(wide(x), **options)
    assert np.all(p[token] > 0)
    assert abs(chi_square(token, p)) < 5
    assert chi_square(token, (p > 0) / np.sum(p > 0)) > 30


def test_rows_are_independent():
    """Of each other and of whether another row has to be read again for its top_p."""
    n = 600
    flat, steep = np.zeros(n, np.float32), -np.arange(n, dtype=np.float32)
    alone = sample(KEY, np.stack([steep, steep, steep]), top_p=0.9)
    beside = sample(KEY, np.stack([steep, flat, steep]), top_p=0.9)
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])
    token, _ = sample(KEY, jnp.zeros((20_000, 2, 4)))
    assert abs(chi_square(np.asarray(token) @ [4, 1], np.full(16, 1 / 16))) < 5


def test_deterministic():
    x = logits(300)
    for options in ({}, {"top_p": 0.7}):
        a, b = (sample(KEY, x, **options)[0] for _ in range(2))
        np.testing.assert_array_equal(a, b)
        assert np.any(a != sample(jax.random.key(1), x, **options)[0])


@pytest.mark.costly(1)
@pytest.mark.parametrize("n", [600, pytest.param(6, marks=slow)])
@pytest.mark.parametrize("others", [{"top_p": 0.5}, {}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_greedy(n, others):
    """Temperature 0 takes the first of the largest, with probability 1; also where only some rows have it."""
    x = np.round(np.random.default_rng(0).standard_normal((50, n))).astype(np.float32) + 0.0  # without -0
    token, p = sample(KEY, x, temperature=0, **others)
    np.testing.assert_array_equal(token, x.argmax(-1))
    np.testing.assert_array_equal(p, 1)
    cold = np.arange(50) % 2 == 0
    token, p = sample(KEY, x, temperature=np.where(cold, 0, 1.5), **others)
    np.testing.assert_array_equal(token[cold], x.argmax(-1)[cold])
    np.testing.assert_array_equal(p[cold], 1)
    assert np.any(np.asarray(token)[~cold] != x.argmax(-1)[~cold])
    assert np.any(p[~cold] < 1)


@pytest.mark.costly(1)
@pytest.mark.parametrize("n", [4, 512])
@pytest.mark.parametrize(
    "top_p, share", [(0.2501, 0.25), (0.25, 0.25), (0.5, 0.5), (0.75, 0.75), (1.0, 1.0), (1e-9, 0)]
)
def test_reaching_top_p_exactly(n, top_p, share):
    """Equal tokens: those with the lowest indices are kept, and exactly as many as reach top_p."""
    kept = max(1, int(share * n) + (top_p == 0.2501))
    for top_k in (None, n):
        token, p = sample(KEY, jnp.zeros((500, n)), top_p=jnp.float32(top_p), top_k=top_k)
        np.testing.assert_allclose(p, 1 / kept, rtol=1e-6)
        assert set(np.asarray(token).tolist()) <= set(range(kept))
        assert n > 4 or len(set(np.asarray(token).tolist())) == kept


def test_top_p_is_of_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1, the first two are 4/7 and 3/7: one reaches 0.5 of them, but not of all four."""
    x = jnp.broadcast_to(jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1])), (200, 4))
    assert set(np.asarray(sample(KEY, x, top_k=2, top_p=0.5)[0]).tolist()) == {0}
    assert set(np.asarray(sample(KEY, x, top_p=0.5)[0]).tolist()) == {0, 1}


@pytest.mark.costly(1)
@pytest.mark.parametrize("n", [600, pytest.param(5, marks=slow)])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_without_a_distribution(n, options):
    """Their probability is NaN, and their neighbours' draws are what they are alone."""
    good = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    masked, infinite, negative = np.full(n, -np.inf, np.float32), good.copy(), good.copy()
    infinite[[3, 4]] = np.inf
    nan = good.copy()
    nan[3] = np.nan
    negative[3] = -np.nan
    for temperature in (0, 0.5):
        token, p = sample(KEY, np.stack([masked, infinite, nan, negative, good]), temperature=temperature, **options)
        alone = sample(KEY, np.stack([good] * 5), temperature=temperature, **options)
        np.testing.assert_array_equal(np.isnan(p), [True] * 4 + [False])
        assert np.all((token >= 0) & (token < n))
        assert (token[4], p[4]) == (alone[0][4], alone[1][4])


@pytest.mark.costly(1)
@pytest.mark.parametrize("n", [600, 3])
@pytest.mark.parametrize("options", [{"top_p": 0.9}, {}, {"min_p": 0.1}, {"top_k": 3}], ids=str)
def test_scaled_logits_out_of_range(n, options):
    """Only the largest are left, with alike probabilities, one of which is the whole of a row without its equals."""
    tops = np.array([[100, 50, 99.5], [-100, -150, -101], [3e38, -3e38, 1e38], [-1e38, -3e38, -2e38]], np.float32)
    alone = np.repeat(tops[:, 1:2], n, axis=1)
    alone[:, [0, n - 1]] = tops[:, [0, 2]]
    alike = np.resize(tops.T, (n, 4)).T
    for x in (alone, alike, np.resize([0, -1e38, -3e38], (4, n)).astype(np.float32)):
        for temperature in (1e-37, 1e-20, 0.3, np.array([1e-37, 1e-3, 0.3, 0.1], np.float32)):
            given = {"temperature": temperature, **options}
            far = np.abs(x[:, :1].astype(np.float64)) / np.reshape(temperature, (-1, 1)) > 1e37
            expected = distributions(x, given)
            token, p = sample(KEY, np.broadcast_to(x, (8, 4, n)), **in_every_draw(given))
            true = np.take_along_axis(expected, np.asarray(token).T, axis=1).T
            np.testing.assert_array_less(0, true)
            np.testing.assert_allclose(p, true, rtol=1e-5 if np.all(far) else 1e-4)


@pytest.mark.parametrize("temperature", [1e38, 3.4e38, jnp.inf])
def test_hot(temperature):
    """All that is above -inf is alike."""
    x = np.array([0, 5, -np.inf, -5], np.float32)
    token, p = sample(KEY, np.broadcast_to(x, (50, 4)), temperature=jnp.float32(temperature))
    np.testing.assert_allclose(p, 1 / 3, rtol=1e-6)
    assert set(np.asarray(token).tolist()) == {0, 1, 3}


def test_minus_infinity_is_never_drawn():
    x = np.full((1000, 300), -np.inf, np.float32)
    x[:, [7, 299]] = 0, -3
    every = {}, {"top_k": 10}, {"top_p": 0.9999}, {"min_p": 1e-6}
    for token in jax.jit(lambda x: [sample(KEY, x, **options)[0] for options in every])(x):
        assert set(np.asarray(token).tolist()) == {7, 299}


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, *(pytest.param(o, marks=slow) for o in ({}, {"top_k": 5}, {"min_p": 0.1}))], ids=str
)
def test_vmap_and_jit(options):
    """A key for each row, one for all, and one row for many keys; with options that are traced."""
    x, keys = logits(300), jax.random.split(KEY, 12)
    warm = np.linspace(0, 2, 12, dtype=np.float32)
    of_row = lambda k, row, t: sample(k, row, temperature=t, **options)  # noqa: E731
    one_by_one = [jax.jit(of_row)(k, row, t) for k, row, t in zip(keys, x, warm, strict=True)]

    @jax.jit
    def results(keys, x, warm):
        of_one = functools.partial(sample, temperature=0.7, **options)
        return (
            jax.vmap(of_row)(keys, x, warm),
            jax.vmap(jax.vmap(of_one), (1, 1))(keys.reshape(3, 4), x.reshape(3, 4, -1))[0],
            jax.vmap(of_one)(keys, x)[0],
            jax.vmap(lambda k: sample(k, x[1], **options))(keys)[0],
            jax.vmap(lambda row: sample(KEY, row, **options))(x)[0],
        )

    mapped, nested, flat, many, rows = results(keys, x, warm)
    for actual, each in zip(mapped, zip(*one_by_one, strict=True), strict=True):
        np.testing.assert_allclose(actual, np.stack(each), rtol=1e-6)
    np.testing.assert_array_equal(nested, flat.reshape(3, 4).T)
    assert many.shape == (12,) and len(set(many.tolist())) > 1
    assert rows.shape == (12,)


def test_vmap_does_not_read_again_for_every_row():
    """The condition on top_p stays one: a mapped one would become a selection between both of its branches."""
    mapped = jax.jit(jax.vmap(functools.partial(sample, top_p=0.9, implementation="xla")))
    assert " conditional(" in mapped.lower(jax.random.split(KEY, 4), logits(300)[:4]).compile().as_text()


def test_shapes():
    one, few, none = np.zeros(5, np.float32), np.zeros((2, 3, 300), np.float32), np.zeros((0, 300), np.float32)
    given = {"temperature": np.ones((2, 3), np.float32), "top_p": np.full((2, 1, 1), 0.5, np.float32)}
    drawn = jax.jit(
        lambda one, few, none: (
            sample(KEY, one, top_p=0.5),
            *(sample(KEY, few, **options) for options in ({}, given)),
            *(sample(KEY, none, **options) for options in ({}, {"top_p": 0.5})),
        )
    )(one, few, none)
    for found, shape in zip(drawn, [(), (2, 3), (2, 3), (0,), (0,)], strict=True):
        assert [v.shape for v in found] == [shape] * 2
    assert sample(KEY, [0, 1000, 0])[0] == 1
    assert sample(KEY, jnp.array([0, 99, 0], jnp.float8_e4m3fn), top_k=2)[0] == 1


def test_constant_to_derivatives():
    def total(x):
        return sum(sample(KEY, x, **options)[1].sum() for options in ({}, {"top_p": 0.5}))

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(np.ones((2, 300), np.float32)), 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1}, ValueError, r"temperature must be at least 0, finite; got -1"),
        ({"temperature": np.inf}, ValueError, r"temperature must be at least 0, finite; got inf"),
        ({"temperature": np.array([1.0, -0.1])}, ValueError, r"temperature must be at least 0, finite; got array"),
        ({"temperature": "hot"}, TypeError, r"temperature must be a number or an array of numbers; got 'hot'"),
        ({"temperature": np.ones(3)}, ValueError, r"temperature must broadcast to .*\(2,\); got shape \(3,\)"),
        ({"temperature": True}, TypeError, r"temperature must hold real numbers; got dtype bool"),
        ({"top_k": 0}, ValueError, r"top_k must be at least 1, or None; got 0"),
        ({"top_k": 2.0}, TypeError, r"top_k must be None or an integer that is known .*; got 2\.0"),
        ({"top_p": 0}, ValueError, r"top_p must be above 0 and at most 1, or None; got 0"),
        ({"top_p": 1.5}, ValueError, r"top_p must be above 0 and at most 1, or None; got 1\.5"),
        ({"top_p": jnp.ones((1, 2))}, ValueError, r"top_p must broadcast to .*\(2,\); got shape \(1, 2\)"),
        ({"min_p": -0.1}, ValueError, r"min_p must be between 0 and 1, or None; got -0\.1"),
        ({"min_p": 1j}, TypeError, r"min_p must hold real numbers; got dtype complex"),
        ({"implementation": "fast"}, ValueError, r"implementation must be None or one of 'ffi'"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        sample(KEY, np.ones((2, 3), np.float32), **options)


def test_options_of_any_kind():
    """As other arguments: what holds a tracer, what only `__jax_array__` makes an array of, and fractions."""

    class Number:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return jnp.asarray(self.value)

    x, half = logits(7), {name: 0.5 for name in ("temperature", "top_p", "min_p")}
    expected = sample(KEY, x, **half)
    makers = [Number, fractions.Fraction, lambda v: [v] * len(x), lambda v: [jnp.float32(v)] * len(x)]
    if nnx := importlib.util.find_spec("flax") and importlib.import_module("flax.nnx"):
        makers.append(nnx.Param)
    traced = []
    for make in makers:
        assert same_bits(sample(KEY, x, **{name: make(v) for name, v in half.items()}), expected)
        if make is not fractions.Fraction:  # of a traced number there is none
            traced.append(make)
    for token in jax.jit(lambda v: [sample(KEY, x, **{name: make(v) for name in half})[0] for make in traced])(0.5):
        np.testing.assert_array_equal(token, expected[0])
    with pytest.raises(ValueError, match=r"temperature must be at least 0, finite; got -0\.5"):
        sample(KEY, x, temperature=fractions.Fraction(-1, 2))


@pytest.mark.parametrize("key", [None, 0, "a", jnp.zeros(3, jnp.uint32)], ids=repr)
def test_bad_keys(key):
    with pytest.raises(TypeError, match=r"key must be a key of jax\.random; got"):
        sample(key, jnp.ones(3))


def test_many_keys():
    for keys in (jax.random.split(KEY, 2), jax.random.split(jax.random.PRNGKey(0), 2)):
        with pytest.raises(ValueError, match="key must be one key, where vmap takes many; got keys of shape"):
            sample(keys, jnp.ones((2, 3)))
    old = sample(jax.random.PRNGKey(0), jnp.ones((2, 3)))
    assert same_bits(old, sample(jax.random.wrap_key_data(jax.random.PRNGKey(0)), jnp.ones((2, 3))))


def test_bad_logits():
    with pytest.raises(TypeError, match="logits must hold real numbers; got dtype complex64"):
        sample(KEY, jnp.ones(3, jnp.complex64))
    for shape in ((), (2, 0)):
        with pytest.raises(ValueError, match=r"logits must have at least one token along their last axis; got shape"):
            sample(KEY, jnp.ones(shape))


def test_out_of_range_when_it_runs():
    """top_p and min_p leave one of the most probable tokens at the least."""
    x = logits(300)
    drawn = jax.jit(lambda x, p, q: (sample(KEY, x, top_p=p)[0], sample(KEY, x, min_p=q)[0]))
    for token in drawn(x, np.float32(-1), np.float32(2)):
        np.testing.assert_array_equal(x[np.arange(len(x)), np.asarray(token)], x.max(-1))


def test_temperatures_below_zero():
    """Known only when it runs, such a temperature has no distribution; the others' rows have."""
    every = {}, {"top_k": 2}, {"top_p": 0.5}
    drawn = jax.jit(lambda x, t: [sample(KEY, x, temperature=t, **options)[1] for options in every])
    for p in drawn(np.zeros((2, 300), np.float32), np.float32([-1, 1])):
        np.testing.assert_array_equal(np.isnan(p), [True, False])


@needs_devices
def test_sharded_rows():
    """Rows are drawn where they lie, without communication, and as they are on one device."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    x = logits(600)
    rows = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows")))
    draw = jax.jit(functools.partial(sample, temperature=0.7)).lower(KEY, rows).compile()
    assert not [word for word in ("all-reduce", "all-gather", "permute", "all-to-all") if word in draw.as_text()]
    for actual, expected in zip(draw(KEY, rows), sample(KEY, x, temperature=0.7), strict=True):
        assert len(actual.sharding.device_set) == 2
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.costly(1)
@needs_devices
@pytest.mark.parametrize("n", [320, pytest.param(16, marks=slow)])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, pytest.param({"min_p": 0.1}, marks=slow)],
    ids=str,
)
def test_explicitly_sharded_tokens(options, n):
    """Rows that lie on several devices give what whole ones do, and results that are sharded as the rows are."""
    mesh, spec = mesh_of(jax.sharding.AxisType.Explicit), jax.sharding.PartitionSpec("a", None, "b")
    x = np.random.default_rng(n).standard_normal((2, 4, n)).astype(np.float32)
    expected = sample(KEY, x, **options)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        token, p = jax.jit(functools.partial(sample, **options))(KEY, sharded)
        assert jax.typeof(token).sharding.spec == jax.typeof(p).sharding.spec == jax.sharding.PartitionSpec("a", None)
    np.testing.assert_array_equal(token, expected[0])
    np.testing.assert_allclose(p, expected[1], rtol=1e-5)
