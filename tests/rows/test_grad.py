"""Reverse mode: pullbacks against float64, and gradients of every order against jax.nn.

The bounds are relative to the size of the terms of which a gradient is the sum, and so to the probability where the
gradient is proportional to it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import (
    OPS,
    each_dtype,
    each_fast_implementation,
    each_implementation,
    each_op,
    loss,
    ours,
    precision,
    rows,
    served,
    slow,
    theirs,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads
from truth import Truth, assert_within, cotangent, pullback

SHORT = (1, 2, 3, 31, 32, 33, 127, 1000, 1023, 1024, 1025, 4097)
LONG, LONGEST = (50257, 65537, 131072, 151936), (999983, 2**20)


@functools.partial(jax.jit, static_argnums=(0, 1))
def vjp(op, implementation, x, g):
    y, pull = jax.vjp(ours(op, implementation), x)
    return y, pull(g)[0]


def check(op, implementation, x, truth):
    g = (
        np.random.default_rng(x.shape[-1])
        .standard_normal(x.shape if op != "logsumexp" else x.shape[:-1])
        .astype(x.dtype)
    )
    _, dx = vjp(op, implementation, x, g)
    assert dx.dtype == x.dtype
    expected, bound = pullback(op, x, g, truth)
    assert_within(dx, expected, bound, f"gradient of {op}, {x.dtype} {x.shape}")


@pytest.mark.cover("op", "implementation")
@each_op
@each_dtype
@each_fast_implementation
@pytest.mark.parametrize("lengths", [SHORT, LONG, LONGEST], ids=["short", "long", "longest"])
def test_against_float64(op, dtype, implementation, lengths):
    with precision(dtype):
        for n in lengths:
            with served(implementation):
                check(op, implementation, *case(n, dtype))


@functools.lru_cache(maxsize=len(LONG))
def case(n, dtype):
    x = rows(n, dtype)
    return x, Truth.of(x)


@pytest.mark.costly(1)
@each_op
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
@pytest.mark.parametrize("n", [33, 1025, 1])
def test_the_reference_against_float64(op, dtype, n):
    check(op, "reference", *case(n, dtype))


@slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_row_of_2_to_the_24(dtype):
    x = rows(2**24, dtype, count=1)
    truth = Truth.of(x)
    for op in OPS:
        check(op, None, x, truth)


@pytest.mark.costly(1)  # test_higher_orders has the second order
@each_op
@each_implementation
@pytest.mark.parametrize("axis", [-1, pytest.param(0, marks=slow), (0, 2), pytest.param((1, 0), marks=slow), None])
def test_gradients_of_gradients(op, implementation, axis):
    """First, second and third order, for every axis, against jax.nn in float64."""
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((3, 4, 5))
        t = np.cos(x)

        def orders(f):
            first = jax.grad(loss(f, axis=axis))
            second = jax.grad(lambda x: jnp.vdot(first(x), t))
            third = jax.grad(lambda x: jnp.vdot(second(x), t))
            return first(x), second(x), third(x)

        actual, expected = jax.jit(lambda: (orders(ours(op, implementation)), orders(theirs(op))))()
        assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.costly(1)
@each_op
@each_implementation
def test_against_differences(op, implementation):
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((2, 6))
        check_grads(ours(op, implementation), (x,), order=2, modes=("fwd", "rev"), rtol=1e-6, atol=1e-6)


@each_op
@each_implementation
def test_not_jitted(op, implementation):
    """The same gradient, with each operation dispatched by itself."""
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    with served(implementation):
        f = jax.grad(loss(ours(op, implementation)))
        assert_trees_all_close(f(x), jax.jit(f)(x), rtol=1e-5, atol=1e-6)


def test_factors_and_signs():
    """logsumexp's factors b have gradients too, also where they are 0 or negative."""
    with jax.enable_x64(True):
        a = np.random.default_rng(0).standard_normal((4, 5))
        b = np.random.default_rng(1).standard_normal((4, 5))
        b[0, 0], b[1] = 0, np.abs(b[1])

        def total(h):
            return lambda a, b: jnp.sum(jnp.sin(h(a, b)))

        def definition(a, b):  # jax.nn's has the gradient 0 where b is
            return jnp.log(jnp.abs(jnp.sum(b * jnp.exp(a), axis=1)))

        of_ours = total(lambda a, b: ours("logsumexp")(a, axis=1, b=b, return_sign=True)[0])
        actual = jax.grad(of_ours, argnums=(0, 1))(a, b)
        expected = jax.grad(total(definition), argnums=(0, 1))(a, b)
        assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-14)


@each_op
@each_fast_implementation
@given(x=hnp.arrays(np.float64, (2, 4), elements=st.floats(-30, 30)))
def test_any_values(op, implementation, x):
    with jax.enable_x64(True), served(implementation):
        g = cotangent(op, x)
        _, dx = vjp(op, implementation, x, g)
        expected, bound = pullback(op, x, g, Truth.of(x))
        assert_within(dx, expected, bound, f"gradient of {op}")


@each_op
@each_implementation
def test_what_is_kept(op, implementation):
    """Reverse mode keeps one array of x's size: softmax its result, the others x with two numbers a row."""
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    with served(implementation):
        y, pull = jax.vjp(ours(op, implementation), x)
        kept = [v for v in jax.tree.leaves(pull) if hasattr(v, "shape")]
        assert sorted(v.shape for v in kept) == ([(4, 512)] if op == "softmax" else [(4,), (4,), (4, 512)])
        (whole,) = (v for v in kept if v.shape == x.shape)
        np.testing.assert_array_equal(whole, y if op == "softmax" else x)
