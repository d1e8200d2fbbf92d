"""Axes that are not the last: reduced where they lie, for lengths and trailing dimensions that kernels cut up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import each_dtype_in_turn, each_fast_implementation, each_op, on_gpu, ours, precision, served
from truth import Truth, assert_values, assert_within, beside_float64, pullback

LENGTHS, TRAILING = (1, 2, 33, 1000), (1, 3, 64, 257)
SHAPES = [(2, n, trailing) for n in LENGTHS for trailing in TRAILING]


@pytest.mark.cover("op", "implementation")
@each_op
@each_fast_implementation
@each_dtype_in_turn
def test_against_float64(op, implementation, dtype):
    """Values and gradients, as of the same rows along the last axis."""
    with precision(dtype), served(implementation):
        xs = [(2 * np.random.default_rng(i).standard_normal(shape)).astype(dtype) for i, shape in enumerate(SHAPES)]
        xs = xs if implementation == "ffi" or dtype in (jnp.float32, jnp.bfloat16) else xs[::5]
        gs = [np.cos(x[:, 0] if op == "logsumexp" else x).astype(dtype) for x in xs]

        @jax.jit
        def results(xs, gs):
            pairs = [jax.vjp(ours(op, implementation, axis=1), x) for x in xs]
            return [(y, pull(g)[0]) for (y, pull), g in zip(pairs, gs, strict=True)]

        for x, g, (y, dx) in zip(xs, gs, results(xs, gs), strict=True):
            rows = x.swapaxes(1, 2)
            truth = Truth.of(rows)
            if op != "logsumexp":
                y, g = np.asarray(y).swapaxes(1, 2), g.swapaxes(1, 2)
            assert_values(op, rows, y, truth)
            expected, bound = pullback(op, rows, g, truth)
            assert_within(
                np.asarray(dx).swapaxes(1, 2), expected, bound, f"gradient of {op} of {dtype.__name__} {x.shape}"
            )


# So many tiles that they are dealt out one by one: over clusters, to single blocks, and not in whole cache lines.
MANY = [(100, 4096, 128), (8200, 64, 192), (30, 1000, 1000), (3, 20_001, 640)]
# Columns that are not whole packs: an even number of them, and odd ones, in one tile or several.
ODD = [(3, 70, 33), (5, 1000, 50), (7, 33, 127), (3, 4001, 129), (40, 2048, 1001), (9000, 8, 130), (3, 100_003, 63)]
# Of columns: sums of exp(x) itself are in range, at its borders, and far out of it.
OFFSETS = np.float32([0, 50, 100, -57, -62, -64, -70, 61, 63, 66, 90, 1e3, -1e3])


@on_gpu
@each_op
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shapes", [MANY, ODD], ids=["many", "odd"])
def test_tiles(op, dtype, shapes):
    for shape in shapes:
        x = 3 * jax.random.normal(jax.random.key(0), shape, jnp.float32)
        x = x + OFFSETS[np.arange(shape[2]) % len(OFFSETS)][None, None]
        x = x.astype(dtype).at[1, 3, 5].set(jnp.nan).at[2, :, 6].set(-jnp.inf).at[0, 7, 0].set(jnp.inf)
        g = jnp.cos(x[:, 0] if op == "logsumexp" else x)
        some = np.r_[0:3, shape[0] - 3 : shape[0]] % shape[0]
        (y, true_y), (dx, true_dx) = beside_float64(op, x, g, some, axis=1)
        size = np.abs(true_dx) + np.nan_to_num(np.abs(true_dx)).max(axis=1, keepdims=True)
        size += 2 * true_y if op == "softmax" else 0  # which is rounded, and read again
        places, tiny = 2 * float(jnp.finfo(dtype).eps) + 2.0**-18, float(jnp.finfo(dtype).tiny)
        what = f"{op} of {jnp.dtype(dtype).name} {shape}"
        assert_within(y, true_y, places * np.abs(true_y) + tiny, what)
        assert_within(dx, true_dx, places * size + tiny, f"gradient of {what}")


@pytest.mark.costly
@each_op
@each_fast_implementation
def test_any_place(op, implementation):
    """Each axis of several dimensions, with other result dtypes, special rows, and nothing at all."""
    with served(implementation):
        x = np.random.default_rng(0).standard_normal((2, 3, 1, 5)).astype(np.float32)
        x[0, 0, 0, 0], x[1, :, 0, 1], x[1, 2, 0, 2] = np.nan, -np.inf, np.inf
        for axis in range(4):
            f = ours(op, implementation, axis=axis, dtype=jnp.bfloat16)
            y = np.asarray(f(x))
            moved = ours(op, implementation, dtype=jnp.bfloat16)(np.moveaxis(x, axis, -1))
            moved = moved if op == "logsumexp" else np.moveaxis(np.asarray(moved), -1, axis)
            assert y.dtype == jnp.bfloat16
            np.testing.assert_allclose(y.astype(np.float32), np.asarray(moved, np.float32), rtol=1e-2)
        for shape in ((2, 0, 3), (0, 2, 3), (2, 3, 0)):
            y = ours(op, implementation, axis=1)(np.zeros(shape, np.float32))
            assert y.shape == ((shape[0], shape[2]) if op == "logsumexp" else shape)
