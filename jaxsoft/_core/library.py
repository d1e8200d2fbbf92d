"""The C++ and CUDA kernels as shared libraries: one a platform, found, checked and registered with the JAX FFI.

The same target names are registered for both platforms, so the kernel that runs follows from where XLA runs the
computation; the sampler and attention are CUDA's only. Nothing is registered from a library that the installed XLA
would refuse: XLA answers such a registration by disabling the whole platform.
"""

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import jax

_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}
PLATFORMS = tuple(_XLA_NAMES)
# What the CPU's library says of plans and limits, of which one of another version may lack some.
_SAID = ("attention_bounds", "attention_plan", "limit", "row_plan", "row_workspace", "sample_plan", "top_k_limit")
_BUILD_HINT = {
    "cpu": "install jaxsoft from its source tree, which builds it",
    "cuda": "install jaxsoft again with nvcc 12.3 or newer on the PATH",
}


def unavailable(platform: str) -> str | None:
    """None, or why there are no kernels for a platform. The first call loads and registers them."""
    return _register(platform)[1]


def operations(platform: str) -> frozenset[str]:
    """The names of the operations that a platform's library has, whose targets are registered as "jaxsoft_" + name."""
    return _register(platform)[0]


@functools.cache
def _register(platform: str) -> tuple[frozenset[str], str | None]:
    """Loads a platform's library and registers its handlers. Returns their names, and None or why there are none."""
    if platform not in PLATFORMS:
        return frozenset(), f"there are no C++ kernels for the platform {platform!r}"
    path = find(platform)
    if path is None:
        return frozenset(), f"libjaxsoft_{platform} was not built; {_BUILD_HINT[platform]}"
    if platform == "cuda" and (reason := unavailable("cpu")):
        return frozenset(), f"the library for CPUs, which says the plans of the kernels, cannot be used: {reason}"
    try:
        library = _loaded(platform)
        names = [line.split("(")[0] for line in specification(library)]
        handlers = {f"jaxsoft_{name}": getattr(library, f"jaxsoft_{name}") for name in names}
        if platform == "cpu":
            [getattr(library, f"jaxsoft_{function}") for function in _SAID]
        built, ours = (library.jaxsoft_ffi_api_major(), library.jaxsoft_ffi_api_minor()), xla_api()
    except (OSError, AttributeError) as error:
        return frozenset(), f"{path.name} could not be loaded: {error}"
    if built[0] != ours[0] or built[1] > ours[1]:
        return frozenset(), (
            f"{path.name} was built for version {built[0]}.{built[1]} of the XLA FFI, but jaxlib "
            f"has {ours[0]}.{ours[1]}; {_BUILD_HINT[platform]}"
        )
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=_XLA_NAMES[platform])
    return frozenset(names), None


def number(function: str, *arguments: int | str) -> int:
    """What the library answers about its kernels, those for CUDA too, by "jaxsoft_" + function: a number."""
    return _said(function, ctypes.c_int64, arguments)


def text(function: str, *arguments: int | str) -> str:
    """The same, a text."""
    return _said(function, ctypes.c_char_p, arguments).decode()


def _said(function: str, result: Any, arguments: Sequence[int | str]) -> Any:
    # The library for CPUs is asked, as it can be loaded everywhere. An index gives another object each time, whose
    # types may be set.
    call = _loaded("cpu")[f"jaxsoft_{function}"]
    call.restype = result
    call.argtypes = [ctypes.c_char_p if isinstance(v, str) else ctypes.c_int64 for v in arguments]
    return call(*(v.encode() if isinstance(v, str) else v for v in arguments))


@functools.cache
def _loaded(platform: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(find(platform)))


def specification(library: ctypes.CDLL) -> list[str]:
    """The operations of a library, a line each, as `ffi/rows/specification.h` writes them."""
    describe = library.jaxsoft_operations
    describe.restype = ctypes.c_char_p
    return describe().decode().splitlines()


def find(platform: str) -> Path | None:
    """Where a platform's library is, if it was built."""
    return next((path for folder in _folders() for path in folder.glob(f"lib/*jaxsoft_{platform}.*")), None)


def _folders() -> Iterator[Path]:
    """The package's, and for the sources of a clone, beside which nothing is built, the installed package's."""
    yield Path(__file__).parents[1]
    with contextlib.suppress(PackageNotFoundError):
        yield Path(str(distribution("jaxsoft").locate_file("jaxsoft")))


@functools.cache
def xla_api() -> tuple[int, int]:
    """The version of the FFI that the installed jaxlib has."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else (0, 0)
