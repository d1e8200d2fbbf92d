"""Scores that are products, of which XLA may leave out the rounding where it computes them again.

In rows of one large number, as where all of a row is padding, a maximum is then not the maximum of what it is
subtracted from, by more than exp can take. Scales that are powers of two do not show it: their products are exact.
"""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from common import IMPLEMENTATIONS, each_implementation, served, slow
from definitions import ROW_FUNCTIONS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from truth import assert_within, wide

import jaxsoft
from jaxsoft import fold

SCALE = 0.7
ORDERS = {"value": (), "gradient": ("grad",), "forward": ("jvp",), "second": ("grad", "grad"), "mixed": ("grad", "jvp")}
LABELS, OPTIONS = np.array([0, 3, 5, 1], np.int32), {"label_smoothing": 0.1, "entropy": True}


def rows_of(dtype, n=40) -> np.ndarray:
    """Normal numbers, and rows of one large number."""
    x = np.random.default_rng(0).standard_normal((4, n))
    x[1], x[3] = (-6e4, 4e4) if dtype == jnp.float16 else (-1e9, 3e8)
    return x.astype(dtype)


def pairs_of(implementation: str | None, scale: float | None):
    """The functions and their definitions, those that take a scale with this one."""
    beside = {} if scale is None else {"scale": scale}
    of_rows = {name: calls.row_function(implementation, name, **beside) for name in ROW_FUNCTIONS}
    if scale is not None:
        return of_rows
    labels = np.random.default_rng(1).random((4, 40)) / 20
    integer, dense = calls.integer(implementation, LABELS, **OPTIONS), calls.dense(implementation, **OPTIONS)
    dense = tuple(lambda x, f=f: f(x, jnp.asarray(labels, x.dtype)) for f in dense)
    return {**of_rows, "integer": integer, "dense": dense}


def case_of(implementation: str | None, before: bool, dtype) -> Case:
    """All functions of one array: of its product with a number in the same program, or with that as their scale."""

    def after(f):
        return (lambda x: f(x * jnp.asarray(SCALE, x.dtype))) if before else f

    scale = float(np.asarray(SCALE, dtype))
    pairs = pairs_of(implementation, None if before else scale)
    cases = [Case(name, after(ours), after(theirs), [rows_of(dtype)]) for name, (ours, theirs) in pairs.items()]
    return Case.together("products", cases)


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=slow)])
@pytest.mark.parametrize("before", [True, False], ids=["before the call", "scale"])
@pytest.mark.parametrize("order", ORDERS)
@each_implementation
def test_rows_of_one_large_number(implementation, order, before, dtype):
    """Derivatives of 16 bits are rounded between two transformations, so those of second order show nothing."""
    if dtype != jnp.float32 and len(ORDERS[order]) > 1:
        pytest.skip("rounded in between")
    with served(implementation):
        functools.reduce(Case.through, ORDERS[order], case_of(implementation, before, dtype)).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("sharded", [P("a"), P(None, "a")], ids=["rows", "axis"])
@pytest.mark.parametrize("before", [True, False], ids=["before the call", "scale"])
@pytest.mark.parametrize("order", ["gradient", "value"])
def test_over_a_mesh(before, sharded, order):
    mesh = mesh_of(jax.sharding.AxisType.Auto)
    case = functools.reduce(Case.through, ORDERS[order], case_of(None, before, jnp.float32))
    case.check(lambda f: lambda x: jax.jit(f)(jax.device_put(x, NamedSharding(mesh, sharded))))


@each_implementation
@pytest.mark.parametrize("bias", [None, 30.0])
def test_value_beyond_the_range_of_the_rounding_error(implementation, bias):
    """exp of the rounding error of 7e11 is out of range."""
    x, scale = jnp.array([[1e12, 0.0], [-1e12, -1e12]], jnp.float32), jnp.float32(SCALE)
    added = None if bias is None else jnp.full((1, 2), bias, jnp.float32)
    with served(implementation):
        y = jaxsoft.logsumexp(x, axis=-1, scale=scale, bias=added, implementation=implementation)
        assert_within(y, np.array([7e11, -7e11]), np.full(2, 1e5), "logsumexp")
        p = jaxsoft.softmax(x, scale=scale, bias=added, implementation=implementation)
        assert_within(p, np.array([[1, 0], [0.5, 0.5]]), np.full((2, 2), 1e-6), "softmax")


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_product_and_bias_are_rounded_alike(implementation):
    """Where scale and bias are large, the state and what is computed from it have the same scores, rounded twice."""
    rng = np.random.default_rng(3)
    x = (-1e9 * (1 + rng.random((16, 130)) * 1e-6)).astype(np.float32)
    bias = (rng.standard_normal((16, 130)) * 300).astype(np.float32)
    z = wide(x * np.float32(SCALE) + bias)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)

    def sums(x):
        def total(x):
            return jaxsoft.logsumexp(x, axis=-1, scale=jnp.float32(SCALE), bias=bias, implementation=implementation)

        y = jaxsoft.softmax(x, scale=jnp.float32(SCALE), bias=bias, implementation=implementation)
        return y, jax.jvp(total, (x,), (jnp.ones_like(x),))[1], jax.grad(lambda x: total(x).sum())(x)

    with served(implementation):
        y, forward, gradient = jax.jit(sums)(x)
        assert_within(y, p, 1e-5 * p + 1e-30, "softmax")
        assert_within(forward, np.full(16, np.float64(np.float32(SCALE))), np.full(16, 1e-5), "forward mode")
        assert_within(gradient, p * np.float32(SCALE), 1e-5 * p + 1e-30, "gradient")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_states_of_products(dtype):
    """The functions of the fold, of products in the same program, and logsumexp's factors."""
    x = rows_of(dtype)

    def of_products(x):
        z = x * jnp.asarray(SCALE, x.dtype)
        running = fold.running_states(z)
        weighted = jaxsoft.logsumexp(z, axis=-1, b=jnp.full_like(z, 2), dtype=jnp.float32)
        return fold.state(z).s, running.s[..., -1], weighted - jax.lax.optimization_barrier(fold.lse(fold.state(z)))

    s, running, weighted = jax.jit(of_products)(x)
    of_large = np.full(2, x.shape[-1], np.float64)
    assert_within(np.asarray(s)[1::2], of_large, 1e-5 * of_large, "the sum of a state")
    assert_within(np.asarray(running)[1::2], of_large, 1e-5 * of_large, "the sum of running states")
    assert np.all(np.abs(np.asarray(weighted)[1::2]) <= 64), "the sum with factors"


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_draws_from_products(implementation):
    """All tokens of a row of one large number have the same probability."""
    x = jnp.full((2, 40), -1e9)

    def draw(x):
        return jaxsoft.random.sample(
            jax.random.key(0), x * jnp.float32(SCALE), temperature=1.3, min_p=0.5, implementation=implementation
        )[1]

    with served(implementation):
        assert_within(jax.jit(draw)(x), np.full(2, 1 / 40), np.full(2, 1e-6), "probability")
