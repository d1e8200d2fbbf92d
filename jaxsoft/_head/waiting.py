"""Gradients of all scores that wait in the memory of the gradient of weight, and then become it.

Where there are no more rows than hidden has numbers, they fit there. The gradient of hidden states is then one product
of all of them, and not a sum over chunks of classes; and that of weight is not a sum over chunks of rows. It is written
in the place of the gradients of scores, a chunk of the classes at a time: to read and write all of them once more takes
no longer than to add up a sum of a few chunks, and the result is rounded once.
"""

import jax
import jax.numpy as jnp

from jaxsoft._head.chunks import Chunk, over_chunks
from jaxsoft._head.head import Head, product

# At most how many classes are taken at a time where gradients of scores become that of weight. For 4096 rows of 4096
# numbers these are 4 waves of tiles of 128 by 256 on 132 multiprocessors, which are busy for 97 % of them.
_CLASSES = 4096


def may_wait(weight: jax.Array, rows: int, dtype: jnp.dtype) -> bool:
    """Whether gradients of all scores in this dtype fit into the memory of the gradient of weight."""
    return isinstance(rows, int) and weight.dtype == dtype and rows <= weight.shape[0]


def weight_from(head: Head, hidden: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of weight, in the place of the gradients of scores.

    Args:
      head: the layer.
      hidden: the hidden states, in the dtype of the products.
      dx: of the shape of weight; the first rows of it are the gradients of scores. Nothing else may use it.
    """

    def step(dx: jax.Array, chunk: Chunk) -> jax.Array:
        return chunk.written(dx, product(head, hidden, chunk.of(dx)[: len(hidden)], (0, 0), dx.dtype))

    return over_chunks(min(_CLASSES, max(2048, dx.shape[1] // 8)), dx.shape[1], step, dx)
