"""What is documented to be finite sets off no check for NaN or for divisions by 0 on the way, nor has one in gradients.

JAX checks every operation: `checkify.float_checks` those of a compiled program, and `jax.debug_nans` each that runs by
itself. So NaN must not be computed where it is not chosen afterwards either.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import each_fast_implementation
from jax.experimental import checkify

import jaxsoft

NOTHING = np.array([[1, -np.inf, 2, 0.5], [-np.inf] * 4, [0, 1, 2, 3]], np.float32)
CLASSES = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]], bool)
ROWS = np.array([True, False, True])
LABELS, PROBABILITIES = np.array([2, 1, 0]), np.array([[0.5, 0, 0.25, 0.25]] * 3, np.float32)
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.1}
WEIGHTED = {**SMOOTHED, "class_weights": np.arange(1, 5, dtype=np.float32), "return_entropy": True}

integer, dense = jaxsoft.softmax_cross_entropy_with_integer_labels, jaxsoft.softmax_cross_entropy
CALLS = {
    "softmax": lambda x, **how: jaxsoft.softmax(x, where=CLASSES, **how),
    "softmax, scale": lambda x, **how: jaxsoft.softmax(x, where=CLASSES, scale=2.0, **how),
    "logsumexp": lambda x, **how: jnp.exp(jaxsoft.logsumexp(x, -1, **how)),
    "logsumexp, b": lambda x, **how: jnp.exp(jaxsoft.logsumexp(x, -1, np.array([0, 1, 2, 0], np.float32))),
    "entropy": lambda x, **how: jaxsoft.entropy(x, where=CLASSES, **how),
    "entropy of single scores": lambda x, **how: jaxsoft.entropy(jnp.where(CLASSES, -jnp.inf, x)[::2], **how),
    "integer": lambda x, **how: integer(x, LABELS, **how),
    "integer, out of range": lambda x, **how: integer(x, np.array([2, -1, 4]), where=[True, True, False], **how),
    "integer, smoothed": lambda x, **how: integer(x, LABELS, **SMOOTHED, **how),
    "integer, weighted": lambda x, **how: integer(x, LABELS, **WEIGHTED, **how),
    "integer, rows": lambda x, **how: integer(x, LABELS, where=ROWS, **WEIGHTED, **how),
    "integer, classes": lambda x, **how: integer(x, np.array([0, 4, 3]), where=CLASSES, **WEIGHTED, **how),
    "integer, ignored": lambda x, **how: integer(x, np.array([2, -1, -1]), ignore_index=-1, **SMOOTHED, **how),
    "integer, capped": lambda x, **how: integer(x, np.array([0, -1, 3]), where=ROWS, logits_soft_cap=5.0, **how),
    "dense": lambda x, **how: dense(x, PROBABILITIES, **how),
    "dense, weighted": lambda x, **how: dense(x, PROBABILITIES, **WEIGHTED, **how),
    "dense, classes": lambda x, **how: dense(x, np.where(CLASSES, PROBABILITIES, 0), where=CLASSES, **WEIGHTED, **how),
    "kl": lambda x, **how: jaxsoft.softmax_kl_divergence(x, x / 2, **how),
    "kl, masked": lambda x, **how: jaxsoft.softmax_kl_divergence(PROBABILITIES, x, where=CLASSES & (x > -1), **how),
    "kl, infinite": lambda x, **how: jnp.exp(-jaxsoft.softmax_kl_divergence(PROBABILITIES, x, scale=0.5, **how)),
    "top k": lambda x, **how: jaxsoft.top_k_softmax(x[::2], 3, **how)[1],
    "fold": lambda x, **how: jnp.exp(jaxsoft.fold.lse(jaxsoft.fold.combine(*map(jaxsoft.fold.state, (x[:2], x[1:]))))),
}
_SOME = jnp.array([0, 1, 0.5], jnp.float32)
SAMPLED = {
    "0": {"temperature": 0.0},
    "some": {"temperature": _SOME},
    "top k": {"temperature": _SOME, "top_k": 2},
    "top p": {"temperature": _SOME, "top_p": 0.9},
    "all": {"temperature": _SOME, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    "min p": {"temperature": _SOME, "min_p": 0.1},
}


def check(f, *operands):
    error, results = jax.jit(checkify.checkify(f, errors=checkify.float_checks))(*operands)
    error.throw()
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(results))


def with_gradient(f):
    """The results, and the gradient of their sum."""

    def both(x):
        results, pull = jax.vjp(lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x)))), x)
        return results, pull(jnp.ones_like(results))

    return both


@pytest.mark.costly(6)
@pytest.mark.parametrize("name", CALLS)
@each_fast_implementation
def test_float_checks(name, implementation):
    f = functools.partial(
        CALLS[name], **({} if name in ("logsumexp, b", "fold") else {"implementation": implementation})
    )
    check(with_gradient(f), NOTHING)


@pytest.mark.costly
@pytest.mark.parametrize("name", SAMPLED)
def test_float_checks_of_sampling(name):
    x = NOTHING[[0, 0, 2]]
    check(lambda key, x: jaxsoft.random.sample(key, x, **SAMPLED[name]), jax.random.key(0), x)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["integer, smoothed", "dense, weighted", "logsumexp, b"])
def test_debug_nans(name):
    """Operation by operation."""
    with jax.debug_nans(True), jax.disable_jit():
        with_gradient(CALLS[name])(NOTHING)


def test_debug_nans_of_compiled_calls():
    with jax.debug_nans(True):
        with_gradient(CALLS["integer, out of range"])(NOTHING)
        jaxsoft.random.sample(jax.random.key(0), NOTHING[[0, 2]], temperature=0.0)
