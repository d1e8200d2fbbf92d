"""Under jit and without, in scan, under checkpointing, with donated buffers, and from several threads at once."""

import concurrent.futures

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import (
    each_fast_implementation,
    each_implementation,
    each_op,
    each_op_in_turn,
    loss,
    ours,
    same_bits,
    served,
    theirs,
)
from truth import assert_values, in_float64

VARIANTS = {
    "jitted": jax.jit,
    "not jitted": lambda f: f,
    "on a device": lambda f: lambda x: f(jax.device_put(x)),
}


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("variant", VARIANTS)
def test_values(op, implementation, variant):
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    with served(implementation):
        assert_values(op, x, VARIANTS[variant](ours(op, implementation))(x))


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("variant", ["jitted", "not jitted"])
def test_gradients(op, implementation, variant):
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    with served(implementation):
        actual = VARIANTS[variant](jax.grad(loss(ours(op, implementation))))(x)
        chex.assert_trees_all_close(actual, jax.jit(jax.grad(loss(theirs(op))))(x), rtol=1e-4, atol=1e-5)


@each_op_in_turn
@each_implementation
def test_scan_and_checkpoint(op, implementation):
    """Gradients through a scan whose step is checkpointed."""

    def total(f):
        @jax.checkpoint
        def step(carry, x):
            y = f(x * carry)
            return carry + 0.1 * jnp.mean(jnp.sin(y)), y

        return lambda x: jnp.sum(jnp.sin(jax.lax.scan(step, jnp.ones((), x.dtype), x)[1]))

    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((5, 3, 8))
        actual = jax.jit(jax.value_and_grad(total(ours(op, implementation))))(x)
        expected = in_float64(jax.value_and_grad(total(theirs(op))), x)
        chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


@each_op
@each_fast_implementation
def test_control_flow(op, implementation):
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    with served(implementation):
        f = ours(op, implementation)
        for flag in (True, False):
            y = jax.jit(lambda p, x: jax.lax.cond(p, f, lambda x: -f(x), x))(flag, x)
            assert_values(op, x, y if flag else -y)
        y = jax.lax.fori_loop(0, 3, lambda i, y: f(x) + 0 * y, jnp.zeros_like(f(x)))
        assert_values(op, x, y)
        assert_values(op, x, jax.lax.map(f, x))


@each_op
@each_implementation
def test_donation(op, implementation):
    """A donated x may be overwritten by the result, while it is read."""
    for n in (1000, 200_000) if implementation != "reference" else (100,):
        x = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
        with served(implementation):
            given = jnp.array(x)
            y = jax.jit(ours(op, implementation), donate_argnums=0)(given)
            assert_values(op, x, y)
            if op != "logsumexp":
                assert given.is_deleted()


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("shape", [(64, 1000), (2, 300_000)], ids=str)
def test_threads(op, implementation, shape):
    """Calls from many threads at once, of rows that share threads and of rows that have one each."""
    x = np.random.default_rng(0).standard_normal(shape if implementation != "reference" else (8, 100))
    x = x.astype(np.float32)
    with served(implementation):
        f = jax.jit(jax.value_and_grad(loss(ours(op, implementation))))
        first = f(x)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(same_bits(first, y) for y in pool.map(f, [x] * 24))


@each_op
def test_one_program(op):
    """However an axis is written, it is one program."""
    x = np.ones((4, 128), np.float32)
    programs = {jax.jit(ours(op, axis=axis)).lower(x).as_text() for axis in (-1, 1, (1,), [-1])}
    assert len(programs) == 1
