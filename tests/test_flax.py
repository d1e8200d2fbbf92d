"""In models of Flax and of Equinox: the loss and the gradients of all parameters, as with jax.nn; what layers pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import as_usual, each_implementation, ours, served, theirs

import jaxsoft

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


FUNCTIONS = {
    "jaxsoft's": jaxsoft.dot_product_attention,
    "causal": functools.partial(jaxsoft.dot_product_attention, is_causal=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dropout_is_not_lost(name):
    """In training it raises; without it, and in evaluation, the layer gives what it gives with Flax's function."""
    nn = pytest.importorskip("flax.linen")
    x = np.random.default_rng(0).standard_normal((2, 9, 16)).astype(np.float32)
    mask = nn.make_causal_mask(jnp.ones((2, 9))).astype(bool)
    with as_usual():
        for rate in (0.0, 0.5):
            layers = [
                nn.MultiHeadDotProductAttention(4, dropout_rate=rate, attention_fn=f)
                for f in (FUNCTIONS[name], nn.dot_product_attention)
            ]
            parameters = layers[1].init(jax.random.key(0), x, deterministic=True)

            def results(deterministic, layers=layers, parameters=parameters):
                how = {"mask": mask, "deterministic": deterministic, "rngs": {"dropout": jax.random.key(1)}}
                return [layer.apply(parameters, x, **how) for layer in layers]

            actual, expected = results(True)
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
            if rate:
                with pytest.raises(ValueError, match=r"dropout_rate must be 0, .*got 0.5 beside deterministic=False"):
                    results(False)
            else:
                np.testing.assert_allclose(results(False)[0], expected, rtol=1e-4, atol=1e-5)


def test_layers_of_nnx_pass_more():
    """Than dot_product_attention takes: they say so, and take `jaxsoft.flax.attention_fn` (see test_flax_attention)."""
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.MultiHeadAttention(
        4, 16, dropout_rate=0.5, decode=False, attention_fn=jaxsoft.dot_product_attention, rngs=nnx.Rngs(0)
    )
    with as_usual(), pytest.raises(TypeError, match="unexpected keyword argument"):
        layer(jnp.ones((2, 9, 16)), deterministic=False)
