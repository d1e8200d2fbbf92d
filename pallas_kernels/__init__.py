"""`implementation="pallas"`: row operations as Pallas kernels for NVIDIA GPUs from Hopper on.

The kernels are in `tiled`; this file says what they can serve. Backward operations have none yet, and take the
default choice. Nothing here touches a GPU before a kernel is asked for.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from . import tiled

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
_MINIMUM = 512  # bytes: Mosaic wants each thread of a warpgroup to store at least 4 at a time
_ALIGNMENT = 16  # bytes, of bulk copies

# What a device without a compute capability, as in lowering for another machine, is called from Hopper on.
_HOPPER_OR_NEWER = re.compile(r"\b(G?H\d{2,3}|G?B\d{2,3}|RTX 50\d\d|Blackwell|Rubin)\b")


def unavailable(platform: str) -> str | None:
    """None, or why the kernels cannot run on a platform."""
    if platform != "cuda":
        return "Pallas Mosaic GPU kernels run on NVIDIA GPUs only"
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu" and device.device_kind not in _gpus():
        old = None if _HOPPER_OR_NEWER.search(device.device_kind) else device.device_kind
    elif _gpus():
        old = next((f"{kind} ({major}.{minor})" for kind, (major, minor) in _gpus().items() if major < 9), None)
    else:
        return "there is no NVIDIA GPU here"
    return f"it needs Hopper (compute capability 9.0) or newer; this is {old}" if old else None


@functools.cache
def _gpus() -> dict[str, tuple[int, int]]:
    """The compute capability of each kind of GPU that is present."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return {}
    capabilities = {}
    for device in devices:
        major, minor = str(device.compute_capability).split(".")
        capabilities[device.device_kind] = (int(major), int(minor))
    return capabilities


def unsupported(operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype, n = operands[0].dtype, operands[0].shape[-1]
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {dtype.name}"
    if n * dtype.itemsize < _MINIMUM:
        return f"rows must have at least {_MINIMUM} bytes; got n={n} of {dtype.name}"
    if n * dtype.itemsize % _ALIGNMENT:
        return f"rows must be a multiple of {_ALIGNMENT} bytes, the alignment of bulk copies; got n={n} of {dtype.name}"
    return None


def _operation(name: str) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    def kernel(x: jax.Array) -> tuple[jax.Array, ...]:
        *leading, n = x.shape
        rows = math.prod(leading)
        results = tiled.row_kernel(name, rows, n, x.dtype)(x.reshape(rows, n))
        return tuple(y.reshape(*leading, *y.shape[1:]) for y in results)

    return kernel


OPERATIONS = {name: _operation(name) for name in ("softmax", "log_softmax", "state")}
