"""The CUDA kernel of ffi/cuda/head, for Hopper GPUs, called through the JAX FFI: a product in the place of a factor.

No product of XLA's can write where it reads. The kernel's blocks read all of some columns before one of them writes.
It sums in f32, as products of 16 bits are summed at every precision that JAX has.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsoft._core import devices, library

_OPERATION = "product_in_place"
# The limits of ffi/cuda/head/product_in_place.cu: the width is a multiple of _WIDTH, the classes of _CLASSES.
_WIDTH, _CLASSES = 256, 8
# So many rows of the result a block computes, of so many columns. At most _GROUPS groups of blocks take turns.
_ROWS, _COLUMNS, _GROUPS = 128, 256, 128
# A group of blocks computes all rows, and as many groups run as there are multiprocessors for, here those of an H100 or
# H200. On an H200, chunks of the classes by XLA took 1.9 times as long for 1024 rows of as many numbers and 131072
# classes, 1.5 for 2048, 1.2 for 3584 and 4096, 1.1 for 5120, .99 for 7168 and 8192, and .85 for 6144, which leaves 36
# multiprocessors idle (JAX 0.11.2).
_MULTIPROCESSORS, _BUSY = 132, 0.84


def product_in_place(hidden: jax.Array, dx: jax.Array) -> Callable[..., jax.Array] | None:
    """The kernel for hidden^T times the first rows of dx, in the place of dx; None where it does not serve.

    Args:
      hidden: the hidden states, (rows, width).
      dx: (width, classes), of which the first rows are read.
    """
    known = all(isinstance(length, int) for length in (*hidden.shape, *dx.shape))
    if not known or not _serves(hidden, dx) or _OPERATION not in _operations():
        return None
    (rows, width), panels = hidden.shape, -(-dx.shape[1] // _COLUMNS)
    of_group = width // _ROWS
    if _MULTIPROCESSORS // of_group * of_group < _BUSY * _MULTIPROCESSORS:
        return None
    # It holds the counters of all groups, or where no group fits on the device, columns of dx.
    workspace = max(4 * (1 + _GROUPS * (panels + 2)), rows * _COLUMNS * dx.dtype.itemsize)
    types = jax.ShapeDtypeStruct(dx.shape, dx.dtype), jax.ShapeDtypeStruct((workspace,), jnp.uint8)
    call = jax.ffi.ffi_call(f"jaxsoft_{_OPERATION}", types, input_output_aliases={1: 0})
    return lambda hidden, dx: call(hidden, dx)[0]


def _operations() -> frozenset[str]:
    """Those of the CUDA library, if it is built and the GPU is one that it has kernels for."""
    if library.find("cuda") is None or not devices.are_hopper():
        return frozenset()
    return library.operations("cuda")


def _serves(hidden: jax.Array, dx: jax.Array) -> bool:
    """Whether the kernel takes such arrays."""
    (rows, width), classes = hidden.shape, dx.shape[1]
    if dx.dtype not in (jnp.float16, jnp.bfloat16) or hidden.dtype != dx.dtype:
        return False
    return 0 < rows <= width and width % _WIDTH == 0 and classes > 0 and classes % _CLASSES == 0
