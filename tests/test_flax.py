"""In models of Flax and of Equinox: the loss and the gradients of all parameters, as with jax.nn; Flax's attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import as_usual, each_implementation, ours, served, theirs
from test_documents import ROOT, blocks

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


def of_the_guide():
    """The function in the guide that Flax's layers take."""
    (code,) = (code for code, _ in blocks(ROOT / "docs/guide/attention.md") if "nnx.MultiHeadAttention(" in code)
    names = {"jax": jax, "jnp": jnp, "jaxsoft": jaxsoft}
    exec(code, names)
    return names["attend"]


FUNCTIONS = {
    "jaxsoft's": lambda: jaxsoft.dot_product_attention,
    "causal": lambda: functools.partial(jaxsoft.dot_product_attention, is_causal=True),
    "the guide's": of_the_guide,
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
                for f in (FUNCTIONS[name](), nn.dot_product_attention)
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


def test_dropout_of_nnx():
    """With the guide's function, in training and in evaluation; jaxsoft's own does not take all that is passed."""
    nnx = pytest.importorskip("flax.nnx")
    x = np.random.default_rng(0).standard_normal((2, 3, 9, 16)).astype(np.float32)

    def layer(rate, **options):
        return nnx.MultiHeadAttention(4, 16, dropout_rate=rate, decode=False, rngs=nnx.Rngs(0), **options)

    with as_usual():
        for rate in (0.0, 0.5):
            for how in ({"is_causal": True}, {"mask": nnx.make_causal_mask(jnp.ones((2, 3, 9)))}):
                expected = layer(rate)(x, deterministic=True, **how)
                actual = layer(rate, attention_fn=of_the_guide())(x, deterministic=True, **how)
                np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="dropout_rate must be 0"):
            layer(0.5, attention_fn=of_the_guide())(x, deterministic=False)
        with pytest.raises(ValueError, match="module must be None"):
            layer(0.0, attention_fn=of_the_guide())(x, sow_weights=True)
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            layer(0.5, attention_fn=jaxsoft.dot_product_attention)(x, deterministic=False)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 3, 2)], ids=str)
def test_the_function_of_the_guide(batch):
    """As Flax's own: bias, masks of booleans and of numbers, of shapes that broadcast, and any batch dimensions."""
    nn = pytest.importorskip("flax.linen")
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((*batch, t, 4, 8)).astype(np.float32) for t in (5, 7, 7))
    shapes = {(*batch, 4, 5, 7), (*batch, 1, 1, 7), (*(1 for _ in batch), 4, 5, 7), (5, 7), (*batch[:0], 1, 5, 1)}
    attend = of_the_guide()
    with as_usual(), jax.default_matmul_precision("highest"):
        for shape in shapes:
            bias = rng.standard_normal(shape).astype(np.float32)
            for options in ({"bias": bias}, {"mask": bias < 1}, {"mask": (bias < 1).astype(np.float32), "bias": bias}):
                if "mask" in options and shape[-1] == 1:
                    continue  # a query without keys is 0 here, and the mean of the values there
                actual = jax.jit(attend)(query, key, value, **options)
                expected = nn.dot_product_attention(query, key, value, **options, deterministic=True)
                np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
