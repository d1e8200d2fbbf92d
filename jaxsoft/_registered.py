"""The implementations that there are, and what each has for every family, which is imported when it is needed."""

from importlib import import_module
from typing import Any

import jaxsoft.pallas_kernels as pallas_kernels
import jaxsoft.triton_kernels as triton_kernels
from jaxsoft._core import cudnn, library
from jaxsoft._core.implementations import REGISTERED, Backend
from jaxsoft._rows import ffi, plain


def _late(module: str, name: str) -> Any:
    """What has this name in a module that is imported when it is called."""
    return lambda: getattr(import_module(module), name)


REGISTERED.update(
    ffi=Backend(library.unavailable, opaque=True, kernels={"rows": lambda: ffi.KERNELS}),
    pallas=Backend(pallas_kernels.unavailable, opaque=True, kernels={"rows": _late("jaxsoft.pallas_kernels", "ROWS")}),
    triton=Backend(triton_kernels.unavailable, opaque=True, kernels={"rows": _late("jaxsoft.triton_kernels", "ROWS")}),
    cudnn=Backend(cudnn.unavailable, opaque=True),
    xla=Backend(kernels={"rows": lambda: plain.XLA}),
    reference=Backend(kernels={"rows": lambda: plain.REFERENCE}),
)
