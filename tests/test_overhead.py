"""What calls take beside their computation, counted and not timed: calls of Python functions, and what is traced."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import some

import jaxsoft
from jaxsoft._rows import plain

_RNG = np.random.default_rng(0)
X = jnp.asarray(_RNG.standard_normal((8, 128)).astype(np.float32))
LABELS, PROBABILITIES = jnp.asarray(_RNG.integers(0, 128, 8)), jax.nn.softmax(-X)
WHERE = jnp.asarray(_RNG.random((8, 128)) < 0.7)
integer = jaxsoft.softmax_cross_entropy_with_integer_labels
CALLS = {
    "softmax": jaxsoft.softmax,
    "log_softmax": jaxsoft.log_softmax,
    "log_softmax, where": lambda x: jaxsoft.log_softmax(x, where=WHERE),
    "logsumexp": lambda x: jaxsoft.logsumexp(x, axis=-1, keepdims=True),
    "entropy": lambda x: jaxsoft.entropy(x, keepdims=True),
    "top_k": lambda x: jaxsoft.top_k_softmax(x, 3)[:2],
    "integer": lambda x: integer(x, LABELS),
    "integer, entropy": lambda x: integer(x, LABELS, label_smoothing=0.1, return_entropy=True),
    "kl": lambda x: jaxsoft.softmax_kl_divergence(x, PROBABILITIES),
    "dense": lambda x: jaxsoft.softmax_cross_entropy(x, PROBABILITIES),
}
each_call = pytest.mark.parametrize("name", CALLS)


@pytest.mark.costly
@each_call
def test_calls_of_python(name):
    """A call that is compiled checks its arguments and little else. An operation of jax.numpy makes some 50."""
    CALLS[name](X)
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        CALLS[name](X)
    finally:
        sys.setprofile(None)
    assert len(seen) <= 60, seen


@pytest.mark.costly(1)
@pytest.mark.parametrize("name", some(CALLS, ["softmax", "log_softmax, where", "integer, entropy", "kl"]))
def test_no_formula_is_traced(name, monkeypatch):
    """A kernel's results have types without that, and reverse mode has no use for the formula of the tangent."""
    monkeypatch.setattr(plain, "formula", lambda operation, form: pytest.fail(f"traces the formula of {operation}"))

    def total(x):
        return sum(jnp.sum(y) for y in jax.tree.leaves(CALLS[name](x)))

    jax.clear_caches()
    jax.make_jaxpr(jax.value_and_grad(total))(X)
