"""In models of Flax and of Equinox: the loss and the gradients of all parameters, as with jax.nn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import each_implementation, ours, served, theirs

TOKENS = np.random.default_rng(0).integers(0, 50, (4, 9))


def attention(softmax, q, k, v):
    """Causal attention of one head."""
    scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return softmax(scores, where=causal) @ v


def cross_entropy(op, logits, labels):
    """The mean of -log p of the labels."""
    return -jnp.mean(jnp.take_along_axis(op(logits), labels[..., None], axis=-1))


@each_implementation
def test_flax(implementation):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, softmax, rngs):
            self.softmax = softmax
            self.embedding = nnx.Embed(50, 16, rngs=rngs)
            self.qkv = nnx.Linear(16, 48, rngs=rngs)
            self.out = nnx.Linear(16, 50, rngs=rngs)

        def __call__(self, tokens):
            q, k, v = jnp.split(self.qkv(self.embedding(tokens)), 3, axis=-1)
            return self.out(attention(self.softmax, q, k, v))

    def train(softmax, log_softmax):
        @nnx.jit
        def step(model):
            return nnx.value_and_grad(lambda m: cross_entropy(log_softmax, m(TOKENS[:, :-1]), TOKENS[:, 1:]))(model)

        value, grads = step(Model(softmax, nnx.Rngs(0)))
        return value, jax.tree.leaves(grads)

    with served(implementation), jax.default_matmul_precision("highest"):
        actual = train(ours("softmax", implementation), ours("log_softmax", implementation))
        assert_trees_all_close(actual, train(theirs("softmax"), theirs("log_softmax")), rtol=1e-4, atol=1e-6)


@each_implementation
def test_equinox(implementation):
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        embedding: eqx.nn.Embedding
        qkv: eqx.nn.Linear
        out: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.embedding = eqx.nn.Embedding(50, 16, key=keys[0])
            self.qkv = eqx.nn.Linear(16, 48, key=keys[1])
            self.out = eqx.nn.Linear(16, 50, key=keys[2])

        def __call__(self, tokens, softmax):
            q, k, v = jnp.split(jax.vmap(self.qkv)(jax.vmap(self.embedding)(tokens)), 3, axis=-1)
            return jax.vmap(self.out)(attention(softmax, q, k, v))

    def train(softmax, log_softmax):
        @eqx.filter_jit
        @eqx.filter_value_and_grad
        def step(model):
            logits = jax.vmap(lambda tokens: model(tokens, softmax))(TOKENS[:, :-1])
            return cross_entropy(log_softmax, logits, TOKENS[:, 1:])

        value, grads = step(Model(jax.random.key(0)))
        return value, jax.tree.leaves(grads)

    with served(implementation), jax.default_matmul_precision("highest"):
        actual = train(ours("softmax", implementation), ours("log_softmax", implementation))
        assert_trees_all_close(actual, train(theirs("softmax"), theirs("log_softmax")), rtol=1e-4, atol=1e-6)
