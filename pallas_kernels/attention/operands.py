"""How queries, keys and values reach shared memory: by bulk tensor copies, with zeros for what lies past their ends.

Dimensions that copies cannot cut up (see `blocks`) are padded in XLA (`padded`), which copies the array; all others are
read where they lie. Where a head is smaller than what the kernel computes with (`head_size`), copies reach past its
end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..blocks import ROWS, WIDEST, swizzle


def head_size(size: int) -> int:
    """The head size that kernels compute with: a multiple of the narrower of two swizzles."""
    return -(-size // (WIDEST // 2)) * (WIDEST // 2)


def padded_length(length: int) -> int:
    """The length of a sequence that copies can cut up."""
    return length if length <= ROWS else -(-length // ROWS) * ROWS


def padded_head(size: int) -> int:
    """The size of a head that copies can cut up."""
    return size if size <= swizzle(head_size(size)) else head_size(size)


def padded(array: jax.Array) -> jax.Array:
    """An array (B, length, heads, size) of which copies can cut up length and size; usually as it is."""
    _, length, _, size = array.shape
    widths = (0, padded_length(length) - length), (0, padded_head(size) - size)
    return jnp.pad(array, ((0, 0), widths[0], (0, 0), widths[1])) if any(w for _, w in widths) else array


def rows(ref: Any, batch: jax.Array, begin: jax.Array, count: int, head: jax.Array, size: int) -> Any:
    """The part of an array (B, length, heads, size) to copy: rows of a head, of as many elements as computed with."""
    # That the part may end past the array is not to be known when it is traced: Pallas checks what is.
    zero = batch * 0
    return ref.at[batch, pl.ds(begin, count), head, pl.ds(zero, size) if size > ref.shape[3] else slice(None)]
