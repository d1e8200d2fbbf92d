"""The CUDA kernel of ffi/cuda/head, for Hopper GPUs, called through the JAX FFI: the in-place weight gradient.

No product of XLA's can write where it reads. The kernel's blocks read all of some columns before one of them writes.
It sums in f32, as products of 16 bits are summed at every precision that JAX has. Which arrays it takes, and what it
needs for them, the library says itself (ffi/cuda/answers.cc).
"""

import jax
import jax.numpy as jnp

from jaxsoft._core import gpus, library

GENERATIONS = (gpus.Generation.HOPPER,)  # those whose instructions the kernel has
_OPERATION = "weight_gradient_in_place"
# Blocks that compute all rows are a group, and as many groups run as there are multiprocessors for. The part of them
# that must be at work: on an H200, chunks of the classes by XLA took 1.9 times as long for 1024 rows of as many numbers
# and 131072 classes, 1.5 for 2048, 1.2 for 3584 and 4096, 1.1 for 5120, .99 for 7168 and 8192, and .85 for 6144, which
# leaves 36 of 132 idle (JAX 0.11.2).
_BUSY = 0.84


def serves(hidden: jax.Array, dx: jax.Array) -> bool:
    """Whether the kernel takes such arrays on the GPU that is lowered for, and XLA takes no less time.

    Args:
      hidden: the hidden states, (rows, width).
      dx: the first rows are the gradients of scores, (width, classes).
    """
    if library.find("cuda") is None or _OPERATION not in library.operations("cuda"):
        return False
    sizes = (*hidden.shape, dx.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return False
    if dx.dtype not in (jnp.float16, jnp.bfloat16) or hidden.dtype != dx.dtype or gpus.generation() not in GENERATIONS:
        return False
    all_of_them = gpus.multiprocessors()
    at_work = library.number("weight_gradient_multiprocessors", *sizes, all_of_them)
    return at_work >= _BUSY * all_of_them and at_work > 0


def weight_gradient_in_place(hidden: jax.Array, dx: jax.Array) -> jax.Array:
    """hidden^T times the first rows of dx, in the place of dx, by the kernel."""
    size = library.number("weight_gradient_workspace", hidden.shape[0], dx.shape[1], dx.dtype.itemsize)
    types = jax.ShapeDtypeStruct(dx.shape, dx.dtype), jax.ShapeDtypeStruct((size,), jnp.uint8)
    return jax.ffi.ffi_call(f"jaxsoft_{_OPERATION}", types, input_output_aliases={1: 0})(hidden, dx)[0]


def plan(hidden: jax.Array, dx: jax.Array) -> str:
    """How the kernel computes it: its name, as a profiler shows it, and in words."""
    return library.text("weight_gradient_plan", hidden.shape[1], dx.shape[1], gpus.multiprocessors())
