"""How queries, keys and values reach shared memory: by bulk tensor copies, with zeros for what lies past their ends.

In shared memory lie tiles of 8 rows and one swizzle, as wgmma reads them. Copies are cut up in the same way, and JAX
cuts up the whole array: a dimension must be a multiple of its tile, or lie within one. Arrays that are neither are
padded in XLA (`padded`), which copies them; all others are read where they lie. Where a head is smaller than what the
kernel computes with (`head_size`), copies reach past its end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_ROWS = 8  # of a tile in shared memory
_WIDEST = 64  # elements of the widest swizzle, 128 bytes


def head_size(size: int) -> int:
    """The head size that kernels compute with: a multiple of the narrower of two swizzles."""
    return -(-size // (_WIDEST // 2)) * (_WIDEST // 2)


def swizzle(size: int) -> int:
    """The elements of a swizzle for a head size that kernels compute with."""
    return _WIDEST if size % _WIDEST == 0 else _WIDEST // 2


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for rows of heads or scores, as bulk tensor copies and wgmma take them."""
    item_bytes = jnp.dtype(dtype).itemsize
    row_bytes = min(2 * swizzle(shape[-1]), item_bytes * shape[-1])
    width = row_bytes // item_bytes
    tiling: Any = plgpu.TilingTransform  # mypy holds both for abstract
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((_ROWS, width)), swizzling(row_bytes)))


def padded_length(length: int) -> int:
    """The length of a sequence that copies can cut up."""
    return length if length <= _ROWS else -(-length // _ROWS) * _ROWS


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
