"""Gradients of scores that wait in the memory of the gradient of weight until all are there, and then become it.

They fit there where there are no more rows than hidden has numbers. The gradient of weight takes their place, a chunk
of the classes at a time: each is read once more, and overwritten. So it is no sum over chunks of the rows, and rounded
once. Where there are as many rows as numbers, no chunk of rows is needed, and the gradient of hidden states is one
product of all gradients of scores, and no sum over chunks of the classes.
"""

import jax
import jax.numpy as jnp

from jaxsoft._head.chunks import Chunk, over_chunks
from jaxsoft._head.head import Head, product

# At most how many classes are taken at a time. For 4096 rows of 4096 numbers these are 4 waves of tiles of 128 by 256
# on 132 multiprocessors, which are busy for 97 % of them. With 2048 classes the mean and its gradients took 2 % longer,
# and with 8192 no less.
_CLASSES = 4096


def may_wait(weight: jax.Array, rows: int, dtype: jnp.dtype) -> bool:
    """Whether gradients of all scores, which have this dtype, fit into the memory of the gradient of weight."""
    known = isinstance(rows, int) and isinstance(weight.shape[0], int)  # else it cannot be told
    return known and weight.dtype == dtype and rows <= weight.shape[0]


def weight_from(head: Head, hidden: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of weight, in the place of the gradients of scores.

    Args:
      head: the layer.
      hidden: the hidden states, in the dtype of the products.
      dx: of the shape of weight; its first rows are the gradients of scores. Nothing else may use it, or XLA copies it.
    """

    def step(dx: jax.Array, chunk: Chunk) -> jax.Array:
        return chunk.written(dx, product(head, hidden, chunk.of(dx)[: len(hidden)], (0, 0), dx.dtype))

    return over_chunks(min(_CLASSES, max(2048, dx.shape[1] // 8)), dx.shape[1], step, dx)
