"""Cotangents out of the range of f16 beside queries in f16: of parts of the keys, and of outputs in f32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import MOVING, Sizes
from definitions import attention as definition
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import MESH, mesh_of, needs_devices
from truth import in_float64, wide

import jaxsoft
from jaxsoft._attention import adapters, xla
from jaxsoft._attention.form import AttentionForm
from jaxsoft._attention.spec import AttentionPullback

F16 = np.float16


def gradients(f, cotangent, operands):
    """Those of sum(cotangent * f(*operands)) in float64."""
    of = jax.grad(lambda *v: jnp.sum(f(*v) * np.float64(cotangent)), tuple(range(len(operands))))
    return in_float64(of, *operands)


def assert_rows_close(actual, expected, allowed):
    """Gradients agree relative to the norm of each row."""
    for a, e in zip(actual, expected, strict=True):
        of_error, of_row = (np.linalg.norm(x, axis=-1) for x in (wide(a) - e, e))
        assert (of_error <= allowed * of_row).all(), (of_error / of_row).max()


def in_parts(query, key, value):
    _, state = jaxsoft.dot_product_attention(query, key[:, :1], value[:, :1], scale=1.0, return_state=True)
    return jaxsoft.dot_product_attention(query, key[:, 1:], value[:, 1:], scale=1.0, state=state)


@pytest.mark.costly(1)
@pytest.mark.parametrize("score", [-16.0, -13.8])
def test_a_part_of_little_weight(score):
    """The shares of many queries in the gradient of a value, each of which f16 does not hold."""
    query = np.ones((1, 16384, 1, 1), F16)
    key, value = np.array([[score, 0], [1, 2]], F16).reshape(2, 1, 2, 1, 1)
    found = jax.jit(jax.grad(lambda v: jnp.sum(in_parts(query, key, v) * F16(0.02))))(value)
    *_, expected = gradients(lambda *v: definition(*v, scale=1.0)[0], F16(0.02), (query, key, value))
    assert_rows_close([found], [expected], 2e-3)


@pytest.mark.costly(1)
@pytest.mark.parametrize("size", [1e5, 1e30], ids=str)
def test_a_large_cotangent(size):
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 2, 5, 4, 8)).astype(F16)
    value = (10 / size * rng.standard_normal((2, 5, 4, 8))).astype(F16)
    cotangent = (size * rng.standard_normal((2, 5, 4, 8))).astype(np.float32)
    if size > 1e10:
        value[:] = 0  # so that what is finite shows that nothing overflowed
    call = lambda q, k: jnp.sum(jaxsoft.dot_product_attention(q, k, value, dtype=jnp.float32) * cotangent)  # noqa: E731
    found = jax.jit(jax.grad(call, (0, 1)))(query, key)
    expected = gradients(lambda q, k: definition(q, k, wide(value))[0], cotangent, (query, key))
    assert_rows_close(found, expected, 1e-2)  # kernels round gradients of scores to f16, and here these are small


@pytest.mark.costly(1)
@needs_devices
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_a_large_cotangent_over_devices(method):
    rng = np.random.default_rng(2)
    tokens, heads = 2 * MESH[0], MESH[0]
    query, key = rng.standard_normal((2, 1, tokens, heads, 8)).astype(F16)
    value = (1e-4 * rng.standard_normal((1, tokens, heads, 8))).astype(F16)
    cotangent = (1e5 * rng.standard_normal(value.shape)).astype(np.float32)

    def call(q, k):
        y = jaxsoft.ring_attention(q, k, value, axis_name="a", method=method, is_causal=True, dtype=jnp.float32)
        return jnp.sum(y * cotangent)

    with jax.set_mesh(mesh_of(AxisType.Auto)):
        found = jax.jit(jax.grad(call, (0, 1)), in_shardings=P(None, "a"))(query, key)
    expected = gradients(lambda q, k: definition(q, k, wide(value), is_causal=True)[0], cotangent, (query, key))
    # Kernels round the gradients of scores to f16, and then those of queries and keys, in units of the cotangent. Of
    # values as small as these, they are near the least number that f16 has.
    least = 0 if jax.default_backend() == "cpu" else 2 * 2.0**-24 * np.abs(cotangent).max()
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-3 * np.abs(e).max() + least)


@pytest.mark.costly(1)
@pytest.mark.parametrize("moving", [("query", "key", "value"), ("query", "value", "bias"), ("key",)], ids=str)
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6], ids=str)
def test_around_a_kernel_that_takes_f16(moving, size):
    """Of queries with cotangents of very different sizes each has its gradient, and keys and values theirs."""
    rng = np.random.default_rng(3)
    z = Sizes(b=2, t=9, s=7, n=4, k=2, h=8, d=8)
    query = rng.standard_normal((z.b, z.t, z.n, z.h)).astype(F16)
    key, value = rng.standard_normal((2, z.b, z.s, z.k, z.h)).astype(F16)
    bias = MOVING["bias of a head"](rng, z)["bias"].astype(np.float32)
    by_query = size * 10.0 ** rng.integers(-6, 1, (z.b, z.t, z.n, 1))
    cotangent = (by_query * rng.standard_normal((z.b, z.t, z.n, z.d))).astype(np.float32)
    d_lse = (by_query[..., 0] * rng.standard_normal((z.b, z.t, z.n))).astype(np.float32)
    extras = ("bias",) if "bias" in moving else ()
    given = (query, key, value, *([bias] if extras else []))

    def total(*v):
        y, lse = definition(*v)[:2]
        return jnp.sum(y * np.float64(cotangent)) + jnp.sum(lse * np.float64(d_lse))

    names = ("query", "key", "value", "bias")
    y, lse = in_float64(lambda *v: definition(*v)[:2], *given)
    expected = in_float64(jax.grad(total, [names.index(name) for name in moving]), *given)
    lse = np.moveaxis(lse, 2, 1)
    delta = np.moveaxis((y * cotangent).sum(-1) - d_lse, 2, 1)
    form = AttentionForm(np.dtype(np.float32), z.h**-0.5, extras=tuple(e for e in xla.Extra if e.value in extras))
    operation = AttentionPullback(form, moving, wide=True)
    kernel = xla.pullback(form, moving, "cpu", wide=True)

    def of_f16(*operands):
        assert operands[-1].dtype == F16
        return kernel(*operands)

    numbers = (y, lse, np.zeros_like(lse), delta)
    found = jax.jit(adapters.narrowed(operation, of_f16))(*given, *(v.astype(np.float32) for v in numbers), cotangent)
    for name, a, e in zip(moving, found, expected, strict=True):
        assert a.dtype == np.float32
        if name == "query":
            assert_rows_close([a], [np.asarray(e)], 2e-3)
        else:
            np.testing.assert_allclose(a, e, atol=2e-3 * np.abs(e).max())


def test_second_derivatives():
    """The derivatives of gradients by a cotangent of 0 in some rows, and by all operands."""
    rng = np.random.default_rng(4)
    operands = [rng.standard_normal((1, 6, 2, 8)).astype(F16) for _ in range(3)]
    cotangent = (1e-3 * rng.standard_normal((1, 6, 2, 8))).astype(np.float32)
    cotangent[:, 2:4] = 0

    def squares(f, factor):
        of = lambda q, k, v, c: jnp.sum(f(q, k, v) * c)  # noqa: E731
        return jax.grad(lambda *v: sum(jnp.sum(jnp.square(factor * g)) for g in jax.grad(of, (0, 1))(*v)), (0, 3))

    found = jax.jit(squares(lambda *v: jaxsoft.dot_product_attention(*v, dtype=jnp.float32), F16(64)))(
        *operands, cotangent
    )
    expected = in_float64(squares(lambda *v: definition(*v)[0], 64), *operands, cotangent)
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-2 * np.abs(e).max())
