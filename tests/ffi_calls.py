"""Calls of the C++ and CUDA kernels as XLA makes them, without jaxsoft's functions around them."""

import jax
import numpy as np

from jaxsoft._rows import ffi
from jaxsoft._rows.forms import RowForm


def call(target, results, *operands, extras="", trailing=0, masked=False, cap=None):
    """Calls a target with results of the given shapes and dtypes, and the workspace that most targets have."""
    attributes = ffi.attributes(RowForm(np.dtype(np.float32), (), trailing, masked, cap)) | {"extras": extras}
    types = [jax.ShapeDtypeStruct(*result) for result in results]
    types += ffi.workspace(target, jax.ShapeDtypeStruct((4, 8), np.float32))  # enough for short rows
    return jax.block_until_ready(jax.ffi.ffi_call(f"jaxsoft_{target}", types)(*operands, **attributes))
