"""Shared memory for tiles of matrices, as bulk tensor copies bring them and wgmma reads them.

In shared memory lie tiles of 8 rows and one swizzle. Copies are cut up in the same way, and JAX cuts up the whole
array: a dimension must be a multiple of its tile, or lie within one.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 8
WIDEST = 64  # elements of the widest swizzle, 128 bytes


def swizzle(size: int) -> int:
    """The elements of a swizzle of rows of this many elements."""
    return WIDEST if size % WIDEST == 0 else WIDEST // 2


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of this shape, in tiles."""
    item_bytes = jnp.dtype(dtype).itemsize
    row_bytes = min(2 * swizzle(shape[-1]), item_bytes * shape[-1])
    width = row_bytes // item_bytes
    tiling: Any = plgpu.TilingTransform  # mypy holds both for abstract
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((ROWS, width)), swizzling(row_bytes)))
