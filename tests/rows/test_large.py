"""Arrays of more than 2^31 elements, in many rows and in one: offsets that do not fit 32 bits. GPUs have the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ours

pytestmark = pytest.mark.skipif(jax.default_backend() == "cpu", reason="takes 13 GB of memory")


def test_many_rows():
    """The rows repeat 101 different ones, whose results are known; n is odd, so rows begin anywhere."""
    rows, n = 2**20 + 3, 2051
    few = jax.random.normal(jax.random.key(0), (101, n), jnp.bfloat16)
    index = jnp.arange(rows) % 101
    x = few[index]
    for op in ("softmax", "log_softmax"):
        f = jax.jit(ours(op, "ffi"))
        pull = jax.jit(lambda x, g, f=f: jax.vjp(f, x)[1](g)[0])
        for result, expected in ((f(x), f(few)), (pull(x, jnp.cos(x)), pull(few, jnp.cos(few)))):
            places = jax.jit(
                lambda y, e: jnp.max(jnp.abs(y.astype(jnp.float32) - e[index]) / (jnp.abs(e[index]) + 1e-30))
            )
            assert float(places(result, expected.astype(jnp.float32))) <= 2.0**-7  # another place, another rounding
            del result


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_one_row(op):
    """Eight values in turn: the sum is known."""
    n = 2**31 + 8
    with jax.enable_x64(True):
        turn = jnp.arange(8, dtype=jnp.float32)
        x = jnp.broadcast_to(turn.astype(jnp.bfloat16), (n // 8, 8)).reshape(1, n)
        y = ours(op, "ffi")(x).reshape(n // 8, 8)
        log_p = np.arange(8) - np.log(np.sum(np.exp(np.arange(8.0))) * (n // 8))
        expected = np.exp(log_p) if op == "softmax" else log_p
        for part in (y[0], y[n // 16], y[-1]):
            np.testing.assert_allclose(np.asarray(part, np.float64), expected, rtol=2.0**-7)
        assert bool(jnp.all(y == y[:1]))
