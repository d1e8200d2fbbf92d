"""`implementation="ffi"`: the C++ and CUDA kernels of ffi/, called through the JAX FFI.

One shared library a platform, loaded and registered when jaxsoft is imported, so that a program that was exported or
compiled in another process finds the kernels. The same target names are registered for both platforms, so the kernel
that runs follows from where XLA runs the computation. Nothing is registered from a library that the installed XLA would
refuse: XLA answers such a registration by disabling the whole platform.
"""

import ctypes
import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._rows.forms import (
    OPERATIONS,
    RESULTS,
    Form,
    Operands,
    Operation,
    groups,
    is_plain,
    is_wide,
    split,
)
from jaxsoft.fold import accumulator

_NO_WORKSPACE = ("logsumexp_vjp", "label_state_vjp", "label_sums_vjp")
_MOST_K = 256  # kMostK of ffi/rows.h
_GROUPS = 4  # kGroups of ffi/rows.h
_F32 = np.dtype(jnp.float32)
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}
# On a GPU, the bytes in which the states of a long row's parts wait, or the count of the rows dealt out so far. Of rows
# that no cluster of multiprocessors holds, all the states wait, in 1/512 of the space that the rows take.
_WORKSPACE = 1 << 17
_LONG_ROW = 1 << 20
# Or the k largest of each part, as words of 8 bytes, and its state: of so many parts, of all rows together.
_PARTS, _PART = 1024, 16
_BUILD_HINT = {
    "cpu": "install jaxsoft from its source tree, which builds it",
    "cuda": "install jaxsoft again with nvcc 12.8 or newer on the PATH",
}


def _find(platform: str) -> Path | None:
    for folder in sys.modules["jaxsoft"].__path__:  # several where it is installed for development
        for path in Path(folder, "lib").glob(f"*jaxsoft_{platform}.*"):
            return path
    return None


@functools.cache
def _xla_api() -> tuple[int, int]:
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else (0, 0)


def register() -> None:
    """Registers the kernels of every platform that has some."""
    for platform in _XLA_NAMES:
        unavailable(platform)


@functools.cache
def unavailable(platform: str) -> str | None:
    """Loads and registers a platform's kernels. Returns None, or why there are none."""
    if platform not in _XLA_NAMES:
        return f"there are no C++ kernels for the platform {platform!r}"
    path = _find(platform)
    if path is None:
        return f"libjaxsoft_{platform} was not built; {_BUILD_HINT[platform]}"
    try:
        library = ctypes.CDLL(str(path))
        handlers = {f"jaxsoft_{operation}": getattr(library, f"jaxsoft_{operation}") for operation in RESULTS}
        built, ours = (library.jaxsoft_ffi_api_major(), library.jaxsoft_ffi_api_minor()), _xla_api()
    except (OSError, AttributeError) as error:
        return f"{path.name} could not be loaded: {error}"
    if built[0] != ours[0] or built[1] > ours[1]:
        return (
            f"{path.name} was built for version {built[0]}.{built[1]} of the XLA FFI, but jaxlib "
            f"has {ours[0]}.{ours[1]}; {_BUILD_HINT[platform]}"
        )
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=_XLA_NAMES[platform])
    return None


def unsupported(operands: Operands) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype = operands[0].dtype
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16, float32 and float64, not {dtype.name}"
    return None


def kernel(operation: str, form: Form, platform: str, operands: Operands) -> Operation | None:
    """The kernel for an operation in this form, or None where the kernels have to be composed."""
    if operation == "top_k" and (form.k > _MOST_K or (platform == "cuda" and operands[0].dtype == jnp.float64)):
        return None
    if not is_plain(operation, form, operands) and not _takes(operation, form, operands):
        return None

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        shape = operands[0].shape
        axis = len(shape) - 1 - form.trailing
        full = jax.ShapeDtypeStruct(shape, form.dtype)
        statistic = jax.ShapeDtypeStruct((*shape[:axis], *shape[axis + 1 :]), accumulator(operands[0].dtype))
        largest = (jax.ShapeDtypeStruct((*statistic.shape, form.k), dtype) for dtype in (form.dtype, jnp.int32))
        of_kind = dict(zip("xrkj", (full, statistic, *largest), strict=True))
        types = [of_kind[kind] for kind in RESULTS[operation]]
        beside = [] if operation in _NO_WORKSPACE else [workspace(operands[0], form.k)]
        target = jax.ffi.ffi_call(f"jaxsoft_{operation}", (*types, *beside))
        return tuple(target(*operands, **_attributes(form))[: len(types)])

    return call


def workspace(x: jax.Array, k: int = 0) -> jax.ShapeDtypeStruct:
    """What the kernels want for rows like those of x, or to find k elements of each; the least, of an unknown shape"""
    known = all(isinstance(d, int) for d in x.shape)
    long = known and x.ndim > 0 and x.shape[-1] * x.dtype.itemsize >= _LONG_ROW
    size = _PARTS * (8 * k + _PART) if k else max(_WORKSPACE, x.size * x.dtype.itemsize // 512 if long else 0)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _takes(operation: str, form: Form, operands: Operands) -> bool:
    """Whether the kernels take a form that is not plain."""
    dtype = operands[0].dtype
    base, extras = split(operation, form, operands)
    if any(v.dtype != dtype for kind, v in zip(OPERATIONS[operation], base, strict=True) if is_wide(kind)):
        return False
    if form.dtype != dtype:
        wide_and_narrow = {form.dtype, dtype} in ({_F32, np.dtype(jnp.float16)}, {_F32, np.dtype(jnp.bfloat16)})
        if not wide_and_narrow:
            return False
    if form.extras or form.masked:
        no_bias = operation == "log_softmax_vjp" and "b" in extras
        if no_bias or ("b" in extras and extras["b"].dtype != dtype):
            return False
        if len(groups(operands[0].shape[:-1], [v.shape for v in extras.values()])) > _GROUPS:
            return False
    return True


def _attributes(form: Form) -> dict[str, object]:
    return {
        "extras": form.extras,
        "trailing": np.int64(form.trailing),
        "masked": np.bool_(form.masked),
        "cap": np.float64(form.cap or 0),
    }
