"""`implementation="triton"`: row operations as Triton kernels, launched by jax-triton, for NVIDIA GPUs from Ampere on.

This file says what the kernels in `rows` can serve. Triton and jax-triton know AMD's GPUs as well, so the same kernels
could serve those, which is not tested and therefore not offered. Neither package is imported, and no GPU is touched,
before a kernel is asked for.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._core import gpus
from jaxsoft._core.operation import Function, Types
from jaxsoft._rows.forms import RowForm, RowKernels, is_plain, no_kernel, other_form
from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX, LOG_SOFTMAX_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_VJP
from jaxsoft._rows.spec import RowSpec

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
_PACKAGES = {"jax_triton": "jax-triton", "triton": "triton"}
_OLDEST = 80  # Ampere
_MOST_ROWS = 2**31 - 1  # a grid has no more programs, and a program may take a single row


def unavailable(platform: str) -> str | None:
    """None, or why the kernels cannot run on a platform."""
    if platform == "rocm":
        return "its Triton kernels are not tested on AMD GPUs, so they are not offered there"
    if platform != "cuda":
        return "its Triton kernels run on NVIDIA GPUs only"
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed; pip install 'jaxsoft[triton]'"
    found = gpus.targets()
    if not found:
        return "there is no NVIDIA GPU here"
    for kind, gpu in found.items():
        if gpu is None:
            return f"it needs Ampere (compute capability 8.0) or newer; {kind} is older, or not known here"
        if gpu.capability < _OLDEST:
            return f"it needs Ampere (compute capability 8.0) or newer; this is {kind} ({gpu.version})"
    if gpus.target() is None:
        return f"a Triton kernel is compiled for one compute capability, and these have several: {', '.join(found)}"
    return _broken()


@functools.cache
def _broken() -> str | None:
    """Why jax-triton cannot be used although it is installed."""
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernelCall"):
        return "JAX's GPU support, which launches Triton kernels, is not installed; pip install 'jaxsoft[cuda13]'"
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:
        return f"jax-triton cannot be imported: {error}"
    return None


def unsupported(operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels cannot take these operands."""
    x = operands[0]
    if x.dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16, float32 and float64, not {x.dtype.name}"
    if not all(isinstance(size, int) for size in x.shape):
        return f"its kernels are compiled for shapes that are known; got {x.shape}"
    if x.size > _MOST_ROWS * x.shape[-1]:
        return f"there can be {_MOST_ROWS} rows at most; got {x.size // x.shape[-1]}"
    return None


# The operations that have kernels, in their plain form.
KERNELS = frozenset((SOFTMAX, SOFTMAX_VJP, LOG_SOFTMAX, LOG_SOFTMAX_VJP, STATE, LOGSUMEXP_VJP))


def kernel(operation: RowSpec, form: RowForm, platform: str, operands: Types) -> Function | str:
    """The kernel for an operation in this form, or why it has to be composed."""
    del platform
    if operation not in KERNELS:
        return no_kernel(operation)
    if not is_plain(operation, form, operands):
        return other_form(operation, form, operands)

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        from .rows import launch  # imports Triton

        gpu = gpus.target()
        assert gpu  # `unavailable` has seen that there is one
        return launch.call(operation, gpu, *operands)

    return call


# --8<-- [start:describe]
def describe(operation: RowSpec, form: RowForm, platform: str, operands: Types) -> str:
    """The kernel's name, and how it cuts up its work, in words."""
    del form, platform
    from .rows.plan import of_call

    return f"{operation.name}_kernel: {of_call(gpus.assumed().generation, operands).words}"
    # --8<-- [end:describe]


# --8<-- [start:rows]
ROWS = RowKernels(kernel, unsupported, describe=describe)
# --8<-- [end:rows]
