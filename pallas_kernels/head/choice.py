"""Whether the kernels of a linear layer can take its operands. Nothing here imports Pallas."""

import jax
import jax.numpy as jnp

_DTYPES = (jnp.float16, jnp.bfloat16)
_STEP = 64  # width and classes are cut up into multiples of this


def unsupported(hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
    """None, or why the kernels cannot take these operands."""
    if weight.dtype not in _DTYPES or hidden.dtype != weight.dtype:
        return f"its kernels take float16 or bfloat16, not {hidden.dtype.name} and {weight.dtype.name}"
    shape = (*hidden.shape, *weight.shape)
    if not all(isinstance(size, int) for size in shape):
        return f"its kernels are compiled for shapes that are known; got {hidden.shape} and {weight.shape}"
    if not all(shape):
        return "it has no kernel for arrays without elements"
    if any(size % _STEP for size in weight.shape):
        return f"width and classes must be multiples of {_STEP}, for bulk copies; got {weight.shape}"
    return None
