"""What Pallas names otherwise in some of the versions of JAX that are supported, under the newest one's names."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_Pallas: Any = plgpu  # mypy knows the installed version alone
_NAMES_TYPES = "out_type" in inspect.signature(plgpu.kernel).parameters  # not in JAX 0.10.0
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_LOADS_AT_INDEX = _INDEX is not None and _INDEX.default is inspect.Parameter.empty  # in JAX 0.10


def kernel(body: Callable[..., None], out_type: Any, scratch_types: Any = (), **parameters: Any) -> Callable[..., Any]:
    """A kernel with this body."""
    names = ("out_type", "scratch_types") if _NAMES_TYPES else ("out_shape", "scratch_shapes")
    return _Pallas.kernel(body, **dict(zip(names, (out_type, scratch_types), strict=True)), **parameters)


def load(ref: Any, layout: Any = None, optimized: bool = True) -> jax.Array:
    """Loads what a reference to shared or global memory holds."""
    index = (...,) if _LOADS_AT_INDEX else ()
    return _Pallas.load(ref, *index, layout=layout, optimized=optimized)


def store(ref: Any, value: jax.Array) -> None:
    """Stores a value, by accesses that need not be whole sectors of memory."""
    if hasattr(plgpu, "store"):  # JAX 0.12, which checks that they are
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
