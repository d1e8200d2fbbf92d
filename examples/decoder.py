"""A transformer that serving needs: grouped queries, rotary positions, and attention that is passed to each call.

What is passed decides where keys and values come from. So one model trains on whole windows, is served from pages of
keys and values, and is checked without any cache.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

import jaxsoft


class Shape(NamedTuple):
    """The sizes of a model."""

    vocabulary: int
    layers: int
    width: int
    hidden: int  # of the perceptrons
    heads: int  # of queries
    key_heads: int  # of keys and values; heads / key_heads heads of queries share each
    size: int  # of a head


def rotated(x, positions):
    """x (..., heads, size), turned by angles that grow with the positions (...). Source: RoFormer, arXiv:2104.09864."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """Attention with grouped queries, then a gated perceptron, each added to its input."""

    def __init__(self, shape, dtype, rngs):
        """dtype: of the weights, and of keys and values."""

        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.shape = shape
        self.norm1, self.norm2 = (nnx.RMSNorm(shape.width, param_dtype=dtype, rngs=rngs) for _ in range(2))
        self.query = linear(shape.width, shape.heads * shape.size)
        self.key, self.value = (linear(shape.width, shape.key_heads * shape.size) for _ in range(2))
        self.project = linear(shape.heads * shape.size, shape.width)
        self.gate, self.up = (linear(shape.width, shape.hidden) for _ in range(2))
        self.down = linear(shape.hidden, shape.width)

    def __call__(self, x, positions, attend):
        """x (..., width) to the same shape; attend: (q, k, v), each (..., heads, size), -> the values each q takes."""
        h = self.norm1(x)
        q, k, v = (f(h).reshape(*x.shape[:-1], -1, self.shape.size) for f in (self.query, self.key, self.value))
        x = x + self.project(attend(rotated(q, positions), rotated(k, positions), v).reshape(*x.shape[:-1], -1))
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class Decoder(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, shape, dtype, rngs):
        """dtype: that of Block."""
        self.tokens = nnx.Embed(shape.vocabulary, shape.width, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(shape, dtype, rngs) for _ in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.width, param_dtype=dtype, rngs=rngs)
        self.readout = nnx.Linear(shape.width, shape.vocabulary, use_bias=False, param_dtype=dtype, rngs=rngs)

    def features(self, tokens, positions, attend):
        """Tokens (...) at their positions (...) to what logits are read from, (..., width).

        attend: (layer, q, k, v) -> what `attend` of Block gives.
        """
        x = self.tokens(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, lambda *qkv, layer=layer: attend(layer, *qkv))
        return self.norm(x)

    def whole(self, tokens, attention):
        """Tokens (batch, time) to the logits (batch, time, vocabulary) of what follows each of them.

        attention: `dot_product_attention` of jaxsoft, or of jax.nn.
        """
        positions = jnp.arange(tokens.shape[1])
        return self.readout(self.features(tokens, positions, lambda _, *qkv: attention(*qkv, is_causal=True)))

    def loss(self, windows):
        """Mean cross-entropy of each token of windows (batch, time + 1) given those before it, in nats."""
        logits = self.whole(windows[:, :-1], jaxsoft.dot_product_attention)
        return jnp.mean(jaxsoft.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]))
