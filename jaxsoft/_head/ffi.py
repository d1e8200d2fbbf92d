"""The CUDA kernel of ffi/cuda/head, for Hopper GPUs, called through the JAX FFI: a product in the place of a factor.

No product of XLA's can write where it reads. The kernel's blocks read all of some columns before one of them writes.
It sums in f32, as products of 16 bits are summed at every precision that JAX has.
"""

import jax
import jax.numpy as jnp

from jaxsoft._core import gpus, library

GENERATIONS = (gpus.Generation.HOPPER,)  # those whose instructions the kernel has
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


def serves(hidden: jax.Array, dx: jax.Array) -> bool:
    """Whether the kernel takes such arrays on the GPU that is lowered for, and XLA takes no less time.

    Args:
      hidden: the hidden states, (rows, width).
      dx: the first rows are the gradients of scores, (width, classes).
    """
    if not all(isinstance(length, int) for length in (*hidden.shape, *dx.shape)):
        return False
    (rows, width), classes = hidden.shape, dx.shape[1]
    if dx.dtype not in (jnp.float16, jnp.bfloat16) or hidden.dtype != dx.dtype:
        return False
    if not 0 < rows <= width or width % _WIDTH or classes == 0 or classes % _CLASSES:
        return False
    of_group = width // _ROWS
    if _MULTIPROCESSORS // of_group * of_group < _BUSY * _MULTIPROCESSORS or library.find("cuda") is None:
        return False
    return gpus.generation() in GENERATIONS and _OPERATION in library.operations("cuda")


def product_in_place(hidden: jax.Array, dx: jax.Array) -> jax.Array:
    """hidden^T times the first rows of dx, in the place of dx, by the kernel."""
    panels = -(-dx.shape[1] // _COLUMNS)
    # It holds the counters of all groups, or where no group fits on the device, columns of dx.
    workspace = max(4 * (1 + _GROUPS * (panels + 2)), hidden.shape[0] * _COLUMNS * dx.dtype.itemsize)
    types = jax.ShapeDtypeStruct(dx.shape, dx.dtype), jax.ShapeDtypeStruct((workspace,), jnp.uint8)
    return jax.ffi.ffi_call(f"jaxsoft_{_OPERATION}", types, input_output_aliases={1: 0})(hidden, dx)[0]
