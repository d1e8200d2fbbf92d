"""Rows of infinities, NaN, equal and extreme numbers, masks and nothing: JAX's values, and no NaN where JAX has none.

Random numbers never show a missing guard, so each special row is tried in every class of lengths: shorter than a
vector, a tile of 2048 and a segment of 65536 with one element more and less, and several segments.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import IMPLEMENTATIONS, each_dtype, each_implementation, each_op, ours, precision, served, theirs
from truth import Truth, assert_values, assert_within, cotangent, in_float64, pullback, wide

LENGTHS = (1, 3, 33, 2047, 2048, 2049, 65535, 65536, 65537, 140_001)


def special_rows(n: int, dtype) -> dict[str, np.ndarray]:
    """Rows of n scores by name."""
    normal = np.random.default_rng(n).standard_normal(n).astype(dtype)
    inf, top, tiny = np.inf, float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).smallest_subnormal)
    places = {"first": 0, "middle": n // 2, "last": n - 1}

    def filled(value, **at):
        x = np.full(n, value, np.float64)
        for place, v in at.items():
            x[places[place]] = v
        return x

    def with_part(part, value):
        x = normal.copy()
        x[part] = value
        return x

    result = {"all -inf": filled(-inf), "all NaN": filled(np.nan), "all +inf": filled(inf)}
    for place, i in places.items():
        result[f"one finite, {place}"] = filled(-inf, **{place: 2.5})
        result[f"+inf, {place}"] = with_part(slice(i, i + 1), inf)
        result[f"NaN, {place}"] = with_part(slice(i, i + 1), np.nan)
        result[f"only NaN and -inf, {place}"] = filled(-inf, **{place: np.nan})
        result[f"only +inf and -inf, {place}"] = filled(-inf, **{place: inf})
        result[f"one large, {place}"] = filled(0, **{place: 1e4})
        result[f"one at the top of the range, {place}"] = filled(-top, **{place: top})
    result |= {
        "-inf in the first tiles": with_part(slice(0, 5000 if n > 5000 else n // 2), -inf),
        "-inf in the second tile": with_part(slice(2048, 4096), -inf),
        "-inf in the last tiles": with_part(slice(n // 2, n), -inf) if n > 1 else normal,
        "-inf in every other place": with_part(slice(1, None, 2), -inf),
        "NaN and +inf": with_part(slice(0, 1), np.nan) if n == 1 else filled(0, first=inf, last=np.nan),
        "equal": filled(1),
        "equal, large": filled(1e4),
        "equal, at the top of the range": filled(top),
        "equal, at the bottom of the range": filled(-top),
        "one over -5": filled(-5, middle=0),
        "one over -0.1": filled(-0.1, middle=0),
        "offset by 1e4": normal + 1e4,
        "offset by half of the range": normal * (top / 2**20) + top / 2,
        "denormal": (np.arange(n) % 7) * tiny,
        "negative denormal": -(np.arange(n) % 7 + 1) * tiny,
        "probabilities that are denormal": np.where(np.arange(n) == n // 2, 0, -0.9 * np.log(top) - 5),
    }
    return result


def special_batch(n: int, dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.stack([x.astype(dtype) for x in special_rows(n, dtype).values()])


def lengths_for(implementation: str | None, dtype) -> tuple[int, ...]:
    """All lengths for the kernels of the two main dtypes; the others share their code, or have no cuts of their own."""
    if implementation == "reference":
        return (3, 33)
    if implementation in (None, "xla"):
        return (3, 65537) if dtype == jnp.float32 else (2049,)
    return {jnp.float32: LENGTHS, jnp.bfloat16: (3, 2048, 2049, 65536, 65537)}.get(dtype, (33, 2049, 65537))


def vjp(f, x, g):
    y, pull = jax.vjp(f, x)
    return y, pull(g)[0]


@pytest.mark.cover("op", "implementation")
@each_op
@each_dtype
@each_implementation
@pytest.mark.parametrize("part", [0, 1])
def test_values_and_gradients(op, dtype, implementation, part):
    """One batch of all special rows a length, which also shows that they do not disturb each other."""
    with precision(dtype):
        f = jax.jit(functools.partial(vjp, ours(op, implementation)))
        for n in lengths_for(implementation, dtype)[part::2]:
            with served(implementation):
                x = special_batch(n, dtype)
                g = (
                    np.random.default_rng(n)
                    .standard_normal(x.shape if op != "logsumexp" else x.shape[:-1])
                    .astype(dtype)
                )
                y, dx = map(np.asarray, f(x, g))
                truth = Truth.of(x)
                assert_values(op, x, y, truth)
                expected, bound = pullback(op, x, g, truth)
                known = np.isfinite(expected)
                what = f"gradient of {op}, {dtype.__name__} rows of {n}"
                assert_within(np.where(known, dx, 0), np.where(known, expected, 0), bound, what)


@pytest.mark.costly
@each_op
@each_implementation
def test_jax_has_the_same(op, implementation):
    """JAX in float64 has the values of the truth above; and where its gradient is not NaN, ours is the same."""
    with jax.enable_x64(True), served(implementation):
        names, x = special_rows(64, np.float64), special_batch(64, np.float64)
        g = cotangent(op, x)
        expected, expected_dx = map(np.asarray, vjp(theirs(op), x, g))
        assert_values(op, x, expected)
        y, dx = map(np.asarray, vjp(ours(op, implementation), x, g))
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-15)
        known = ~np.isnan(expected_dx)
        np.testing.assert_allclose(dx[known], expected_dx[known], rtol=1e-11, atol=1e-14)
        if op == "logsumexp":  # intended: JAX has NaN
            np.testing.assert_array_equal(dx[list(names).index("all -inf")], 0)


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("n", [3, 2304])
def test_masks(op, implementation, dtype, n):
    """A mask of every shape that broadcasts, over values that must not be seen, with rows of which nothing is left."""

    @jax.jit
    def derivatives(x, where, g):
        f = ours(op, implementation, where=where)
        return *vjp(f, x, g), jax.jvp(f, (x,), (jnp.ones_like(x),))[1]

    if implementation == "reference" and n > 3:
        pytest.skip("scans compile slowly")
    rng = np.random.default_rng(n)
    x = rng.standard_normal((6, n)).astype(dtype)
    g = cotangent(op, x)
    full = rng.random((6, n)) < 0.5
    full[1], full[2] = False, True
    full[3] = np.arange(n) == n // 2
    for where in (full, full[0], full[:, :1], np.bool_(False)):
        mask = np.broadcast_to(where, x.shape)
        seen = np.where(mask, x, -np.inf).astype(dtype)
        for hidden in (0, np.nan, np.inf):
            with served(implementation):
                y, dx, dy = map(np.asarray, derivatives(np.where(mask, x, hidden).astype(dtype), where, g))
                assert_masked(op, seen, mask, y)
                assert np.isfinite(wide(dx)).all() and np.isfinite(wide(dy)).all()
                np.testing.assert_array_equal(wide(dx)[~mask], 0)


def assert_masked(op, seen, mask, y):
    some = mask.any(axis=-1)
    nothing = {"softmax": 0, "log_softmax": -np.inf, "logsumexp": -np.inf}[op]
    np.testing.assert_array_equal(wide(y[~some]), nothing)
    if op != "logsumexp":
        np.testing.assert_array_equal(wide(y[~mask]), nothing)
    if some.any():
        assert_values(op, seen[some], y[some])


@pytest.mark.costly(4)
@each_op
@each_implementation
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None], ids=str)
def test_a_mask_gives_jax_its_gradient(op, implementation, axis):
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(1).standard_normal((5, 7, 6))
        where = np.random.default_rng(2).random((5, 7, 6)) < 0.6
        where[0], where[1, :, 0] = True, False

        def loss(h):
            def total(x):
                y = h(x, axis=axis, where=where)
                weight = 1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)
                return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y) * weight, 0))

            return total

        actual = jax.jit(jax.grad(loss(ours(op, implementation))))(x)
        expected = in_float64(jax.grad(loss(theirs(op))), x)
        chex.assert_trees_all_close(actual, np.nan_to_num(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.costly
@each_op
@each_implementation
def test_empty_arrays(op, implementation):
    for shape, axis in [((0,), -1), ((3, 0), -1), ((3, 0), 0), ((0, 3), -1), ((2, 0, 4), (0, 1)), ((2, 0), None)]:
        x = np.zeros(shape, np.float32)
        f, f0 = ours(op, implementation, axis=axis), theirs(op, axis=axis)
        (actual, t), dx, expected = jax.jit(
            lambda x, f=f, f0=f0: (jax.jvp(f, (x,), (x,)), jax.grad(lambda x: f(x).sum())(x), f0(x))
        )(x)
        chex.assert_trees_all_equal(actual, expected)
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        assert dx.shape == shape
        assert not np.isnan(t).any()


@pytest.mark.costly(3)
@each_op
@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "reference"], ids=str)
def test_special_rows_along_other_axes(op, implementation):
    """The same rows laid out as columns, and as a tuple of axes: what moves axes must not meet the values."""
    x = special_batch(12, np.float32)
    with served(implementation):
        y = ours(op, implementation, axis=0)(x.T)
        assert_values(op, x, y if op == "logsumexp" else y.T)
        folded = x.reshape(-1, 3, 4).transpose(1, 0, 2)
        y = ours(op, implementation, axis=(0, 2))(folded)
        assert_values(op, x, y if op == "logsumexp" else y.transpose(1, 0, 2).reshape(x.shape))
