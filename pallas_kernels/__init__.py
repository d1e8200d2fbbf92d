"""`implementation="pallas"`: row operations as Pallas kernels for NVIDIA GPUs from Hopper on.

`held` has rows that fit the registers of a block, `tiled` longer ones, in shared memory, and `split` few of them, cut
over many blocks. This file says what they can serve, and which of them does. Nothing here touches a GPU before a kernel
is asked for.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from . import arithmetic, held, split, tiled

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)

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


def _multiprocessors() -> int:
    """Of the GPU that is here, or that is lowered for; else an H100's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu" and device.num_cores:
        return device.num_cores
    return jax.devices("cuda")[0].core_count if _gpus() else 132


def unsupported(operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype, n = operands[0].dtype, operands[0].shape[-1]
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {dtype.name}"
    if held.plan(1, n, dtype.itemsize) or tiled.plan("softmax", 1, n, dtype.itemsize, 1):
        return None
    if n * dtype.itemsize <= held.MOST_BYTES:
        return f"rows must have an even number of elements, at least 4; got n={n}"
    return f"long rows must be a multiple of 16 bytes, the alignment of bulk copies; got n={n} of {dtype.name}"


def row_kernel(operation: str, rows: int, n: int, dtype: jnp.dtype) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel for an operation on `rows` rows of n elements: a function of arrays (rows, n) and (rows,)."""
    if found := held.plan(rows, n, dtype.itemsize):
        return _padded(rows, found.rows, functools.partial(held.row_kernel, operation, n=n, dtype=dtype, plan=found))
    if parts := split.plan(operation, rows, n, dtype.itemsize):
        return split.row_kernel(operation, rows, n, dtype, *parts)
    cut = tiled.plan(operation, rows, n, dtype.itemsize, _multiprocessors())
    assert cut, "unsupported() says so"
    kernel = tiled.row_kernel(operation, rows, n, dtype, cut)
    of_rows, wide = arithmetic.SIGNATURES[operation][::2]

    def in_vectors(*operands):
        vectors = [x.reshape(rows, -1, cut.vector) for x in operands[:of_rows]]
        results = kernel(*vectors, *operands[of_rows:])
        return *(y.reshape(rows, n) for y in results[:wide]), *results[wide:]

    return in_vectors


def _padded(rows: int, least: int, kernel: Callable) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel that takes no fewer rows than a block does, for fewer."""
    if rows >= least:
        return kernel(rows=rows)

    def function(*operands):
        more = [jnp.pad(x, [(0, least - rows)] + [(0, 0)] * (x.ndim - 1)) for x in operands]
        return tuple(y[:rows] for y in kernel(rows=least)(*more))

    return function


def _operation(name: str) -> Callable[..., tuple[jax.Array, ...]]:
    def kernel(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *leading, n = operands[0].shape
        rows, ndim = math.prod(leading), operands[0].ndim
        arrays = [x.reshape(rows, n) for x in operands if x.ndim == ndim]
        numbers = [x.reshape(rows) for x in operands if x.ndim < ndim]
        results = row_kernel(name, rows, n, operands[0].dtype)(*arrays, *numbers)
        return tuple(y.reshape(*leading, *y.shape[1:]) for y in results)

    return kernel


OPERATIONS = {
    name: _operation(name)
    for name in ("softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp", "state", "logsumexp_vjp")
}
