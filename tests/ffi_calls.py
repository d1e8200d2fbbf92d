"""Calls of the C++ and CUDA kernels as XLA makes them, without jaxsoft's functions around them."""

import jax
import numpy as np

from jaxsoft._rows import ffi
from jaxsoft._rows.forms import Form


def call(target, results, *operands, extras="", trailing=0, masked=False, cap=None):
    """Calls a target with results of the given shapes and dtypes, and the workspace that most targets have."""
    form = Form(np.dtype(np.float32), extras, trailing, masked, cap)
    attributes = ffi._attributes(form)
    types = [jax.ShapeDtypeStruct(*result) for result in results]
    if target not in ffi._NO_WORKSPACE:
        types.append(ffi.workspace(jax.ShapeDtypeStruct((4, 8), np.float32)))  # enough for short rows
    return jax.block_until_ready(jax.ffi.ffi_call(f"jaxsoft_{target}", types)(*operands, **attributes))
