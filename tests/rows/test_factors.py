"""The factors b of logsumexp, and their derivatives, where a factor is 0 too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import each_dtype_in_turn, precision, some
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_devices
from truth import in_float64, wide

import jaxsoft

A = np.array([[0.5, -1, 2, 0], [1, 3, -2, -np.inf], [0, 6, 1, 2]], np.float32)
B = np.array([[2, 0, -0.5, 3], [0, 0, 1, 0], [1, 0, 2, 0]], np.float32)


def derivatives(f, a, b):
    """Values; first derivatives in both modes; the second ones."""
    both = (0, 1)
    return f(a, b), jax.jacrev(f, both)(a, b), jax.jacfwd(f, both)(a, b), jax.jacfwd(jax.jacrev(f, both), both)(a, b)


def defined(a, b):
    """By its definition, for sums that float64 holds."""
    total = jnp.sum(b * jnp.exp(a), -1)
    return jnp.log(jnp.abs(total)), jnp.sign(total)


@pytest.mark.costly(1)
@each_dtype_in_turn
def test_derivatives(dtype):
    """By a and b, of both orders, in both modes; where b is 0, too."""
    operands = A.astype(dtype), B.astype(dtype)
    expected = in_float64(functools.partial(derivatives, defined), *operands)
    f = lambda a, b: jaxsoft.logsumexp(a, -1, b, return_sign=True)  # noqa: E731
    with precision(dtype):
        actual, mapped = jax.jit(lambda a, b: (derivatives(f, a, b), derivatives(jax.vmap(f), a, b)))(*operands)
    tolerance = {2: 2e-2, 4: 5e-6, 8: 1e-12}[np.dtype(dtype).itemsize]
    for found in (actual, mapped):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(wide(x), y, rtol=tolerance, atol=1e-3 * tolerance)


@pytest.mark.costly
@pytest.mark.parametrize("hidden", [120.0, 300.0, np.inf, -np.inf, np.nan])
def test_what_a_factor_of_0_leaves_out(hidden):
    """It does not count, whatever it is. The derivative by its factor is its exponential, which may be out of range."""
    a, b = np.array([[0, hidden, 1], [1, 2, 0]], np.float32), np.array([2, 0, 5], np.float32)
    total = 2 + 5 * np.e
    f = lambda a, b: jaxsoft.logsumexp(a, -1, b)  # noqa: E731

    @jax.jit
    def results(a, b):
        jacobians = [jacobian(f, (0, 1))(a, b) for jacobian in (jax.jacrev, jax.jacfwd)]
        return [jaxsoft.logsumexp(a[0], b=b), jax.nn.logsumexp(a[0], b=b)], jacobians

    values, jacobians = jax.tree.map(np.asarray, results(a, b))
    np.testing.assert_allclose(values, np.log(total), rtol=1e-6)
    for da, db in jacobians:
        np.testing.assert_allclose(da[0, 0], [2 / total, 0, 5 * np.e / total], rtol=1e-6)
        np.testing.assert_allclose(db[0, ::2], [1 / total, np.e / total], rtol=1e-6)
        assert db[0, 1] == 0 if np.isnan(hidden) or hidden == -np.inf else 1e30 < db[0, 1] < np.inf
        assert not np.any(da[0, 1]) and np.isfinite(da[1]).all() and np.isfinite(db[1]).all()


@pytest.mark.costly
@pytest.mark.parametrize("hidden", [95.0, 200.0, 1e4, np.inf, np.nan])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_factors_that_are_masked_by_a_product(hidden, scale):
    """What leaves out an element by a factor times 0 has the gradient 0, as the derivative by the factor is finite."""
    a, mask = np.array([hidden, 1, 2], np.float32), np.array([0, 1, 1], np.float32)
    share = np.exp([1, 2]) / np.exp([1, 2]).sum()
    of_factors = lambda w: jaxsoft.logsumexp(a, b=w * mask)  # noqa: E731
    w = np.full(3, scale, np.float32)

    @jax.jit
    def derivatives(w):
        modes = jax.grad, jax.jacfwd
        by_scale = [derivative(lambda s: of_factors(s * w))(jnp.float32(1)) for derivative in modes]
        return [derivative(of_factors)(w) * w for derivative in modes], by_scale, jax.hessian(of_factors)(w / scale)

    by_factors, by_scale, hessian = derivatives(w)
    np.testing.assert_allclose(by_factors, [[0, *share]] * 2, rtol=1e-5)
    np.testing.assert_allclose(by_scale, 1, rtol=1e-5)
    assert np.isfinite(hessian).all()


@pytest.mark.costly
@needs_devices
@pytest.mark.parametrize("spec", some([P("a"), P(None, "b"), P("a", "b"), P()], [P("a", "b"), P()]), ids=str)
@pytest.mark.parametrize("of_factors", [P(), P(None, "b"), None], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_factors_that_lie_otherwise_over_a_mesh(spec, of_factors, masked):
    """Over explicit axes, factors and a mask that are sharded in another way than the scores, or not at all."""
    x, b = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    b[0, 0], where, mesh = 0, x > -1, mesh_of(AxisType.Explicit)
    put = lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec))  # noqa: E731

    def both(a, b, **options):
        def total(a, b):
            return jnp.sum(jaxsoft.logsumexp(a, 1, b, return_sign=True, **options)[0])

        return jax.value_and_grad(total, (0, 1))(a, b)

    known = jax.jit(both)(x, b, where=where if masked else None)
    with jax.set_mesh(mesh):
        operands = put(x, spec), b if of_factors is None else put(b, of_factors)
        shown = put(where, P()) if masked else None
        for run in (both, jax.jit(both)):
            for v, w in zip(jax.tree.leaves(run(*operands, where=shown)), jax.tree.leaves(known), strict=True):
                np.testing.assert_allclose(v, w, rtol=1e-4, atol=1e-5)


def test_where_the_sum_is_0():
    """Factors that are 0, and what counts is -inf: -inf, and no gradient."""
    value_and_grad = jax.jit(jax.value_and_grad(lambda a, b: jaxsoft.logsumexp(a, b=b), (0, 1)))
    for a, b in (([1, 2], [0, 0]), ([-np.inf, 3], [1, 0]), ([-np.inf, -np.inf], [1, 2])):
        y, gradients = value_and_grad(np.array(a, np.float32), np.array(b, np.float32))
        assert y == -np.inf and not np.any(gradients)


@pytest.mark.parametrize("hidden", [np.nan, np.inf])
def test_hidden_factors(hidden):
    """What `where` masks does not count, whatever its factor is."""
    a, b = np.array([1, 2, 3], np.float32), np.array([1, hidden, 2], np.float32)
    where = np.array([True, False, True])
    f = lambda a, b: jaxsoft.logsumexp(a, b=b, where=where)  # noqa: E731
    np.testing.assert_allclose(f(a, b), np.log(np.e + 2 * np.exp(3)), rtol=1e-6)
    of_shown = jax.jit(jax.grad(lambda a, b: jaxsoft.logsumexp(a, b=b), (0, 1)))(a[::2], b[::2])
    for found, known in zip(jax.jit(jax.grad(f, (0, 1)))(a, b), of_shown, strict=True):
        np.testing.assert_allclose(found, [known[0], 0, known[1]], rtol=1e-6)
