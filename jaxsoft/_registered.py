"""The implementations that there are, and the kernels for rows that each has."""

import jaxsoft.pallas_kernels as pallas_kernels
import jaxsoft.triton_kernels as triton_kernels
from jaxsoft._core import cudnn, library
from jaxsoft._core.implementations import REGISTERED, Backend
from jaxsoft._rows import ffi, plain

REGISTERED.update(
    ffi=Backend(library.unavailable, opaque=True, rows=ffi.KERNELS),
    pallas=Backend(
        pallas_kernels.unavailable, opaque=True, rows=pallas_kernels.ROWS, by_name_only=pallas_kernels.BY_NAME_ONLY
    ),
    triton=Backend(triton_kernels.unavailable, opaque=True, rows=triton_kernels.ROWS),
    cudnn=Backend(cudnn.unavailable, opaque=True),
    xla=Backend(rows=plain.XLA),
    reference=Backend(rows=plain.REFERENCE),
)
