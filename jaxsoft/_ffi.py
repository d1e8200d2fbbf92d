"""`implementation="ffi"`: the C++ and CUDA kernels of ffi/, called through the JAX FFI.

One shared library a platform, loaded when jaxsoft is imported. The same target names are registered for both
platforms, so the kernel that runs follows from where XLA runs the computation. Nothing is registered from a library
that the installed XLA would refuse: XLA answers such a registration by disabling the whole platform.
"""

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxsoft.fold import accumulator

TARGETS = ("softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp", "state", "logsumexp_vjp")
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}
# Where a long row is split over blocks of a GPU, their states wait here: 24 bytes each, four for each multiprocessor.
_WORKSPACE = jax.ShapeDtypeStruct((1 << 14,), jnp.uint8)
_BUILD_HINT = {
    "cpu": "install jaxsoft from its source tree, which builds it",
    "cuda": "install jaxsoft again with nvcc 12.8 or newer on the PATH",
}


def _find(platform: str) -> Path | None:
    for folder in sys.modules["jaxsoft"].__path__:  # several where it is installed for development
        for path in Path(folder, "lib").glob(f"*jaxsoft_{platform}.*"):
            return path
    return None


def _xla_api() -> tuple[int, int]:
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else (0, 0)


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
    except OSError as error:
        return f"{path.name} could not be loaded: {error}"
    built, ours = (library.jaxsoft_ffi_api_major(), library.jaxsoft_ffi_api_minor()), _xla_api()
    if built[0] != ours[0] or built[1] > ours[1]:
        return (
            f"{path.name} was built for version {built[0]}.{built[1]} of the XLA FFI, but jaxlib "
            f"has {ours[0]}.{ours[1]}; {_BUILD_HINT[platform]}"
        )
    for target in TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, f"jaxsoft_{target}"))
        jax.ffi.register_ffi_target(f"jaxsoft_{target}", capsule, platform=_XLA_NAMES[platform])
    return None


def unsupported(operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype = operands[0].dtype
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16, float32 and float64, not {dtype.name}"
    return None


def _call(target: str, results: str) -> Callable[..., tuple[jax.Array, ...]]:
    def kernel(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        full = jax.ShapeDtypeStruct(x.shape, x.dtype)
        statistic = jax.ShapeDtypeStruct(x.shape[:-1], accumulator(x.dtype))
        types = tuple({"x": full, "r": statistic, "w": _WORKSPACE}[kind] for kind in results)
        return tuple(jax.ffi.ffi_call(f"jaxsoft_{target}", types)(x, *rest)[: len(results.rstrip("w"))])

    return kernel


OPERATIONS = {
    "softmax": _call("softmax", "xw"),
    "softmax_vjp": _call("softmax_vjp", "xw"),
    "log_softmax": _call("log_softmax", "xrrw"),
    "log_softmax_vjp": _call("log_softmax_vjp", "xw"),
    "state": _call("state", "rrw"),
    "logsumexp_vjp": _call("logsumexp_vjp", "x"),
}
