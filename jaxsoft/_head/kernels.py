"""Kernels that multiply hidden and weight and keep the scores in registers, and which calls they serve.

The state of the scores, or their gradients, are made of each tile of the products before anything of it reaches memory.
So there are no chunks, nothing is rounded but the gradients, and no time goes into reading and writing scores.
"""

from collections.abc import Sequence

import jax

import jaxsoft.pallas_kernels as pallas_kernels
from jaxsoft import fold
from jaxsoft._head.head import Head
from jaxsoft._head.operation import Kind

# With fewer rows most of a tile is empty. On an H200, 16 rows of 4096 numbers and 128256 classes in bf16 took 340 us,
# in chunks of the classes 273; 32 rows 320 and 810 (JAX 0.11.2).
_LEAST_ROWS = 17


def serve(head: Head, hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> bool:
    """Whether the kernels serve a layer, on a GPU.

    Args:
      head: the layer.
      hidden: in the dtype of the products.
      weight: the layer's matrix.
    """
    if head.summed or Kind.BIAS in head.parameters or head.chunk_size is not None:
        return False
    if pallas_kernels.unavailable("cuda") or pallas_kernels.head_unsupported(hidden, weight):
        return False
    return hidden.shape[0] >= _LEAST_ROWS


def statistics(
    head: Head, hidden: jax.Array, weight: jax.Array, here: jax.Array
) -> tuple[fold.State, jax.Array, jax.Array | None]:
    """The state of the scores but the label's, the label's score or 0 if it is not here, and what the entropy needs.

    Args:
      head: the layer.
      hidden: in the dtype of the products.
      weight: the layer's matrix.
      here: the index of each row's label among these classes.
    """
    options = {"scale": head.scale, "cap": head.cap, "entropy": head.entropy}
    return pallas_kernels.head_statistics(hidden, weight, here, **options)


def gradients(
    head: Head,
    hidden: jax.Array,
    weight: jax.Array,
    here: jax.Array,
    state: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
) -> jax.Array:
    """The gradients by hidden @ weight, of the shape of weight: its first rows have them, and what follows may be NaN.

    Args:
      head: the layer.
      hidden: in the dtype of the products, of no more rows than weight has.
      weight: the layer's matrix.
      here: the index of each row's label among these classes.
      state: (m, s) of the scores but the label's, and where the entropy is wanted the sum for that.
      cotangents: of the logsumexp of these scores, of the label's score, and of the entropy if that is wanted.
    """
    (m, s, *products), (g, h, *k) = state, cotangents
    entropy = (products[0], k[0]) if head.entropy else None
    options = {"scale": head.scale, "cap": head.cap}
    return pallas_kernels.head_gradients(hidden, weight, here, fold.State(m, s), g, h, entropy, len(weight), **options)
