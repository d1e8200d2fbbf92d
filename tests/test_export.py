"""jax.export: programs that are stored, moved and called again, for shapes and platforms not known beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import assert_values, each_op, loss, ours, theirs

TARGETS = ("softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp", "state", "logsumexp_vjp")
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(f"jaxsoft_{target}") for target in TARGETS]
PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


def there_and_back(f, x, platforms=None):
    exported = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=CHECKS)(x)
    return jax.export.deserialize(exported.serialize())


@each_op
@pytest.mark.parametrize("implementation", [None, "xla"], ids=str)
def test_round_trip(op, implementation):
    x = np.random.default_rng(0).standard_normal((4, 33)).astype(np.float32)
    f = ours(op, implementation)
    assert_values(op, x, there_and_back(f, x).call(x))
    assert_trees_all_close(
        there_and_back(jax.grad(loss(f)), x).call(x), jax.grad(loss(theirs(op)))(x), rtol=1e-4, atol=1e-5
    )


@each_op
@pytest.mark.parametrize("implementation", [None, "xla"], ids=str)
def test_symbolic_shapes(op, implementation):
    """One program for any number of rows and any length."""
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b, n"), jnp.float32)
    exported = there_and_back(ours(op, implementation), shape)
    pulled = there_and_back(lambda x: jax.vjp(ours(op, implementation), x)[1](ours(op, implementation)(x))[0], shape)
    for given in ((2, 3, 33), (1, 1, 1), (3, 1, 5000)):
        x = np.random.default_rng(0).standard_normal(given).astype(np.float32)
        assert_values(op, x, exported.call(x))
        y, pull = jax.vjp(theirs(op), x)
        assert_trees_all_close(pulled.call(x), pull(y)[0], rtol=1e-4, atol=1e-5)


@each_op
def test_two_platforms(op):
    """One program for CPU and GPU holds both kernels; here it runs on whichever is there."""
    if PLATFORM not in ("cpu", "cuda"):
        pytest.skip(f"runs on cpu and cuda, and this is {PLATFORM}")
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    exported = there_and_back(ours(op), x, ("cpu", "cuda"))
    assert set(exported.platforms) == {"cpu", "cuda"}
    assert_values(op, x, exported.call(x))
    pulled = there_and_back(jax.grad(loss(ours(op))), x, ("cpu", "cuda"))
    assert_trees_all_close(pulled.call(x), jax.grad(loss(theirs(op)))(x), rtol=1e-4, atol=1e-5)
