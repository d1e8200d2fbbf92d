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
from truth import in_float64, wide


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


@pytest.mark.costly(1)  # test_higher_orders has the second order
@each_op_in_turn
@each_fast_implementation
@pytest.mark.parametrize("order", [3, 2])
def test_every_order_of_both_modes(op, implementation, order):
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((2, 3))

        def derivatives(f):
            h = loss(f)
            functions = [b(h) for b in MODES] if order == 2 else [jax.hessian(h)]
            return [a(f)(x) for a in MODES for f in functions]

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
        shape = x.shape if op != "logsumexp" else x.shape[:-1]
        g, t = np.sin(np.arange(np.prod(shape))).reshape(shape), np.cos(x)

        @jax.jit
        def derivatives(x, g, t):
            linear, pull = jax.linearize(f, x)[1], jax.vjp(f, x)[1]
            transposed = jax.linear_transpose(linear, x)(g)
            return linear(t), pull(g), transposed, jax.jvp(pull, (g,), (g,))[1], jax.vjp(pull, g)[1]((t,))[0]

        pushed, pulled, transposed, of_cotangent, transposed_twice = derivatives(x, g, t)
        assert_trees_all_close(transposed, pulled, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(np.vdot(g, pushed), np.vdot(pulled[0], t), rtol=1e-12)
        assert_trees_all_close(of_cotangent, pulled, rtol=1e-12, atol=1e-14)
        assert_trees_all_close(transposed_twice, pushed, rtol=1e-12, atol=1e-14)


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
        p, tangent = in_float64(lambda x, t: jax.jvp(theirs(op), (x,), (t,)), x, t)
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
