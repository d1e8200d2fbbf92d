"""Forward mode, alone and mixed with reverse mode, against jax.nn in float64; what custom_vjp alone would refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import (
    each_dtype,
    each_fast_implementation,
    each_implementation,
    each_op,
    each_op_in_turn,
    loss,
    ours,
    precision,
    served,
    theirs,
)
from truth import wide


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None])
def test_forward_mode(op, implementation, axis):
    """jvp, linearize and jacfwd, with and without jit, for every axis."""
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((2, 3, 4))
        t = np.cos(x)

        def derivatives(f):
            y, linear = jax.linearize(f, x)
            return jax.jvp(f, (x,), (t,)), y, linear(t), jax.jacfwd(f)(x), jax.jacrev(f)(x)

        f, f0 = ours(op, implementation, axis=axis), theirs(op, axis=axis)
        actual, expected = jax.jit(lambda: (derivatives(f), derivatives(f0)))()
        assert_trees_all_close(actual, expected, rtol=1e-11, atol=1e-13)
        if axis == -1:
            assert_trees_all_close(derivatives(f), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.costly
@each_op_in_turn
@each_fast_implementation
def test_every_order_of_both_modes(op, implementation):
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((2, 3))

        def derivatives(f):
            h = loss(f)
            second = [a(b(h))(x) for a in MODES for b in MODES]
            return second, [a(jax.hessian(h))(x) for a in MODES]

        actual, expected = jax.jit(lambda: (derivatives(ours(op, implementation)), derivatives(theirs(op))))()
        assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


MODES = (jax.jacfwd, jax.jacrev)


@each_op
@each_implementation
def test_transposed_tangent(op, implementation):
    """The transpose of the linearized function is the pullback; and the pullback is linear in its cotangent."""
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((3, 7))
        f = ours(op, implementation)
        y, linear = jax.linearize(f, x)
        g, t = np.sin(np.arange(y.size)).reshape(y.shape), np.cos(x)
        pull = jax.vjp(f, x)[1]
        assert_trees_all_close(jax.linear_transpose(linear, x)(g), pull(g), rtol=1e-12, atol=1e-14)
        assert_trees_all_close(jnp.vdot(g, linear(t)), jnp.vdot(pull(g)[0], t), rtol=1e-12)
        assert_trees_all_close(jax.jvp(pull, (g,), (g,))[1], pull(g), rtol=1e-12, atol=1e-14)
        assert_trees_all_close(jax.vjp(pull, g)[1]((t,))[0], linear(t), rtol=1e-12, atol=1e-14)


@pytest.mark.cover("op", "implementation")
@each_op
@each_dtype
@each_implementation
def test_dtypes(op, dtype, implementation):
    """A tangent has the dtype of the result, and its accuracy."""
    with precision(dtype), served(implementation):
        x = np.random.default_rng(0).standard_normal((3, 200)).astype(dtype)
        t = np.random.default_rng(1).standard_normal((3, 200)).astype(dtype)
        y, dy = jax.jvp(ours(op, implementation), (x,), (t,))
        assert y.dtype == dy.dtype == dtype
        with jax.enable_x64(True):
            p, tangent = jax.jvp(theirs(op), (wide(x),), (wide(t),))
            scale = p * 4 if op == "softmax" else 4
        tolerance = {2: 4 * float(jnp.finfo(dtype).eps), 4: 1e-6, 8: 1e-14}[x.dtype.itemsize]
        small = float(jnp.finfo(dtype).smallest_subnormal)
        assert (np.abs(wide(dy) - wide(tangent)) <= tolerance * wide(scale) + 8 * small).all()


@each_op
@each_implementation
def test_constant_tangents(op, implementation):
    """A scalar that moves everything by the same: softmax stays, logsumexp follows."""
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    with served(implementation):
        f = ours(op, implementation)
        _, t = jax.jvp(lambda c: f(x + c), (0.0,), (1.0,))
        np.testing.assert_allclose(t, 1 if op == "logsumexp" else 0, rtol=1e-6, atol=1e-6)
